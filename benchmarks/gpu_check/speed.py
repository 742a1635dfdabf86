"""Parts on speed: bigtrain against a bare loop, HF Trainer + DeepSpeed and litgpt, by model size.

The measuring is `benchmarks/gpu_step.py`'s. Each contender runs in a process of its own, within
what is left of the part's time; one that does not fit into memory gets a row with that reason.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.processes import live, write
from benchmarks.gpu_check.results import Part, Setup
from benchmarks.gpu_check.stand_ins import quick_compilation
from benchmarks.gpu_step import measure
from benchmarks.support import litgpt_loop
from benchmarks.support.points import Point

_VARIED = "1b"
"""The size at which bigtrain's own variants are measured too; compilation takes half a minute."""
_VARIANTS: dict[str, dict[str, str]] = {
    "bigtrain, liger": {"kernels": "liger"},
    "bigtrain, compiled": {"compile": "on"},
    "bigtrain, compiled, float8": {"compile": "on", "float8": "tensorwise"},
}
LEAST_SECONDS = 15.0
"""Left of a part's time, with less of which no contender begins."""
TRACE = "profile.json.gz"

_COMMON: dict[str, Any] = {
    "zero_stage": 1,
    "accumulation": 1,
    "dtype": "bf16",
    "contenders": (),
    "quick_weights": True,
}
# zero3 with gradients in bfloat16 is what leaves an 8B model and its optimizer, 16 bytes a
# parameter, on one device of 141 GB: ZeRO 1 makes a float32 copy of all gradients in its step.
_SIZES: dict[str, dict[str, Any]] = {
    "1b": {"micro_batch_size": 4},
    "3b": {"micro_batch_size": 2},
    "8b": {
        "micro_batch_size": 1,
        "checkpointing": "full",
        "engine": "zero3",
        "gradient_dtype": "bfloat16",
    },
}


def speed(size: str, setup: Setup, part: Part) -> None:
    """Measure tokens/s, utilization and peak memory of every contender at `size`.

    The part fails if bigtrain has no result; a peer that has none is a row.
    """
    end = time.monotonic() + setup.seconds - 2.0
    point = point_of(size, setup)
    rows: dict[str, Any] = part.figures.setdefault("rows", {})
    trials = {"bigtrain": point, "bare": point, "hf": point}
    if litgpt_loop.is_installed():
        trials["litgpt"] = point
    if find_spec("torchtitan") is not None:
        part.note("torchtitan", "is not run from here: measure it separately (gpu_step.py --peer)")
    if size == _VARIED:
        trials |= _variants(setup, part, point)
    for name, at in trials.items():
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            rows[name] = {"failed": "no time was left"}
            continue
        contender = name.partition(",")[0]
        profiled = contender == "bigtrain"
        at = replace(at, contenders=(contender,), loss=loss_of(contender), profile=profiled)
        rows[name] = _measure(at, setup, name, left)
    _summarize(setup, part)


def _variants(setup: Setup, part: Part, point: Point) -> dict[str, Point]:
    """Return the variants of `point` that can run here, by name."""
    needed = {"kernels": "liger_kernel", "float8": "torchao"}
    possible = {}
    for name, keys in _VARIANTS.items():
        missing = [needed[k] for k in keys if k in needed and not find_spec(needed[k])]
        if missing:
            part.note(name, f"{missing[0]} is not installed")
        elif "kernels" in keys and not setup.on_gpu:
            part.note(name, "needs CUDA")
        else:
            possible[name] = replace(point, **keys)
    return possible


def point_of(size: str, setup: Setup) -> Point:
    """Return the point measured at `size`; the tiny model on few tokens in tests."""
    common = {**_COMMON, "threads": torch.get_num_threads()}
    if setup.tiny:
        few = {**_SIZES[size], "micro_batch_size": 2}
        return Point(size="tiny", rounds=1, steps_per_round=2, **common, **few)
    return Point(size=size, rounds=3, steps_per_round=4, **common, **_SIZES[size])


def loss_of(contender: str) -> str:
    """Return bigtrain's own choice of the loss; the others' loops compute it plainly."""
    return "auto" if contender == "bigtrain" else "plain"


def _measure(point: Point, setup: Setup, name: str, limit_seconds: float) -> dict[str, Any]:
    directory = setup.directory / name.replace(", ", "-")
    directory.mkdir()

    told = {"point": asdict(point), "directory": str(directory)}
    life = live("speed:measure_into", told, setup, directory / "output.txt", limit_seconds)
    # Gigabytes of a run's data are of no use to the next.
    shutil.rmtree(directory / "shards", ignore_errors=True)
    if life.code == 0:
        result: dict[str, Any] = json.loads((directory / "result.json").read_text())
        return result
    if life.code is None:
        return {"failed": f"took longer than {limit_seconds:.0f} s"}
    lines = [line for line in life.output.strip().splitlines() if line.strip()]
    reason = next((line for line in lines if "out of memory" in line.lower()), (lines or [""])[-1])
    return {"failed": reason.strip()[:300]}


def measure_into(point: dict[str, Any], directory: str) -> None:
    """Call `measure` for a point in JSON, with the result in a file of `directory`."""
    contenders = tuple(point["contenders"])
    with quick_compilation(point["size"] == "tiny"):
        result = measure(Point(**{**point, "contenders": contenders}), Path(directory))
    write(Path(directory) / "result.json", result)


def _summarize(setup: Setup, part: Part) -> None:
    """Add results of all rows, and the trace of bigtrain's fastest next to the results."""
    rows = part.figures["rows"]
    for name, row in rows.items():
        if "failed" in row:
            part.note(name, row["failed"])
            continue
        part.figures[name] = {
            "tokens_per_s": row["tokens_per_second"],
            "mfu": row["model_flops_utilization"],
            "peak_gib": row["peak_gib"],
            **_beside(row),
        }
    base = rows.get("bare", {}).get("tokens_per_second")
    ours = {
        name: row["tokens_per_second"]
        for name, row in rows.items()
        if name.startswith("bigtrain") and "float8" not in name and "failed" not in row
    }
    if not ours:
        part.fail(f"bigtrain has no result: {rows['bigtrain']['failed']}")
        return
    best = max(ours, key=lambda name: ours[name])
    if base:
        part.figures["best_over_bare"] = ours[best] / base
    part.figures["best"] = best
    part.figures["top_ops"] = rows[best].get("top_ops", [])
    _keep_trace(setup.directory / best.replace(", ", "-") / "trace.json", setup.directory / TRACE)


def _beside(row: dict[str, Any]) -> dict[str, Any]:
    """Return the planner's predictions of bigtrain's own rows, and their ratios to the measured
    ones.

    On a CPU the peak is the process's, which does not depend on its tensors only.
    """
    if "not_predicted" in row:
        return {"not_predicted": row["not_predicted"]}
    predictions = {}
    for predicted, name, measured in (
        ("predicted_gib", "planner_gib", "peak_gib"),
        ("predicted_tokens_per_second", "planner_tokens_per_s", "tokens_per_second"),
    ):
        if predicted in row:
            predictions[name] = row[predicted]
            predictions[f"{name}_over_measured"] = row[predicted] / row[measured]
    return predictions


def _keep_trace(trace: Path, target: Path) -> None:
    if trace.exists():
        with trace.open("rb") as source, gzip.open(target, "wb", compresslevel=6) as file:
            shutil.copyfileobj(source, file)
        trace.unlink()


speed_1b, speed_3b, speed_8b = (partial(speed, size) for size in _SIZES)
