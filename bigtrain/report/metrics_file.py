"""Incremental reader of `metrics.jsonl`, of any length in bounded memory.

Lines are parsed a block at a time (a million in 3 seconds) and reduced immediately. Fields and
kinds of lines: docs/reference/metrics.md. A file may be of any version of bigtrain, or corrupt:
unreadable lines are counted and named, and an incomplete last line is read later.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bigtrain.errors import DataError
from bigtrain.metrics.step_metrics import names_of_kind
from bigtrain.report.reduction import MAX_BUCKETS, Column, Reducer

CURVE_FIELDS = names_of_kind("number")
"""Fields of a logged step that are drawn as curves."""
POSITIONS = (*names_of_kind("position"), "hours")
"""Fields that can be the x axis; hours of training are summed up from `step_seconds`."""
BREAKDOWN = "breakdown"
WAITING = f"{BREAKDOWN}/communication_seconds"
"""Time that the training thread waits for other ranks; it is a share of the other parts' times."""
PHASES = "peak_memory_gib_by_phase"
EXPERTS = "expert_imbalance"
SOURCES = "held_out_sources"
BITS = "held_out_bits_per_byte"
TASKS = "tasks"
HELD_OUT_METRICS = "held_out_metrics"
"""Objects of a line: each entry is a series, named ``OBJECT/ENTRY``."""
MAX_OVER_LAYERS, MEAN_OVER_LAYERS = "busiest_layer", "mean_of_layers"
"""Series computed from the entries of `EXPERTS`, since a model may have a hundred layers."""
OBJECT_FIELDS = names_of_kind("entries")
"""Fields of a logged step that are objects of numbers."""
OUTER_CURVE_FIELDS = ("sent_bytes", "link_bytes", "seconds", "waited_seconds", "change", "distance")
"""Fields of an outer step that are drawn as curves."""
SITES = "sites"
"""The sites that took part in an outer step; their number is a curve."""
TABLES = ("steps", "evaluations", "outer_steps")
"""Attributes of `MetricsFile` that contain the charts' data."""

NON_FINITE = "not finite"
"""Event of a logged step without a finite loss or gradient norm."""
OTHER_SITES = "other sites"
"""Event of an outer step whose sites differ from those of the previous one."""

_BLOCK_BYTES = 1 << 20
_TAIL_BYTES = 256
_MAX_SERIES = 64
_MAX_DETAILS = 500
_MAX_NAMED_LINES = 5


@dataclass
class Events:
    """Events by kind: all steps, and the lines (`details`) of the first ones."""

    steps: dict[str, array[int]] = field(default_factory=dict)
    details: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(self, event_kind: str, step: int, line: dict[str, Any]) -> None:
        """Record an event of `event_kind` in `step`."""
        self.steps.setdefault(event_kind, array("q")).append(step)
        details = self.details.setdefault(event_kind, [])
        if len(details) < _MAX_DETAILS:
            details.append(line)

    def count(self, event_kind: str) -> int:
        """Return the number of events of `event_kind`."""
        return len(self.steps.get(event_kind, ()))


@dataclass
class SiteParticipation:
    """Participation of sites in outer steps.

    num_outer_steps: in total. counts: by site, the outer steps in which it took part. last: by
    site, the number of the last one; None if its line has no number. newest: sites of the newest
    outer step.
    """

    num_outer_steps: int = 0
    counts: Counter[int] = field(default_factory=Counter)
    last: dict[int, int | None] = field(default_factory=dict)
    newest: tuple[int, ...] = ()

    def add(self, line: dict[str, Any]) -> bool:
        """Record an outer step; return whether its sites differ from those of the previous one."""
        number, site_list = line.get("outer_step"), line.get(SITES)
        site_list = site_list if isinstance(site_list, list) else []
        sites = tuple(site for site in site_list if type(site) is int)
        previous_sites, self.newest = self.newest, sites
        self.num_outer_steps += 1
        for site in sites:
            if site in self.counts or len(self.counts) < _MAX_SERIES:
                self.counts[site] += 1
                self.last[site] = number if type(number) is int else None
        return self.num_outer_steps > 1 and sites != previous_sites


