"""Predicted time and memory of a run, the planner's `Layout` of a resolved run, and a check that it
fits its device. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.errors import LaunchError
from bigtrain.planner.engine_json import engine_fields
from bigtrain.planner.layout import Layout, OptimizerCosts, Recompute
from bigtrain.planner.memory import MemoryUse, peak_memory, usable_memory
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.tables.engines import MeasuredEngine, engine_named
from bigtrain.planner.tables.hardware import Device
from bigtrain.settings.compatibility.facts import read_facts
from bigtrain.settings.deepspeed.engine_config import offload_device
from bigtrain.settings.fast_path import (
    ANY_CUDA,
    CPU,
    SINGLE_KERNELS,
    FastPath,
    LossKernels,
    choose_fast_path,
)
from bigtrain.settings.hf_config_keys import inspect_configuration
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.settings.run_config import ModelSection, OptimizerSection
from bigtrain.settings.sections.model import chunk_tokens
from bigtrain.system.units import DTYPE_BYTES, GIB

if TYPE_CHECKING:
    from bigtrain.planner.memory_checkpoints import MemoryCheckpointCosts
    from bigtrain.planner.step_time import StepTime

PREDICTION = "prediction.json"


@dataclass(frozen=True)
class RunPrediction:
    """Prediction for a run. `time` is None if its device is unknown (`device` None).

    `tokens_per_step`: tokens over all ranks; `memory_checkpoints`: costs of checkpoints in memory,
    if any."""

    memory: MemoryUse
    time: StepTime | None
    device: str | None
    tokens_per_step: int
    is_cpu: bool = False
    memory_checkpoints: MemoryCheckpointCosts | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all ranks."""
        return None if self.time is None else self.tokens_per_step / self.time.total

    def line(self) -> str:
        """Return one human-readable line to print before the run."""
        terms = self.memory.terms()
        parts = ", ".join(
            f"{name} {size / GIB:.3g}" for name, size in terms.items() if size and name != "context"
        )
        rate = self.tokens_per_second
        text = f"predicted: {self.memory.allocated / GIB:.3g} GiB of tensors on the fullest rank"
        text += f" ({parts})"
        return text if rate is None else f"{text}, {rate:,.0f} tokens/s on {self.device}"

    def beside(self, tokens_per_second: float, memory_gib: float) -> list[str]:
        """Return a line for the end of a run: the predictions and their errors. On a CPU only the
        time: the memory of a process does not show the memory of tensors."""
        rate = self.tokens_per_second
        if rate is None:
            return []
        line = f"predicted {rate:,.0f} tokens/s ({rate / tokens_per_second - 1:+.0%})"
        if not self.is_cpu:
            peak = self.memory.allocated / GIB
            line += f", {peak:.2f} GiB ({peak / max(memory_gib, 1e-9) - 1:+.0%})"
        return [line]

    def write(self, directory: Path) -> None:
        """Write ``prediction.json``: seconds by term, GiB by term; on a CPU without the peak, as in
        `beside`. Raises OSError."""
        terms = {name: size / GIB for name, size in self.memory.terms().items() if size}
        tree = {
            "device": self.device,
            "step_seconds": None if self.time is None else self.time.total,
            "tokens_per_second": self.tokens_per_second,
            "peak_memory_gib": None if self.is_cpu else self.memory.allocated / GIB,
            "terms": {} if self.time is None else self.time.terms(),
            "memory_terms": terms,
        }
        (directory / PREDICTION).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def predict_run(
    run: ResolvedRun,
    model: ModelCosts,
    loss_chunk_tokens: int | None,
    device: Device | None,
    measured: MeasuredEngine | None = None,
    *,
    is_cpu: bool = False,
    has_partners: bool = True,
    fast_path: FastPath | None = None,
) -> RunPrediction:
    """Predict memory and, if `device` is known, time of `run` with `model`. `measured`: the engine
    on the CPUs that `device` was calibrated on; `is_cpu`: the run is on CPUs, known or not;
    `has_partners`: it has several hosts; `fast_path`: how its layers compute, by default on a
    device of this kind that is not here."""
    engine = engine_named("deepspeed")
    is_cpu = is_cpu or (device is not None and device.is_cpu)
    if fast_path is None:
        fast_path = fast_path_elsewhere(run, is_cpu=is_cpu)
    layout = layout_of(run, loss_chunk_tokens, has_partners=has_partners, fast_path=fast_path)
    if measured is not None:
        engine = engine.with_measured(measured)
    elif is_cpu:
        engine = replace(engine, context_bytes=0.0)
    memory = peak_memory(model, layout, engine)
    time, name, costs = None, None, None
    if device is not None:
        from bigtrain.planner.step_time import step_time

        time, name = step_time(model, layout, device, engine), device.name
    if run.config.checkpoint.memory is not None:
        from bigtrain.planner.memory_checkpoints import memory_checkpoint_costs

        costs = memory_checkpoint_costs(model, layout, device, engine)
    return RunPrediction(memory, time, name, run.plan.tokens_per_step, is_cpu, costs)


def with_teacher(
    prediction: RunPrediction,
    teacher: ResolvedRun,
    model: ModelCosts,
    device: Device | None,
    measured: MeasuredEngine | None = None,
) -> RunPrediction:
    """Return `prediction` with the parameters and forward passes of `teacher`, the run of a teacher
    in the run, whose model has the costs `model`."""
    from bigtrain.planner.teacher_costs import TeacherCosts

    layout, engine = layout_of(teacher), engine_named("deepspeed")
    if measured is not None:
        engine = engine.with_measured(measured)
    costs = TeacherCosts(model, lambda own_layout: own_layout)
    memory, time = costs.with_parameters(prediction.memory, layout, engine), prediction.time
    if time is not None and device is not None:
        time = costs.with_passes(time, layout, device, engine)
    return replace(prediction, memory=memory, time=time)


