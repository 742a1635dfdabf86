"""Overhead of DeepSpeed on this machine's CPUs, where nothing overlaps: engines of two models are
timed on one rank and on two ranks. The step of a wide model mostly moves gradients and parameters;
the step of a deep model of tiny layers mostly launches operations and runs ZeRO 3's hooks."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.errors import LaunchError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import choose
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.tables.engines import MeasuredEngine, ZeroCosts
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.local_world import run_local_world
from bigtrain.system.processes import exit_process
from bigtrain.system.world import World, read_world

_TOKENS = 8
_STEPS = 10
_ACCUMULATIONS = (1, 4)
_SHAPE = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4,
          "max_position_embeddings": 64}  # fmt: skip
_WIDE = {**_SHAPE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 1,
         "vocab_size": 2048}  # fmt: skip
_DEEP = {**_SHAPE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 12,
         "vocab_size": 64}  # fmt: skip


def measure_engine() -> MeasuredEngine:
    """Return the seconds of the engine by parameter byte, operation and parameter tensor. Not
    collective. Raises LaunchError."""
    one_rank, two_ranks = _seconds(1), _seconds(2)
    deep, wide = _costs(_DEEP), _costs(_WIDE)
    # The deep model only launches kernels: in a forward pass, and twice as many in the backward
    # pass. ZeRO 3 adds its hooks.
    kernel_seconds = one_rank["deep 0 1"] / (3 * _num_kernels(deep))
    num_tensors = sum(deep.kinds[layer_type].num_tensors for layer_type in deep.layers)
    hook_seconds = max(0.0, one_rank["deep 3 1"] - one_rank["deep 0 1"]) / num_tensors
    wide_kernel_seconds = 3 * _num_kernels(wide) * kernel_seconds
    parameter_bytes = wide.num_parameters * 4
    costs = {}
    for zero_stage in range(4):
        # Seconds of the wide model by world size: of a micro-batch without kernels, and of a step
        # without micro-batches. Steps of few and of many micro-batches separate the two.
        few, many = _ACCUMULATIONS
        batch_seconds, step_seconds = [], []
        for seconds in (one_rank, two_ranks):
            with_few = seconds[f"wide {zero_stage} {few}"]
            with_many = seconds[f"wide {zero_stage} {many}"]
            per_batch = max(0.0, with_many - with_few) / (many - few)
            batch_seconds.append(max(0.0, per_batch - wide_kernel_seconds))
            step_seconds.append(max(0.0, with_few - few * per_batch))
        # Time on two ranks above the minimum is communication.
        costs[zero_stage] = ZeroCosts(
            min(batch_seconds) / parameter_bytes,
            min(step_seconds) / parameter_bytes,
            (batch_seconds[1] - min(batch_seconds)) / parameter_bytes,
            (step_seconds[1] - min(step_seconds)) / parameter_bytes,
        )
    return MeasuredEngine(kernel_seconds, hook_seconds, costs)


def _costs(values: dict[str, Any]) -> ModelCosts:
    hf_config = load_hf_config(_config(values, 0, 1, 1).model)
    return trace_model(hf_config, torch.float32)


def _num_kernels(costs: ModelCosts) -> float:
    return sum(costs.kinds[layer_type].num_kernels for layer_type in costs.layers)


def _config(values: dict[str, Any], zero: int, accumulation: int, world_size: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"config": values, "loss": "plain"},
            "data": {"path": "unused"},
            "batch": {"sequence_length": _TOKENS, "micro_batch_size": 1,
                      "global_batch_size": accumulation * world_size},
            "train": {"steps": 3},
            "optimizer": {"lr": 1e-3},
            "precision": {"dtype": "float32"},
            "engine": {"deepspeed_config": f"zero{zero}"},
            "output": {"directory": "unused"},
        }
    )  # fmt: skip


def _seconds(world_size: int) -> dict[str, float]:
    """Return the seconds of a step of a world of `world_size` ranks, by text of model, ZeRO stage
    and accumulation: "wide 3 4"."""
    with tempfile.TemporaryDirectory() as name:
        output = Path(name) / "seconds.json"
        try:
            run_local_world(world_size, ["-m", __name__, str(output)], {})
        except LaunchError as error:
            raise LaunchError(f"an engine of {world_size} ranks failed: {error}") from error
        seconds: dict[str, float] = json.loads(output.read_text())
    return seconds


def _measure(output: Path) -> None:
    """Measure all cases on this rank. Collective."""
    world = read_world(os.environ)
    torch.set_num_threads(1)
    cases = [("wide", _WIDE, zero, n) for zero in range(4) for n in _ACCUMULATIONS]
    cases += [("deep", _DEEP, zero, 1) for zero in (0, 3)]
    seconds = {}
    with process_group(world):
        for name, values, zero, accumulation in cases:
            seconds[f"{name} {zero} {accumulation}"] = _step(values, zero, accumulation, world)
            gc.collect()
        if world.is_main:
            output.write_text(json.dumps(seconds))


def _step(values: dict[str, Any], zero: int, accumulation: int, world: World) -> float:
    """Return the least seconds of a step, after two for warming up. Collective."""
    config = _config(values, zero, accumulation, world.size)
    run = resolve_run(config, world.size, None, "cpu")
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    assert plan is not None, problems
    mesh = open_mesh(run.topology, world.rank)
    device = torch.device("cpu")
    engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
    ids = torch.arange(_TOKENS).reshape(1, _TOKENS) + 1
    batches = [MicroBatch(ids, ids.clone()) for _ in range(accumulation)]
    step_seconds = []
    for _ in range(2 + _STEPS):
        dist.barrier()
        start = time.perf_counter()
        engine.train_step(batches, 1e-4)
        dist.barrier()
        step_seconds.append(time.perf_counter() - start)
    engine.close()
    return min(step_seconds[2:])


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
    exit_process(0)
