// Which requests a step has, and what the number of requests does to throughput and latency. Measured, but for what is called
// computed: the same answers, had each batch been held until its longest one ended.
"use strict";

(() => {
  const { run, ms, number, drawn, pressed, figures, table, player } = Gantry;
  const { crowd, sweep } = run;
  const answered = crowd.requests.map((one, index) => ({ index, one })).filter(({ one }) => one.pieces.length);

  // --- who is in a step ---

  const continuous = crowd.steps.map(({ at, of }) => ({ at, of, empty: 0 }));
  // In batches of as many as there are sequences, in their order: a step for each token of the longest.
  const fixed = d3.range(0, answered.length, crowd.parallel).flatMap((begin) => {
    const batch = answered.slice(begin, begin + crowd.parallel), length = d3.max(batch, ({ one }) => one.pieces.length);
    return d3.range(length).map((token) => {
      const of = batch.filter(({ one }) => token < one.pieces.length).map(({ index }) => index);
      return { of, empty: crowd.parallel - of.length };
    });
  });
  const silent = crowd.counted.steps - crowd.steps.length;
  let mode = "continuous", step = 0, passed = 0;
  const shown = () => (mode === "continuous" ? continuous : fixed);
  const most = Math.max(continuous.length, fixed.length); // both on one axis: the shorter one is the faster one
  let x;

  const steps = drawn("#steps", (svg, width) => {
    const left = width < 560 ? 30 : 40, right = width - 4, row = width < 560 ? 15 : 18, bottom = answered.length * row + 26;
    x = d3.scaleLinear([0, most], [left, right]);
    svg.attr("viewBox", `0 0 ${width} ${bottom + 42}`).attr("height", bottom + 42).attr("data-mode", mode);
    const cell = Math.max(1, x(1) - x(0) - (x(1) - x(0) > 5 ? 1 : 0.4));
    const lines = svg.append("g").selectAll("g").data(answered).join("g").attr("transform", (_, index) => `translate(0,${index * row + 22})`);
    lines.append("line").attr("class", "grid").attr("x1", left).attr("x2", right).attr("y1", row - 1).attr("y2", row - 1);
    lines.append("text").attr("class", "soft").attr("x", left - 8).attr("y", row - 5).attr("text-anchor", "end").text(({ index }) => index + 1);
    const places = new Map(answered.map(({ index }, place) => [index, place]));
    svg.append("g").selectAll("rect").data(shown().flatMap(({ of }, at) => of.map((index) => [at, index]))).join("rect").attr("class", "bar decode cell")
      .attr("x", ([at]) => x(at)).attr("y", ([, index]) => places.get(index) * row + 25).attr("width", cell).attr("height", row - 6);
    svg.append("g").attr("class", "axis").attr("transform", `translate(0,${bottom})`).call(d3.axisBottom(x).ticks(width < 560 ? 5 : 10).tickSizeOuter(0));
    svg.append("text").attr("class", "soft").attr("x", 0).attr("y", 12).text("Request");
    svg.append("text").attr("class", "soft").attr("x", right).attr("y", bottom + 38).attr("text-anchor", "end").text("Step");
    svg.append("rect").attr("class", "cursor").attr("fill", "none").attr("y", 20).attr("height", bottom - 20).attr("width", Math.max(3, x(1) - x(0)));
    move();
  });

  function move() {
    const all = shown(), { of, at, empty } = all[step];
    d3.select("#steps").attr("data-step", step + 1).select(".cursor").attr("x", x(step));
    d3.select("#step").attr("max", all.length - 1).property("value", step).attr("aria-valuetext", `step ${step + 1}`);
    const who = `tokens of ${of.length === 1 ? "request" : "requests"} ${of.map((index) => index + 1).sort((a, b) => a - b).join(", ")}`;
    d3.select("#now").text(`Step ${step + 1} of ${all.length}: ${who}${at === undefined ? (empty ? `; ${empty} of ${crowd.parallel} rows empty` : "") : `, ${ms(at)} after the first request`}.`);
  }

  function tell() {
    const all = shown(), rows = d3.sum(all, ({ of }) => of.length), places = all.length * crowd.parallel;
    d3.select("#steps-note").text(mode === "continuous"
      ? `The answers of the crowd on ${crowd.parallel} sequences: a cell is text that came to its client, a column what came together, within ${crowd.stepGapMs} ms, and so of one step. `
        + `The engine counted ${number(crowd.counted.steps)} steps with ${number(crowd.counted.rows)} rows for tokens${silent ? `; ${number(silent)} of them only computed parts of prompts, and brought no text` : ""}.`
      : `Not measured: the same answers with the same lengths, put into batches of ${crowd.parallel} in their order, each held until its longest answer ends. Prompts are left out.`);
    figures("#step-figures", [
      [mode === "static" ? "Steps" : "Steps with text", number(all.length)], ["Tokens a step, mean", number(rows / all.length, 2), `of ${crowd.parallel}`],
      ["Rows empty", `${number((100 * (places - rows)) / places, 0)} %`, `of ${number(places)}`],
      mode === "static" && ["Steps beyond continuous batching's", number(all.length - continuous.length), `${number((100 * (all.length - continuous.length)) / continuous.length)} %`],
    ].filter(Boolean));
    step = Math.min(step, all.length - 1);
    steps();
  }

  d3.select("#step").on("input", (event) => { play.stop(); step = Number(event.target.value); move(); });
  d3.selectAll("input[name=mode]").on("change", (event) => { play.stop(); mode = event.target.value; step = 0; tell(); });
  const play = player(document.querySelector("#play"), (elapsed) => {
    passed += elapsed;
    if (passed < 90) return true;
    passed = 0;
    if (step < shown().length - 1) { step += 1; move(); }
    return step < shown().length - 1;
  });
  document.querySelector("#play").addEventListener("click", () => { if (play.playing && step === shown().length - 1) { step = 0; move(); } });

  // --- throughput and latency ---

  const measures = [
    { id: "itl", title: "Between tokens", of: (level) => level.itlMs, name: "Time between two pieces of an answer" },
    { id: "ttft", title: "First token", of: (level) => level.ttftMs, name: "Time to the first token" },
    { id: "step", title: "A step", of: (level) => ({ p50: level.stepMs.before + level.stepMs.decode + level.stepMs.after }), name: "Time of a step, mean" },
  ];
  const { levels } = sweep;
  let measure = measures[0], level = levels.find(({ streams }) => streams === 8) ?? levels[0];

  const chart = drawn("#sweep", (svg, width) => {
    const stacked = width < 640, gap = 56, each = stacked ? width : (width - gap) / 2, height = 230, left = 46, top = 50;
    svg.attr("viewBox", `0 0 ${width} ${(stacked ? 2 : 1) * (height + 88)}`).attr("height", (stacked ? 2 : 1) * (height + 88)).attr("data-measure", measure.id).attr("data-streams", level.streams);
    const panel = (place, title, curves, unit) => {
      const g = svg.append("g").attr("transform", stacked ? `translate(0,${place * (height + 88)})` : `translate(${place * (each + gap)},0)`);
      const across = d3.scalePoint(levels.map(({ streams }) => streams), [left, each - 14]).padding(0.3);
      const up = d3.scaleLinear([0, d3.max(curves.flatMap(({ values }) => values)) * 1.08], [top + height - 20, top]).nice(5);
      g.append("text").attr("font-weight", 650).attr("x", 0).attr("y", 14).text(title);
      g.append("g").attr("class", "axis").attr("transform", `translate(${left},0)`).call(d3.axisLeft(up).ticks(5).tickSize(-(each - left - 14)).tickFormat((value) => number(value))).call((axis) => axis.select(".domain").remove())
        .selectAll(".tick line").attr("class", "grid");
      g.append("g").attr("class", "axis").attr("transform", `translate(0,${top + height - 20})`).call(d3.axisBottom(across).tickSizeOuter(0));
      g.append("text").attr("class", "soft").attr("x", each - 14).attr("y", top + height + 18).attr("text-anchor", "end").text("requests at once");
      g.append("text").attr("class", "soft").attr("x", 0).attr("y", top + height + 18).text(unit);
      const legend = g.append("text").attr("class", "soft").attr("x", 0).attr("y", 32);
      for (const { colour, values, label } of curves) {
        const line = d3.line((_, index) => across(levels[index].streams), up);
        g.append("path").attr("class", `curve ${colour}`).attr("d", line(values));
        g.append("g").selectAll("circle").data(values).join("circle").attr("class", `dot ${colour}`).attr("cx", (_, index) => across(levels[index].streams)).attr("cy", (value) => up(value))
          .attr("r", (_, index) => (levels[index] === level ? 8 : 4.5));
        if (label) legend.append("tspan").attr("class", `key ${colour}`).attr("dx", legend.text() ? 14 : 0).text("● ").select(function () { return this.parentNode; }).append("tspan").text(label);
      }
      // All of a column chooses its level; the radios above do so by keyboard.
      g.append("g").selectAll("rect").data(levels).join("rect").attr("class", "column").attr("fill", "transparent").style("cursor", "pointer")
        .attr("x", ({ streams }) => across(streams) - across.step() / 2).attr("width", across.step()).attr("y", top).attr("height", height)
        .on("click", (_, one) => choose(one));
    };
    panel(0, "Throughput, all together", [{ colour: "decode", values: levels.map((one) => one.tokensPerSecond) }], "tokens/s");
    const high = levels.map((one) => measure.of(one).p95);
    panel(1, measure.name, [...(high[0] === undefined ? [] : [{ colour: "queue", values: high, label: "95th percentile" }]),
      { colour: "prefill", values: levels.map((one) => measure.of(one).p50), label: high[0] === undefined ? "" : "median" }], "ms");
  });

  function choose(one) {
    level = one;
    d3.selectAll("#streams input").property("checked", (other) => other === level);
    const alone = levels[0], { before, decode, after } = level.stepMs;
    figures("#sweep-figures", [
      ["At once", level.streams], ["Throughput", number(level.tokensPerSecond, 0), "tokens/s"],
      ["Of one alone", `${number(level.tokensPerSecond / alone.tokensPerSecond, 1)}×`], ["For each request", number(level.tokensPerSecond / level.streams, 1), "tokens/s"],
      ["Rows a step, mean", number(level.rowsPerStep, 1), `${number(level.batchTokensPerStep, 1)} tokens with prompts`],
      ["A step, mean", ms(before + decode + after), `${number((100 * decode) / (before + decode + after), 1)} % of it in llama.cpp`],
      ["First token", ms(level.ttftMs.p50), `p95 ${ms(level.ttftMs.p95)}`], ["Between tokens", ms(level.itlMs.p50), `p95 ${ms(level.itlMs.p95)}`],
      ["Padding that is not computed", number(level.paddingTokens), `tokens beside ${number(level.batchTokens)} that are`],
    ]);
    chart();
  }
  const [least, most_] = [levels[0], levels.at(-1)], times = (of) => `${number(of(most_) / of(least), 1)} times`;
  d3.select("#sweep-note").text(`${levels.length} loads on a server with ${sweep.parallel} sequences: so many requests at once, with answers of ${sweep.levelTokens} tokens. Throughput is counted while all of them decode; the time to the first token has the prompts of all in it. `
    + `From ${least.streams} to ${most_.streams} at once throughput is ${times((one) => one.tokensPerSecond)} as much, and the time between two pieces ${times((one) => one.itlMs.p50)}: one pass over the weights serves all rows of a step, while their arithmetic adds up.`);
  const kinds = d3.select("#measure").selectAll("label").data(measures).join("label");
  kinds.append("input").attr("type", "radio").attr("name", "measure").attr("value", ({ id }) => id).property("checked", (one) => one === measure).on("change", (_, one) => { measure = one; chart(); });
  kinds.append("span").text(({ title }) => title);
  const numbers = d3.select("#streams").selectAll("label").data(levels).join("label");
  numbers.append("input").attr("type", "radio").attr("name", "streams").attr("value", ({ streams }) => streams).on("change", (_, one) => choose(one));
  numbers.append("span").text(({ streams }) => streams);
  table("#sweep-table", ["at once", "requests", "tokens/s", "first token p50", "p95", "between p50", "p95", "rows a step", "step", "waited"], levels.map((one) => [one.streams, one.requests, number(one.tokensPerSecond, 1),
    ms(one.ttftMs.p50), ms(one.ttftMs.p95), ms(one.itlMs.p50), ms(one.itlMs.p95), number(one.rowsPerStep, 2), ms(one.stepMs.before + one.stepMs.decode + one.stepMs.after), `${number(100 * one.waitedShare, 0)} %`]));
  tell();
  choose(level);
})();
