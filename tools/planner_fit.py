"""Fit the constants of the planner's devices and engines to published rows.

    python tools/planner_fit.py                # fit to all rows, print the errors
    python tools/planner_fit.py --held-out     # fit to every other row, print the others' errors
    python tools/planner_fit.py --write        # and write bigtrain/planner/tables/
    python tools/planner_fit.py --held-out --write    # and write benchmarks/planner_held_out.json
    python tools/planner_fit.py --rows benchmarks/planner_other_rows.csv \\
        --only reach/B200 megatron_core automodel deepspeed    # of these no others speak

    python tools/planner_fit.py --leave-one-out [--write]    # of each source by all the others

With --held-out constants start in the middle of their bounds, not where the tables have them: those
have seen the rows that are judged. `docs/planner.md` shows both tables of errors; the file of
held-out constants is there so that a test can compute the second one in a second.

Constants belong to devices (`hardware.json`: reach) and engines (`engines.json`), never to a source
or a model. Damped least squares of the logarithm of tokens a second, with Tukey's idea of robust
weights and bounds that keep every constant what it is called; written out here, since numpy is
there anyway and scipy is not.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bigtrain.planner.published.evaluation import error_table, predict, read_rows, summarize
from bigtrain.planner.published.rows import run_of
from bigtrain.planner.seconds import kernels
from bigtrain.planner.tables import engines, hardware

ROWS = Path(__file__).parents[1] / "benchmarks" / "planner_rows.csv"
OTHER_ROWS = ROWS.with_name("planner_other_rows.csv")
HELD_OUT = ROWS.with_name("planner_held_out.json")
LEFT_OUT = ROWS.with_name("planner_left_out.json")
FREE: dict[str, dict[str, tuple[float, float]]] = {
    "reach/A100": {
        "matmul": (0.73, 0.95), "matmul_depth": (100, 700), "memory": (0.6, 0.95),
        "link": (0.65, 0.9), "start_seconds": (1e-6, 3e-4), "network": (0.3, 0.95),
        "link_seconds": (1e-6, 6e-5), "network_seconds": (1e-6, 3e-5),
        "kernel_seconds": (1e-6, 1e-5),
    },
    "reach/H100": {
        "matmul": (0.62, 0.95), "matmul_depth": (20, 700), "memory": (0.6, 0.95),
        "link": (0.65, 0.9), "start_seconds": (1e-6, 3e-4), "network": (0.3, 0.95),
        "link_seconds": (1e-6, 6e-5), "network_seconds": (1e-6, 3e-5),
    },
    "megatron_deepspeed": {
        "kernel_host_seconds": (5e-6, 6e-5), "step_seconds": (1e-4, 1e-2), "moved": (0.3, 1.2),
        "exposed_gradients": (0.05, 1.0), "optimizer_bytes": (10, 60), "loss_bytes": (8, 50),
        "launch_overlap": (2, 10),
    },
    "fsdp": {
        "attention": (0.3, 1.2), "moved": (0.2, 1.5), "slowdown": (0.001, 1.0),
        "loss_bytes": (8, 50), "float8": (0.5, 1.0),
    },
    "fsdp_compiled": {"moved": (0.05, 1.0), "products": (1.0, 1.3)},
    "nanotron": {"moved": (0.2, 1.2)},
    # These have rows only in planner_other_rows.csv.
    "reach/B200": {"matmul": (0.4, 0.95), "memory": (0.6, 0.95), "network": (0.3, 0.95)},
    "megatron_core": {
        "products": (1.0, 1.3), "float8": (0.5, 1.0), "moved": (0.1, 1.0),
        "exposed_gradients": (0.05, 1.0), "tensor_exposed": (0.2, 1.0),
        "expert_exposed": (0.1, 1.0),
        "pipeline_exposed": (0.05, 1.0), "kernel_host_seconds": (2e-6, 2e-5),
        "expert_host_seconds": (1e-5, 2e-3),
    },
    "automodel": {"products": (1.0, 1.3), "moved": (0.1, 1.0), "expert_exposed": (0.1, 1.0)},
    "deepspeed": {"network": (0.03, 0.3)},
}  # fmt: skip
"""Constants by owner, with their bounds."""
OTHERS = ("reach/B200", "megatron_core", "automodel", "deepspeed")
_ROBUST = 0.1  # errors above count less and less
_PRIOR = 0.03  # weight of staying where a constant is, in its logarithm


class Tables:
    """The constants as one vector of logarithms; `load` puts one in force in this process."""

    def __init__(self, only: Collection[str] = (), *, from_middle: bool = False) -> None:
        self.hardware = json.loads((hardware.TABLES / "hardware.json").read_text())
        self.engines = json.loads((hardware.TABLES / "engines.json").read_text())
        owners = only or [owner for owner in FREE if owner not in OTHERS]
        self.names = [(owner, name) for owner in owners for name in FREE[owner]]
        bounds = [FREE[owner][name] for owner, name in self.names]
        self.low, self.high = np.log(np.array(bounds)).T
        here = [math.log(self._owner(owner)[name]) for owner, name in self.names]
        middle = (self.low + self.high) / 2
        self.start = middle if from_middle else np.clip(here, self.low, self.high)

    def _owner(self, name: str) -> dict[str, Any]:
        if name.startswith("reach/"):
            reach: dict[str, Any] = self.hardware["reach"][name.removeprefix("reach/")]
            return reach
        engine: dict[str, Any] = self.engines[name]
        return engine

    def load(self, vector: np.ndarray) -> None:
        """Let predictions use `vector`."""
        for (owner, name), value in zip(self.names, vector, strict=True):
            self._owner(owner)[name] = float(f"{math.exp(value):.3g}")
        kernels.matmul_seconds.cache_clear()

    def constants(self) -> dict[str, float]:
        """Return those in force, by ``owner.name``."""
        return {f"{owner}.{name}": self._owner(owner)[name] for owner, name in self.names}

    def load_constants(self, constants: Mapping[str, float]) -> None:
        """Let predictions use what `constants` wrote."""
        self.load(np.log([constants[f"{owner}.{name}"] for owner, name in self.names]))

    def write(self) -> None:
        """Write both tables."""
        for name, tree in (("hardware", self.hardware), ("engines", self.engines)):
            (hardware.TABLES / f"{name}.json").write_text(json.dumps(tree, indent=1) + "\n")


@contextmanager
def in_force(tables: Tables) -> Iterator[None]:
    """Make the planner read `tables` inside."""
    before = hardware._table, engines._table
    hardware._table, engines._table = lambda: tables.hardware, lambda: tables.engines
    try:
        yield
    finally:
        hardware._table, engines._table = before


def residuals(
    tables: Tables,
    rows: Sequence[dict[str, str]],
    vector: np.ndarray,
    chosen: Sequence[int] | None = None,
) -> np.ndarray:
    """Return the residuals of the logarithms of tokens per second, of the `chosen` rows (all of
    them); a source of few rows counts as much as many would."""
    tables.load(vector)
    counts = Counter(row["source"] for row in rows)
    told = []
    for row in rows if chosen is None else [rows[n] for n in chosen]:
        predicted = predict(row).tokens_per_second
        assert predicted is not None, row
        weight = (len(rows) / counts[row["source"]]) ** 0.4
        told.append(weight * math.log(predicted / float(row["tokens_per_s_per_gpu"])))
    return np.array(told)


def owners_of(row: dict[str, str]) -> tuple[str, str]:
    """Return the owners of the constants in a row's prediction."""
    run = run_of(row)
    family = hardware._table()["devices"][run.device.name]["reach"]
    return f"reach/{family}", run.engine.name


