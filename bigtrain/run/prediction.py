"""Prediction of a run's time and memory, from its model and device, and its FLOPs utilization."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from bigtrain.errors import ConfigError, ModelError, one_line
from bigtrain.models.build import empty_model
from bigtrain.models.equivalence.model_plan import ModelPlan
from bigtrain.models.layers.kernels import fast_path_of
from bigtrain.models.layers.multi_token import mtp_layers
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import (
    RunPrediction,
    auto_loss_chunk,
    predict_run,
    refuse_too_large,
    with_teacher,
)
from bigtrain.planner.tables.engines import MeasuredEngine, kept_calibration
from bigtrain.planner.tables.hardware import Device, find_device
from bigtrain.run.context import RunContext
from bigtrain.run.preflight import Inputs
from bigtrain.run.run_directory import layer_lines
from bigtrain.settings.resolve import ResolvedRun, resolve_teacher

if TYPE_CHECKING:
    from bigtrain.planner.flops import ModelShape


def log_prediction(context: RunContext, inputs: Inputs) -> RunPrediction | None:
    """Log how the layers compute, and the predicted time and memory; refuse a run that cannot fit
    its device. Collective."""

    # Copies of checkpoints in memory need a second host.
    section, has_partners = context.config.checkpoint.memory, False
    if section is not None:
        from bigtrain.run.checkpointing.host_files import Partners
        from bigtrain.run.shared_memory import memory_lines

        has_partners = Partners.of(context.hosts) is not None

    def predict_and_log() -> RunPrediction | None:
        compilation = inputs.model_plan.compilation
        for line in layer_lines(context.run, inputs.hf_config, context.device.type, compilation):
            context.log.info(line)
        prediction, reason = predict(
            context.run,
            inputs.hf_config,
            inputs.model_plan,
            context.device,
            has_partners=has_partners,
        )
        context.log.info(f"no prediction: {reason}" if prediction is None else prediction.line())
        if prediction is not None and section is not None:
            num_host_ranks = context.hosts.count(context.hosts[context.world.rank])
            for line in memory_lines(prediction, section, num_host_ranks):
                context.log.info(line)
        if prediction is not None and context.device.type == "cuda":
            device_bytes = torch.cuda.get_device_properties(context.device).total_memory
            refuses = context.config.engine.refuse_too_large
            if warning := refuse_too_large(prediction, float(device_bytes), refuses=refuses):
                context.log.info(warning)
        return prediction

    # One rank predicts: a trace takes seconds.
    return context.long_work.on_main_rank(predict_and_log)


def predict(
    run: ResolvedRun,
    hf_config: Any,
    plan: ModelPlan,
    device: torch.device,
    *,
    has_partners: bool = True,
) -> tuple[RunPrediction | None, str]:
    """Predict the time and memory of `run`, in a second or two; if impossible, return None and
    why. `has_partners`: hosts keep copies of the memory checkpoints of partner hosts."""
    try:
        model, _ = model_costs(run.config, hf_config)
    except (ConfigError, ModelError) as error:
        return None, one_line(error, None)
    loss = plan.loss
    chunk_tokens = loss.chunk_tokens if loss.kind == "chunked" else None
    if loss.kind == "liger":  # its kernel chooses the chunks itself, about as bigtrain does
        num_tokens = run.plan.micro_batch_tokens // run.topology.sequence_size
        chunk_tokens = auto_loss_chunk(run.config.model, model, num_tokens)
    is_cpu = device.type == "cpu"
    # A GPU of the tables, or this machine's CPUs if they are calibrated.
    device_rates: Device | None = None
    measured: MeasuredEngine | None = None
    if is_cpu:
        device_rates, measured = kept_calibration() or (None, None)
    else:
        with suppress(ConfigError):
            device_rates = find_device(torch.cuda.get_device_name(device))
    prediction = predict_run(
        run, model, chunk_tokens, device_rates, measured, is_cpu=is_cpu, has_partners=has_partners,
        fast_path=fast_path_of(run.config, run.engine, hf_config, device.type, plan.compilation),
    )  # fmt: skip
    if (teacher := resolve_teacher(run)) is not None:
        teacher_costs, _ = model_costs(teacher.config)
        prediction = with_teacher(prediction, teacher, teacher_costs, device_rates, measured)
    return prediction, ""


def utilization_of(context: RunContext, hf_config: Any) -> Callable[[float], float | None]:
    """Return a function from tokens per second to model FLOPs utilization: None if the device's
    peak or the formula is unknown."""
    if context.device.type != "cuda":
        return lambda _: None
    from bigtrain.planner.flops import (
        flops_per_token,
        model_flops_utilization,
        peak_flops_per_second,
    )

    # The model's shape is read once, when the first step is logged. An empty model: the model of
    # the engine may have only some of the parameters, or a shard of each.
    @cache
    def token_flops() -> int | None:
        shape = _shape_of(empty_model(hf_config))
        if shape is None:
            return None
        is_base_frozen = context.config.adapters is not None
        return flops_per_token(shape, context.plan.sequence_length, frozen=is_base_frozen)

    def utilization(tokens_per_second: float) -> float | None:
        if (flops := token_flops()) is None:
            return None
        name = torch.cuda.get_device_name(context.device)
        peak = peak_flops_per_second(name, context.config.precision.dtype)
        return model_flops_utilization(
            tokens_per_second, flops, peak, num_devices=context.world.size
        )

    return utilization


def _shape_of(model: Any) -> ModelShape | None:
    """Return the shape of a complete model, with its layers of multi-token prediction; None if its
    attention is unknown."""
    from bigtrain.planner.flops import model_shape

    parameters = dict(model.named_parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    sizes = [(name, p.numel()) for name, p in parameters.items()]
    mtp = mtp_layers(model)
    if mtp is not None:  # each layer of multi-token prediction applies the head again
        sizes += [("head", head.weight.numel())] * len(mtp.layers)
    shape = model_shape(
        model.config.get_text_config(),
        sizes,
        next(name for name, p in parameters.items() if p is embedding),
        tied=head is not None and head.weight is embedding,
    )
    if shape is None or mtp is None:
        return shape
    # The parameters of the added layers are in `sizes`; their attention is not in `shape` yet.
    mtp_shape = model_shape(mtp.mtp_model.config, [], "", tied=False)
    if mtp_shape is None:
        return None
    return replace(shape, attention_width=shape.attention_width + mtp_shape.attention_width)
