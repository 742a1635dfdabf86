"""One traced case: builds the engine of a rank on fake CUDA tensors, takes steps, evaluates.

To be run in a process of its own, after `fake_cuda.load_before_torch`.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from typing import Any

import deepspeed
import peft  # noqa: F401  (before CUDA is stood in for: it looks for kernels then)
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_proof.cases import EXPERT_ROWS, LLAMA, Case
from benchmarks.gpu_proof.fake_cuda import fake_cuda_tensors, stand_in_for_cuda
from benchmarks.gpu_proof.trace import Collective, Record, Tracer, ranks_text
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import choose
from bigtrain.models.layers.kernels import fast_path_of
from bigtrain.models.layers.plans import LossPlan
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import layout_of, predict_run
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig

PEAK_ERROR = 0.2
"""Largest relative error of the planner's peak that is no problem."""


@dataclass
class Traced:
    """Result of a case. step: the second optimizer step, without logging. logged: reading its loss
    and norm. evaluation: of two batches. predicted: bytes of tensors at the peak by the planner.
    gradient_bytes: of a gradient, by the planner. num_reduced: gradients to reduce in a step."""

    step: Record
    logged: Record
    evaluation: Record
    predicted: float
    gradient_bytes: int
    num_reduced: int

    def problems(self, case: Case) -> list[str]:
        """Return what contradicts the planner: dtype and number of reduced gradients, the peak."""
        reductions = [each for each in self.step.collectives if _is_of_gradients(each)]
        differences = [
            f"{each.operation} of {each.num_elements:,} gradients in {each.dtype} by {each.place}: "
            f"the planner counts {self.gradient_bytes} bytes each"
            for each in reductions
            if each.dtype.itemsize != self.gradient_bytes
        ]
        reduced = sum(each.num_elements for each in reductions)
        if case.world_size > 1 and not 1 <= reduced / self.num_reduced < 1.01:  # with padding
            differences.append(f"{reduced:,} gradients are reduced, and not {self.num_reduced:,}")
        error = self.predicted / self.step.peak - 1
        if case.follows_memory and not -PEAK_ERROR < error < PEAK_ERROR:
            differences.append(
                f"the planner's peak of {self.predicted / 2**20:.1f} MiB is {error:+.0%} off "
                f"{self.step.peak / 2**20:.1f}"
            )
        return differences


def _is_of_gradients(each: Collective) -> bool:
    """Tell reductions of gradients from those of activations, which the model asks for, and from
    norms and counts."""
    reduces = each.operation.startswith(("allreduce", "reduce_scatter"))
    by_model = each.place.startswith("bigtrain/models/")
    return reduces and not by_model and each.num_elements > 64 and each.dtype.is_floating_point


def _mask_on_the_cpu(engine: TrainEngine) -> None:
    def add(module: Any, args: Any, kwargs: Any) -> Any:
        tokens = kwargs["hidden_states"].shape[1]
        mask = torch.zeros(1, 1, tokens, tokens, device="cpu", dtype=torch.bfloat16)
        return args, {**kwargs, "attention_mask": mask}

    engine.module.model.layers[0].self_attn.register_forward_pre_hook(add, with_kwargs=True)


def _item_in_the_loop(engine: TrainEngine) -> None:
    engine.module.model.layers[0].register_forward_hook(lambda *args: float(args[2].sum()) and None)


