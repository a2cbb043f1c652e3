// The map of parts, and what flows along it. State: the flow, its step, the part that is open. Everything else is drawn from
// those; parts.js says what there is.
"use strict";

(() => {
  const { run, ms, calm, drawn, pressed, player } = Gantry;
  const { parts, zones, flows } = GANTRY_PARTS;
  const byId = new Map(parts.map((part) => [part.id, part]));
  const WIDE_FROM = 760; // px: from here on the wide layout
  const HOP_MS = 1000; // how long one hop is shown; what it really took stands beside it

  let flow = flows[0], step = 0, open = byId.get("scheduler"), passed = 0;
  let moves = () => {}; // draws the packets at `passed`

  // From border to border: straight where the two are beside or above each other, else a curve, or along `via`.
  function path(from, to, via) {
    const centre = ({ x, y, w, h }) => [x + w / 2, y + h / 2];
    const [ax, ay] = centre(from), [bx, by] = centre(to);
    if (via) return d3.line()(via);
    const overlap = (a, al, b, bl) => Math.min(a + al, b + bl) - Math.max(a, b);
    const rows = overlap(from.y, from.h, to.y, to.h), columns = overlap(from.x, from.w, to.x, to.w);
    if (rows > 14) {
      const y = Math.max(from.y, to.y) + rows / 2;
      return d3.line()(ax < bx ? [[from.x + from.w, y], [to.x, y]] : [[from.x, y], [to.x + to.w, y]]);
    }
    if (columns > 14) {
      const x = Math.max(from.x, to.x) + columns / 2;
      return d3.line()(ay < by ? [[x, from.y + from.h], [x, to.y]] : [[x, from.y], [x, to.y + to.h]]);
    }
    const [sx, tx] = ax < bx ? [from.x + from.w, to.x] : [from.x, to.x + to.w];
    return d3.linkHorizontal()({ source: [sx, ay], target: [tx, by] });
  }

  const redraw = drawn("#map", (svg, width) => {
    const layout = width >= WIDE_FROM ? "wide" : "narrow";
    const [w, h] = layout === "wide" ? [1244, 544] : [360, 1026];
    svg.attr("viewBox", `0 0 ${w} ${h}`).attr("data-layout", layout);
    const box = (part) => { const [x, y, bw, bh] = part[layout]; return { x, y, w: bw, h: bh }; };

    svg.append("defs").append("marker").attr("id", "arrow").attr("viewBox", "0 0 8 8").attr("refX", 7).attr("refY", 4).attr("markerWidth", 8)
      .attr("markerHeight", 8).attr("markerUnits", "userSpaceOnUse").attr("orient", "auto").append("path").attr("class", "arrow").attr("d", "M0 0L8 4L0 8Z");
    const zone = svg.append("g").selectAll("g").data(zones.filter((one) => one[layout])).join("g");
    zone.append("rect").attr("class", (one) => `zone ${one.inner ? "inner" : ""}`).attr("rx", 14)
      .attr("x", (one) => one[layout][0]).attr("y", (one) => one[layout][1]).attr("width", (one) => one[layout][2]).attr("height", (one) => one[layout][3]);

    const hops = flows.flatMap((one) => one.steps.flatMap(({ hops }) => hops));
    const key = ([from, to]) => `${from}-${to}`;
    const edges = [...new Map(hops.map((hop) => [key(hop), hop])).values()];
    svg.append("g").selectAll("path").data(edges, key).join("path").attr("class", "edge").attr("id", (hop) => `edge-${key(hop)}`)
      .attr("d", ([from, to]) => path(box(byId.get(from)), box(byId.get(to)), GANTRY_PARTS.bends[layout][`${from}-${to}`]));

    // Above the edges, which may pass behind them.
    svg.append("g").selectAll("text").data(zones.filter((one) => one[layout])).join("text").attr("class", (one) => `soft label ${one.inner ? "inner" : ""}`)
      .attr("x", (one) => one[`${layout}Label`]?.[0] ?? one[layout][0] + 14).attr("y", (one) => one[`${layout}Label`]?.[1] ?? one[layout][1] + 20).text((one) => one.name);

    const part = svg.append("g").selectAll("g").data(parts).join("g").attr("class", (one) => `part ${one.colour}`).attr("id", (one) => `node-${one.id}`)
      .attr("transform", (one) => `translate(${one[layout][0]},${one[layout][1]})`).attr("aria-label", (one) => one.name);
    part.append("rect").attr("class", "outline").attr("rx", 9).attr("width", (one) => box(one).w).attr("height", (one) => box(one).h);
    part.append("rect").attr("class", "mark").attr("x", 0).attr("y", 9).attr("width", 4).attr("height", (one) => box(one).h - 18).attr("rx", 2);
    part.append("text").attr("x", 13).attr("y", (one) => box(one).h / 2 - 3).attr("font-weight", 650).text((one) => one.short);
    part.append("text").attr("class", "soft").attr("x", 13).attr("y", (one) => box(one).h / 2 + 14).text((one) => one.what);
    pressed(part, (one) => { open = one; tell(); });

    const packets = svg.append("g");
    moves = () => {
      const { hops, train } = flow.steps[step];
      const lines = hops.map((hop) => svg.select(`#edge-${key(hop)}`).node()), lengths = lines.map((line) => line.getTotalLength());
      const whole = d3.sum(lengths), along = Math.min(1, passed / durationOf(flow.steps[step]));
      const places = d3.range(train ? 5 : 1).map((place) => along * (train ? 1 + 4 * 0.16 : 1) - place * 0.16).filter((place) => place >= 0 && place <= 1);
      packets.selectAll("circle").data(calm() ? [1] : places).join("circle").attr("class", `packet ${flow.colour}`).attr("r", layout === "wide" ? 7 : 6)
        .each(function (place) {
          let at = place * whole, line = 0;
          while (line < lines.length - 1 && at > lengths[line]) at -= lengths[line++];
          const { x, y } = lines[line].getPointAtLength(at);
          d3.select(this).attr("cx", x).attr("cy", y);
        });
    };
    tell();
  });

  function durationOf({ hops, train }) { return HOP_MS * (train ? 2.4 : 1) * Math.max(1, hops.length * 0.8); }

  // Shows the state.
  function tell() {
    const now = flow.steps[step], on = new Set(now.hops.flat()), along = new Set(flow.steps.flatMap(({ hops }) => hops.map((hop) => hop.join("-"))));
    const svg = d3.select("#map").attr("data-flow", flow.id).attr("data-step", step + 1);
    svg.selectAll(".part").classed("on", (one) => on.has(one.id)).attr("aria-pressed", (one) => String(one === open));
    svg.selectAll(".edge").attr("class", function () {
      const id = this.id.slice(5);
      return `edge ${along.has(id) ? "flow" : ""} ${now.hops.some((hop) => hop.join("-") === id) ? `now ${flow.colour}` : ""}`;
    });
    moves();

    d3.select("#flow-name").text(flow.name);
    d3.select("#flow-note").text(flow.note);
    d3.select("#steps").selectAll("li").data(flow.steps).join((enter) => enter.append("li").call((item) => {
      const button = item.append("button").attr("type", "button");
      button.append("span");
      button.append("b");
    })).select("button").attr("aria-current", (_, index) => (index === step ? "step" : null))
      .on("click", (_, one) => go(flow.steps.indexOf(one)))
      .call((button) => { button.select("span").text((one) => one.say); button.select("b").text((one) => one.took?.(run) ?? ""); });
    d3.select("#back").property("disabled", step === 0);
    d3.select("#next").property("disabled", step === flow.steps.length - 1);

    d3.select("#part-name").text(open.name);
    d3.select("#part-where").text(open.where);
    d3.select("#part-does").text(open.does);
    d3.select("#part-never").text(open.never);
    d3.select("#part-files").selectAll("li").data(open.files).join("li").html("").append("a").attr("href", (file) => `../../${file}`).append("code").text(String);
  }

  function go(to) {
    step = Math.max(0, Math.min(flow.steps.length - 1, to));
    passed = 0;
    tell();
  }

  const choices = d3.select("#flows").selectAll("label").data(flows).join("label");
  choices.append("input").attr("type", "radio").attr("name", "flow").attr("value", (one) => one.id).property("checked", (one) => one === flow)
    .on("change", (_, one) => { play.stop(); flow = one; go(0); });
  choices.append("span").text((one) => one.title);
  d3.select("#back").on("click", () => { play.stop(); go(step - 1); });
  d3.select("#next").on("click", () => { play.stop(); go(step + 1); });

  const play = player(document.querySelector("#play"), (elapsed) => {
    passed += elapsed;
    if (passed < durationOf(flow.steps[step])) { if (!calm()) moves(); return true; }
    if (step < flow.steps.length - 1) { go(step + 1); return true; }
    return false;
  });
  // From its end a flow begins anew.
  document.querySelector("#play").addEventListener("click", () => { if (play.playing && step === flow.steps.length - 1) go(0); });
  redraw();
})();
