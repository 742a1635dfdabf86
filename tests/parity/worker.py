"""One process of a world that trains many small cases after each other in one process group.

Started by `tests/parity/conftest.py` with RANK, WORLD_SIZE and a rendezvous in the environment.
Arguments: a JSON file with the cases, and a file for rank 0 to write the results to.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from bigtrain.config import RunConfig
from bigtrain.data.loader import open_training_data
from bigtrain.engine.build import TrainEngine, build_engine
from bigtrain.engine.checkpoint import read_weights, restore_engine, save_engine
from bigtrain.engine.distributed import process_group
from bigtrain.engine.mesh import open_mesh
from bigtrain.engine.resolve import resolve_run
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.weights import find_weights
from bigtrain.schedule import learning_rate_at
from bigtrain.world import World, read_world


def run_case(case: dict[str, Any], world: World, device: torch.device) -> dict[str, Any]:
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["deepspeed_config"], device.type)
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh)
    if config.model.path is not None:
        read_weights(engine, find_weights(config.model.path, hf_config))
    place = mesh.coordinates
    batches = open_training_data(config, run.plan, place.data_rank)
    losses, norms, samples = [], [], []
    first = case.get("first_step", 0)
    if first:
        scalars = json.loads(Path(case["restore_from"], "scalars.json").read_text())
        restore_engine(engine, Path(case["restore_from"], "tensors"), scalars)
        if "save_again_to" in case:
            save(engine, Path(case["save_again_to"]), world)
    if case.get("save_at") == 0:
        save(engine, Path(case["save_to"]), world)
    for step in range(first, case.get("last_step", config.train.steps)):
        torch.manual_seed(1000 * step + place.data_rank)
        lr = learning_rate_at(step, config.optimizer.lr, config.schedule, config.train.steps)
        micro_batches = batches.step(step * run.plan.global_samples)
        samples.append([crc32(row.numpy()) for batch in micro_batches for row in batch.input_ids])
        result = engine.train_step(micro_batches, lr)
        losses.append(engine.step_loss(result))
        norms.append(engine.gradient_norm())
        if step + 1 == case.get("save_at"):
            save(engine, Path(case["save_to"]), world)
    batches.close()
    engine.close()
    return {
        "losses": losses,
        "norms": norms,
        "accumulation": run.plan.accumulation,
        "samples": samples_of_steps(samples, place.data_rank, world),
    }


def samples_of_steps(own: list[list[int]], data_rank: int, world: World) -> list[list[int]]:
    """Checksums of the samples of every global batch, in no order."""
    everyone: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(everyone, (data_rank, own))
    replicas = dict(everyone).values()  # processes that share samples have the same
    return [sorted(chain.from_iterable(parts)) for parts in zip(*replicas, strict=True)]


def save(engine: TrainEngine, directory: Path, world: World) -> None:
    if world.is_main:
        directory.mkdir(parents=True)
    torch.distributed.barrier()
    scalars = save_engine(engine, directory / "tensors")
    if world.is_main:
        (directory / "scalars.json").write_text(json.dumps(scalars))
    torch.distributed.barrier()


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    world = read_world(os.environ)
    results = {}
    with process_group(world) as device:
        for name, case in cases.items():
            results[name] = run_case(case, world, device)
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
