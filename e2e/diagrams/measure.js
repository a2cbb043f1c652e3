// Measures what the pages of docs/diagrams show: starts gantry-server on the loopback, drives it, and prints the figures
// as JSON. Times are in milliseconds; those of a request count from when its client sent it.
//
//   node measure.js SERVER MODEL [FLAG...]    FLAGs go to the server as they are
//
// Three sources: the client's clock, `timings` in the answers (the engine's), and the server's log (the front's). Counters
// come from /metrics, once those say that all tokens which clients got are in them. Absent: any figure that is not of this run.
import { spawn } from "node:child_process";
import { createHash } from "node:crypto";
import { createReadStream, readFileSync, readdirSync } from "node:fs";
import http from "node:http";
import os from "node:os";
import path from "node:path";
import { createInterface } from "node:readline";
import { once } from "node:events";
import { setTimeout as pause } from "node:timers/promises";

const CONCURRENCY = [1, 2, 4, 8, 16, 32]; // requests at once, a level each
const LEVEL_MS = 2500; // a level has rounds until all of its streams have decoded together for so long
const LEVEL_TOKENS = 48; // of each answer
const CONTEXT_TOKENS = 512; // of each sequence
const CROWD = { parallel: 4, queue: 8, requests: 16, apartMs: 25 };
const DEADLINE_MS = 120_000; // for anything that is waited for
const MOST_WAITED = 0.15; // the most of the time that the server may wait for a processor: what had more is measured again
const PATIENCE_MS = 60_000 * (Number(process.env.PATIENCE_MINUTES) || 15); // for a machine that is quiet enough
const STEP_GAP_MS = 5; // pieces that came closer than this to the one before are of one step

const [program, model, ...flags] = process.argv.slice(2);
if (!program || !model) throw new Error("usage: node measure.js SERVER MODEL [FLAG...]");

const round = (ms) => Math.round(ms * 100) / 100;
const now = () => performance.now();

async function until(what, condition) {
  for (const end = now() + DEADLINE_MS; now() < end; await pause(20)) {
    const value = await condition();
    if (value) return value;
  }
  throw new Error(`${what}: not within ${DEADLINE_MS / 1000} s`);
}

// --- the server ------------------------------------------------------------------------------------------------------

class Server {
  static async start(parallel, ...more) {
    const server = new Server();
    server.flags = ["-c", `${parallel * CONTEXT_TOKENS}`, "-np", `${parallel}`, ...more, ...flags];
    const environment = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("GANTRY_")));
    const args = ["serve", model, "--port", "0", "--metrics-port", "-1", ...server.flags];
    server.child = spawn(program, args, { env: { ...environment, RUST_LOG: "info" }, stdio: ["ignore", "pipe", "pipe"] });
    const end = () => server.child.kill("SIGKILL");
    process.on("exit", end);
    server.ended = once(server.child, "exit").then(([code]) => { server.over = true; process.off("exit", end); return code; });
    server.said = [];
    server.requests = new Map(); // by x-request-id: what the front's log says of it
    for (const stream of [server.child.stdout, server.child.stderr]) createInterface(stream).on("line", (line) => server.#hear(line));
    await until("the server's start", () => {
      if (server.over) throw new Error(`the server ended at its start:\n${server.said.join("\n")}`);
      return server.url;
    });
    await until("the measuring of what steps cost", async () => (await server.counters()).get("gantry_engine_measures") === 0);
    return server;
  }

  #hear(line) {
    let told;
    try { told = JSON.parse(line); } catch { this.said.push(line); return; }
    if (told.level !== "INFO") this.said.push(line);
    if (told.message?.startsWith("ready") && told.url) this.url = told.url;
    if (told.message === "request ended") this.requests.set(told.request_id, told);
  }

  // Every metric, summed over its labels; those of one `part` also by it.
  async counters() {
    const text = await (await fetch(`${this.url}/metrics`)).text();
    const sums = new Map();
    for (const line of text.split("\n")) {
      const found = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line);
      if (!found) continue;
      const [, name, labels, value] = found, part = /\bpart="(\w+)"/.exec(labels ?? "")?.[1];
      for (const key of part ? [name, `${name}.${part}`] : [name]) sums.set(key, (sums.get(key) ?? 0) + Number(value));
    }
    return sums;
  }

  // The counters once they have so many tokens more than before: a worker tells them with its heartbeat.
  async countersWith(tokens, before) {
    const name = "gantry_engine_generated_tokens_total";
    return until("the worker's counters", async () => {
      const after = await this.counters();
      return after.get(name) - (before.get(name) ?? 0) >= tokens && after.get("gantry_requests_running") === 0 && after;
    });
  }

  async stop() {
    if (!this.over) this.child.kill("SIGINT");
    const code = await this.ended;
    if (code !== 0) throw new Error(`the server ended with ${code}:\n${this.said.join("\n")}`);
  }

  // How long the threads of the server's processes have waited for a processor so far.
  waitedMs() {
    const of = (pid) => readdirSync(`/proc/${pid}/task`).reduce((sum, thread) => {
      const task = `/proc/${pid}/task/${thread}`;
      try {
        // Each thread has the children that it began.
        const children = readFileSync(`${task}/children`, "utf8").split(" ").filter(Boolean);
        return sum + Number(readFileSync(`${task}/schedstat`, "utf8").split(" ")[1]) / 1e6 + children.reduce((all, child) => all + of(child), 0);
      } catch { return sum; } // it has ended meanwhile
    }, 0);
    return of(this.child.pid);
  }
}

