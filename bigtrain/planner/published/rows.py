"""Model, layout, device and engine of a row of published measurements. Pure.

An empty column is filled from the model's name (`known_models`), then from the page's text
(`notes`, `source`), then with the usual value. A measured run did train, so a row is refused only
if its device, model or number of devices is unknown, or its columns contradict each other. Nothing
here is fitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.model_costs import DenseShape, ModelCosts, of_all_linear, with_adapters
from bigtrain.planner.published.known_models import (
    ExpertDimensions,
    Latent,
    PublishedModelShape,
    costs_of,
    known_figures,
    usual_shape,
)
from bigtrain.planner.published.words import (
    MOST,
    Row,
    active_billions,
    billions,
    compiles_loss,
    degree,
    engine_name,
    has_float32_gradients,
    has_fused_loss,
    has_value,
    is_float4,
    is_float8,
    is_single_precision,
    loss_chunks,
    network_bits,
    number,
    offloads,
    recompute,
    sequence_length,
    virtual_stages,
    words,
    zero_stage,
)
from bigtrain.planner.step_time import step_time
from bigtrain.planner.tables.engines import Engine, engine_named
from bigtrain.planner.tables.hardware import Device, find_device, with_network

_GATED = r"llama|mistral|mixtral|qwen|gemma|deepseek|olmo|swiglu|gpt.?oss|kimi|glm|phi|yi\b"


@dataclass(frozen=True)
class RowRun:
    """Run that a row describes. guessed: what of the model's shape no column and no table of models
    has, so that the prediction is of another model; empty if there is nothing."""

    model: ModelCosts
    layout: Layout
    device: Device
    engine: Engine
    gain: float
    guessed: str = ""


def run_of(row: Row) -> RowRun:
    """Return model, layout, device and engine of a row. Raises ValueError with the problem."""
    engine = engine_named(engine_name(row))
    if engine.compiled_logit_bytes and compiles_loss(row):
        engine = replace(engine, logit_bytes_cut=engine.compiled_logit_bytes)
    device = find_device(row["gpu"])
    network = network_bits(row.get("notes") or "")
    if network is not None:
        device = with_network(device, network / device.devices_per_node)
    single = is_single_precision(row)
    if single and "tf32" in words(row, "precision"):
        device = replace(device, float32_flops=device.peak_flops / 2)
    gain = max(1.0, device.float8_gain * engine.float8) if is_float8(row) else 1.0
    if is_float4(row):
        gain *= device.float4_gain
    model = _model(row, engine, 4 if single else 2)
    layout = _layout(row, engine, model, 4 if single else 2)
    return _with_batch(row, RowRun(model, layout, device, engine, gain, guessed_shape(row)))


def guessed_shape(row: Row) -> str:
    """Return what of the shape of a row's model is neither in its columns nor known by the model's
    name, and decides most of the costs."""
    if known_figures(row["model"]):
        return ""
    missing = [name for name in ("layers", "hidden") if not has_value(row, name)]
    if missing:
        return f"{' and '.join(missing)}, by the number of parameters"
    said = words(row, "model", "notes")
    is_mixture = re.search(r"\bmoe\b|experts|\b\d+x\d+(\.\d+)?b\b|-a\d", said)
    if (is_mixture or degree(row, "ep") > 1) and not re.search(
        r"\d+\s*(routed\s*)?experts|\b\d+x\d", said
    ):
        return "the number of experts"
    return ""


def _model(row: Row, engine: Engine, element_bytes: int) -> ModelCosts:
    said = words(row, "model", "notes")
    named_figures = known_figures(row["model"])
    gated = named_figures.get("gated", bool(named_figures) or bool(re.search(_GATED, said)))
    usual = named_figures
    if not named_figures and not (has_value(row, "layers") and has_value(row, "hidden")):
        size = billions(row) or active_billions(row)
        usual = usual_shape(size, gated=gated) if size else named_figures

    def figure(column: str, default: int | None = None) -> int:
        return number(row, column, usual.get(column, default))

    layers, hidden = figure("layers"), figure("hidden")
    if layers > MOST // 1000:
        raise ValueError(f"layers = {layers} is not a count")
    # Heads of about 128 that divide the hidden size, where the number is not stated.
    near_128 = (n for n in range(max(1, hidden // 128), 0, -1) if hidden % n == 0)
    heads = figure("heads", next(near_128))
    head_size = named_figures.get("head_size") if named_figures.get("heads") == heads else None
    if hidden % heads and not head_size:
        head_size = 128  # heads of such models are not a division of the hidden size
    key_heads = figure("kv_heads", heads)
    if heads % key_heads and has_value(row, "heads") and has_value(row, "kv_heads"):
        raise ValueError(f"kv_heads = {key_heads} does not divide heads = {heads}")
    experts = _experts(row, named_figures, hidden)
    # A gated layer has three matrices in its feed-forward network where others have two.
    wide = 8 * hidden // 3 if gated else 4 * hidden
    ffn = named_figures["ffn"] if named_figures and experts else figure("ffn", wide)
    dense = DenseShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=ffn,
        vocabulary_size=figure("vocab", 32000 if gated else 50257),
        gated=gated,
        tied="tied" in said.replace("untied", "") or named_figures.get("tied", not gated),
        dropout=engine.score_passes is not None,
        fused_attention=engine.score_passes is None or "flash" in said,
        head_size=head_size,
    )
    if experts is None and not named_figures:
        experts = _guessed_experts(row, said, dense)
    latent = Latent(*named_figures["latent"]) if "latent" in named_figures else None
    window, every = named_figures.get("window"), named_figures.get("window_every", 1)
    if re.search(r"\bpacked\b", said):
        window, every = _PACKED, 1
    shape = PublishedModelShape(dense, experts, latent, window, every)
    model = costs_of(shape, element_bytes)
    if re.search(r"\bq?lora\b|\bpeft\b", words(row, "model", "notes", "source", "precision")):
        rank = re.search(r"(?:rank|\br|dim)\W{0,3}(\d+)", said)
        size = number({"rank": rank.group(1)}, "rank") if rank else 16
        model = with_adapters(model, of_all_linear(model, size))
    return model


_PACKED = 256
"""Tokens of a sample in a packed sequence, which attends only to itself: instructions and answers
of fine-tuning sets have some 100 to 500."""


def _experts(row: Row, named_figures: Mapping[str, object], hidden: int) -> ExpertDimensions | None:
    """Return the experts of a model known by name, scaled with the hidden size for a proxy."""
    if "experts" not in named_figures:
        return None
    figures = {name: value for name, value in named_figures.items() if isinstance(value, int)}
    scale = hidden / figures["hidden"]
    return ExpertDimensions(
        num=figures["experts"],
        per_token=figures["experts_per_token"],
        inner=max(1, round(figures["expert_ffn"] * scale)),
        shared_inner=round(figures.get("shared_ffn", 0) * scale),
        num_dense_layers=figures.get("dense_layers", 0),
        every=figures.get("expert_every", 1),
    )


def _guessed_experts(row: Row, said: str, dense: DenseShape) -> ExpertDimensions | None:
    """Return the experts of an unknown model: from text such as "8x7B", "64 experts", "top-2" and
    "A3B", and from its parameters (`params_b`) in addition to the parameters of `dense`, whose
    `ffn` is then an expert's."""
    times = re.search(r"\b(\d+)x\d+(?:\.\d+)?b\b", said)
    stated = re.search(r"(\d+)\s*(?:routed\s*)?experts", said)
    number = int((times or stated).group(1)) if times or stated else 0  # type: ignore[union-attr]
    matrix_parameters = (3 if dense.gated else 2) * dense.hidden_size * dense.intermediate_size
    per_expert = matrix_parameters * dense.num_layers
    other_parameters = costs_of(PublishedModelShape(dense)).num_parameters - per_expert
    all_parameters = billions(row) * 1e9
    speaks = bool(number) or "moe" in said or "expert" in said or degree(row, "ep") > 1
    if not number and speaks and all_parameters > 1.3 * (other_parameters + per_expert):
        number = round((all_parameters - other_parameters) / per_expert)
    if number < 2:
        return None
    top_k = re.search(r"top.?(\d+)", said)
    active = re.search(r"-a(\d+(?:\.\d+)?)b", said)
    met = int(top_k.group(1)) if top_k else 2
    if active and not top_k:
        met = max(1, round((float(active.group(1)) * 1e9 - other_parameters) / per_expert))
    return ExpertDimensions(number, max(1, min(met, number)), dense.intermediate_size)


