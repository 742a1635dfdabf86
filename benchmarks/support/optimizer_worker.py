"""One process of the world that `benchmarks/optimizers.py` starts: what a step costs."""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoModelForCausalLM

from benchmarks.support.memory_worker import MARK, peak_of
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.snapshot import read_weights
from bigtrain.engine.optimizers.update_rule import RuleOptimizer
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import choose
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World, read_world


def of_bigtrain(case: dict[str, Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Return a step, and what DeepSpeed calls the optimizer."""
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, dist.get_world_size(), case["engine"], "cpu")
    mesh = open_mesh(run.topology, dist.get_rank())
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    assert plan is not None, problems
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
    assert config.model.path is not None
    read_weights(engine, find_weights(config.model.path, hf_config))
    ids = _ids(config)
    batches = [MicroBatch(ids, ids.clone()) for _ in range(run.plan.accumulation)]

    def step() -> None:
        engine.train_step(batches, 1e-4)

    return step, engine.engine.optimizer


def of_deepspeed(case: dict[str, Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Build DeepSpeed's own Muon on the same model."""
    config = RunConfig.model_validate(case["config"])
    assert config.model.path is not None
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=case["deepspeed"]
    )
    ids = _ids(config).to(device)

    def step() -> None:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()

    return step, engine.optimizer


def _ids(config: RunConfig) -> torch.Tensor:
    shape = config.batch.micro_batch_size, config.batch.sequence_length
    return torch.arange(shape[0] * shape[1]).reshape(shape) % 61 + 1


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer, whatever wraps it."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the states on this rank, without masters."""
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    if isinstance(optimizer, RuleOptimizer):
        states += [tensor for _, kinds in optimizer.small_states() for tensor in kinds.values()]
    return sum(t.numel() * t.itemsize for t in states if torch.is_tensor(t))


def measure(
    cases: list[dict[str, Any]], rounds: int, world: World, device: torch.device
) -> list[dict[str, float]]:
    """Return the maxima over ranks for each case, after the optimizers took turns. Collective.

    seconds, cpu_seconds: of a step, medians; cpu_seconds of this process with all its threads.
    bytes: of states. step_bytes: the most that a step has allocated at a time. sent_bytes: in an
    update, where it is counted.
    """
    made = [(of_deepspeed if "deepspeed" in case else of_bigtrain)(case, device) for case in cases]
    taken: list[list[tuple[float, float]]] = [[] for _ in cases]
    for number in range(1 + rounds):
        for (step, _), times in zip(made, taken, strict=True):
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            step()
            dist.barrier()
            spent = time.perf_counter() - begun[0], time.process_time() - begun[1]
            if number:  # the first one allocates
                times.append(spent)
    rows = []
    for (step, wrapped), times in zip(made, taken, strict=True):
        optimizer = inner(wrapped)
        sent = optimizer.sent_bytes() if isinstance(optimizer, RuleOptimizer) else None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            with record_function(MARK):
                step()
        own = [statistics.median(column) for column in zip(*times, strict=True)]
        own += [held_bytes(optimizer), peak_of(seen)["peak"], sent or 0]
        figures = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(figures, op=dist.ReduceOp.MAX)
        names = ("seconds", "cpu_seconds", "bytes", "step_bytes", "sent_bytes")
        rows.append(dict(zip(names, figures.tolist(), strict=True)))
    return rows


def main() -> int:
    """Measure every list of cases of a file; results are written as soon as they are known."""
    torch.set_num_threads(1)
    world = read_world(os.environ)
    order = json.loads(Path(sys.argv[1]).read_text())
    with process_group(world) as joined:
        for cases in order["turns"]:
            rows = measure(cases, order["rounds"], world, joined.device)
            if world.is_main:
                with Path(order["output"]).open("a") as file:
                    for case, figures in zip(cases, rows, strict=True):
                        file.write(json.dumps({"key": case["key"], **figures}) + "\n")
            gc.collect()
    return 0


if __name__ == "__main__":
    exit_process(main())
