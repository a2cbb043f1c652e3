// A request's stages over time, as its client, the front and the engine saw them, and the crowd that one of them waited in.
// State: the request, the time, the part of the axis. Nothing is computed but differences of what was measured.
"use strict";

(() => {
  const { run, ms, number, drawn, pressed, figures, table, player } = Gantry;
  const { crowd, timeline } = run;
  const longest = d3.max(crowd.requests.filter((one) => one.engine), (one) => one.engine.queueMs);
  const waits = crowd.requests.findIndex((one) => one.engine?.queueMs === longest);
  const refused = crowd.requests.findIndex((one) => one.status === 429);

  const cases = [
    { id: "alone", title: "Alone", of: timeline.alone, note: (one) => `Nothing else is asked. ${number(one.engine.computed)} tokens of the prompt are computed before the first token of the answer.` },
    { id: "again", title: "The same again", of: timeline.again, note: (one) => `The same prompt once more: the state of ${number(one.engine.cached)} of its ${number(one.engine.cached + one.engine.computed)} tokens is still there, and ${number(one.engine.computed)} had to be computed.` },
    { id: "waits", title: "In a crowd", of: crowd.requests[waits], note: () => `One of ${crowd.requests.length} requests for ${crowd.parallel} sequences, the one that waited longest. Meanwhile it has a place in the queue, and nothing is computed for it.` },
    { id: "refused", title: "Refused", of: crowd.requests[refused], note: (one) => `All ${crowd.queue} places in the queue are taken: status ${one.status} at once, with Retry-After: ${one.retryAfterSeconds} s. “${one.message}”` },
    { id: "leaves", title: "Client leaves", of: timeline.leaves, note: (one) => `After ${one.pieces.length} pieces the client closes the connection. The front notices, and the sequence ends within a step. Such an answer has no last event that could tell its stages.` },
    { id: "other", title: "Of the crowd", hidden: true, note: (one) => `The request that was sent ${ms(one.sentMs)} after the crowd's first.` },
  ].filter((one) => one.hidden || one.of);
  let chosen = cases[0], at = 0, zoom = "all";

  const stagesOf = ({ engine }) => {
    if (!engine) return [];
    let begin = 0;
    return [["tokenize", "template and tokens", engine.tokenizeMs], ["queue", "queue", engine.queueMs], ["prefill", "prefill", engine.prefillMs], ["decode", "decode", engine.decodeMs]]
      .map(([stage, name, took]) => ({ stage, name, begin, took, end: (begin += took) }));
  };
  const endOf = (one) => one.done ?? one.left;
  const shownEnd = () => (zoom === "first" && chosen.of.pieces.length ? chosen.of.pieces[0] * 1.06 : endOf(chosen.of) * 1.02);

  let scale;
  const lanes = drawn("#lanes", (svg, width) => {
    const one = chosen.of, left = width < 560 ? 62 : 92, right = width - 12, lane = 46, top = 8, height = 34;
    const rows = ["Client", "Front", "Engine"], bottom = top + rows.length * lane;
    svg.attr("viewBox", `0 0 ${width} ${bottom + 46}`).attr("height", bottom + 46).attr("data-case", chosen.id).attr("data-zoom", zoom);
    scale = d3.scaleLinear([0, shownEnd()], [left, right]);
    const x = (time) => Math.min(right, scale(time));
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom + 4})`).call(d3.axisBottom(scale).ticks(width < 560 ? 4 : 8).tickSizeOuter(0));
    svg.append("text").attr("class", "soft").attr("x", right).attr("y", bottom + 42).attr("text-anchor", "end").text("milliseconds since each had the request");
    svg.append("g").selectAll("text").data(rows).join("text").attr("x", 0).attr("y", (_, row) => top + row * lane + height / 2 + 5).attr("font-weight", 650).text(String);
    svg.append("g").selectAll("line").data(rows).join("line").attr("class", "grid").attr("x1", left).attr("x2", right)
      .attr("y1", (_, row) => top + row * lane + height + 6).attr("y2", (_, row) => top + row * lane + height + 6);

    const bar = (row, stage, begin, end) => end > begin && begin < scale.domain()[1] && svg.append("rect").attr("class", `bar ${stage}`)
      .attr("x", x(begin)).attr("y", top + row * lane + 7).attr("width", Math.max(1.5, x(end) - x(begin))).attr("height", height - 14).attr("rx", 3);
    const first = one.pieces[0], ended = one.status === 200 && !one.left ? "decode" : "refused";
    // The client: waiting for its first text, and each piece as it came.
    svg.append("line").attr("class", "rule").attr("x1", left).attr("x2", x(first ?? endOf(one))).attr("y1", top + height / 2).attr("y2", top + height / 2);
    svg.append("g").selectAll("line").data(one.pieces.filter((time) => time <= scale.domain()[1])).join("line").attr("class", "curve decode").style("stroke-width", 1.5)
      .attr("x1", (time) => x(time)).attr("x2", (time) => x(time)).attr("y1", top + 6).attr("y2", top + height - 6);
    if (endOf(one) <= scale.domain()[1]) svg.append("circle").attr("class", `dot ${ended}`).attr("cx", x(endOf(one))).attr("cy", top + height / 2).attr("r", 6);
    // The front: to its first text, and to the end.
    const { firstMs, durationMs } = one.front;
    if (firstMs === undefined) bar(1, "refused", 0, durationMs);
    else { bar(1, "cluster", 0, firstMs); bar(1, "decode", firstMs, durationMs); }
    for (const { stage, begin, end } of stagesOf(one)) bar(2, stage, begin, end);
    if (!one.engine) svg.append("text").attr("class", "soft").attr("x", left + 4).attr("y", top + 2 * lane + height / 2 + 5).text(one.status === 429 ? "never heard of it" : "no last event, so no stages");
    svg.append("line").attr("class", "cursor").attr("y1", 0).attr("y2", bottom + 4);
    move();
  });

  function stateAt(one, time) {
    if (one.status !== 200) return time >= one.done ? `refused with ${one.status}` : "asking";
    if (one.left !== undefined && time >= one.left) return "the client has left";
    if (one.done !== undefined && time >= one.done) return "done";
    const stage = stagesOf(one).find(({ end }) => time < end);
    const pieces = one.pieces.filter((piece) => piece <= time).length;
    if (pieces) return `decode: ${pieces} of ${one.pieces.length} pieces have come`;
    return stage && stage.stage !== "decode" ? stage.name : "on its way";
  }

  // Shows the time.
  function move() {
    const one = chosen.of, x = scale(Math.min(at, scale.domain()[1]));
    d3.select("#lanes .cursor").attr("x1", x).attr("x2", x);
    d3.select("#time").property("value", at);
    d3.select("#now").text(`After ${ms(at)}: ${stateAt(one, at)}.`);
    d3.select("#answer").text(one.text.filter((_, piece) => one.pieces[piece] <= at).join(""));
  }

  function tell() {
    const one = chosen.of;
    d3.select("#case-note").text(chosen.note(one));
    d3.selectAll("#cases input").property("checked", (other) => other === chosen);
    d3.select("#time").attr("max", Math.ceil(endOf(one) * 10) / 10);
    const { engine, front } = one, server = engine && d3.sum(stagesOf(one), ({ took }) => took);
    figures("#figures", [
      ["Status", one.status], one.pieces.length && ["Time to first token, at the client", ms(one.pieces[0])],
      engine && ["Template and tokens", ms(engine.tokenizeMs)], engine && ["Queue", ms(engine.queueMs)],
      engine && ["Prefill", ms(engine.prefillMs), `${number(engine.computed)} tokens and ${number(engine.cached)} reused`],
      engine && ["Decode", ms(engine.decodeMs), `${number(engine.generated)} tokens`],
      ["Whole, at the front", ms(front.durationMs)], [one.left === undefined ? "Whole, at the client" : "Left, at the client", ms(endOf(one))],
      server && ["Beyond the engine, at the client", ms(endOf(one) - server), "HTTP, front, sockets"],
    ].filter(Boolean));
    lanes();
    d3.selectAll("#crowd .row").attr("aria-pressed", (other) => String(other === one));
  }
  function choose(next) { play.stop(); chosen = next; at = endOf(next.of); tell(); }

  // The crowd: a row for each request, from when it was sent.
  drawn("#crowd", (svg, width) => {
    const left = width < 560 ? 30 : 40, right = width - 8, row = 26, rows = crowd.requests;
    const end = d3.max(rows, (one) => one.sentMs + endOf(one)), x = d3.scaleLinear([0, end * 1.01], [left, right]), bottom = rows.length * row + 6;
    svg.attr("viewBox", `0 0 ${width} ${bottom + 44}`).attr("height", bottom + 44);
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom})`).call(d3.axisBottom(x).ticks(width < 560 ? 4 : 8).tickSizeOuter(0));
    svg.append("text").attr("class", "soft").attr("x", right).attr("y", bottom + 40).attr("text-anchor", "end").text("milliseconds since the crowd's first request");
    const one = svg.append("g").selectAll("g").data(rows).join("g").attr("class", "row").attr("transform", (_, index) => `translate(0,${index * row + 2})`)
      .attr("aria-label", (request, index) => `Request ${index + 1}, ${request.status === 200 ? `first token after ${ms(request.pieces[0])}` : `refused with ${request.status}`}`);
    one.append("rect").attr("class", "outline").attr("x", 0).attr("width", width).attr("height", row - 2).attr("rx", 5).attr("fill", "transparent");
    one.append("text").attr("class", "soft").attr("x", left - 8).attr("y", 15).attr("text-anchor", "end").text((_, index) => index + 1);
    one.each(function (request) {
      const g = d3.select(this), bars = stagesOf(request);
      for (const { stage, begin, end } of bars) {
        g.append("rect").attr("class", `bar ${stage}`).attr("x", x(request.sentMs + begin)).attr("y", 5).attr("height", row - 12).attr("rx", 2).attr("width", Math.max(1, x(request.sentMs + end) - x(request.sentMs + begin)));
      }
      if (!bars.length) {
        g.append("circle").attr("class", "dot refused").attr("cx", x(request.sentMs + endOf(request))).attr("cy", row / 2 - 1).attr("r", 5);
        g.append("text").attr("class", "soft").attr("x", x(request.sentMs) + 10).attr("y", 15).text(`${request.status}, try again in ${request.retryAfterSeconds} s`);
      }
    });
    pressed(one, (request) => choose(Object.assign(cases.at(-1), { of: request })));
    one.attr("aria-pressed", (request) => String(request === chosen.of));
  });
  const outcomes = d3.rollup(crowd.requests, (all) => all.length, (one) => one.status);
  d3.select("#crowd-note").text(`${crowd.requests.length} requests of different lengths come shortly after each other; there are ${crowd.parallel} sequences and ${crowd.queue} places to wait. `
    + `${outcomes.get(200)} were answered, ${outcomes.get(429) ?? 0} refused at once. Choose one to see it above.`);
  table("#crowd-table", ["request", "sent", "status", "queue", "prefill", "first token", "tokens", "whole"], crowd.requests.map((one, index) => [index + 1, ms(one.sentMs), one.status,
    one.engine ? ms(one.engine.queueMs) : "", one.engine ? ms(one.engine.prefillMs) : "", one.pieces.length ? ms(one.pieces[0]) : "", one.engine?.generated ?? "", ms(endOf(one))]));

  const choices = d3.select("#cases").selectAll("label").data(cases.filter((one) => !one.hidden)).join("label");
  choices.append("input").attr("type", "radio").attr("name", "case").attr("value", (one) => one.id).on("change", (_, one) => choose(one));
  choices.append("span").text((one) => one.title);
  d3.select("#time").on("input", (event) => { play.stop(); at = Number(event.target.value); move(); });
  d3.selectAll("input[name=zoom]").on("change", (event) => { zoom = event.target.value; lanes(); });
  const play = player(document.querySelector("#play"), (elapsed) => {
    const end = endOf(chosen.of);
    at = Math.min(end, at + elapsed); // as fast as it was
    move();
    return at < end;
  });
  document.querySelector("#play").addEventListener("click", () => { if (play.playing && at >= endOf(chosen.of)) { at = 0; move(); } });
  choose(chosen);
})();
