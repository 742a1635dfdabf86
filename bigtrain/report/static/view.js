// View: axis, range, colours, and numbers as text.

const AXES = { step: "Step", tokens: "Tokens", samples: "Samples", hours: "Hours of training" };

/** fineness: canvas pixels for each CSS pixel, beside the screen's own: paper has more. */
const view = { axis: "step", min: 0, max: 1, everything: true, logarithmic: new Set(), fineness: 1, listeners: [] };

function shownRuns() {
  return runs.filter((run) => run.visible);
}

/** First and last position of what is drawn. */
function fullRange() {
  let min = Infinity;
  let max = -Infinity;
  for (const run of shownRuns().length ? shownRuns() : runs) {
    for (const name of payload.tables) {
      const xs = positions(run, name, view.axis);
      if (xs.length) {
        min = Math.min(min, xs[0]);
        max = Math.max(max, xs[xs.length - 1]);
      }
    }
    for (const one of run.marks) {
      if (!one.steps.length) continue;
      min = Math.min(min, position(run, one.steps[0], view.axis));
      max = Math.max(max, position(run, one.steps[one.steps.length - 1], view.axis));
    }
  }
  if (min > max) return [0, 1];
  return min === max ? [min - 0.5, max + 0.5] : [min, max];
}

function show(min, max) {
  const [first, last] = fullRange();
  const span = Math.min(max - min, last - first);
  if (!(span > 0)) return;
  view.min = Math.min(Math.max(min, first), last - span);
  view.max = view.min + span;
  view.everything = view.min <= first && view.max >= last;
  for (const listener of view.listeners) listener();
}

function showEverything() {
  show(...fullRange());
}

/** Less (factor < 1) or more, around a position. */
function zoom(factor, around = (view.min + view.max) / 2) {
  const [first, last] = fullRange();
  const least = (last - first) / 1e6;
  const span = Math.max((view.max - view.min) * factor, least);
  const share = (around - view.min) / (view.max - view.min);
  show(around - share * span, around - share * span + span);
}

/** By a share of what is seen. */
function pan(share) {
  const by = share * (view.max - view.min);
  show(view.min + by, view.max + by);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function withAlpha(hex, alpha) {
  const value = parseInt(hex.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${alpha})`;
}

const MARK_COLOURS = {
  restart: "mark-restart",
  rollback: "mark-rollback",
  hang: "mark-hang",
  "skipped step": "mark-skipped",
  "not finite": "mark-nonfinite",
  straggler: "mark-straggler",
  "other sites": "mark-sites",
};

/** Colour of a kind of event, or of the run if there are several runs. */
function markColour(kind, run) {
  if (runs.length > 1) return colour(`run-${runs.indexOf(run) % 8}`);
  return colour(MARK_COLOURS[kind] ?? "muted");
}

/** For axes: 250k, 1.2M, 3e-4. */
function short(value) {
  const size = Math.abs(value);
  if (value === 0) return "0";
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= unit * 0.9995) return `${Number((value / unit).toPrecision(6))}${letter}`;
  }
  return size < 1e-3 ? value.toExponential().replace(/(\.\d{3})\d+/, "$1") : `${Number(value.toPrecision(6))}`;
}

/** For reading: thousands separators, five significant digits, more where they are whole. */
function exact(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(3);
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
}

/** Round positions between two, about `count` of them. */
function ticks(min, max, count) {
  const rough = (max - min) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(min / size); n * size <= max; n++) found.push(n * size);
  return found;
}