def _layout(row: Row, engine: Engine, model: ModelCosts, element_bytes: int) -> Layout:
    """Return the degrees and options of a row, without its batch."""
    notes = row.get("notes") or ""
    tp, pp, cp = degree(row, "tp"), degree(row, "pp"), degree(row, "cp")
    dp = _replicas(row, tp, pp, cp)
    ep = degree(row, "ep")
    if ep == 1 and "deepep" in notes.lower():
        ep = math.gcd(model.num_experts, dp * cp)  # a library for nothing but that
    moved = offloads(row)
    zero = zero_stage(row, engine.name)
    recompute_name, every = recompute(row, engine.name)
    return Layout(
        data_size=dp,
        tensor_size=tp,
        pipeline_size=min(pp, len(model.layers)),
        sequence_size=cp,
        ring_size=1 if engine.is_deepspeed else cp,
        expert_size=min(ep, model.num_experts),
        zero_stage=zero,
        sequence_length=sequence_length(row),
        recompute=recompute_name,
        recompute_every=every,
        tensor_sequence="REDUCE_SCATTER" in notes
        or "sequence parallel" in notes.lower()
        or (tp > 1 and engine.name in _SEQUENCE_PARALLEL),
        num_virtual_stages=virtual_stages(notes),
        parameter_bytes=element_bytes,
        gradient_bytes=4 if element_bytes == 4 or has_float32_gradients(row) else 2,
        offload_optimizer=zero > 0 and "optimizer" in moved,
        offload_parameters=zero == 3 and "parameters" in moved,
        offload_activations="activations" in moved and recompute_name == "full",
        loss_kernels="liger" if has_fused_loss(row) else "operators",
    )


