// Controls, keyboard and touch, light, dark and print, and updates of a running run.

/** Ways to a plot other than the mouse: keyboard, fingers, and its name for a screen reader. */
function reachable(plot, chart) {
  const wrap = plot.root;
  wrap.tabIndex = 0;
  wrap.setAttribute("role", "group");
  wrap.setAttribute("aria-label", `${chart.title}, drawn; see the table "Curve values" for a text alternative. Arrow keys pan, plus and minus zoom, 0 shows everything.`);
  wrap.addEventListener("keydown", (event) => {
    const done = {
      ArrowLeft: () => pan(-0.2),
      ArrowRight: () => pan(0.2),
      "+": () => zoom(0.5),
      "=": () => zoom(0.5),
      "-": () => zoom(2),
      0: showEverything,
      Home: showEverything,
    }[event.key];
    if (!done || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    done();
  });
  const over = plot.over;
  const fingers = new Map();
  over.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch") fingers.set(event.pointerId, event.clientX);
  });
  over.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return;
    const before = [...fingers.values()];
    fingers.set(event.pointerId, event.clientX);
    const after = [...fingers.values()];
    const width = over.clientWidth;
    if (before.length === 1) pan((before[0] - after[0]) / width);
    else if (before.length === 2) {
      const apart = (pair) => Math.max(20, Math.abs(pair[0] - pair[1]));
      const middle = (after[0] + after[1]) / 2 - over.getBoundingClientRect().left;
      zoom(apart(before) / apart(after), view.min + (middle / width) * (view.max - view.min));
    }
  });
  for (const end of ["pointerup", "pointercancel"]) {
    over.addEventListener(end, (event) => fingers.delete(event.pointerId));
  }
}

/** Follow the mouse until its button is up. */
function startPan(plot, event) {
  let x = event.clientX;
  const move = (next) => {
    pan((x - next.clientX) / plot.over.clientWidth);
    x = next.clientX;
  };
  document.addEventListener("mousemove", move);
  document.addEventListener("mouseup", () => document.removeEventListener("mousemove", move), { once: true });
  event.preventDefault();
}

function button(text, label, action) {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, title: label });
  made.setAttribute("aria-label", label);
  made.addEventListener("click", action);
  return made;
}

function buildControls() {
  const bar = document.getElementById("controls");
  if (runs.length > 1) {
    const group = Object.assign(document.createElement("div"), { className: "runs" });
    runs.forEach((run, number) => {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: true });
      box.addEventListener("change", () => {
        run.visible = box.checked;
        drawAll();
      });
      const swatch = Object.assign(document.createElement("span"), { className: `swatch run-${number % 8}` });
      label.append(box, swatch, run.name);
      group.append(label);
    });
    bar.append(group);
  }
  const choice = document.createElement("select");
  for (const [axis, name] of Object.entries(AXES)) {
    const known = axis === "step" || runs.some((run) => run.knots[axis].value.at(-1) > 0);
    if (known) choice.append(new Option(name, axis));
  }
  choice.addEventListener("change", () => {
    view.axis = choice.value;
    view.everything = true;
    drawAll();
  });
  const label = document.createElement("label");
  label.append("Against ", choice);
  const buttons = Object.assign(document.createElement("div"), { className: "buttons" });
  buttons.append(
    button("−", "Zoom out", () => zoom(2)),
    button("+", "Zoom in", () => zoom(0.5)),
    button("‹", "Pan to earlier steps", () => pan(-0.5)),
    button("›", "Pan to later steps", () => pan(0.5)),
    button("All", "Show everything", showEverything),
  );
  bar.append(label, buttons);
  bar.hidden = false;
  for (const chart of charts.filter((one) => one.logarithmic)) {
    const toggle = button("log", `${chart.title} on a logarithmic scale`, () => {
      if (!view.logarithmic.delete(chart.name)) view.logarithmic.add(chart.name);
      toggle.setAttribute("aria-pressed", view.logarithmic.has(chart.name));
      drawChart(chart);
    });
    toggle.className = "log";
    toggle.setAttribute("aria-pressed", "false");
    document.querySelector(`#chart-${chart.name} figcaption`).append(toggle);
  }
}

function drawAll(draw = drawChart) {
  if (view.everything) [view.min, view.max] = fullRange();
  for (const chart of charts) draw(chart);
  drawTimeline();
}

function fit() {
  for (const chart of charts) {
    for (const one of drawn.get(chart.name) ?? []) {
      one.plot.setSize(sizeOf(one.host));
      seeRange(chart, one);
    }
  }
  drawTimeline();
}

/** On paper: light colours, everything open, the width of the paper, and twice as fine. */
let opened = null;
function toPaper() {
  if (opened) return;
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const one of opened) one.open = true;
  document.documentElement.dataset.print = "";
  view.fineness = 2;
  drawAll();
}

function fromPaper() {
  if (!opened) return;
  for (const one of opened) one.open = false;
  opened = null;
  delete document.documentElement.dataset.print;
  view.fineness = 1;
  drawAll();
}

/** Ask the server for what is new, for ever. */
async function follow() {
  const status = document.getElementById("status");
  let seen = payload.revision;
  for (;;) {
    await new Promise((done) => setTimeout(done, payload.poll_seconds * 1000));
    try {
      const have = runs.map((run) => [run.version, ...payload.tables.flatMap((name) => [run[name].width, run[name].complete])].join(":"));
      const answer = await fetch(`data?seen=${seen}&have=${have.join(",")}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      if (answer.status === 200) {
        const news = await answer.json();
        takeIn(news);
        seen = news.revision;
      }
      status.textContent = ` · live, updated ${new Date().toLocaleTimeString("en-GB")}`;
      status.className = "";
    } catch (error) {
      status.textContent = " · the server does not respond; this page is outdated";
      status.className = "stale";
    }
  }
}

function takeIn(news) {
  runs.forEach((run, number) => extendRun(run, news.runs[number]));
  charts = news.charts;
  for (const [name, html] of Object.entries(news.sections)) {
    const part = document.getElementById(`section-${name}`);
    const open = [...part.querySelectorAll("details")].map((one) => one.open);
    part.innerHTML = html; // the server's own, escaped there
    part.querySelectorAll("details").forEach((one, i) => (one.open = open[i] ?? false));
  }
  drawAll(refreshChart);
}

let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  if (drawn.size) fit();
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
matchMedia("print").addEventListener("change", (event) => (event.matches ? toPaper() : fromPaper()));
addEventListener("beforeprint", toPaper);
addEventListener("afterprint", fromPaper);

buildControls();
drawAll();
if (payload.live) follow();
window.bigtrainReport = { runs, view, drawn, show, pan, zoom, showEverything, drawnAt: performance.now() };
