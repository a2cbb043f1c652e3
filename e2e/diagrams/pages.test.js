// Opens the pages of docs/diagrams from their files in a real browser, on a desk and on a phone, light and dark, and uses
// every control that they have: by mouse, by keyboard, and where no motion is wanted.
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";
import { chromium } from "playwright-core";

const pages = path.resolve(process.env.PAGES ?? "../../docs/diagrams");
const root = path.resolve(pages, "../..");
const NAMES = ["architecture", "timeline", "batching"];
const DESK = { width: 1280, height: 900 }, PHONE = { width: 375, height: 740 };
const FORWARD_MS = 900; // at a time: d3 takes a second without a frame for a page that slept, and leaves it out
const LEAST_CONTRAST = 4.5, LEAST_CONTRAST_LARGE = 3; // WCAG 2.2, level AA

let browser;
before(async () => {
  browser = await chromium.launch({ executablePath: process.env.BROWSER ?? "/usr/bin/chromium", args: process.getuid() === 0 ? ["--no-sandbox"] : [] });
});
after(() => browser?.close());

// A page, and what was wrong with it: a word on the console, an error, a request for anything but the pages' own files.
async function opened(name, { viewport = DESK, clock = false, ...more } = {}, use) {
  const context = await browser.newContext({ viewport, ...more });
  const page = await context.newPage(), wrong = [];
  page.setDefaultTimeout(20_000);
  page.on("console", (message) => wrong.push(`console: ${message.text()}`));
  page.on("pageerror", (error) => wrong.push(`error: ${error.stack}`));
  page.on("requestfailed", (request) => wrong.push(`failed: ${request.url()}`));
  page.on("request", (request) => {
    const url = request.url(), own = url.startsWith("data:") || (url.startsWith("file:") && fileURLToPath(url.split("#")[0]).startsWith(pages + path.sep));
    if (!own) wrong.push(`request: ${url}`);
  });
  if (clock) await page.clock.install({ time: 0 });
  await page.goto(pathToFileURL(path.join(pages, `${name}.html`)).href);
  if (clock) await page.clock.pauseAt(600_000); // from here on time passes when the test says so
  try {
    await use(page);
    assert.deepEqual(wrong, []);
  } finally {
    await context.close();
  }
}
// What can be seen of a page's state. Which radio is chosen and where a slider stands are properties and not in it: a
// control has to change more than itself.
const state = (page) => page.evaluate(() => document.documentElement.outerHTML);
const run = (page) => page.evaluate(() => window.GANTRY_RUN);
const ms = (page, value) => page.evaluate((value) => Gantry.ms(value), value);
const text = (page, selector) => page.locator(selector).innerText();
const choose = (page, name, value) => page.locator(`input[name="${name}"][value="${value}"]`).check();

function contrasts() { // in the page: texts that differ too little from what is behind them
  const rgb = (colour) => colour.match(/[\d.]+/g)?.map(Number) ?? [];
  const opaque = (colour) => /^rgb/.test(colour) && (rgb(colour)[3] ?? 1) === 1;
  const luminance = (colour) => rgb(colour).slice(0, 3).map((part) => part / 255).map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
  const behind = (element) => {
    if (!(element instanceof SVGElement)) {
      for (let one = element; one; one = one.parentElement) if (opaque(getComputedStyle(one).backgroundColor)) return getComputedStyle(one).backgroundColor;
      return "rgb(255, 255, 255)";
    }
    element.scrollIntoView({ block: "center" });
    const { x, y, width, height } = element.getBoundingClientRect();
    for (const one of document.elementsFromPoint(x + width / 2, y + height / 2)) {
      if (one === element || one instanceof SVGTextElement) continue;
      const style = getComputedStyle(one);
      if (one instanceof SVGGeometryElement) { if (opaque(style.fill)) return style.fill; } else if (!(one instanceof SVGElement)) return behind(one);
    }
    throw new Error(`nothing is behind ${element.textContent}`);
  };
  const found = [];
  let looked = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim());
    if (!own || ["SCRIPT", "LEGEND"].includes(element.tagName) || !element.checkVisibility()) continue;
    const style = getComputedStyle(element), size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const [low, high] = [luminance(element instanceof SVGElement ? style.fill : style.color), luminance(behind(element))].sort((a, b) => a - b);
    looked += 1;
    found.push({ text: element.textContent.trim().slice(0, 40), large, ratio: (high + 0.05) / (low + 0.05), size });
  }
  return { looked, found };
}