_SEQUENCE_PARALLEL = ("megatron_core", "automodel", "fsdp", "fsdp_compiled")
"""Engines that shard norms and residuals along the sequence under tensor parallelism."""


_MICRO_PER_STAGE = ("fsdp", "fsdp_compiled")
"""torchtitan's default: as many micro-batches as the pipeline has stages."""


def _replicas(row: Row, tp: int, pp: int, cp: int) -> int:
    """Return the data-parallel size. Some tables omit it, include context-parallel ranks, exclude
    expert-parallel ones, or state the ranks that share one copy of the states (HSDP)."""
    stated = number(row, "dp", 0)
    world = number(row, "num_gpus", stated * tp * pp * cp or None)
    if not stated:
        if world % (tp * pp * cp):
            raise ValueError(f"tp x pp x cp = {tp * pp * cp} does not divide num_gpus = {world}")
        return world // (tp * pp * cp)
    product = stated * tp * pp * cp
    if product == world:
        return stated
    replicas, remainder = divmod(world, tp * pp * cp)
    if remainder or (replicas % stated and stated % replicas):
        raise ValueError(f"dp x tp x pp x cp = {product} is not num_gpus = {row['num_gpus']}")
    return replicas


def _with_batch(row: Row, run: RowRun) -> RowRun:
    """Return `run` with its batch. A missing micro-batch size is the fastest power of two that
    fits the device and divides the batch; a missing batch is one micro-batch, or four for each
    pipeline stage. A batch is in tokens if it is too large for samples."""
    layout = run.layout
    dp, p = layout.data_size, layout.pipeline_size
    micro, batch = number(row, "micro_batch", 0), number(row, "global_batch", 0)
    if layout.sequence_length >= 512 and batch >= 2 * dp * layout.sequence_length:
        batch = dp * max(1, round(batch / layout.sequence_length / dp))
    if not micro and p > 1 and batch % (dp * p) == 0 and run.engine.name in _MICRO_PER_STAGE:
        micro = max(1, batch // (dp * p * layout.num_virtual_stages))
    if not micro:
        micro = _fastest_micro(batch, run)
    if batch and batch < micro * dp:
        raise ValueError(f"global_batch = {batch} is less than micro_batch x dp = {micro * dp}")
    if batch % dp:
        raise ValueError(f"global_batch = {batch} is not a multiple of dp = {dp}")
    num_accumulation = _usual_accumulation(p)
    if batch:
        num_accumulation = math.ceil(batch // dp / micro)
        micro = math.ceil(batch // dp / num_accumulation)  # of uneven ones the mean
    layout = replace(layout, micro_batch_size=micro, num_accumulation=num_accumulation)
    chunks = loss_chunks(row)
    if chunks is not None:
        chunk_tokens = max(1, layout.tokens_per_micro_batch // chunks)
        layout = replace(layout, loss_chunk_tokens=chunk_tokens)
    if not has_value(row, "recompute") and words(row, "recompute").strip() != "none":
        # The page does not state it: the least recomputation that fits memory (+10 %).
        choices = [layout]
        choices += [replace(layout, recompute="full", recompute_every=n) for n in (8, 4, 3, 2)]
        limit = 1.1 * run.device.memory_bytes
        layout = next(
            (c for c in choices if peak_memory(run.model, c, run.engine).total <= limit),
            replace(layout, recompute="full", recompute_every=1),
        )
    return replace(run, layout=layout)


def _usual_accumulation(pipeline_size: int) -> int:
    """Return the micro-batches of a rank for a row that states no batch."""
    return 4 * pipeline_size if pipeline_size > 1 else 1


def _fastest_micro(batch: int, run: RowRun) -> int:
    """Return the micro-batch size that is predicted to be the fastest that fits: a power of two
    that divides the samples of a rank."""
    layout, p = run.layout, run.layout.pipeline_size
    samples = batch // layout.data_size if batch else 64
    best, best_size, micro = 0.0, 1, 1
    while samples % micro == 0 and micro <= max(1, samples):
        num_accumulation = samples // micro if batch else _usual_accumulation(p)
        larger = replace(layout, micro_batch_size=micro, num_accumulation=num_accumulation)
        if peak_memory(run.model, larger, run.engine).total > run.device.memory_bytes and best:
            break
        seconds = step_time(run.model, larger, run.device, run.engine, gain=run.gain).total
        if larger.global_batch_size / seconds > best:
            best, best_size = larger.global_batch_size / seconds, micro
        micro *= 2
    return best_size