@dataclass
class UnreadableLines:
    """Unreadable lines: their number, and texts on the first ones with line number and reason."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, number: int, reason: str) -> None:
        """Record that line `number`, from 1, cannot be read."""
        self.count += 1
        if len(self.first) < _MAX_NAMED_LINES:
            self.first.append(f"line {number:,} {reason}")


class MetricsFile:
    """Metrics of a run, up to the point where its file has been read.

    Attributes: `steps`, `evaluations`, `outer_steps`: tables of curves; `participation`; `events`;
    `unreadable`; `missing`: by field, the number of logged steps in which it is null; `last`: the
    line of the last logged step, `best`: the line of the evaluation with the lowest held-out loss,
    or None. `version` is incremented when the file was replaced or truncated, and read again from
    the start.
    """

    def __init__(self, path: Path, max_buckets: int = MAX_BUCKETS) -> None:
        self.path = path
        self.version = 0
        self._max_buckets = max_buckets
        self._reset()

    def _reset(self) -> None:
        """Set the state of a file of which nothing has been read."""
        self.steps = Reducer(POSITIONS, self._max_buckets)
        self.evaluations = Reducer(("step",), self._max_buckets)
        self.outer_steps = Reducer(("step",), self._max_buckets)
        self.participation = SiteParticipation()
        self.events = Events()
        self.unreadable = UnreadableLines()
        self.missing: Counter[str] = Counter()
        self.last: dict[str, Any] | None = None
        self.best: dict[str, Any] | None = None
        self.num_bytes = 0
        self._num_lines = 0
        self._identity: tuple[int, int] | None = None
        self._tail = b""
        self._last_step = self._last_evaluated_step = self._step_of_last_outer = 0
        self._hours = 0.0

    def read(self, final: bool = False) -> bool:
        """Read new lines; return whether there were any. `final`: also a last line without a
        newline, if it is valid.

        A rollback or a resume truncates the file, which is then read again from its start.
        Raises DataError if it cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                # Read from the start if the file was replaced or truncated. A truncated file may
                # have grown again, but then the last bytes that were read before differ.
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                file.seek(self.num_bytes - len(self._tail))
                tail = file.read(len(self._tail))
                has_changed = identity != self._identity or tail != self._tail
                is_new = self._identity is not None and has_changed
                if is_new:
                    self._reset()
                    self.version += 1
                self._identity = identity

                # Read complete lines; the last one may still be written.
                num_lines_before = self._num_lines
                file.seek(self.num_bytes)
                while block := file.read(_BLOCK_BYTES):
                    block += file.readline()
                    end = block.rfind(b"\n") + 1
                    self._read_block(block[:end])
                    self.num_bytes += end
                    if end:
                        self._tail = block[max(0, end - _TAIL_BYTES) : end]
                    if end < len(block):
                        if final and _parse_line(block[end:]) is not None:
                            self._read_block(block[end:] + b"\n")
                        break
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        return is_new or self._num_lines > num_lines_before

    def _read_block(self, block: bytes) -> None:
        """Add the lines of `block`, which ends with a newline, to tables and events."""
        # Parse all lines at once; if that fails, line by line, to name the bad lines.
        lines: list[Any] = []
        if block:
            try:
                lines = orjson.loads(b"[" + block[:-1].replace(b"\n", b",") + b"]")
            except ValueError:
                lines = []
            if len(lines) != block.count(b"\n"):
                lines = [_parse_line(text) for text in block.split(b"\n")[:-1]]

        # Sort the lines by what they report. Steps must ascend, since curves are drawn by step.
        steps: list[dict[str, Any]] = []
        evaluations: list[dict[str, Any]] = []
        outer_steps: list[dict[str, Any]] = []
        for number, line in enumerate(lines, self._num_lines + 1):
            if line is _BLANK:
                continue
            step = line.get("step") if type(line) is dict else None
            if type(step) is not int or not 0 <= step < _MAX_STEP:
                problem = "has no step" if isinstance(line, dict) else "is not a JSON object"
                self.unreadable.add(number, "is not JSON" if line is None else problem)
            elif "event" in line:
                self.events.add(str(line["event"])[:100], step, line)
            elif "loss" in line:
                if step > self._last_step:
                    self._last_step = step
                    steps.append(line)
                else:
                    self.unreadable.add(
                        number, f"is of step {step:,}, which is not later than before"
                    )
            elif "held_out_loss" in line or TASKS in line:
                if step > self._last_evaluated_step:
                    self._last_evaluated_step = step
                    evaluations.append(line)
                else:
                    self.unreadable.add(number, f"repeats the evaluation of step {step:,}")
            elif "outer_step" in line:
                # A step may have several outer steps, one for each part of the model.
                if step >= self._step_of_last_outer:
                    self._step_of_last_outer = step
                    outer_steps.append(line)
                else:
                    self.unreadable.add(
                        number, f"is an outer step before step {self._step_of_last_outer:,}"
                    )
        self._num_lines += len(lines)
        if steps:
            self._add_steps(steps)
        if evaluations:
            self._add_evaluations(evaluations)
        if outer_steps:
            self._add_outer_steps(outer_steps)

    def table(self, name: str) -> Reducer:
        """Return the table of `TABLES` with this name."""
        table: Reducer = getattr(self, name)
        return table

    def _add_steps(self, lines: list[dict[str, Any]]) -> None:
        """Add the curves of logged steps: their numbers, entries of objects, and statistics over
        layers."""
        previous = {"step": 0} if self.last is None else self.last
        series = {}
        for name in CURVE_FIELDS:
            series[name] = column = _column(lines, name)
            # A field that is present without a number counts as missing; an absent field does not.
            if np.isnan(column).any():
                self.missing[name] += sum(
                    1 for line in lines if name in line and math.isnan(_number_or_nan(line[name]))
                )

        # Steps ascend, since `_read_block` drops lines of earlier steps. Tokens and samples must
        # ascend, too: a missing or smaller value is replaced by its predecessor.
        positions = {"step": _column(lines, "step")}
        for name in ("tokens", "samples"):
            previous_value = np.nan_to_num(_number_or_nan(previous.get(name, 0)))
            column = np.maximum(np.nan_to_num(_column(lines, name)), previous_value)
            positions[name] = np.maximum.accumulate(column)
        num_steps = np.diff(positions["step"], prepend=previous["step"])
        seconds = np.nan_to_num(series["step_seconds"]) * num_steps
        positions["hours"] = self._hours + np.cumsum(np.maximum(seconds, 0.0)) / 3600
        self._hours = float(positions["hours"][-1])

        # A field that is an object has one series for each entry.
        for name in OBJECT_FIELDS:
            series.update(self._entries(lines, name, self.steps.names))
        # Maximum and mean over the layers with experts.
        columns = [column for name, column in series.items() if name.startswith(f"{EXPERTS}/")]
        if columns:
            series[MAX_OVER_LAYERS] = np.fmax.reduce(columns)
            num_known = np.sum(~np.isnan(columns), axis=0)
            total = np.nansum(columns, axis=0)
            layer_mean = total / np.maximum(num_known, 1)
            series[MEAN_OVER_LAYERS] = np.where(num_known > 0, layer_mean, math.nan)

        # `_column` has NaN for a value that is infinite or absent, too.
        bad = np.isnan(series["loss"]) | np.isnan(series["grad_norm"])
        for row in np.flatnonzero(bad).tolist():
            self.events.add(NON_FINITE, lines[row]["step"], lines[row])
        self.steps.add(positions, series)
        self.last = lines[-1]

    def _entries(
        self, lines: list[dict[str, Any]], name: str, series_names: list[str]
    ) -> Iterator[tuple[str, Column]]:
        """Yield the series of the objects under `name`, one for each entry. series_names: of the
        table; an object gets at most `_MAX_SERIES`, with those that the table has."""
        if not any(name in line for line in lines):
            return
        objects = [_dict_or_empty(line.get(name)) for line in lines]
        entries = dict.fromkeys(entry for values_by_entry in objects for entry in values_by_entry)
        known_names = {key for key in series_names if key.startswith(f"{name}/")}
        for entry in entries:
            key = f"{name}/{entry}"
            if key in known_names or len(known_names) < _MAX_SERIES:
                known_names.add(key)
                yield key, _column(objects, entry)

    def _add_evaluations(self, lines: list[dict[str, Any]]) -> None:
        """Add the curves of evaluations, and find the best one."""
        series = {"held_out_loss": _column(lines, "held_out_loss")}
        if any(BITS in line for line in lines):
            series[BITS] = _column(lines, BITS)
        # Of a source's metrics only the loss is a curve.
        source_losses = []
        for line in lines:
            metrics_by_source = _dict_or_empty(line.get(SOURCES))
            losses = {
                name: _dict_or_empty(metrics).get("loss")
                for name, metrics in metrics_by_source.items()
            }
            source_losses.append({SOURCES: losses})
        series.update(self._entries(source_losses, SOURCES, self.evaluations.names))
        series.update(self._entries(lines, TASKS, self.evaluations.names))
        series.update(self._entries(lines, HELD_OUT_METRICS, self.evaluations.names))
        self.evaluations.add({"step": _column(lines, "step")}, series)
        if not np.isnan(series["held_out_loss"]).all():
            lowest = lines[int(np.nanargmin(series["held_out_loss"]))]
            if self.best is None or lowest["held_out_loss"] < self.best["held_out_loss"]:
                self.best = lowest

    def _add_outer_steps(self, lines: list[dict[str, Any]]) -> None:
        """Add the curves of outer steps, and events for steps whose sites differ."""
        series = {
            name: _column(lines, name)
            for name in OUTER_CURVE_FIELDS
            if any(name in line for line in lines)
        }
        site_lists = [line.get(SITES) for line in lines]
        num_sites = [len(sites) if isinstance(sites, list) else math.nan for sites in site_lists]
        series[SITES] = np.array(num_sites, dtype=np.float64)
        self.outer_steps.add({"step": _column(lines, "step")}, series)
        for line in lines:
            if self.participation.add(line):
                self.events.add(OTHER_SITES, line["step"], line)


_BLANK = object()  # a line without characters, which is no problem
_NUMBERS = {int, float, type(None)}
_MAX_STEP = 2**53
"""Integers from this value on may be inexact as floats."""


def _parse_line(text: bytes) -> Any:
    """Return the value of a line, `_BLANK` for a blank line; None if it is not JSON. Unlike orjson,
    Python's parser accepts NaN."""
    if not text.strip():
        return _BLANK
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _column(lines: list[dict[str, Any]], name: str) -> Column:
    """Return a field of the lines; NaN if it is missing, not a number, or not finite."""
    try:
        # Usually every line has the field, and indexing is faster than `get`.
        try:
            values = [line[name] for line in lines]
        except KeyError:
            values = [line.get(name) for line in lines]
        # numpy converts None to NaN, but also strings and booleans to numbers.
        if set(map(type, values)) <= _NUMBERS:
            column = np.array(values, dtype=np.float64)
            column[~np.isfinite(column)] = np.nan
            return column
    except OverflowError:  # an integer too large for a float
        pass
    return np.array([_number_or_nan(line.get(name)) for line in lines], dtype=np.float64)


def _number_or_nan(value: Any) -> float:
    if type(value) not in (int, float):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _dict_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