for (const name of NAMES) {
  for (const [where, viewport] of [["desk", DESK], ["phone", PHONE]]) {
    test(`${name} on a ${where}: nothing is wrong, nothing leaves, all can be read, by day and by night`, async () => {
      await opened(name, { viewport, isMobile: where === "phone", hasTouch: where === "phone" }, async (page) => {
        assert.equal(await page.locator("svg").first().evaluate((svg) => svg.childElementCount > 0), true);
        for (const summary of await page.locator("summary").all()) await summary.click();
        const { scroll, width } = await page.evaluate(() => ({ scroll: document.documentElement.scrollWidth, width: document.documentElement.clientWidth }));
        assert.ok(scroll <= width && width === viewport.width, `${scroll} of ${width} px: the page scrolls sideways`);
        const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
        const bright = (colour) => colour.match(/\d+/g).map(Number).every((part) => part > 128);
        for (const colorScheme of ["light", "dark"]) {
          await page.emulateMedia({ colorScheme });
          assert.equal(bright(await ground()), colorScheme === "light");
          const { looked, found } = await page.evaluate(contrasts);
          assert.ok(looked > 30, `only ${looked} texts`);
          assert.deepEqual(found.filter(({ ratio, large }) => ratio < (large ? LEAST_CONTRAST_LARGE : LEAST_CONTRAST)), [], colorScheme);
          assert.deepEqual(found.filter(({ size }) => size < 11), [], "too small to be read");
        }
        // The switch goes before the system, and is remembered.
        for (const theme of ["dark", "light"]) {
          await choose(page, "theme", theme);
          assert.equal(bright(await ground()), theme === "light");
        }
        await page.reload();
        assert.equal(bright(await ground()), true, "the switch is forgotten");
      });
    });
  }

  test(`${name}: every control does something`, async () => {
    await opened(name, {}, async (page) => {
      const controls = await page.locator("button:visible, input, select, summary, [role=button]").all();
      const names = [];
      // What cannot be gone back to yet, can once another control was used: such come last.
      const enabled = async (control) => control.isEnabled();
      const order = [];
      for (const control of controls) (await enabled(control) ? order.unshift : order.push).call(order, control);
      for (const control of order.filter(Boolean)) {
        const label = await control.evaluate((one) => one.getAttribute("aria-label") ?? (one.closest("label") ?? one).textContent.trim());
        const kind = await control.evaluate((one) => one.type ?? one.tagName);
        if (!(await enabled(control))) await page.locator("#next").click();
        if (kind === "radio" && (await control.isChecked())) {
          const other = page.locator(`input[name="${await control.getAttribute("name")}"]`);
          for (const one of await other.all()) if (!(await one.isChecked())) { await one.check(); break; }
        }
        const before = await state(page);
        if (kind === "radio") await control.check();
        else if (kind === "range") {
          await control.focus();
          const atEnd = await control.evaluate((one) => Number(one.value) >= Number(one.max));
          await page.keyboard.press(atEnd ? "PageDown" : "PageUp");
        } else await control.click({ position: await control.evaluate((one) => one.matches("g.row")) ? { x: 8, y: 8 } : undefined });
        assert.ok((await state(page)) !== before, `${label} (${kind}) changes nothing`);
        names.push(label);
      }
      assert.ok(names.length >= 15, `only ${names}`);
    });
  });

  test(`${name}: every link leads somewhere`, async () => {
    await opened(name, {}, async (page) => {
      const links = await page.locator("a[href]").evaluateAll((all) => all.map((one) => one.href));
      assert.ok(NAMES.every((other) => links.some((link) => link.endsWith(`/${other}.html`))));
      for (const link of links) assert.ok(existsSync(fileURLToPath(link)), link);
    });
  });

  test(`${name}: the keyboard reaches every control, and one sees where it is`, async () => {
    await opened(name, {}, async (page) => {
      // Of radios that belong together the Tab key reaches one, and arrows the others.
      const wanted = await page.evaluate(() => {
        const all = [...document.querySelectorAll("a[href], button:enabled, input, summary, [role=button]")].filter((one) => one.checkVisibility());
        const stops = all.filter((one) => one.type !== "radio" || one.checked);
        stops.forEach((one, index) => one.setAttribute("data-stop", index));
        return stops.length;
      });
      const reached = new Set();
      for (let press = 0; press < wanted; press++) {
        await page.keyboard.press("Tab");
        const { stop, seen } = await page.evaluate(() => {
          const one = document.activeElement, shown = (element) => element && parseFloat(getComputedStyle(element).outlineWidth) >= 2 && getComputedStyle(element).outlineStyle !== "none";
          const outline = one.querySelector?.(".outline");
          return { stop: one.getAttribute("data-stop"), seen: shown(one) || shown(one.closest("label")) || (outline && parseFloat(getComputedStyle(outline).strokeWidth) >= 3) };
        });
        assert.ok(seen, `the focus on ${stop} cannot be seen`);
        reached.add(stop);
      }
      assert.equal(reached.size, wanted);
      await page.locator("input[name=theme]:checked").focus();
      const before = await state(page);
      await page.keyboard.press("ArrowRight");
      assert.ok((await state(page)) !== before, "an arrow key changes nothing");
    });
  });
}

