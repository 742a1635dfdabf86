"""Fit the constants of the planner's devices and engines to published rows.

    python tools/planner_fit.py                # fit to all rows, say how well
    python tools/planner_fit.py --held-out     # fit to every other row, say how well the others do
    python tools/planner_fit.py --write        # and write bigtrain/planner/tables/

Constants belong to devices (`hardware.json`: reach) and engines (`engines.json`), never to a source
or a model. Damped least squares of the logarithm of tokens a second, with Tukey's idea of robust
weights and bounds that keep every constant what it is called; written out here, since numpy is
there anyway and scipy is not.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bigtrain.planner import engines, hardware, kernels
from bigtrain.planner.evaluation import error_table, predict, read_rows, summarize

ROWS = Path(__file__).parents[1] / "benchmarks" / "planner_rows.csv"
FREE: dict[str, dict[str, tuple[float, float]]] = {
    "reach/A100": {
        "matmul": (0.73, 0.95), "matmul_depth": (20, 700), "memory": (0.6, 0.95),
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
        "loss_bytes": (8, 50),
    },
    "fsdp_compiled": {"moved": (0.05, 1.0)},
    "nanotron": {"moved": (0.2, 1.2)},
}  # fmt: skip
"""By owner: constants and the bounds within which they may lie."""
_ROBUST = 0.1  # errors above count less and less
_PRIOR = 0.1  # weight of staying where a constant is, in its logarithm


class Tables:
    """The constants as one vector of logarithms; `load` puts one in force in this process."""

    def __init__(self) -> None:
        self.hardware = json.loads((hardware.TABLES / "hardware.json").read_text())
        self.engines = json.loads((hardware.TABLES / "engines.json").read_text())
        self.names = [(owner, name) for owner, names in FREE.items() for name in names]
        bounds = [FREE[owner][name] for owner, name in self.names]
        self.low, self.high = np.log(np.array(bounds)).T
        self.start = np.clip([math.log(self._owner(o)[n]) for o, n in self.names],
                             self.low, self.high)  # fmt: skip

    def _owner(self, name: str) -> dict[str, Any]:
        if name.startswith("reach/"):
            found: dict[str, Any] = self.hardware["reach"][name.removeprefix("reach/")]
            return found
        engine: dict[str, Any] = self.engines[name]
        return engine

    def load(self, vector: np.ndarray) -> None:
        """Let predictions use `vector`."""
        for (owner, name), value in zip(self.names, vector, strict=True):
            self._owner(owner)[name] = float(f"{math.exp(value):.3g}")
        kernels.matmul_seconds.cache_clear()

    def write(self) -> None:
        """Write both tables."""
        for name, tree in (("hardware", self.hardware), ("engines", self.engines)):
            (hardware.TABLES / f"{name}.json").write_text(json.dumps(tree, indent=1) + "\n")


@contextmanager
def in_force(tables: Tables) -> Iterator[None]:
    """Inside, the planner reads `tables`."""
    before = hardware._table, engines._table
    hardware._table, engines._table = lambda: tables.hardware, lambda: tables.engines
    try:
        yield
    finally:
        hardware._table, engines._table = before


def residuals(tables: Tables, rows: Sequence[dict[str, str]], vector: np.ndarray) -> np.ndarray:
    """Of the logarithms of tokens a second; a source of few rows counts as much as many would."""
    tables.load(vector)
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["source"]] = counts.get(row["source"], 0) + 1
    told = []
    for row in rows:
        found = predict(row).tokens_per_second
        assert found is not None, row
        weight = (len(rows) / counts[row["source"]]) ** 0.25
        told.append(weight * math.log(found / float(row["tokens_per_s_per_gpu"])))
    return np.array(told)


def fit(tables: Tables, rows: Sequence[dict[str, str]], num_rounds: int = 8) -> np.ndarray:
    """The vector of least robust squares, by damped Gauss-Newton steps with finite differences."""
    vector, damping = tables.start.copy(), 1e-2

    def cost(errors: np.ndarray, at: np.ndarray) -> float:
        prior = _PRIOR**2 * float(np.sum((at - tables.start) ** 2))
        return float(np.sum(np.log1p((errors / _ROBUST) ** 2))) * _ROBUST**2 + prior

    errors = residuals(tables, rows, vector)
    for _ in range(num_rounds):
        slopes = np.empty((len(errors), len(vector)))
        for index in range(len(vector)):
            moved = vector.copy()
            moved[index] += 1e-2 if moved[index] + 1e-2 <= tables.high[index] else -1e-2
            change = residuals(tables, rows, moved) - errors
            slopes[:, index] = change / (moved[index] - vector[index])
        weights = 1 / (1 + (errors / _ROBUST) ** 2)
        curvature = slopes.T @ (weights[:, None] * slopes) + _PRIOR**2 * np.eye(len(vector))
        gradient = slopes.T @ (weights * errors) + _PRIOR**2 * (vector - tables.start)
        for _ in range(6):
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            tried = np.clip(vector - step, tables.low, tables.high)
            found = residuals(tables, rows, tried)
            if cost(found, tried) < cost(errors, vector):
                vector, errors, damping = tried, found, damping / 3
                break
            damping *= 4
    tables.load(vector)
    return vector


def main() -> None:
    """Fit and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows, tables = read_rows(args.rows), Tables()
    fitted, judged = (rows[::2], rows[1::2]) if args.held_out else (rows, rows)
    with in_force(tables):
        vector = fit(tables, fitted)
        for (owner, name), value, low, high in zip(
            tables.names, vector, tables.low, tables.high, strict=True
        ):
            bound = " (at its bound)" if min(value - low, high - value) < 0.01 else ""
            print(f"{owner}.{name} = {math.exp(value):.3g}{bound}")
        print(error_table(summarize(judged, [predict(row) for row in judged])))
    if args.write:
        tables.write()


if __name__ == "__main__":
    main()