def refuse_too_large(prediction: RunPrediction, memory_bytes: float, *, refuses: bool) -> str:
    """Return a warning if the run does not fit a device of `memory_bytes` by the rule of
    `bigtrain plan` (`usable_memory`); empty if it fits.

    Raises LaunchError if `refuses`.
    """
    needed, usable = prediction.memory.total, usable_memory(memory_bytes)
    if needed <= usable:
        return ""
    terms = prediction.memory.terms()
    largest = max(terms, key=lambda name: terms[name])
    text = (
        f"the run is predicted to need {needed / GIB:.1f} GiB on its fullest rank, "
        f"{terms[largest] / GIB:.1f} of them {largest}, and of the device's "
        f"{memory_bytes / GIB:.1f} GiB {usable / GIB:.1f} are usable -> use bigtrain plan for a "
        "layout that fits, or set engine.refuse_too_large=false"
    )
    if refuses:
        raise LaunchError(text)
    return text


def fast_path_elsewhere(run: ResolvedRun, *, is_cpu: bool) -> FastPath:
    """Return how the layers of `run` compute on a machine that is not here: with what torch brings
    along."""
    dimensions, _ = inspect_configuration(run.config.model)
    facts = read_facts(run.config, run.engine.deepspeed, dimensions)
    return choose_fast_path(run.config.model, facts, CPU if is_cpu else ANY_CUDA)


def layout_of(
    run: ResolvedRun,
    loss_chunk_tokens: int | None = None,
    *,
    has_partners: bool = True,
    fast_path: FastPath = SINGLE_KERNELS,
) -> Layout:
    """Return the layout of `run`. `loss_chunk_tokens`: tokens whose logits exist at a time, None
    for the loss of all logits; `has_partners`: hosts have others to keep copies of checkpoints in
    memory; `fast_path`: how its layers compute, by default by single kernels."""
    config, topology = run.config, run.topology
    memory_checkpoints = config.checkpoint.memory
    checkpointing = config.model.gradient_checkpointing
    recompute: Recompute = "none" if checkpointing == "none" else "full"
    return Layout(
        **topology.degrees(),
        zero_stage=run.engine.zero_stage,
        micro_batch_size=run.plan.micro_batch_size,
        rows_per_sample=config.objective.kind.trained_rows_per_sample,
        num_reference_rows=config.objective.kind.num_reference_rows(config),
        num_counted_rows=config.objective.kind.rows_per_sample,
        num_accumulation=run.plan.accumulation,
        sequence_length=config.batch.sequence_length,
        recompute=recompute,
        recompute_every=checkpointing if isinstance(checkpointing, int) else 1,
        offload_optimizer=offload_device(run.engine.deepspeed, "offload_optimizer") is not None,
        offload_parameters=offload_device(run.engine.deepspeed, "offload_param") is not None,
        offload_activations=config.model.activation_offload,
        loss_chunk_tokens=loss_chunk_tokens,
        fused_layers=fast_path.fuses_layers,
        loss_kernels=fast_path.loss_kernels(
            config.model.loss, has_plain_entropies=config.objective.has_plain_entropies
        ),
        float8=config.precision.float8 != "none",
        tiled_mlp=config.model.tiled_mlp,
        parameter_bytes=DTYPE_BYTES[config.precision.dtype],
        **engine_fields(run.engine.deepspeed, config, run.engine.zero_stage),
        copies_states=config.checkpoint.asynchronous,
        memory_every_steps=None if memory_checkpoints is None else memory_checkpoints.every_steps,
        partner_copies=0
        if memory_checkpoints is None or not has_partners
        else memory_checkpoints.copies,
        optimizer=optimizer_costs(config.optimizer),
    )


def optimizer_costs(section: OptimizerSection) -> OptimizerCosts:
    """Return the costs of a run's optimizer."""
    return OptimizerCosts(
        section.type,
        2 if section.state_dtype == "bfloat16" else 4,
        2 if section.muon.ns_dtype == "bfloat16" else 4,
        section.muon.ns_steps,
        0 if section.ema is None else 4,
    )


def auto_loss_chunk(
    section: ModelSection,
    model: ModelCosts,
    num_tokens: int,
    loss_kernels: LossKernels = "operators",
) -> int | None:
    """Return how many of the `num_tokens` of a rank's micro-batch have logits at a time, by the
    rule of a run (`models.equivalence.loss`); None if the loss is computed from all logits, not in
    chunks. One chunk may have all tokens."""
    if section.loss == "plain":
        return None
    chunk = chunk_tokens(model.vocabulary_size, section.loss_chunk_tokens)
    if section.loss == "liger":
        # Logits as large as the hidden states, rounded up to a power of two
        # (liger_kernel/ops/fused_linear_cross_entropy.py, 0.8.5).
        tokens = -(-num_tokens // -(-model.vocabulary_size // model.hidden_size))
        return 1 << max(0, tokens - 1).bit_length()
    saves = num_tokens > chunk or loss_kernels == "compiled"
    needs_chunks = model.num_further_losses > 0
    return chunk if section.loss == "chunked" or saves or needs_chunks else None