def slopes_of(
    tables: Tables, rows: Sequence[dict[str, str]], vector: np.ndarray, errors: np.ndarray
) -> np.ndarray:
    """Return ``rows x constants``: by how much each error grows with a constant. Of rows that are
    none of its owner's nothing is worked out."""
    owners = [owners_of(row) for row in rows]
    slopes = np.zeros((len(rows), len(vector)))
    for index, (owner, _) in enumerate(tables.names):
        own = [n for n, names in enumerate(owners) if owner in names]
        moved = vector.copy()
        moved[index] += 1e-2 if moved[index] + 1e-2 <= tables.high[index] else -1e-2
        change = residuals(tables, rows, moved, own) - errors[own]
        slopes[own, index] = change / (moved[index] - vector[index])
    return slopes


def fit(tables: Tables, rows: Sequence[dict[str, str]], num_rounds: int = 8) -> np.ndarray:
    """Return the vector of least robust squares, by damped Gauss-Newton steps with finite
    differences."""
    vector, damping = tables.start.copy(), 1e-2

    def cost(errors: np.ndarray, at: np.ndarray, width: float) -> float:
        prior = _PRIOR**2 * float(np.sum((at - tables.start) ** 2))
        return float(np.sum(np.log1p((errors / width) ** 2))) * width**2 + prior

    errors = residuals(tables, rows, vector)
    for number in range(num_rounds):
        # From far away every row is an outlier at first, and would count for nothing.
        width = max(_ROBUST, 0.5**number)
        slopes = slopes_of(tables, rows, vector, errors)
        weights = 1 / (1 + (errors / width) ** 2)
        curvature = slopes.T @ (weights[:, None] * slopes) + _PRIOR**2 * np.eye(len(vector))
        gradient = slopes.T @ (weights * errors) + _PRIOR**2 * (vector - tables.start)
        for _ in range(6):
            damped = curvature + damping * np.diag(np.diag(curvature))
            step = _inside(damped, gradient, vector, tables)
            tried = np.clip(vector - step, tables.low, tables.high)
            trial_residuals = residuals(tables, rows, tried)
            if cost(trial_residuals, tried, width) < cost(errors, vector, width):
                vector, errors, damping = tried, trial_residuals, damping / 3
                break
            damping *= 4
    tables.load(vector)
    return vector


