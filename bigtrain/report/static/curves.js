// One uPlot for each chart for which a run has values; for stacked charts, one per run.

const DASHES = [[6, 3], [2, 3], [10, 4], [6, 3, 2, 3], [4, 6]];
const drawn = new Map(); // name of a chart -> [{plot, lines, host}]
const PAPER_WIDTH = 680; // CSS pixels of A4 between its margins; letter is a little wider

/** Canvas pixels of a length in CSS pixels. */
function pixels(length) {
  return length * uPlot.pxRatio * view.fineness;
}

/** The lines of a chart: run, series, label, colour, dash; those that are stacked first. */
function linesOf(chart) {
  const found = [];
  runs.forEach((run, number) => {
    if (!run.visible) return;
    const names = chart.series[number];
    names.forEach((name, index) => {
      const whole = chart.named.includes(name);
      const own = whole && chart.named.length > 1;
      const entry = own ? name.replaceAll("_", " ") : whole ? "" : name.slice(name.indexOf("/") + 1);
      const labels = runs.length > 1 && !chart.stacked ? [run.name, entry] : [entry || chart.title];
      const alone = runs.length === 1 || chart.stacked;
      found.push({
        run,
        name,
        label: labels.filter(Boolean).join(": ").replace(/_seconds$/, ""),
        colour: `run-${(alone ? index : number) % 8}`,
        stacked: chart.stacked && !chart.apart.includes(name),
        // Solid: the total of the entries, or the first of several series.
        dash: chart.apart.includes(name) || (entry && !chart.stacked && !(own && index === 0)) ? DASHES[(index + DASHES.length - 1) % DASHES.length] : [],
      });
    });
  });
  return found;
}

/** What uPlot draws: of each line the range that is seen, and what each series of it looks like. */
function prepare(chart, lines, width) {
  const tables = [];
  const series = [{}];
  const bands = [];
  const add = (label, stroke, more) => series.push({ label, stroke, points: { show: false }, ...more });
  let below = null;
  lines.forEach((line, number) => {
    const group = grouping(line.run, chart.table, width);
    const columns = grouped(line.run[chart.table].series[line.name], group, chart.scale);
    const stroke = () => colour(line.colour);
    if (line.stacked) {
      below = columns.mean.map((v, i) => (v === null && !below?.[i] ? null : (v ?? 0) + (below?.[i] ?? 0)));
      tables.push([group.x, below]);
      const fill = () => withAlpha(colour(line.colour), 0.55);
      // The lowest area has nothing below it: uPlot fills down to zero.
      add(line.label, stroke, { width: view.fineness, fill: number === 0 ? fill : undefined });
      if (number > 0) bands.push({ series: [series.length - 1, series.length - 2], fill });
      return;
    }
    tables.push([group.x, columns.low, columns.high, columns.mean]);
    add(`${line.label}, lowest`, stroke, { width: 0 });
    add(`${line.label}, highest`, stroke, { width: 0 });
    const fill = () => withAlpha(colour(line.colour), runs.length > 2 ? 0.15 : 0.3);
    bands.push({ series: [series.length - 1, series.length - 2], fill });
    const few = line.run[chart.table].step.length < 80;
    const points = few ? { show: true, size: 4 * view.fineness, fill: stroke } : { show: false };
    const dash = line.dash.map((length) => length * view.fineness);
    add(line.label, stroke, { width: 1.5 * view.fineness, dash, points });
  });
  const first = tables[0][0];
  const data = tables.every((one) => one[0] === first)
    ? [first, ...tables.flatMap((one) => one.slice(1))]
    : uPlot.join(tables);
  return { data, series, bands };
}

/** Which buckets are seen, and how many of them make a point so that there is about one a pixel. */
function grouping(run, tableName, width) {
  const key = `grouping ${tableName}`;
  const asked = `${view.axis} ${view.min} ${view.max} ${width}`;
  const before = run.cache.get(key);
  if (before?.asked === asked) return before;
  const xs = positions(run, tableName, view.axis);
  let begin = Math.max(0, lastNotAbove(xs, view.min) - 1);
  let end = Math.min(xs.length, lastNotAbove(xs, view.max) + 2);
  let size = 1;
  while ((end - begin) / size > width) size *= 2;
  // Group the same buckets for every start of the view: panning moves a curve but does not change it.
  begin -= begin % size;
  end = Math.min(xs.length, Math.ceil(end / size) * size);
  const x = [];
  for (let i = begin; i < end; i += size) x.push(xs[Math.min(i + size, end) - 1]);
  const found = { asked, begin, end, size, x };
  run.cache.set(key, found);
  return found;
}

/** A series in these groups: least, greatest and mean; null where there is nothing. The first two
 * are null throughout where a point is one logged step. */