// How much of the time some thread of the server waited for a processor that others had: what makes figures worse than they are.
class Waiting {
  constructor(server) { this.server = server; this.begin = { at: now(), waited: server.waitedMs() }; }
  share() { return Math.round((1000 * (this.server.waitedMs() - this.begin.waited)) / (now() - this.begin.at)) / 1000; }
}

// Measures again what others disturbed.
let tries = 0;
const began = now();
async function undisturbed(measure) {
  for (;;) {
    const measured = await measure();
    tries += 1;
    if (measured.waitedShare <= MOST_WAITED && !measured.torn) return measured;
    if (now() - began > PATIENCE_MS) throw new Error(`other programs keep the server from its processors, for ${PATIENCE_MS / 60_000} minutes now: end them, or say PATIENCE_MINUTES=60`);
  }
}

// --- a request -------------------------------------------------------------------------------------------------------

// Streams an answer. `leaveAfter`: the client goes away after so many pieces.
function ask(server, { prompt, tokens, leaveAfter = Infinity, agent }) {
  const body = JSON.stringify({
    messages: [{ role: "user", content: prompt }], stream: true, stream_options: { include_usage: true }, timings: true,
    temperature: 0.8, seed: 7, max_tokens: tokens, ignore_eos: true,
  });
  return new Promise((resolve, reject) => {
    const told = { sent: now(), status: 0, pieces: [], text: [] };
    const at = () => round(now() - told.sent);
    const request = http.request(`${server.url}/v1/chat/completions`, { method: "POST", agent, headers: { "content-type": "application/json" } });
    const event = (line) => {
      if (line === "[DONE]") { told.done = at(); return; }
      const { choices, usage, error } = JSON.parse(line);
      if (error) { reject(new Error(`an answer broke off: ${error.message}`)); return; }
      if (usage) told.usage = usage;
      for (const { delta, timings } of choices) {
        if (timings) told.timings = timings;
        if (delta.content) { told.pieces.push(at()); told.text.push(delta.content); } else told.opened ??= at();
      }
      if (told.pieces.length >= leaveAfter && told.left === undefined) { told.left = at(); request.destroy(); resolve(told); }
    };
    request.on("response", (response) => {
      told.headers = at();
      told.status = response.statusCode;
      told.id = response.headers["x-request-id"];
      told.retryAfter = response.headers["retry-after"];
      let rest = "";
      response.setEncoding("utf8").on("data", (chunk) => {
        rest += chunk;
        if (told.status !== 200) return;
        for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
          const line = rest.slice(0, end);
          if (line.startsWith("data: ")) event(line.slice(6));
        }
      });
      response.on("end", () => {
        if (told.status !== 200) { told.done = at(); told.error = JSON.parse(rest).error; }
        told.done === undefined ? reject(new Error("an answer ended without its end")) : resolve(told);
      });
      response.on("error", (error) => told.left ?? reject(error));
    });
    request.on("error", (error) => told.left ?? reject(error));
    request.end(body);
  });
}

// --- what is asked ---------------------------------------------------------------------------------------------------

function* numbers(seed) { for (let state = seed; ; ) yield (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32; }
const random = numbers(34);
const among = (list) => list[Math.floor(random.next().value * list.length)];
const between = (least, most) => least + Math.floor(random.next().value * (most - least + 1));

const SUBJECTS = ["a lighthouse in a storm", "how bread rises", "the night train to Lisbon", "why the sea is salty", "a clock that runs backwards",
  "the first day of spring", "how a crane lifts its load", "a letter that came too late", "what bees do in winter", "the longest bridge in the town"];
let number = 0;
const shortPrompt = () => `Note ${++number}. Tell me about ${among(SUBJECTS)}, for somebody who has never heard of it, and begin with what matters most.`;

const longPrompt = () => `Note ${++number}. Here is what the keeper wrote. ${SUBJECTS.map((subject, line) =>
  `On day ${line + 1} I thought about ${subject}, and put it into the book, with the weather, the wind and the ships that went by.`).join(" ")} What did the keeper write about?`;

// --- the measurements ------------------------------------------------------------------------------------------------

const quantile = (values, q) => {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? round(sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))]) : null;
};
const gaps = (pieces) => pieces.slice(1).map((at, before) => at - pieces[before]);