test("the figures are those of one run, and it says of which", async () => {
  await opened("batching", {}, async (page) => {
    const { date, machine, server, model, sweep, crowd } = await run(page), source = await text(page, "#source");
    for (const part of [date, machine.processor, server.version, server.commit, model.file]) assert.ok(part && source.includes(part), `${part} is not in: ${source}`);
    assert.match(model.sha256, /^[0-9a-f]{64}$/);
    for (const level of sweep.levels) {
      await choose(page, "streams", level.streams);
      const shown = await text(page, "#sweep-figures");
      for (const value of [Math.round(level.tokensPerSecond).toLocaleString("en"), await ms(page, level.ttftMs.p50), await ms(page, level.itlMs.p95)]) assert.ok(shown.includes(value), `${value} is not in: ${shown}`);
      // Counted twice: by the client and by the engine.
      assert.ok(level.rowsPerStep <= level.streams + 0.01, `${level.rowsPerStep} rows a step of ${level.streams} streams`);
      assert.ok(level.tokensPerSecond > 0 && level.steps > 0 && level.waitedShare < 0.5);
    }
    const pieces = crowd.requests.reduce((sum, one) => sum + one.pieces.length, 0), rows = crowd.steps.reduce((sum, { of }) => sum + of.length, 0);
    assert.equal(rows, pieces);
    assert.ok(crowd.steps.length <= crowd.counted.steps, "more steps than the engine counted");
    assert.ok(crowd.steps.every(({ of }) => new Set(of).size === of.length && of.length <= crowd.parallel));
  });
});

test("stages and clocks of a request agree", async () => {
  await opened("timeline", {}, async (page) => {
    const { timeline, crowd } = await run(page);
    for (const one of [timeline.alone, timeline.again, ...crowd.requests.filter(({ status }) => status === 200)]) {
      const { tokenizeMs, queueMs, prefillMs, decodeMs } = one.engine, engine = tokenizeMs + queueMs + prefillMs;
      assert.ok(engine <= one.pieces[0] + 0.1, `the engine's first token after ${engine} ms, the client's after ${one.pieces[0]} ms`);
      assert.ok(engine + decodeMs <= one.done + 0.1);
      assert.ok(one.front.durationMs <= one.done + 0.1, `${one.front.durationMs} ms at the front, ${one.done} ms at the client`);
    }
    assert.ok(timeline.again.engine.cached > timeline.alone.engine.cached);
    const refused = crowd.requests.filter(({ status }) => status === 429);
    assert.ok(refused.length > 0 && refused.every(({ retryAfterSeconds }) => retryAfterSeconds >= 1));
  });
});

test("architecture: a flow is played to its end, beside which each step can be chosen", async () => {
  await opened("architecture", { clock: true }, async (page) => {
    const map = page.locator("#map"), play = page.locator("#play");
    for (const flow of ["request", "change"]) {
      await choose(page, "flow", flow);
      const steps = await page.locator("#steps li").count();
      assert.equal(await map.getAttribute("data-step"), "1");
      const place = () => page.locator(".packet").first().evaluate((one) => [one.getAttribute("cx"), one.getAttribute("cy")].join());
      const begin = await place();
      await play.click();
      await page.clock.runFor(300);
      assert.notEqual(await place(), begin, "the packet does not move");
      assert.equal(await play.innerText(), "Pause");
      for (let round = 0; round < 60 && (await play.innerText()) === "Pause"; round++) await page.clock.fastForward(FORWARD_MS);
      assert.equal(await play.innerText(), "Play");
      assert.equal(await map.getAttribute("data-step"), `${steps}`);
      await page.locator("#steps button").nth(1).click();
      assert.equal(await map.getAttribute("data-step"), "2");
      assert.equal(await page.locator("#steps [aria-current]").count(), 1);
    }
  });
});

