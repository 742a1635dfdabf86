"""Steps of the contenders of docs/benchmarks.md, recorded on fake CUDA tensors.

To be run in a process of its own, after `fake_cuda.load_before_torch`. The recorded step is the
second one: the first makes the optimizer's states.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import peft  # noqa: F401  (before CUDA is stood in for: it looks for kernels then)
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

from benchmarks.gpu_proof.fake_cuda import fake_cuda_tensors, stand_in_for_cuda
from benchmarks.gpu_roofline.kernel import Kernel
from benchmarks.gpu_roofline.recorder import KernelRecorder, update_bytes
from benchmarks.gpu_roofline.triton_launches import record_launches
from benchmarks.support.contenders import BareLoop
from benchmarks.support.points import Point, resolve_point
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.deepspeed_patches import bf16_update, fused_adamw
from bigtrain.engine.deepspeed_patches import step as step_patches
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import ModelPlan, choose
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run

LR, ENGINE = 1e-4, "zero1"


def record_step(point: Point, num_ranks: int = 1, *, is_before: bool = False) -> list[Kernel]:
    """Return the kernels of a step of the one contender of `point` on the first of `num_ranks`
    GPUs, which have other samples each. is_before: without what bigtrain changed of the update
    since the rows were measured."""
    if is_before:
        update: Any = bf16_update
        update.shorten_bf16_update = lambda *_: False
        patches: Any = step_patches
        patches._skip_lone_reduction = lambda _: None
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        run = resolve_point(point, Path(folder), num_ranks)
    # On the CPU, as it is chosen: trials of the model need values.
    hf_config = load_hf_config(run.config.model)
    plan, problems = choose(run.config, hf_config, run.plan)
    assert plan is not None, problems
    if plan.float8.recipe != "none":  # emulated where there is no GPU
        plan = replace(plan, float8=replace(plan.float8, is_emulated=False))
    stand_in_for_cuda(lambda _: None)
    # transformers reads from the positions whether samples are one document each, as they are here.
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    # It takes fake tensors for an export, which keeps masks that a run does not have.
    masking_utils.is_tracing = lambda *_: False
    _register_kernels()
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    run = resolve_run(run.config, num_ranks, point.engine_name, "cuda")
    (contender,) = point.contenders
    recorder = KernelRecorder()
    if "liger" in (point.kernels, point.loss):
        record_launches(recorder.add_launch)
    with fake_cuda_tensors(lambda tensor: [1] * tensor.numel()):
        step = _STEPS[contender](Contestant(run, hf_config, plan, recorder))
        with recorder:
            step()
            recorder.kernels.clear()
            step()
    return recorder.kernels


def _register_kernels() -> None:
    """Give operations that have one CUDA kernel a stand-in, without which torch's CPU build would
    divide them into several before the recorder sees them."""
    for name in _KERNELS_OF_CUDA:
        _LIBRARY.impl(name, lambda *_, **__: None, "CUDA")


_LIBRARY = torch.library.Library("aten", "IMPL")
_KERNELS_OF_CUDA = ("silu_backward",)


def _batches(run: ResolvedRun) -> list[MicroBatch]:
    batch = run.config.batch
    ids = torch.ones((batch.micro_batch_size, batch.sequence_length), dtype=torch.long)
    return [MicroBatch(ids, ids.clone(), None) for _ in range(run.plan.accumulation)]


@dataclass(frozen=True)
class Contestant:
    """What a contender is made of. plan: of the model, as bigtrain chose it."""

    run: ResolvedRun
    hf_config: Any
    plan: ModelPlan
    recorder: KernelRecorder


def _record_update(recorder: KernelRecorder) -> None:
    """Record the compiled update as one kernel; `fused_layer` checks that Inductor makes one of
    it."""

    def launched(*tensors: torch.Tensor, **_: Any) -> None:
        recorder.add_launch("fused AdamW", update_bytes(*tensors))

    fused_adamw.compile_update = lambda: launched
    # The trial compares values, and needs Triton.
    fused: Any = fused_adamw.FusedAdamW
    fused.supports = lambda _: True


def _bigtrain(contestant: Contestant) -> Callable[[], object]:
    run, device = contestant.run, torch.device("cuda", 0)
    _record_update(contestant.recorder)
    mesh = open_mesh(run.topology, 0)
    engine = build_engine(
        run.config, run.engine, run.plan, contestant.hf_config, device, mesh, contestant.plan
    )
    contestant.recorder.watch(engine.module)
    # Every run has a guard, which asks before each update.
    return lambda: engine.train_step(_batches(run), LR, lambda _: True)


def _bare(contestant: Contestant) -> Callable[[], object]:
    steps = [_batches(contestant.run) for _ in range(3)]
    loop = BareLoop(contestant.run, contestant.hf_config, steps, torch.device("cuda", 0))
    contestant.recorder.watch(loop.model)
    return lambda: loop.run(1)


def _hf(contestant: Contestant) -> Callable[[], object]:
    """What transformers' Trainer asks of DeepSpeed with the run's JSON: transformers' own loss, and
    none of bigtrain's patches."""
    run = contestant.run
    config, batch = run.config, run.config.batch
    tree: Any = json.loads(find_deepspeed_config(ENGINE).read_text())
    tree |= {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": run.plan.accumulation,
        "gradient_clipping": config.optimizer.clip_norm,
        "bf16": {"enabled": config.precision.dtype == "bfloat16"},
        "fp16": {"enabled": False},
    }
    tree["optimizer"]["params"] |= {
        "lr": LR, "betas": list(config.optimizer.betas), "eps": config.optimizer.eps,
        "weight_decay": config.optimizer.weight_decay,
    }  # fmt: skip
    model = build_model(config.model, contestant.hf_config, seed=0)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=tree
    )
    engine.train()
    contestant.recorder.watch(engine.module)

    def step() -> None:
        for moved in _batches(run):
            ids = moved.input_ids.to("cuda")
            engine.backward(engine(input_ids=ids, labels=ids.clone(), use_cache=False).loss)
            engine.step()

    return step


_STEPS = {"bigtrain": _bigtrain, "bare": _bare, "hf": _hf}
