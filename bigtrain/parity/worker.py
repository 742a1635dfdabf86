"""Rank of the world that `bigtrain.parity.run` starts: trains the cases in order."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.snapshot import read_weights, save_engine
from bigtrain.engine.deepspeed_patches.startup import destroyed_groups
from bigtrain.engine.live_teacher import LiveTeacher
from bigtrain.engine.principal_adapters import begin_principal_adapters
from bigtrain.engine.startup.long_work import on_every_rank
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.layers.token_loss import TopTokens
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.parity.batches import RATES, micro_batches
from bigtrain.parity.reference import layer_outputs
from bigtrain.settings.resolve import resolve_run, resolve_teacher
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World, read_world


def train_case(case: dict[str, Any], world: World, device: torch.device) -> None:
    """Train one case; rank 0 writes its results, all write the weights. Collective."""
    directory = Path(case["directory"])
    if world.is_main:
        directory.mkdir()
    dist.barrier()
    # The engine as a run builds it, with weights and adapters.
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["engine"], "cpu")
    mesh = open_mesh(run.topology, world.rank)
    coordinates = mesh.coordinates
    hf_config = load_hf_config(config.model)
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh)
    assert config.model.path is not None
    weights = find_weights(config.model.path, hf_config)
    read_weights(engine, weights)
    if config.adapters is not None and config.adapters.init == "pissa":
        begin_principal_adapters(
            engine, config, hf_config, weights, is_new=True, gather=on_every_rank
        )
    # The frozen model of a live teacher.
    teacher = resolve_teacher(run)
    if teacher is not None:
        section = teacher.config.model
        assert section.path is not None
        hf_teacher = load_hf_config(section)
        frozen = build_engine(
            teacher.config, teacher.engine, teacher.plan, hf_teacher, device, mesh
        )
        read_weights(frozen, find_weights(section.path, hf_teacher))
        objective = config.objective
        top = TopTokens(objective.teacher_top_k, temperature=objective.temperature)
        engine.teach = LiveTeacher(frozen, top, {})
    # Outputs of layers name the first difference, before any update.
    first = micro_batches(config, run.plan, 0, coordinates.data_rank)
    rank_sums = layer_outputs(engine.module, lambda: engine.evaluate(first))
    if coordinates.tensor_rank != 0:  # tensor-parallel ranks have equal outputs
        rank_sums = {}
    sums_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sums_by_rank, rank_sums)
    layers: dict[str, float] = {}
    for sums in sums_by_rank:
        for name, value in sums.items():
            layers[name] = layers.get(name, 0.0) + value
    # Train; the first update and the last are compared by weights.
    losses, norms = [], []
    for step in range(config.train.total_steps):
        batches = micro_batches(config, run.plan, step, coordinates.data_rank)
        result = engine.train_step(batches, RATES[step])
        losses.append(engine.step_loss(result))
        norms.append(engine.gradient_norm())
        if step == 0:
            save_engine(engine, directory / "first")
    save_engine(engine, directory / "last")
    engine.close()
    if isinstance(engine.teach, LiveTeacher):
        engine.teach.close()
    if world.is_main:
        figures = {"losses": losses, "norms": norms, "layers": layers}
        (directory / "figures.json").write_text(json.dumps(figures))


def main() -> None:
    """Train the cases in the file named by the first argument."""
    torch.set_num_threads(1)
    world = read_world(os.environ)
    with process_group(world) as joined:
        for case in json.loads(Path(sys.argv[1]).read_text()):
            try:
                with destroyed_groups():
                    train_case(case, world, joined.device)
            except Exception as error:
                error_file = Path(case["directory"]) / f"error{world.rank}"
                first_line = next(iter(str(error).strip().splitlines()), "")
                error_file.write_text(f"{type(error).__name__}: {first_line}"[:300])
                traceback.print_exc()
                exit_process(1)  # otherwise other ranks would wait for this process to unload


if __name__ == "__main__":
    main()
    exit_process(0)
