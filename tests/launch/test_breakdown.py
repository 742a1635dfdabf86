"""The real loop under a clock that stands still but where a part of the step lets it go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.support.points import Point, resolve_point
from bigtrain.data.loading.loader import open_training_data
from bigtrain.engine.build import build_engine
from bigtrain.engine.deepspeed_patches import host_time, zero3_hooks
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.models import torch_patches
from bigtrain.run import loop
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.checkpointing.resume import Recovery
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.step_clock import PartMemory, StepClock
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.health.fencing import RunClaim
from bigtrain.run.outer_steps import OuterSteps
from bigtrain.run.preflight import inspect_inputs
from bigtrain.run.run_log import RunLog
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.session import begin_writing, open_session
from bigtrain.run.state import TrainState
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.world import World

# torch's of its own code, which DeepSpeed makes it import, and of calls of DeepSpeed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(all_gather_into|reduce_scatter)_tensor:FutureWarning"),
]

PARTS = {"data": 5.0, "forward": 7.0, "backward": 11.0, "optimizer": 13.0, "engine": 17.0}
ACCUMULATION = 2


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, function: Any, seconds: float) -> Any:
        """`function`, which takes `seconds`."""

        def slowed(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return function(*args, **kwargs)

        return slowed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loop, "StepClock", partial(StepClock, now=clock))
    for module in (host_time, zero3_hooks):
        monkeypatch.setattr(module, "perf_counter", clock)
    waits = type("time", (), {"perf_counter": clock, "sleep": time.sleep})
    monkeypatch.setattr(torch_patches, "time", waits)
    return clock


def run_of(directory: Path, zero_stage: int) -> ResolvedRun:
    """Thirteen steps of one process, of which the tenth and the last are logged."""
    point = Point(
        size="tiny",
        zero_stage=zero_stage,
        accumulation=ACCUMULATION,
        micro_batch_size=1,
        dtype="fp32",
        rounds=1,
        steps_per_round=6,
        threads=1,
        contenders=(),
    )
    return resolve_point(point, directory)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """One for all runs: DeepSpeed keeps the groups of the first that there was."""
    run = run_of(tmp_path_factory.mktemp("session"), 0)
    with open_session(run, World(0, 1, 0)) as context:
        yield context


def train(
    session: RunContext, directory: Path, zero_stage: int, prepare: Callable[[Any, Any], None]
) -> list[dict[str, Any]]:
    """The lines of logged steps, and checks that hold of all; `prepare` slows the engine down."""
    run = run_of(directory, zero_stage)
    inputs = inspect_inputs(run)
    claim = RunClaim(Path(run.config.output.directory))
    log = RunLog(claim, is_main=True)
    launch = replace(session, run=run, claim=claim, log=log)
    batches = open_training_data(run.config, run.plan, 0)
    mesh = open_mesh(run.topology, 0)
    engine = build_engine(run.config, run.engine, run.plan, inputs.hf_config, launch.device, mesh)
    prepare(engine, batches)
    context = SegmentContext(**vars(launch), inputs=inputs, engine=engine)
    begin_writing(context, TrainState())
    with Saver(context) as saver:
        steps = loop.Loop(
            context,
            engine,
            batches=batches,
            evaluator=Evaluator(context, []),
            saver=saver,
            outer=OuterSteps(context),
            callbacks=Callbacks(context),
            roll_back=Recovery(context, saver, None, 0).roll_back,
            memory=PartMemory("cpu"),
        )
        steps.run(TrainState())
    batches.close()
    engine.close()
    assert log.metrics is not None
    (summary,) = [line for line in log.metrics.summary() if line.startswith("step ")]
    assert "data " in summary
    log.close()
    lines = (context.directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [line["step"] for line in records] == [10, 13]
    for line in records:
        assert "peak_memory_gib_by_phase" not in line  # a CPU
        parts = {k: v for k, v in line["breakdown"].items() if k != "communication_seconds"}
        seconds = sum(v for v in parts.values() if v is not None)
        assert seconds == pytest.approx(line["step_seconds"])
    return records


def test_every_part_of_a_step_is_what_it_took(
    session: RunContext, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(engine: Any, batches: Any) -> None:
        own, once = engine.engine, 1 / ACCUMULATION
        batches.step = clock.slow(batches.step, PARTS["data"])
        engine.module.forward = clock.slow(engine.module.forward, once * PARTS["forward"])
        own.backward = clock.slow(own.backward, once * PARTS["backward"])
        own.optimizer.step = clock.slow(own.optimizer.step, PARTS["optimizer"])
        # What is done with gradients in the middle of the backward pass is the engine's.
        reduce = clock.slow(own.allreduce_gradients, once * PARTS["engine"] / 4)
        own.allreduce_gradients = engine.host_time.timed(reduce)
        after = clock.slow(loop.Guard.end, 3 * PARTS["engine"] / 4)
        monkeypatch.setattr(loop.Guard, "end", after)

    for line in train(session, tmp_path, 0, prepare):
        assert line["step_seconds"] == pytest.approx(sum(PARTS.values()))
        breakdown = line["breakdown"]
        assert {part: breakdown[f"{part}_seconds"] for part in PARTS} == pytest.approx(PARTS)
        assert breakdown["compute_seconds"] is None
        assert breakdown["communication_seconds"] == 0.0


@pytest.mark.slow
def test_hooks_of_zero_3_are_the_engine_s(
    session: RunContext, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_modules = 0

    def prepare(engine: Any, _batches: Any) -> None:
        nonlocal num_modules
        kind = zero3_hooks._Coordinator
        monkeypatch.setattr(kind, "fetch", clock.slow(kind.fetch, 1.0))
        monkeypatch.setattr(kind, "release", clock.slow(kind.release, 1.0))
        engine.module.forward = clock.slow(engine.module.forward, 7.0)
        # Lists have hooks and are not called.
        num_modules = sum(type(m).__name__ != "ModuleList" for m in engine.module.modules())

    for line in train(session, tmp_path, 3, prepare):
        breakdown = line["breakdown"]
        assert breakdown["forward_seconds"] == 7.0 * ACCUMULATION
        assert breakdown["backward_seconds"] == 0.0
        # Two calls before and after each pass of a module; some have no input with a gradient.
        calls = breakdown["engine_seconds"] / ACCUMULATION
        assert 3 * num_modules <= calls <= 4 * num_modules


def test_waiting_for_other_ranks_is_a_part_of_the_others(
    session: RunContext, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wait in the forward pass takes a second, also one inside of the engine's hooks."""
    wait = dist.Work.wait
    monkeypatch.setattr(dist.Work, "wait", clock.slow(wait, 1.0))

    def prepare(engine: Any, _batches: Any) -> None:
        forward = engine.module.forward

        def exchanging(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            return forward(*args, **kwargs)

        engine.module.forward = exchanging
        reduce = engine.engine.allreduce_gradients

        def waiting(*args: Any, **kwargs: Any) -> Any:
            dist.barrier()
            dist.barrier()
            return reduce(*args, **kwargs)

        engine.engine.allreduce_gradients = engine.host_time.timed(waiting)

    for line in train(session, tmp_path, 0, prepare):
        breakdown = line["breakdown"]
        assert breakdown["forward_seconds"] == ACCUMULATION
        assert breakdown["backward_seconds"] == 2 * ACCUMULATION
        assert breakdown["communication_seconds"] >= 3 * ACCUMULATION
        assert breakdown["communication_seconds"] == pytest.approx(line["step_seconds"])
