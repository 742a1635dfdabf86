"""Training of every point in worlds of real processes on CPUs, and comparison with the
reference."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from bigtrain.engine.checkpoint.fragments import MASTER
from bigtrain.engine.checkpoint.io import read_full, read_full_masters
from bigtrain.engine.optimizers.update_rule import AVERAGE
from bigtrain.errors import BigtrainError, LaunchError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.experts import has_auxiliary_loss
from bigtrain.models.transformers_patches import without_progress
from bigtrain.parity.comparison import Verdict, compare
from bigtrain.parity.proxy import shrink
from bigtrain.parity.reference import (
    TrainingTrace,
    average_name,
    train_reference,
    train_reordered,
)
from bigtrain.parity.routers import StepDivision
from bigtrain.parity.topologies import Point, points
from bigtrain.parity.visibility import invisible_settings
from bigtrain.settings.deepspeed.engine_config import gradient_dtype_of
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.local_world import run_local_world


def run_parity(
    config: RunConfig,
    world_size: int,
    say: Callable[[str], None],
    report: Callable[[Point, Verdict | None], None],
) -> bool:
    """Compare every legal topology of `world_size` ranks; call `report` for every point, with None
    for a refused point, and `say` with the proxy's notes first.

    Returns whether all passed; a crashed topology has failed, and the next topologies continue. For
    a setting in which an error would not be detected, `say` gets a line, and the result is False.
    Raises ModelError if no proxy model can be built or plain transformers fails, ConfigError as
    `shrink`, LaunchError if no process starts, BigtrainError if every topology is refused.
    """
    with tempfile.TemporaryDirectory(prefix="bigtrain-parity-") as name:
        directory = Path(name)
        with without_progress():
            proxy = shrink(config, world_size, directory / "model")
        for note in proxy.notes:
            say(note)
        # Report refused topologies first.
        all_points = points(proxy, world_size)
        for point in all_points:
            if point.is_wrong:
                report(point, Verdict(crash=f"different auxiliary loss: {point.refusal}"))
            elif point.refusal is not None:
                report(point, None)
        legal = [point for point in all_points if point.refusal is None]
        has_wrong_points = any(point.is_wrong for point in all_points)
        if not legal and has_wrong_points:
            return False
        if not legal:
            raise BigtrainError(f"no topology of {world_size} ranks is legal")
        with without_progress():
            references = {point.name: reference_of(point, world_size) for point in legal}
            reordered = {point.name: reordered_of(point, world_size) for point in legal}
            invisible = invisible_settings(proxy.config)
        for line in invisible:
            say(f"NOT COMPARED: {line}")
        passed = not invisible and not has_wrong_points
        for point, result in train_points(legal, world_size, directory):
            if isinstance(result, str):
                verdict = Verdict(crash=result)
            else:
                verdict = compare(references[point.name], result, reordered[point.name])
            report(point, verdict)
            passed = passed and verdict.passed
        return passed


def reference_of(point: Point, world_size: int) -> Sequence[TrainingTrace]:
    """Return plain transformers' results for `point`. Raise ModelError if it fails."""
    stage = resolve_run(point.config, world_size, point.engine, "cpu").engine.zero_stage
    is_float32 = gradient_dtype_of(point.config, stage) == "fp32"
    sum_dtype = torch.float32 if is_float32 else None
    return _reference(_key(point), sum_dtype, _division(point, world_size))


def _division(point: Point, world_size: int) -> StepDivision | None:
    """Return how `point` divides a step, if its router losses depend on it."""
    if not has_auxiliary_loss(load_hf_config(point.config.model)):
        return None
    plan = resolve_run(point.config, world_size, point.engine, "cpu").plan
    is_global = point.config.moe.auxiliary_loss == "global_batch"
    return StepDivision(plan.micro_batch_size, plan.data_size if is_global else 1)


def reordered_of(point: Point, world_size: int) -> Sequence[TrainingTrace]:
    """Return runs of the float32 reference with sums in other orders; none in 16 bit, where the
    reference consists of several runs itself."""
    if point.config.precision.dtype != "float32":
        return []
    return _reordered(_key(point), _division(point, world_size))


def _key(point: Point) -> str:
    """Return the cache key of a reference: the run without degrees, equal for the points of a
    dtype."""
    without_degrees = RunConfig.model_fields["parallel"].default
    return point.config.model_copy(update={"parallel": without_degrees}).model_dump_json()


@cache
def _reordered(config_json: str, division: StepDivision | None) -> Sequence[TrainingTrace]:
    return train_reordered(RunConfig.model_validate_json(config_json), division)


@cache
def _reference(
    config_json: str, sum_dtype: torch.dtype | None, division: StepDivision | None
) -> Sequence[TrainingTrace]:
    return train_reference(RunConfig.model_validate_json(config_json), sum_dtype, division)


def train_points(
    legal: Sequence[Point], world_size: int, directory: Path
) -> list[tuple[Point, TrainingTrace | str]]:
    """Train the `legal` points in worlds of `world_size` ranks; return for each its trace, or the
    first line of the error if it crashes. Raises LaunchError with the end of the ranks' output if
    they fail before the first point."""
    directories = [directory / f"point{number}" for number in range(len(legal))]
    cases = [
        {
            "config": point.config.model_dump(mode="json"),
            "engine": point.engine,
            "directory": str(point_directory),
        }
        for point, point_directory in zip(legal, directories, strict=True)
    ]
    # A world ends at its first crash; another world trains the points after it.
    crashes: dict[int, str] = {}
    begin = 0
    while begin < len(cases):
        (directory / "cases.json").write_text(json.dumps(cases[begin:]))
        try:
            run_local_world(
                world_size,
                ["-m", "bigtrain.parity.worker", str(directory / "cases.json")],
                {"CUDA_VISIBLE_DEVICES": ""},
            )
            break
        except LaunchError as error:
            started = [n for n in range(begin, len(cases)) if directories[n].exists()]
            if not started:
                raise
            # The error of the rank that failed first; other ranks lose their connection afterwards.
            crashed = started[-1]
            error_files = list(directories[crashed].glob("error*"))
            if error_files:
                earliest = min(error_files, key=lambda path: path.stat().st_mtime_ns)
                crashes[crashed] = earliest.read_text()
            else:
                crashes[crashed] = str(error).splitlines()[0].rstrip(":")
            begin = crashed + 1
    return [
        (point, crashes[number] if number in crashes else _read_trace(directories[number]))
        for number, point in enumerate(legal)
    ]


def _read_trace(directory: Path) -> TrainingTrace:
    """Return the measurements that the worker wrote for a point."""
    scalars = json.loads((directory / "figures.json").read_text())
    first, last = (read_full_masters(directory / step) for step in ("first", "last"))
    for key, average in read_full(directory / "last", (MASTER, AVERAGE)).items():
        if key.startswith(f"{AVERAGE}/"):
            last[average_name(key.removeprefix(f"{AVERAGE}/"))] = average
    return TrainingTrace(**scalars, first=first, last=last)
