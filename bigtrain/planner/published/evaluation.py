"""Predictions compared with published measurements: ``bigtrain plan --evaluate ROWS.csv``. Pure.

`rows` reads a row. Nothing is fitted to a single source: the only constants are in
`tables/`, for devices and engines.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import ConfigError, Problem, one_line
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.published.rows import run_of
from bigtrain.planner.published.words import has_value, plain_number
from bigtrain.planner.step_time import step_time
from bigtrain.system.units import GIB

COLUMNS = (
    "source", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gpu",
    "num_gpus", "dp", "tp", "pp", "zero", "micro_batch", "global_batch", "recompute", "precision",
    "tokens_per_s_per_gpu",
)  # fmt: skip
"""Required columns; ``cp``, ``ep``, ``peak_gib``, ``params_b`` and ``notes`` are optional."""


@dataclass(frozen=True)
class RowPrediction:
    """Prediction for one row: tokens/s per device, and GiB; `refused`: why there is none;
    `guessed`: what of the model's shape was guessed, so that it is in no mean."""

    tokens_per_second: float | None
    peak_gib: float | None
    refused: str = ""
    guessed: str = ""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a header. Raises ConfigError for a file that is none, for
    missing columns and for columns and values that may be read in two ways."""

    def refusal(rule: str, remedy: str) -> ConfigError:
        return ConfigError(Problem("--evaluate", str(path), rule, remedy))

    rows = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
            if rule_and_remedy := _header_problem(names):
                raise refusal(*rule_and_remedy)
            empty = dict.fromkeys(COLUMNS, "")
            for row in reader:
                if None in row:  # under which csv puts what is beyond the header
                    rule = f"has more values in line {reader.line_num} than columns in the header"
                    raise refusal(rule, 'quote a value with a comma: "1,039"')
                rows.append(empty | {key: value or "" for key, value in row.items() if key})
    except UnicodeDecodeError as error:
        raise refusal(f"is not UTF-8: {error}", "save it as CSV in UTF-8") from error
    except (OSError, csv.Error) as error:
        raise refusal(f"cannot be read: {error}", "name a CSV file") from error
    if not rows:
        raise refusal("has a header and no rows", "add a row for each measurement")
    return rows


def _header_problem(names: Sequence[str]) -> tuple[str, str] | None:
    """Return what is wrong with the columns of a file, and the remedy; None for nothing."""
    remedy = "give it the columns that docs/planner.md lists"
    if not any(names):
        return "has no header", remedy
    separator = next((character for character in ";\t|" if character in names[0]), None)
    if len(names) == 1 and separator is not None:
        return f"has columns separated by {separator!r}", "separate them by commas"
    if repeated := [name for name, count in Counter(names).items() if name and count > 1]:
        return f"has the column {repeated[0]} twice", "keep one of them"
    missing = [name for name in COLUMNS if name not in names]
    if "peak_gib" in names:  # a row may have only memory
        missing = [name for name in missing if name != "tokens_per_s_per_gpu"]
    if missing:
        return f"has no column{'s' * (len(missing) > 1)} {', '.join(missing)}", remedy
    return None


def _why_not_measured(row: Mapping[str, str]) -> str:
    """Return why a row has no measurement (throughput or memory, as positive numbers); empty if it
    has one."""
    measured_columns = [
        name for name in ("tokens_per_s_per_gpu", "peak_gib") if has_value(row, name)
    ]
    for name in measured_columns:
        try:
            right = (_measured(row, name) or 0.0) > 0
        except ValueError:
            right = False
        if not right:
            return f"{name} = {(row.get(name) or '').strip()!r} is not a positive number"
    return "" if measured_columns else "neither tokens_per_s_per_gpu nor peak_gib is given"


def _measured(row: Mapping[str, str], name: str = "tokens_per_s_per_gpu") -> float | None:
    """Return a measured number, also "1,039" and "77 GiB"; None if the column is empty. Raises
    ValueError if it is not a number."""
    if not has_value(row, name):
        return None
    value = float(plain_number(re.sub(r"\s*(gib|gb|tokens/s.*)$", "", row[name].strip().lower())))
    if not math.isfinite(value):
        raise ValueError(f"{name} = {row[name]} is not finite")
    return value


def predict(row: Mapping[str, str]) -> RowPrediction:
    """Return the prediction for one row; `refused` has the reason if there is none."""
    if reason := _why_not_measured(row):
        return RowPrediction(None, None, reason)
    try:
        run = run_of(row)
    except ConfigError as error:  # the device is unknown
        problem = error.problems[0]
        return RowPrediction(
            None, None, f"gpu = {problem.value}: {problem.rule} -> {problem.remedy}"
        )
    except (ValueError, KeyError) as error:
        return RowPrediction(None, None, one_line(error, None))
    seconds = step_time(run.model, run.layout, run.device, run.engine, gain=run.gain).total
    tokens = run.layout.global_batch_size * run.layout.sequence_length
    use = peak_memory(run.model, run.layout, run.engine)
    # Bytes as the source counts them: allocated, reserved, or used on the device.
    peak_bytes, notes = use.total, row.get("notes", "").lower()
    if re.search(r"peak.?alloc|max_memory_alloc|\(allocated\)|memory allocated", notes):
        peak_bytes = use.allocated
    elif re.search(r"\(reserved\)|max_memory_reserved|peak.?reserved", notes):
        peak_bytes = use.allocated * run.engine.reserved
    rate = tokens / seconds / run.layout.world_size
    return RowPrediction(rate, peak_bytes / GIB, guessed=run.guessed)


@dataclass(frozen=True)
class SourceErrors:
    """Relative errors over the rows of a source: of tokens/s, of memory, of a baseline that
    predicts a constant utilization; and the rank correlation of the source's layouts. Rows whose
    shape was guessed (`num_guessed`) are in none of them."""

    source: str
    num_rows: int
    mean: float
    worst: float
    baseline: float
    memory_rows: int
    memory_mean: float
    memory_worst: float
    rank_correlation: float | None
    num_refused: int
    num_guessed: int = 0


def summarize(
    rows: Sequence[Mapping[str, str]], predictions: Sequence[RowPrediction]
) -> list[SourceErrors]:
    """Return the errors per source, in the order of the rows; the last entry is over all rows."""
    sources = dict.fromkeys(row["source"] for row in rows)
    pairs = list(zip(rows, predictions, strict=True))
    errors = [_of_source(name, [p for p in pairs if p[0]["source"] == name]) for name in sources]
    return [*errors, _of_source("all", pairs)] if len(errors) > 1 else errors


_Pairs = Sequence[tuple[Mapping[str, str], RowPrediction]]


def _of_source(name: str, all_pairs: _Pairs) -> SourceErrors:
    pairs = [pair for pair in all_pairs if not pair[1].guessed]
    # Speed and memory, where both were published and predicted.
    measured_rows = []
    for row, p in pairs:
        if p.tokens_per_second is not None:
            tokens_per_second = _measured(row)
            if tokens_per_second:
                measured_rows.append((row, p.tokens_per_second, tokens_per_second))
    errors = [abs(p / measured - 1) for _, p, measured in measured_rows]
    memory_errors = []
    for row, p in pairs:
        if p.peak_gib is not None:
            peak_gib = _measured(row, "peak_gib")
            if peak_gib:
                memory_errors.append(abs(p.peak_gib / peak_gib - 1))
    return SourceErrors(
        source=name,
        num_rows=len(all_pairs),
        mean=_mean(errors),
        worst=max(errors, default=math.nan),
        baseline=_mean(_baseline_errors([(row, measured) for row, _, measured in measured_rows])),
        memory_rows=len(memory_errors),
        memory_mean=_mean(memory_errors),
        memory_worst=max(memory_errors, default=math.nan),
        rank_correlation=_rank_correlation(measured_rows),
        num_refused=sum(1 for _, p in pairs if p.tokens_per_second is None),
        num_guessed=len(all_pairs) - len(pairs),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _baseline_errors(rows: Sequence[tuple[Mapping[str, str], float]]) -> list[float]:
    """Return the errors of predicting each source's mean utilization for the source's rows."""
    utilization: dict[str, list[float]] = {}
    for row, measured in rows:
        run = run_of(row)
        # FLOPs of a token forward and backward, attention in full: what a page's utilization is of.
        flops = 6.0 * run.model.vocabulary_size * run.model.hidden_size
        for layer_type in run.model.layers:
            layer = run.model.kinds[layer_type]
            flops += 6.0 * layer.num_active_parameters
            if layer.attention is not None:
                heads = layer.attention
                width = heads.num_heads * (heads.head_size + heads.value_size)
                flops += 6.0 * width * run.layout.sequence_length
        spent = flops * measured / run.device.peak_flops
        utilization.setdefault(row["source"], []).append(spent)
    errors = []
    for shares in utilization.values():
        constant = _mean(shares)
        errors += [abs(constant / spent - 1) for spent in shares]
    return errors


def _rank_correlation(
    measured_rows: Sequence[tuple[Mapping[str, str], float, float]],
) -> float | None:
    """Return Spearman's rank correlation among layouts of the same model on as many devices; the
    mean over groups of at least three layouts, weighted by their sizes."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row, predicted, measured in measured_rows:
        key = tuple(row[k] for k in ("source", "model", "layers", "hidden", "gpu", "num_gpus"))
        groups.setdefault(key, []).append((predicted, measured))
    weighed = []
    for pairs in groups.values():
        size = len(pairs)
        if size >= 3:
            first = _ranks([a for a, _ in pairs])
            second = _ranks([b for _, b in pairs])
            # Spearman's 1 - 6 sum(d^2) / (n (n^2 - 1)), with differences d of ranks.
            squares = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
            weighed.append((size, 1.0 - 6.0 * squares / (size * (size * size - 1))))
    total = sum(size for size, _ in weighed)
    return sum(size * value for size, value in weighed) / total if total else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda index: values[index])
    ranks = [0.0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = float(rank)
    return ranks


def write_rows(
    path: Path, rows: Sequence[Mapping[str, str]], predictions: Sequence[RowPrediction]
) -> None:
    """Write every row with its prediction, or the reason for none. Raises OSError."""
    added = ("predicted_tokens_per_s_per_gpu", "predicted_peak_gib", "refused", "guessed")
    columns = tuple(rows[0]) if rows else COLUMNS
    names = [name for name in columns if name not in added]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*names, *added], extrasaction="ignore")
        writer.writeheader()
        for row, p in zip(rows, predictions, strict=True):
            tokens = "" if p.tokens_per_second is None else f"{p.tokens_per_second:.6g}"
            peak = "" if p.peak_gib is None else f"{p.peak_gib:.4g}"
            values = (tokens, peak, p.refused, p.guessed)
            writer.writerow({**row, **dict(zip(added, values, strict=True))})


def error_table(errors: Sequence[SourceErrors]) -> str:
    """Return `errors` as a Markdown table."""
    lines = [
        "| source | rows | tokens/s: mean error | worst | constant utilization | "
        "rank correlation | memory rows | memory: mean error | worst |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for error in errors:
        rank = "" if error.rank_correlation is None else f"{error.rank_correlation:.2f}"
        memory = ["", ""]
        if error.memory_rows:
            memory = [f"{error.memory_mean:.1%}", f"{error.memory_worst:.1%}"]
        refused = f" ({error.num_refused} refused)" if error.num_refused else ""
        if error.num_guessed:
            refused += f" ({error.num_guessed} of a guessed shape, not in the means)"
        lines.append(
            f"| {error.source} | {error.num_rows}{refused} | {_percent(error.mean)} "
            f"| {_percent(error.worst)} | {_percent(error.baseline)} | {rank} "
            f"| {error.memory_rows or ''} | {memory[0]} | {memory[1]} |"
        )
    return "\n".join(lines)


def _percent(share: float) -> str:
    """Format a share; empty for NaN (a source without rows)."""
    return "" if math.isnan(share) else f"{share:.1%}"