function grouped(values, { begin, end, size, x }, scale) {
  const low = new Array(x.length).fill(null);
  const high = new Array(x.length).fill(null);
  const mean = new Array(x.length).fill(null);
  const single = size === 1 && !values.low;
  for (let n = 0; n < x.length; n++) {
    let [least, greatest, sum, count] = [Infinity, -Infinity, 0, 0];
    for (let i = begin + n * size; i < Math.min(begin + (n + 1) * size, end); i++) {
      if (values.mean[i] === null) continue;
      least = Math.min(least, (values.low ?? values.mean)[i]);
      greatest = Math.max(greatest, (values.high ?? values.mean)[i]);
      sum += values.mean[i];
      count++;
    }
    if (!count) continue;
    mean[n] = (scale * sum) / count;
    if (!single) [low[n], high[n]] = [scale * least, scale * greatest];
  }
  return { low, high, mean };
}

function predictedOf(chart, lines) {
  if (!chart.predicted) return [];
  const found = [];
  for (const run of new Set(lines.map((line) => line.run))) {
    const value = run.predicted[chart.predicted];
    if (typeof value === "number") found.push({ run, value });
  }
  return found;
}

function options(chart, lines, prepared, host) {
  const predicted = predictedOf(chart, lines);
  const logarithmic = view.logarithmic.has(chart.name);
  const fine = view.fineness;
  const axis = {
    stroke: () => colour("muted"),
    grid: { stroke: () => colour("grid"), width: fine },
    ticks: { show: false },
    font: `${12 * fine}px system-ui, sans-serif`,
    gap: 4 * fine,
  };
  return {
    ...sizeOf(host),
    pxAlign: 0,
    legend: { show: false },
    series: prepared.series,
    bands: prepared.bands,
    padding: [8 * fine, 18 * fine, 0, 0],
    cursor: {
      y: false,
      points: { show: false },
      drag: { x: true, y: false, setScale: false },
      // Cursor position; `show` handles a selection, once.
      sync: {
        key: "report",
        setSeries: false,
        scales: ["x", null],
        filters: { pub: (type) => type === "mousemove" || type === "mouseleave" },
      },
      bind: {
        dblclick: () => () => showEverything(),
        mousedown: (u, target, handler) => (event) => {
          if (event.shiftKey) startPan(u, event);
          else handler(event);
        },
      },
    },
    scales: {
      x: { time: false, range: () => [view.min, view.max] },
      y: {
        distr: logarithmic ? 3 : 1,
        range: (u, low, high) => yRange(chart, low, high, predicted, logarithmic),
      },
    },
    axes: [
      { ...axis, size: 28 * fine, space: 64 * fine, values: (u, splits) => splits.map(short) },
      {
        ...axis,
        size: 52 * fine,
        space: 32 * fine,
        values: (u, splits) => splits.map((v) => (v === null ? "" : short(v))),
      },
    ],
    hooks: {
      draw: [(u) => drawMarks(u, lines), (u) => drawPredicted(u, predicted)],
      setSelect: [
        (u) => {
          if (u.select.width > 4) {
            show(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
          }
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
        },
      ],
      setCursor: [(u) => readOut(chart, lines, host, u)],
    },
  };
}

function sizeOf(host) {
  const width = view.fineness > 1 ? PAPER_WIDTH : Math.max(240, Math.floor(host.clientWidth));
  const height = width < 480 || view.fineness > 1 ? 200 : 240;
  return { width: width * view.fineness, height: height * view.fineness };
}

function yRange(chart, low, high, predicted, logarithmic) {
  let min = low ?? 0;
  let max = high ?? 1;
  for (const { value } of predicted) {
    min = Math.min(min, value);
    max = Math.max(max, value);
  }
  if (logarithmic) return uPlot.rangeLog(min > 0 ? min : max / 1e3 || 1e-3, max > 0 ? max : 1, 10, false);
  if (chart.stacked || chart.fromZero) min = Math.min(0, min);
  if (max === min) return [min - (Math.abs(min) || 1) * 0.1, max + (Math.abs(max) || 1) * 0.1];
  return uPlot.rangeNum(min, max, 0.06, true);
}

function drawMarks(u, lines) {
  const { ctx } = u;
  const { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.lineWidth = pixels(1);
  for (const run of new Set(lines.map((line) => line.run))) {
    for (const one of run.marks) {
      const full = ["restart", "rollback", "hang"].includes(one.kind);
      ctx.strokeStyle = markColour(one.kind, run);
      ctx.setLineDash(full ? [pixels(4), pixels(3)] : []);
      ctx.beginPath();
      for (const step of one.steps) {
        // On whole pixels: one line instead of two halves.
        const at = Math.round(u.valToPos(position(run, step, view.axis), "x", true) - 0.5) + 0.5;
        if (at < left || at > left + width) continue;
        ctx.moveTo(at, full ? top : top + height - pixels(7));
        ctx.lineTo(at, top + height);
      }
      ctx.stroke();
    }
  }
  ctx.restore();
}

function drawPredicted(u, predicted) {
  const { ctx } = u;
  const { left, top, width, height } = u.bbox;
  ctx.save();
  ctx.font = `${pixels(11)}px system-ui, sans-serif`;
  ctx.textAlign = "right";
  ctx.lineWidth = pixels(1.5);
  ctx.setLineDash([pixels(7), pixels(5)]);
  for (const { run, value } of predicted) {
    const at = u.valToPos(value, "y", true);
    if (at < top || at > top + height) continue;
    ctx.strokeStyle = ctx.fillStyle = runs.length > 1 ? colour(`run-${runs.indexOf(run) % 8}`) : colour("text");
    ctx.beginPath();
    ctx.moveTo(left, at);
    ctx.lineTo(left + width, at);
    ctx.stroke();
    const below = at < top + pixels(16);
    const place = ["predicted", left + width - pixels(4), at + pixels(below ? 14 : -5)];
    const dash = ctx.getLineDash();
    ctx.setLineDash([]);
    ctx.strokeStyle = colour("background"); // a halo, for curves behind the word
    ctx.lineWidth = pixels(4);
    ctx.strokeText(...place);
    ctx.fillText(...place);
    ctx.setLineDash(dash);
    ctx.lineWidth = pixels(1.5);
  }
  ctx.restore();
}

/** The values under the cursor, run by run; without a cursor the names and the last values. */
function readOut(chart, lines, host, u) {
  const under = u && u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null;
  const parts = lines.map((line) => {
    const { run, name } = line;
    const { step, series, width } = run[chart.table];
    const xs = positions(run, chart.table, view.axis);
    const values = series[name];
    let i = xs.length - 1;
    if (under !== null) {
      i = lastNotAbove(xs, under);
      if (i + 1 < xs.length && (i < 0 || xs[i + 1] - under < under - xs[i])) i++;
    }
    const scaled = (v) => exact(v === null || v === undefined ? null : v * chart.scale);
    const range = values.low && under !== null ? ` (${scaled(values.low[i])} to ${scaled(values.high[i])})` : "";
    const before = width > 1 && i > 0 ? `${exact(step[i - 1] + 1)}–` : "";
    const at = under === null && lines.length > 1 ? "" : ` at step ${before}${exact(step[i])}`;
    const item = document.createElement("span");
    const swatch = document.createElement("span");
    swatch.className = `swatch ${line.colour}${line.dash.length ? " dashed" : ""}`;
    const label = lines.length > 1 ? `${line.label} ` : "";
    const unit = chart.unit ? ` ${chart.unit}` : "";
    item.append(swatch, `${label}${scaled(values.mean[i])}${range}${unit}${at}`);
    return item;
  });
  host.closest("figure, .stack").querySelector(".readout").replaceChildren(...parts);
}

/** Make a figure's plots anew. */
function drawChart(chart) {
  const figure = document.getElementById(`chart-${chart.name}`);
  for (const one of drawn.get(chart.name) ?? []) one.plot.destroy();
  drawn.delete(chart.name);
  const lines = linesOf(chart);
  figure.hidden = lines.length === 0;
  if (!lines.length) return;
  const plot = figure.querySelector(".plot");
  const groups = chart.stacked ? runs.map((run) => lines.filter((line) => line.run === run)) : [lines];
  plot.replaceChildren();
  const made = groups.filter((group) => group.length).map((group) => {
    let host = plot;
    if (chart.stacked && runs.length > 1) {
      const stack = document.createElement("div");
      stack.className = "stack";
      stack.append(Object.assign(document.createElement("h4"), { textContent: group[0].run.name }));
      stack.append(Object.assign(document.createElement("div"), { className: "readout" }));
      host = document.createElement("div");
      stack.append(host);
      plot.append(stack);
    }
    const prepared = prepare(chart, group, sizeOf(host).width);
    const made = new uPlot(options(chart, group, prepared, host), prepared.data, host);
    reachable(made, chart);
    readOut(chart, group, host, null);
    return { plot: made, lines: group, host };
  });
  drawn.set(chart.name, made);
}

/** Give a chart's plots what there is now; where the lines are others, make them anew. */
function refreshChart(chart) {
  const key = (lines) => lines.map((line) => line.label).join("\n");
  const before = drawn.get(chart.name) ?? [];
  if (key(before.flatMap((one) => one.lines)) !== key(linesOf(chart))) {
    drawChart(chart);
    return;
  }
  for (const one of before) seeRange(chart, one);
}

/** Draw the range that is seen. */
function seeRange(chart, { plot, lines, host }) {
  plot.batch(() => {
    plot.setData(prepare(chart, lines, sizeOf(host).width).data, false);
    plot.setScale("x", { min: view.min, max: view.max });
  });
  if (plot.cursor.left < 0 || plot.cursor.left === undefined) readOut(chart, lines, host, null);
}

view.listeners.push(() => {
  for (const chart of charts) {
    for (const one of drawn.get(chart.name) ?? []) seeRange(chart, one);
  }
});
