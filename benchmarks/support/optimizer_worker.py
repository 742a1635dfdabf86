"""One process of the worlds that `benchmarks/optimizers.py` starts: seconds of a step."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.snapshot import read_weights
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import choose
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World, read_world


def of_bigtrain(
    case: dict[str, Any], world: World, device: torch.device
) -> tuple[Callable[[], None], Any]:
    """A step, and what DeepSpeed calls the optimizer."""
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["engine"], "cpu")
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    assert plan is not None, problems
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
    assert config.model.path is not None
    read_weights(engine, find_weights(config.model.path, hf_config))
    ids = _ids(config)
    batches = [MicroBatch(ids, ids.clone()) for _ in range(run.plan.accumulation)]
    return lambda: engine.train_step(batches, 1e-4) and None, engine.engine.optimizer


def of_deepspeed(
    case: dict[str, Any], _world: World, device: torch.device
) -> tuple[Callable[[], None], Any]:
    """DeepSpeed's own Muon on the same model."""
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


def held_bytes(optimizer: Any) -> int:
    """Of the torch optimizer's states on this rank, whatever wraps it; masters left out."""
    while not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    tensors = [t for state in optimizer.state.values() for t in state.values()]
    return sum(t.numel() * t.itemsize for t in tensors if torch.is_tensor(t))


def measure(case: dict[str, Any], steps: int, world: World, device: torch.device) -> dict[str, Any]:
    """Seconds of the fastest of `steps` steps, the slowest rank's. Collective."""
    make = of_deepspeed if "deepspeed" in case else of_bigtrain
    step, optimizer = make(case, world, device)
    taken = []
    for _ in range(1 + steps):
        dist.barrier()
        begun = time.perf_counter()
        step()
        dist.barrier()
        taken.append(time.perf_counter() - begun)
    figures = torch.tensor([min(taken[1:]), held_bytes(optimizer)], dtype=torch.float64)
    dist.all_reduce(figures, op=dist.ReduceOp.MAX)
    return {"seconds": float(figures[0]), "bytes": int(figures[1])}


def main() -> int:
    """Measure every case of a file; each result is written as soon as it is known."""
    world = read_world(os.environ)
    order = json.loads(Path(sys.argv[1]).read_text())
    with process_group(world) as joined:
        for case in order["cases"]:
            found = measure(case, order["steps"], world, joined.device)
            if world.is_main:
                with Path(order["output"]).open("a") as file:
                    file.write(json.dumps({"key": case["key"], **found}) + "\n")
            gc.collect()
    return 0


if __name__ == "__main__":
    exit_process(main())
