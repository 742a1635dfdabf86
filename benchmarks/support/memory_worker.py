"""One process of the world that `benchmarks/planner_memory.py` starts: the most bytes of live
tensors at once in a training step, by torch's own profile of every allocation."""

from __future__ import annotations

import bisect
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.snapshot import read_weights
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import choose
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World, read_world

WARM_UP = 2
MARK = "bigtrain measured step"


def measure(case: dict[str, Any], world: World, device: torch.device) -> dict[str, float]:
    """Peak and resting bytes of this rank, and the seconds of the step: by the clock, and of the
    processor, which other work does not prolong. Collective."""
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["engine"], "cpu")
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    assert plan is not None, problems
    gc.collect()  # what the case before left, or it would be missed from this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
        assert config.model.path is not None
        read_weights(engine, find_weights(config.model.path, hf_config))
        batches = batches_of(config, run.plan)
        for _ in range(case.get("warm_up", WARM_UP)):
            engine.train_step(batches, 1e-4)
        with record_function(MARK):
            since, cpu_since = time.perf_counter(), time.process_time()
            engine.train_step(batches, 1e-4)
            step_seconds = time.perf_counter() - since
            cpu_seconds = time.process_time() - cpu_since
    engine.close()
    return {**peak_of(seen), "seconds": step_seconds, "cpu_seconds": cpu_seconds}


def batches_of(config: RunConfig, plan: BatchPlan) -> list[MicroBatch]:
    """Return the micro-batches of a step: rows without padding, of pairs with scores of the
    reference."""
    size = config.batch.micro_batch_size * plan.rows_per_sample, config.batch.sequence_length
    ids = torch.arange(size[0] * size[1]).reshape(size) % 61 + 1
    reference = torch.zeros(size[0]) if config.objective.kind.reads_scores(config) else None
    batch = MicroBatch(ids, ids.clone(), reference=reference)
    return [batch] * plan.accumulation


def peak_of(seen: profile) -> dict[str, float]:
    """Return the most bytes live at once in the measured step, and those live before it.

    By address: what another thread frees (gloo's) is not seen until some of its memory is given out
    again.
    """
    assert seen.profiler is not None
    results = seen.profiler.kineto_results
    step = next(event for event in results.events() if event.name() == MARK)
    begin, end = step.start_ns(), step.start_ns() + step.duration_ns()
    live: dict[int, int] = {}
    starts: list[int] = []  # of what lives, ascending
    now = most = resting = 0
    for when, address, size in sorted(_allocations(results.experimental_event_tree())):
        first = bisect.bisect_left(starts, address)
        if first and starts[first - 1] + live[starts[first - 1]] > address:
            first -= 1
        last = bisect.bisect_left(starts, address + max(size, 1))
        for gone in starts[first:last]:
            now -= live.pop(gone)
        starts[first:last] = [address] if size > 0 else []
        if size > 0:
            live[address] = size
            now += size
        if when < begin:
            resting = now
        elif when <= end:
            most = max(most, now)
    return {"peak": most, "resting": resting}


def let_gloo_go_first() -> None:
    """Return from a collective when gloo's thread has let go of the tensor that it sends, so that
    its memory is freed where the profile sees it."""

    def returning_last(run: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = kwargs[name] if name in kwargs else args[position]
            held = sent._use_count()
            work = run(*args, **kwargs)
            while work is None and sent._use_count() > held:
                os.sched_yield()
            return work

        return call

    dist.all_reduce = returning_last(dist.all_reduce, 0, "tensor")
    dist.all_to_all_single = returning_last(dist.all_to_all_single, 1, "input")


def _allocations(events: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield time, address and bytes of each allocation; negative bytes if freed."""
    for event in events:
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            yield event.start_time_ns, fields.ptr, fields.alloc_size
        yield from _allocations(event.children)


def main() -> None:
    """Read the cases from the file that the first argument names."""
    torch.set_num_threads(1)
    world = read_world(os.environ)
    let_gloo_go_first()
    with process_group(world) as joined:
        for case in json.loads(Path(sys.argv[1]).read_text()):
            measured = measure(case, world, joined.device)
            Path(f"{case['output']}.{world.rank}").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
    exit_process(0)