def _reduction_in_16_bits(engine: TrainEngine) -> None:
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype == torch.float32 and tensor.numel() > 1:
            tensor = tensor.bfloat16()
        return reduce(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce


def _count_on_the_cpu(engine: TrainEngine) -> None:
    def count(micro_batches: Any) -> torch.Tensor:
        total = torch.tensor(sum(batch.labels.numel() for batch in micro_batches))
        dist.all_reduce(total, group=engine.mesh.replicas)
        return total.to(engine.device)

    engine._count_targets = count  # type: ignore[method-assign]


def _another_group(engine: TrainEngine) -> None:
    """Of as many ranks as the right one."""
    others = [rank ^ 1 for rank in dist.get_process_group_ranks(engine.mesh.replicas)]
    wrong = dist.new_group([dist.get_rank(), *others[1:]])
    reduce, right = dist.all_reduce, engine.mesh.replicas

    def all_reduce(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        return reduce(tensor, *args, group=wrong if group is right else group, **kwargs)

    dist.all_reduce = all_reduce


def _no_wait_in_the_feed(engine: TrainEngine) -> None:
    engine.feed._when_copied = lambda batch, copied: (batch, copied.batch)  # type: ignore[method-assign]


def _copy_that_blocks(engine: TrainEngine) -> None:
    def copy(module: Any, args: Any) -> None:
        torch.tensor([1.0, 2.0]).to(engine.device)

    engine.module.model.layers[0].register_forward_pre_hook(copy)


def _item_for_each_evaluated_batch(engine: TrainEngine) -> None:
    loss_of = engine._objective.summed_loss

    def summed_loss(passes: Any, batch: Any, moved: Any, *args: Any) -> Any:
        result = loss_of(passes, batch, moved, *args)
        if not engine.module.training:
            float(result[0])
        return result

    engine._objective.summed_loss = summed_loss  # type: ignore[method-assign]


FAULTS = {
    "count on the CPU": _count_on_the_cpu,
    "another group of the same size": _another_group,
    "no wait in the feed": _no_wait_in_the_feed,
    "copy that blocks": _copy_that_blocks,
    "item for each evaluated batch": _item_for_each_evaluated_batch,
    "mask on the CPU": _mask_on_the_cpu,
    "item in the loop": _item_in_the_loop,
    "reduction in 16 bits": _reduction_in_16_bits,
}
"""Faults that a trace must find, planted in an engine before its steps."""


def trace_case(case: Case, fault: str = "") -> Traced:
    """Trace one step of `case`, with a fault planted if one is named. Raises what the step raises,
    such as RuntimeError for tensors on two devices."""
    os.environ |= {"RANK": str(case.rank), "WORLD_SIZE": str(case.world_size), "LOCAL_RANK": "0"}
    tracer = Tracer()
    stand_in_for_cuda(tracer.waited, tracer.ordered)
    dist.init_process_group("fake", rank=case.rank, world_size=case.world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    config = RunConfig.model_validate(_settings(case))
    run = resolve_run(config, case.world_size, None, "cuda")
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    if plan is None:
        raise ValueError(f"{case.name}: {problems}")
    predicted, gradient_bytes = _predicted(run, hf_config, plan.loss)
    dist.all_gather_object = _gather_own
    with fake_cuda_tensors(lambda tensor: tracer.read_list(tensor, EXPERT_ROWS)), tracer:
        mesh = open_mesh(run.topology, case.rank)
        device = torch.device("cuda", 0)
        engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
        _skip_comparison_of_ranks()
        if fault:
            FAULTS[fault](engine)
        # Every run has a guard, which asks before each update.
        engine.train_step(_batches(case, run), 1e-4, lambda _: True)
        tracer.reset()
        result = engine.train_step(_batches(case, run), 1e-4, lambda _: True)
        step = tracer.record
        tracer.reset()
        engine.step_loss(result)
        engine.gradient_norm()
        logged = tracer.record
        tracer.reset()
        # Of two batches: what is done for each is done twice.
        engine.evaluate(_batches(case, run)[:2])
        times = run.plan.accumulation if run.engine.zero_stage >= 2 else 1
        num_reduced = times * _num_trained(engine)
        return Traced(step, logged, tracer.record, predicted, gradient_bytes, num_reduced)


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


def _predicted(run: ResolvedRun, hf_config: Any, loss: LossPlan) -> tuple[float, int]:
    """Return the planner's bytes at the peak, and of one gradient."""
    model, _ = model_costs(run.config, hf_config)
    chunk = loss.chunk_tokens if loss.kind == "chunked" else None
    fast_path = fast_path_of(run.config, run.engine, hf_config, "cuda")
    memory = predict_run(run, model, chunk, None, fast_path=fast_path).memory
    return float(memory.allocated), layout_of(run, chunk).gradient_bytes


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


def _num_trained(engine: TrainEngine) -> int:
    trained = (p for p in engine.module.parameters() if p.requires_grad)
    return sum(getattr(p, "ds_numel", p.numel()) for p in trained)


def as_json(case: Case, traced: Traced) -> str:
    """Return `traced` as one line of JSON."""
    records = {}
    for name in ("step", "logged", "evaluation"):
        record: Record = getattr(traced, name)
        exchanged = sorted(record.by_kind().items(), key=lambda item: str(item[0]))
        records[name] = {
            "waits": dict(sorted(record.waits.items())),
            "orders": dict(sorted(record.orders.items())),
            "peak": record.peak,
            "exchanged": [
                [operation, ranks_text(ranks), str(dtype).removeprefix("torch."), count]
                for (operation, ranks, dtype), count in exchanged
            ],
        }
    facts = {"predicted": traced.predicted, "num_reduced": traced.num_reduced}
    return json.dumps({**records, **facts, "problems": traced.problems(case)})