// So many requests at once, all with answers of one length, in rounds. The decode rate counts tokens while all of a round
// decode: from the last one's first piece to the first one's last.
async function level(server, streams) {
  const before = await server.counters(), agent = new http.Agent({ keepAlive: true, maxSockets: streams }), waiting = new Waiting(server);
  const answers = [];
  let timedMs = 0, tokens = 0, rounds = 0;
  for (; timedMs < LEVEL_MS; rounds++) {
    const all = await Promise.all(Array.from({ length: streams }, () => ask(server, { prompt: shortPrompt(), tokens: LEVEL_TOKENS, agent })));
    const bad = all.find(({ status }) => status !== 200);
    if (bad) throw new Error(`one of ${streams} requests was answered with ${bad.status}: ${bad.error?.message}`);
    const from = Math.max(...all.map(({ sent, pieces }) => sent + pieces[0])), to = Math.min(...all.map(({ sent, pieces }) => sent + pieces.at(-1)));
    timedMs += to - from;
    // The pieces at the beginning are what the time is counted from.
    tokens += all.flatMap(({ sent, pieces }) => pieces.map((at) => sent + at)).filter((at) => at > from && at <= to).length;
    answers.push(...all);
  }
  const waitedShare = waiting.share();
  agent.destroy();
  const after = await server.countersWith(answers.reduce((sum, { usage }) => sum + usage.completion_tokens, 0), before);
  const grown = (name) => after.get(name) - (before.get(name) ?? 0), steps = grown("gantry_engine_steps_total");
  const firsts = answers.map(({ pieces }) => pieces[0]), between_ = answers.flatMap(({ pieces }) => gaps(pieces));
  const part = (name) => round((1000 * grown(`gantry_engine_step_seconds_total.${name}`)) / steps);
  return {
    streams, rounds, requests: answers.length, timedMs: round(timedMs), tokensPerSecond: round((1000 * tokens) / timedMs),
    ttftMs: { p50: quantile(firsts, 0.5), p95: quantile(firsts, 0.95) }, itlMs: { p50: quantile(between_, 0.5), p95: quantile(between_, 0.95) },
    steps, batchTokensPerStep: round(grown("gantry_engine_batch_tokens_total") / steps), rowsPerStep: round(grown("gantry_engine_batch_rows_total") / steps),
    stepMs: { before: part("before"), decode: part("decode"), after: part("after") },
    batchTokens: grown("gantry_engine_batch_tokens_total"), paddingTokens: grown("gantry_engine_padding_tokens_total"), waitedShare,
  };
}

// What the pages need of a request; what the front logged of it comes with it.
async function shown(server, told) {
  const front = await until("the front's line on a request", () => server.requests.get(told.id));
  const { timings: t } = told;
  return {
    status: told.status, outcome: front.outcome, opened: told.opened, headers: told.headers, pieces: told.pieces, text: told.text, done: told.done,
    left: told.left, retryAfterSeconds: told.retryAfter && Number(told.retryAfter), message: told.error?.message,
    front: { firstMs: front.first_token_ms === undefined ? undefined : round(front.first_token_ms), durationMs: round(front.duration_ms) },
    engine: t && { tokenizeMs: t.tokenize_ms, queueMs: t.queue_ms, prefillMs: t.prompt_ms, decodeMs: t.predicted_ms, cached: t.cache_n, computed: t.prompt_n, generated: t.predicted_n },
  };
}

// Steps as clients can see them: a step's tokens leave the worker together. None has two of one request.
function stepsOf(requests) {
  const steps = [];
  let step, seen, last = -Infinity;
  for (const { at, of } of requests.flatMap(({ sentMs, pieces }, of) => pieces.map((ms) => ({ at: round(sentMs + ms), of }))).sort((a, b) => a.at - b.at)) {
    if (!step || at - last > STEP_GAP_MS || seen.has(of)) { steps.push(step = { at, of: [] }); seen = new Set(); }
    step.of.push(of); seen.add(of); last = at;
  }
  return steps;
}

