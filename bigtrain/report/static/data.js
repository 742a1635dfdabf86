// The page's data: columns decoded from base64, and the runs built from them.
"use strict";

const payload = JSON.parse(document.getElementById("data").textContent);

/** Numbers of a base64 text, null for what is not finite: a gap. */
function column(text, Type) {
  const bytes = atob(text);
  const buffer = new Uint8Array(bytes.length);
  for (let i = 0; i < bytes.length; i++) buffer[i] = bytes.charCodeAt(i);
  const values = Array.from(new Type(buffer.buffer));
  for (let i = 0; i < values.length; i++) if (!Number.isFinite(values[i])) values[i] = null;
  return values;
}

function table(given) {
  const series = {};
  for (const [name, parts] of Object.entries(given.series)) {
    series[name] = {};
    for (const [part, text] of Object.entries(parts)) series[name][part] = column(text, Float32Array);
  }
  return {
    width: given.width,
    complete: given.complete,
    rows: given.rows,
    step: column(given.step, Float64Array),
    series,
  };
}

function knots(given) {
  const found = {};
  for (const [name, one] of Object.entries(given)) {
    found[name] = { step: column(one.step, Float64Array), value: column(one.value, Float64Array) };
  }
  return found;
}

function makeRun(given) {
  return {
    name: given.name,
    version: given.version,
    ...Object.fromEntries(payload.tables.map((name) => [name, table(given[name])])),
    knots: knots(given.knots),
    marks: given.marks,
    predicted: given.predicted,
    visible: true,
    cache: new Map(),
  };
}

/** Append the new rows of a live run; a table that begins at 0 replaces the old one. */
function extendRun(run, given) {
  for (const name of payload.tables) {
    const fresh = table(given[name]);
    const since = given[name].since;
    if (since > 0) {
      const old = run[name];
      fresh.step = old.step.slice(0, since).concat(fresh.step);
      for (const key of new Set([...Object.keys(old.series), ...Object.keys(fresh.series)])) {
        const parts = fresh.width > 1 ? ["mean", "low", "high"] : ["mean"];
        const joined = {};
        for (const part of parts) {
          const before = old.series[key]?.[part]?.slice(0, since) ?? new Array(since).fill(null);
          const added = fresh.series[key]?.[part];
          joined[part] = before.concat(added ?? new Array(fresh.step.length - since).fill(null));
        }
        if (joined.mean.some((value) => value !== null)) fresh.series[key] = joined;
        else delete fresh.series[key];
      }
    }
    run[name] = fresh;
  }
  run.version = given.version;
  run.knots = knots(given.knots);
  run.marks = given.marks;
  run.predicted = given.predicted;
  run.cache.clear();
}

/** The last index whose value is not above `wanted`; -1 before the first. */
function lastNotAbove(values, wanted) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Where `step` stands on an axis: itself, or tokens, samples or hours at its end. */
function position(run, step, axis) {
  if (axis === "step") return step;
  const { step: steps, value: values } = run.knots[axis];
  if (!steps.length) return 0;
  const i = lastNotAbove(steps, step);
  // Before the first logged step: from the beginning of the run.
  if (i < 0) return steps[0] > 0 ? (values[0] * step) / steps[0] : 0;
  if (i === steps.length - 1) return values[i];
  const share = (step - steps[i]) / (steps[i + 1] - steps[i]);
  return values[i] + share * (values[i + 1] - values[i]);
}

/** Positions of a table's buckets on an axis. */
function positions(run, tableName, axis) {
  if (axis === "step") return run[tableName].step;
  const key = `${tableName} ${axis}`;
  if (!run.cache.has(key)) {
    run.cache.set(key, run[tableName].step.map((step) => position(run, step, axis)));
  }
  return run.cache.get(key);
}

const runs = payload.runs.map(makeRun);
let charts = payload.charts;