test("architecture: a part says what it does and which file it is", async () => {
  await opened("architecture", {}, async (page) => {
    const parts = await page.evaluate(() => GANTRY_PARTS.parts.map(({ id, name, files }) => ({ id, name, files })));
    for (const { id, name, files } of parts) {
      await page.locator(`#node-${id}`).focus();
      await page.keyboard.press(id.length % 2 ? "Enter" : " ");
      assert.equal(await text(page, "#part-name"), name);
      assert.deepEqual(await page.locator("#part-files a").allInnerTexts(), files);
      for (const file of files) assert.ok(existsSync(path.join(root, file)), `${file} is not there`);
    }
  });
});

test("architecture: without motion, packets stand still and steps go on", async () => {
  await opened("architecture", { clock: true, reducedMotion: "reduce" }, async (page) => {
    const place = () => page.locator(".packet").evaluateAll((all) => all.map((one) => one.getAttribute("cx")).join());
    const begin = await place();
    await page.locator("#play").click();
    await page.clock.runFor(400);
    assert.equal(await place(), begin);
    await page.clock.runFor(1200);
    assert.equal(await page.locator("#map").getAttribute("data-step"), "2");
  });
});

test("every drawing follows the width", async () => {
  for (const name of NAMES) {
    await opened(name, {}, async (page) => {
      const svg = page.locator("svg").first(), before = await svg.getAttribute("viewBox");
      await page.setViewportSize(PHONE);
      await page.waitForFunction(([before]) => document.querySelector("svg").getAttribute("viewBox") !== before, [before]);
      assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= document.documentElement.clientWidth));
    });
  }
});

test("timeline: the answer comes as it came", async () => {
  await opened("timeline", { clock: true }, async (page) => {
    const { alone } = (await run(page)).timeline, whole = alone.text.join("").trim();
    assert.equal((await text(page, "#answer")).trim().replace(/\s+/g, " "), whole.replace(/\s+/g, " "));
    await page.locator("#play").click();
    assert.equal(await text(page, "#answer"), "");
    for (let left = Math.floor(alone.pieces[0]) - 60; left > 0; left -= FORWARD_MS) await page.clock.fastForward(Math.min(left, FORWARD_MS));
    assert.equal(await text(page, "#answer"), "", "text that has not come yet");
    await page.clock.runFor(120);
    assert.ok(alone.text.join("").trim().startsWith((await text(page, "#answer")).trim()));
    const at = await page.locator("#time").inputValue();
    assert.match(await text(page, "#now"), /decode: \d+ of \d+ pieces/);
    await page.locator("#play").click();
    await page.clock.runFor(500);
    assert.equal(await page.locator("#time").inputValue(), at, "it goes on after Pause");
    await choose(page, "zoom", "first");
    assert.equal(await page.locator("#lanes").getAttribute("data-zoom"), "first");
    await choose(page, "case", "refused");
    assert.match(await text(page, "#now"), /refused with 429/);
  });
});

test("batching: steps are gone through, and static batches are called computed", async () => {
  await opened("batching", { clock: true }, async (page) => {
    const { crowd } = await run(page), steps = page.locator("#steps");
    assert.equal(await page.locator("#steps .cell").count(), crowd.steps.reduce((sum, { of }) => sum + of.length, 0));
    await page.locator("#play").click();
    for (let round = 0; round < 300 && (await page.locator("#play").innerText()) === "Pause"; round++) await page.clock.fastForward(200);
    assert.equal(await steps.getAttribute("data-step"), `${crowd.steps.length}`);
    await choose(page, "mode", "static");
    assert.match(await text(page, "#steps-note"), /^Not measured/);
    assert.equal(await page.locator("#steps .cell").count(), crowd.steps.reduce((sum, { of }) => sum + of.length, 0), "the same tokens");
    await page.locator("#sweep .column").last().click();
    assert.equal(await page.locator("#sweep").getAttribute("data-streams"), `${(await run(page)).sweep.levels.at(-1).streams}`);
  });
});

test("d3 is the pinned one, with its licence", () => {
  const package_ = path.resolve(createRequire(import.meta.url).resolve("d3"), "../..");
  for (const [ours, theirs] of [["d3.min.js", "dist/d3.min.js"], ["LICENSE", "LICENSE"]]) {
    assert.ok(readFileSync(path.join(pages, "d3", ours)).equals(readFileSync(path.join(package_, theirs))), `${ours} is not d3's of the package that is pinned: hack/diagrams.sh d3`);
  }
});