// More requests than there are sequences and places in the queue, of different lengths, one shortly after the other.
async function crowd(server) {
  const before = await server.counters(), waiting = new Waiting(server), begin = now();
  const agent = new http.Agent({ keepAlive: true }), asked = [];
  for (let request = 0; request < CROWD.requests; request++) {
    asked.push(ask(server, { prompt: shortPrompt(), tokens: between(8, 48), agent }));
    await pause(CROWD.apartMs); // the load itself: one comes after the other
  }
  const told = await Promise.all(asked), waitedShare = waiting.share();
  agent.destroy();
  const tokens = told.reduce((sum, { usage }) => sum + (usage?.completion_tokens ?? 0), 0), after = await server.countersWith(tokens, before);
  const requests = await Promise.all(told.map(async (one) => ({ sentMs: round(one.sent - begin), ...(await shown(server, one)) })));
  const grown = (name) => after.get(name) - (before.get(name) ?? 0), steps = stepsOf(requests);
  return {
    parallel: CROWD.parallel, queue: CROWD.queue, requests, steps, stepGapMs: STEP_GAP_MS, waitedShare,
    // What a step brought came apart, so that clients cannot tell steps.
    torn: steps.length > grown("gantry_engine_steps_total") || undefined,
    counted: { steps: grown("gantry_engine_steps_total"), rows: grown("gantry_engine_batch_rows_total"), tokens: grown("gantry_engine_batch_tokens_total") },
  };
}

// JSON with lines of a length that a change of one figure can be seen in: so many levels have a line for each value.
function inLines(value, levels) {
  if (!levels || value === null || typeof value !== "object") return JSON.stringify(value);
  const known = Object.entries(value).filter(([, part]) => part !== undefined);
  const lines = known.map(([name, part]) => (Array.isArray(value) ? "" : `${JSON.stringify(name)}: `) + inLines(part, levels - 1)).join(",\n");
  return Array.isArray(value) ? `[\n${lines}\n]` : `{\n${lines}\n}`;
}

async function main() {
  const hash = createHash("sha256");
  for await (const part of createReadStream(model)) hash.update(part);
  const run = { date: new Date().toISOString().slice(0, 16).replace("T", " ") + " UTC" };
  const say = (what) => process.stderr.write(`    ${what}\n`);
  let server = await Server.start(CROWD.parallel, "--max-queue", `${CROWD.queue}`);
  const version = (await (await fetch(`${server.url}/metrics`)).text()).match(/^gantry_build_info\{.*version="([^"]*)"/m)?.[1];
  const threads = (await server.counters()).get("gantry_worker_threads");
  run.server = { version, commit: process.env.COMMIT, threads, flags: server.flags.map((flag) => (flag.includes("/") ? path.basename(flag) : flag)) };
  await ask(server, { prompt: "Hello!", tokens: 8 }); // the first one brings in what later ones find there
  const timeline = {};
  const single = async (what) => {
    const waiting = new Waiting(server), told = await ask(server, what), waitedShare = waiting.share();
    return { ...(await shown(server, told)), waitedShare };
  };
  // Both or none: what is measured again must be new again.
  const { alone, again } = await undisturbed(async () => {
    const prompt = longPrompt(), alone = await single({ prompt, tokens: 48 }), again = await single({ prompt, tokens: 48 });
    return { alone, again, waitedShare: Math.max(alone.waitedShare, again.waitedShare) };
  });
  Object.assign(timeline, { alone, again });
  say(`first text after ${alone.pieces[0]} ms, and again after ${again.pieces[0]} ms`);
  timeline.leaves = await undisturbed(() => single({ prompt: shortPrompt(), tokens: 200, leaveAfter: 16 }));
  run.crowd = await undisturbed(() => crowd(server));
  say(`crowd: ${run.crowd.steps.length} steps with text, ${run.crowd.counted.steps} in all, ${run.crowd.requests.filter(({ status }) => status === 429).length} refused`);
  await server.stop();
  run.timeline = timeline;

  server = await Server.start(CONCURRENCY.at(-1));
  await ask(server, { prompt: "Hello!", tokens: 8 });
  run.sweep = { parallel: CONCURRENCY.at(-1), contextTokens: CONTEXT_TOKENS, levelMs: LEVEL_MS, levelTokens: LEVEL_TOKENS, levels: [] };
  for (const streams of CONCURRENCY) {
    const one = await undisturbed(() => level(server, streams));
    run.sweep.levels.push(one);
    say(`${streams} streams: ${one.tokensPerSecond} tokens/s, ${one.rowsPerStep} rows a step, waited ${Math.round(100 * one.waitedShare)} % of the time`);
  }
  run.sweep.flags = server.flags.map((flag) => (flag.includes("/") ? path.basename(flag) : flag));
  await server.stop();
  const [cpu] = os.cpus();
  say(`${tries - CONCURRENCY.length - 3} measurements were disturbed, and made again`);
  run.machine = { processor: cpu.model.trim(), cores: os.cpus().length, memoryGiB: Math.round(os.totalmem() / 2 ** 30), client: `Node ${process.version} on the same machine` };
  run.model = { file: path.basename(model), sha256: hash.digest("hex") };
  process.stdout.write(inLines(run, 3));
}

for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(130));
await main().catch((error) => {
  process.stderr.write(`error: ${error.message}\n`);
  process.exit(1);
});
