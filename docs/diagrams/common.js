// What the three pages share: the run that they show, the light and the dark, and how things are drawn. Plain scripts and
// no modules, since a browser loads none of those from a file.
"use strict";

const Gantry = (() => {
  const run = window.GANTRY_RUN;
  const root = document.documentElement;

  // Light, dark, or as the system has it; remembered where the browser lets a file remember something.
  const remembered = (theme) => {
    try {
      if (theme !== undefined) localStorage.setItem("gantry-theme", theme);
      return localStorage.getItem("gantry-theme");
    } catch { return null; }
  };
  const show = (theme) => (theme === "auto" ? root.removeAttribute("data-theme") : root.setAttribute("data-theme", theme));
  const switches = [...document.querySelectorAll("input[name=theme]")];
  const first = switches.find((one) => one.value === remembered()) ?? switches[0];
  first.checked = true;
  show(first.value);
  for (const one of switches) one.addEventListener("change", () => { remembered(one.value); show(one.value); });

  const number = (value, digits = 0) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  // Milliseconds as people read them: three digits that count.
  const ms = (value) => (value >= 9995 ? `${number(value / 1000, 1)} s` : value >= 999.5 ? `${number(value / 1000, 2)} s`
    : `${number(value, value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2)} ms`);
  const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  // Draws into an svg, now and whenever its width changes. `paint(svg, width)` is given an empty one.
  function drawn(selector, paint) {
    const svg = d3.select(selector), parent = svg.node().parentElement;
    let last = 0;
    const again = () => {
      const width = Math.floor(svg.node().getBoundingClientRect().width);
      if (!width) return;
      last = width;
      svg.selectAll("*").remove();
      paint(svg, width);
    };
    new ResizeObserver(() => { if (Math.floor(svg.node().getBoundingClientRect().width) !== last) again(); }).observe(parent);
    again();
    return again;
  }

  // What a click does, Enter and the space bar do as well.
  function pressed(selection, act) {
    return selection.attr("role", "button").attr("tabindex", 0).on("click", (_, datum) => act(datum)).on("keydown", (event, datum) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act(datum);
    });
  }

  // Figures as a list of cards: [name, value, unit].
  function figures(selector, list) {
    d3.select(selector).selectAll("div").data(list).join((enter) => enter.append("div").call((card) => { card.append("dt"); card.append("dd"); }))
      .call((card) => {
        card.select("dt").text(([name]) => name);
        card.select("dd").text(([, value]) => value).append("small").text(([, , unit]) => unit ?? "");
      });
  }

  function table(selector, columns, rows) {
    const made = d3.select(selector).html("").append("table");
    made.append("thead").append("tr").selectAll("th").data(columns).join("th").attr("scope", "col").text(String);
    made.append("tbody").selectAll("tr").data(rows).join("tr").selectAll("td").data((row) => row).join("td").text(String);
  }

  // A clock that a button starts and stops: `advance(ms)` says whether it goes on.
  function player(button, advance) {
    let timer;
    const stop = () => { timer?.stop(); timer = undefined; button.textContent = "Play"; button.setAttribute("aria-pressed", "false"); };
    const start = () => {
      let before = 0;
      button.textContent = "Pause";
      button.setAttribute("aria-pressed", "true");
      timer = d3.timer((elapsed) => { const passed = elapsed - before; before = elapsed; if (!advance(passed)) stop(); });
    };
    button.addEventListener("click", () => (timer ? stop() : start()));
    stop();
    return { stop, get playing() { return timer !== undefined; } };
  }

  const { machine, server, model, date } = run;
  const waited = Math.max(...[run.crowd, ...Object.values(run.timeline), ...run.sweep.levels].map((one) => one.waitedShare));
  document.querySelector("#source").textContent = `All figures are of one run on ${date}: gantry-server ${server.version} (${server.commit}) with ${model.file}, `
    + `on ${machine.processor} with ${machine.cores} cores, of which ${server.threads} computed, and ${machine.memoryGiB} GiB, the client (${machine.client}) beside it; `
    + `the server waited for a processor during at most ${Math.round(100 * waited)} % of the time. They tell about this machine: make diagrams measures yours.`;

  return { run, number, ms, calm, drawn, pressed, figures, table, player };
})();
