// Event marks, a lane for each kind, for the range that the curves show.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function drawTimeline() {
  const figure = document.getElementById("timeline");
  const host = figure.querySelector(".lanes");
  const kinds = new Set(shownRuns().flatMap((run) => run.marks.filter((m) => m.steps.length).map((m) => m.kind)));
  figure.hidden = kinds.size === 0;
  if (!kinds.size) return host.replaceChildren();
  const width = view.fineness > 1 ? PAPER_WIDTH : Math.max(240, Math.floor(host.clientWidth));
  // Each of several runs has its own row in a lane, so that marks of the same step stay separate.
  const rows = shownRuns();
  const row = rows.length > 1 ? 10 : 0;
  const lane = 38 + row * (rows.length - 1);
  const [left, right] = [8, width - 20];
  const height = kinds.size * lane + 22;
  const at = (x) => left + ((x - view.min) / (view.max - view.min)) * (right - left);
  const picture = svg("svg", { width, height, role: "img", "aria-label": `Events by ${AXES[view.axis].toLowerCase()}` });
  [...kinds].forEach((kind, number) => {
    const y = number * lane + 27;
    const total = shownRuns().flatMap((run) => run.marks).filter((m) => m.kind === kind).reduce((sum, m) => sum + m.total, 0);
    picture.append(
      svg("text", { x: left, y: y - 12, class: "lane" }, `${kind} (${total.toLocaleString("en-US")})`),
    );
    rows.forEach((run, index) => {
      const level = y + index * row;
      picture.append(svg("line", { x1: left, x2: right, y1: level, y2: level, class: "lane" }));
      const fill = markColour(kind, run);
      for (const mark of run.marks.filter((one) => one.kind === kind)) {
        mark.steps.forEach((step, i) => {
          const x = at(position(run, step, view.axis));
          if (x < left - 1 || x > right + 1) return;
          picture.append(svg("circle", { cx: x, cy: level, r: 4.5, fill }, svg("title", {}, tooltip(run, mark, step, mark.counts[i]))));
        });
      }
    });
  });
  for (const x of ticks(view.min, view.max, width / 80)) {
    picture.append(svg("text", { x: at(x), y: height - 4, class: "tick" }, short(x)));
  }
  host.replaceChildren(picture);
}

function tooltip(run, mark, step, count) {
  const texts = mark.texts.filter(([at]) => at === step).map(([, text]) => text);
  const name = runs.length > 1 ? `${run.name}: ` : "";
  const many = count > 1 ? ` (${count})` : "";
  return [`${name}step ${step.toLocaleString("en-US")}: ${mark.kind}${many}`, ...texts.slice(0, 5)].join("\n");
}

view.listeners.push(drawTimeline);
