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
from functools import partial
from typing import Any

import deepspeed
import peft  # noqa: F401  (before CUDA is stood in for: it looks for kernels then)
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu_proof.cases import EXPERT_ROWS, LLAMA, Case
from benchmarks.gpu_proof.fake_cuda import answer_for_cuda, fake_cuda_tensors, replace_methods
from benchmarks.gpu_proof.faults import FAULTS
from benchmarks.gpu_proof.peers import Peers, exchange_among
from benchmarks.gpu_proof.trace import Collective, Record, Tracer, mismatches, ranks_text
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.build import build_engine
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import ModelPlan, choose
from bigtrain.models.layers.kernels import fast_path_of
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import layout_of, predict_run
from bigtrain.settings.compatibility.facts import Facts, read_facts
from bigtrain.settings.fast_path import ANY_CUDA, choose_fast_path
from bigtrain.settings.hf_config_keys import EXPERTS, number_of
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig

PEAK_ERROR = 0.2
"""Largest relative error of the planner's peak that is no problem."""


@dataclass
class Traced:
    """Result of a case. step: the third optimizer step, without logging. logged: reading its loss
    and norm. evaluation: of two batches. choice: what `auto` chose. predicted: bytes of tensors at
    the peak by the planner. gradient_bytes: of a gradient, by the planner. num_reduced: gradients
    to reduce in a step. mismatched: what ranks that are traced together exchange differently."""

    step: Record
    logged: Record
    evaluation: Record
    choice: str
    predicted: float
    gradient_bytes: int
    num_reduced: int
    mismatched: list[str]

    def problems(self, case: Case) -> list[str]:
        """Return what contradicts the planner: dtype and number of reduced gradients, the peak."""
        reductions = [each for each in self.step.collectives if _is_of_gradients(each)]
        differences = [*self.mismatched]
        differences += [
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


def trace_case(case: Case, fault: str = "", peers: Peers | None = None) -> Traced:
    """Trace one step of `case`, with a fault planted if one is named, on the rank of `peers` if
    several are traced. Raises what the step raises, such as RuntimeError for tensors on two
    devices."""
    rank = case.rank if peers is None else peers.rank
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(case.world_size), "LOCAL_RANK": "0"}
    # Chosen as on a machine with a GPU: trials compute on the CPU, by torch's own methods.
    tracer = Tracer()
    answer_for_cuda(tracer.waited, tracer.ordered)
    config = RunConfig.model_validate(_settings(case))
    run = resolve_run(config, case.world_size, None, "cuda")
    hf_config = load_hf_config(config.model)
    plan, problems = choose(config, hf_config, run.plan)
    if plan is None:
        raise ValueError(f"{case.name}: {problems}")
    predicted, gradient_bytes = _predicted(run, hf_config, plan)
    choice = _choice(run, hf_config, plan)
    # A world of which only this rank, and its peers, exist.
    replace_methods()
    dist.init_process_group("fake", rank=rank, world_size=case.world_size, store=FakeStore())
    deepspeed.init_distributed(dist_backend="nccl", auto_mpi_discovery=False, verbose=False)
    dist.all_gather_object = partial(_gather_own, tracer)
    if peers is not None:
        exchange_among(peers, tracer)
    with fake_cuda_tensors(lambda tensor: tracer.read_list(tensor, EXPERT_ROWS)), tracer:
        mesh = open_mesh(run.topology, rank)
        device = torch.device("cuda", 0)
        engine = build_engine(config, run.engine, run.plan, hf_config, device, mesh, plan)
        _skip_comparison_of_ranks()
        if fault:
            FAULTS[fault](engine)
        # DeepSpeed does some things from the third step on. Every run has a guard, which asks
        # before each update.
        for _ in range(3):
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
        evaluation = tracer.record
        times = run.plan.accumulation if run.engine.zero_stage >= 2 else 1
        num_reduced = times * _num_trained(engine)
    mismatched = []
    if peers is not None:
        collectives = step.collectives + logged.collectives + evaluation.collectives
        all_collectives = peers.all_gather(collectives, peers.ranks)
        mismatched = mismatches(dict(zip(peers.ranks, all_collectives, strict=True)))
    facts = choice, predicted, gradient_bytes, num_reduced, mismatched
    return Traced(step, logged, evaluation, *facts)


def _choice(run: ResolvedRun, hf_config: Any, plan: ModelPlan) -> str:
    """Return what ``auto`` chose for the layers and the loss, and what it would choose for the
    layers on a CUDA machine, where torch brings Triton."""
    path = fast_path_of(run.config, run.engine, hf_config, "cuda", plan.compilation)
    num_experts = number_of(hf_config.get_text_config().to_dict(), EXPERTS)
    facts = read_facts(run.config, run.engine.deepspeed, None) | Facts(num_experts=num_experts)
    on_cuda = choose_fast_path(run.config.model, facts, ANY_CUDA, str(hf_config.model_type))
    text = f"Layers {path.words}"
    if on_cuda.words != path.words:
        text += f" (with Triton, which is not here, {on_cuda.words})"
    losses = {"plain": "from all logits at once", "chunked": "in chunks", "liger": "by Liger"}
    return f"{text}, loss {losses[plan.loss.kind]}"


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


def _gather_own(tracer: Tracer, objects: list[Any], value: Any, group: Any = None) -> None:
    """Stand in for `all_gather_object`, which reads what it gathers: the other ranks have what this
    one has."""
    tracer.waited("objects of ranks")
    objects[:] = [value] * len(objects)


def _predicted(run: ResolvedRun, hf_config: Any, plan: ModelPlan) -> tuple[float, int]:
    """Return the planner's bytes at the peak, and of one gradient."""
    model, _ = model_costs(run.config, hf_config)
    chunk = plan.loss.chunk_tokens if plan.loss.kind == "chunked" else None
    fast_path = fast_path_of(run.config, run.engine, hf_config, "cuda", plan.compilation)
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
    facts = {"choice": traced.choice, "predicted": traced.predicted}
    return json.dumps({**records, **facts, "problems": traced.problems(case)})
