"""One process of the worlds that `benchmarks/planner_ranking.py` starts: seconds of a training step
under one layout after the other."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def seconds(case: dict[str, Any], steps: int, world: World, device: torch.device) -> float:
    """Return the seconds of the fastest of `steps` steps on the slowest rank. Collective."""
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["engine"], "cpu")
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    assert plan is not None, problems
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
    assert config.model.path is not None
    read_weights(engine, find_weights(config.model.path, hf_config))
    shape = config.batch.micro_batch_size, config.batch.sequence_length
    ids = torch.arange(shape[0] * shape[1]).reshape(shape) % 61 + 1
    batches = [MicroBatch(ids, ids.clone()) for _ in range(run.plan.accumulation)]
    taken = []
    for _ in range(1 + steps):
        dist.barrier()
        begun = time.perf_counter()
        engine.train_step(batches, 1e-4)
        dist.barrier()
        taken.append(time.perf_counter() - begun)
    engine.close()
    slowest = torch.tensor([min(taken[1:])])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def main() -> int:
    """Measure every case of a file; each result is written as soon as it is known."""
    world = read_world(os.environ)
    order = json.loads(Path(sys.argv[1]).read_text())
    with process_group(world) as joined:
        for case in order["cases"]:
            taken = seconds(case, order["steps"], world, joined.device)
            if world.is_main:
                with Path(order["output"]).open("a") as file:
                    file.write(json.dumps({"key": case["key"], "seconds": taken}) + "\n")
            gc.collect()
    return 0


if __name__ == "__main__":
    exit_process(main())