def _inside(
    curvature: np.ndarray, gradient: np.ndarray, vector: np.ndarray, tables: Tables
) -> np.ndarray:
    """Return the step to take away, of the constants that it does not push over a bound they are
    at: with those among them the others' steps would make up for what cannot be done."""
    free = np.ones(len(vector), dtype=bool)
    while True:
        step = np.zeros(len(vector))
        step[free] = np.linalg.solve(curvature[np.ix_(free, free)], gradient[free])
        outward = (vector <= tables.low + 1e-9) & (step > 0)
        outward |= (vector >= tables.high - 1e-9) & (step < 0)
        if not (outward & free).any():
            return step
        free &= ~outward


def split(rows: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return every other row to fit to, and the others to judge by."""
    return list(rows[::2]), list(rows[1::2])


def errors_of(rows: Sequence[dict[str, str]]) -> str:
    """Return the table of errors of `rows`, by the constants in force."""
    return error_table(summarize(rows, [predict(row) for row in rows]))


def left_out(constants_of: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of errors of each source's rows, by constants that were fitted to the rows
    of all other sources."""
    rows = [*read_rows(ROWS), *read_rows(OTHER_ROWS)]
    tables = Tables(list(FREE))
    predictions = {}
    with in_force(tables):
        for source, constants in constants_of.items():
            tables.load_constants(constants)
            predictions.update({id(row): predict(row) for row in rows if row["source"] == source})
    return error_table(summarize(rows, [predictions[id(row)] for row in rows]))


def leave_one_out(num_rounds: int) -> dict[str, dict[str, float]]:
    """Fit the constants for each source to all other sources' rows."""
    rows = [*read_rows(ROWS), *read_rows(OTHER_ROWS)]
    constants = {}
    for source in dict.fromkeys(row["source"] for row in rows):
        tables = Tables(list(FREE), from_middle=True)
        with in_force(tables):
            fit(tables, [row for row in rows if row["source"] != source], num_rounds)
            constants[source] = tables.constants()
        print(f"fitted without {source}", flush=True)
    return constants


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--rounds", type=int, help="of the fit (default: 8, of --held-out 40)")
    parser.add_argument("--only", nargs="+", default=(), choices=sorted(FREE), help="what to fit")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(arguments)
    if args.leave_one_out:
        constants = leave_one_out(args.rounds or 40)
        print(left_out(constants))
        if args.write:
            LEFT_OUT.write_text(json.dumps(constants, indent=1) + "\n")
        return
    rows, tables = read_rows(args.rows), Tables(args.only, from_middle=args.held_out)
    fitted, judged = split(rows) if args.held_out else (rows, rows)
    with in_force(tables):
        vector = fit(tables, fitted, args.rounds or (40 if args.held_out else 8))
        for (owner, name), value, low, high in zip(
            tables.names, vector, tables.low, tables.high, strict=True
        ):
            bound = " (at its bound)" if min(value - low, high - value) < 0.01 else ""
            print(f"{owner}.{name} = {math.exp(value):.3g}{bound}")
        print(errors_of(judged))
    if args.write and args.held_out:
        HELD_OUT.write_text(json.dumps(tables.constants(), indent=1) + "\n")
    elif args.write:
        tables.write()


if __name__ == "__main__":
    main()
