"""One traced case: builds the engine of a rank on fake CUDA tensors, takes steps, evaluates.

To be run in a process of its own, after `fake_cuda.load_before_torch`.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import peft  # noqa: F401  (before CUDA is stood in for: it looks for kernels then)
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_proof.cases import EXPERT_ROWS, LLAMA, Case
from benchmarks.gpu_proof.fake_cuda import fake_cuda_tensors, stand_in_for_cuda
from benchmarks.gpu_proof.trace import Record, Tracer
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import choose
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import predict_run
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig


@dataclass
class Traced:
    """Result of a case. step: the second optimizer step, without logging. logged: reading its loss
    and norm. evaluation: of one batch. predicted: bytes of tensors at the peak by the planner.
    trained: parameters of the rank's part of the model, and of the model."""

    step: Record
    logged: Record
    evaluation: Record
    predicted: float
    num_parameters: int
    states: dict[str, Any] = field(default_factory=dict)


def trace_case(case: Case, *, spoil: Any = None) -> Traced:
    """Trace one step of `case`. `spoil` changes the engine before it: a planted fault. Raises what
    the step raises, such as RuntimeError for tensors on two devices."""
    os.environ |= {"RANK": str(case.rank), "WORLD_SIZE": str(case.world_size), "LOCAL_RANK": "0"}
    tracer = Tracer()
    stand_in_for_cuda(tracer.waited)
    dist.init_process_group("fake", rank=case.rank, world_size=case.world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    config = RunConfig.model_validate(_settings(case))
    run = resolve_run(config, case.world_size, None, "cuda")
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    if plan is None:
        raise ValueError(f"{case.name}: {problems}")
    predicted = _predicted(run, hf_config, plan.loss)
    dist.all_gather_object = _gather_own
    with fake_cuda_tensors(lambda tensor: tracer.read_list(tensor, EXPERT_ROWS)), tracer:
        mesh = open_mesh(run.topology, case.rank)
        device = torch.device("cuda", 0)
        engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
        _skip_comparison_of_ranks()
        if spoil is not None:
            spoil(engine)
        engine.train_step(_batches(case, run), 1e-4)
        tracer.reset()
        result = engine.train_step(_batches(case, run), 1e-4)
        step = tracer.record
        tracer.reset()
        engine.step_loss(result)
        engine.gradient_norm()
        logged = tracer.record
        tracer.reset()
        engine.evaluate(_batches(case, run)[:1])
        return Traced(step, logged, tracer.record, predicted, _num_parameters(engine))


def _settings(case: Case) -> dict[str, Any]:
    """Return the settings of the run, with a base model on disk if it wants one."""
    tree = case.run()
    if case.base:
        folder = tempfile.mkdtemp(prefix="gpu-proof-")
        atexit.register(shutil.rmtree, folder)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA)).save_pretrained(folder)
        del tree["model"]["config"]
        tree["model"]["path"] = folder
    return tree


def _gather_own(objects: list[Any], value: Any, group: Any = None) -> None:
    """Stand in for `all_gather_object`: the other ranks have what this one has."""
    objects[:] = [value] * len(objects)


def _predicted(run: ResolvedRun, hf_config: Any, loss: Any) -> float:
    model, _ = model_costs(run.config, hf_config)
    chunk = loss.chunk_tokens if loss.kind == "chunked" else None
    return float(predict_run(run, model, chunk, None).memory.allocated)


def _batches(case: Case, run: ResolvedRun) -> list[MicroBatch]:
    """Return the rank's micro-batches of a step, on the host."""
    batch = run.config.batch
    shape = (batch.micro_batch_size, batch.sequence_length)
    positions = None
    if case.isolated:
        half = torch.arange(batch.sequence_length // 2)
        positions = half.repeat(2).expand(shape).contiguous()
    ids = torch.ones(shape, dtype=torch.long)
    return [MicroBatch(ids, ids.clone(), positions) for _ in range(run.plan.accumulation)]


def _skip_comparison_of_ranks() -> None:
    """Turn off DeepSpeed's comparison of a list between ranks in its first ZeRO 3 step: the other
    ranks do not exist."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    coordinator.assert_ints_same_as_other_ranks = lambda *_: None


def _num_parameters(engine: TrainEngine) -> int:
    return sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())


def as_json(traced: Traced) -> str:
    """Return `traced` as one line of JSON."""
    records = {}
    for name in ("step", "logged", "evaluation"):
        record: Record = getattr(traced, name)
        records[name] = {
            "waits": dict(sorted(record.waits.items())),
            "peak": record.peak,
            "exchanged": [
                [operation, size, str(dtype).removeprefix("torch."), count]
                for (operation, size, dtype), count in sorted(
                    record.by_kind().items(), key=lambda item: str(item[0])
                )
            ],
        }
    return json.dumps(
        {**records, "predicted": traced.predicted, "num_parameters": traced.num_parameters}
    )
