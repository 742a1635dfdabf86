"""What a row of published measurements says: model, layout, device and engine. Pure.

Columns first; where one is empty, what the model's name says (`known_models`), then what the page's
words say (`notes`, `source`), then what such runs usually have. What was measured was trained, so a
row is refused only where its device, its model or its number of devices cannot be told, or where
its columns contradict each other. Nothing here is fitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bigtrain.planner.layout import Layout, Recompute
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.model_costs import DenseShape, ModelCosts, of_all_linear, with_adapters
from bigtrain.planner.published.known_models import (
    Experts,
    Latent,
    ModelShape,
    costs_of,
    known_figures,
)
from bigtrain.planner.tables.engines import Engine, engine_named
from bigtrain.planner.tables.hardware import Device, find_device, with_network

Row = Mapping[str, str]

_MOST = 10**8  # of anything that is counted; of layers a thousandth
_NOTHING = {"", "-", "n/a", "na", "nan", "none", "null", "?", "unknown"}
_ENGINES = (
    (r"megatron[- ]?deepspeed", "megatron_deepspeed"),
    (r"nanotron", "nanotron"),
    (r"auto ?model", "automodel"),
    (r"torchtitan|foundry", "fsdp"),
    (r"nemo|megatron[- ]?(bridge|core)|mcore", "megatron_core"),
    (r"fsdp", "fsdp"),
    (r"megatron", "megatron"),
    (r"deepspeed|zero[- ]?[0-3]\b", "deepspeed"),
    (r"\btrl\b|unsloth|axolotl|accelerate|lit-?gpt|olmo|torchtune|levanter|nanogpt", "fsdp"),
)
"""Words of a page and the engine they mean; the first found counts, else it is DeepSpeed."""
_GATED = r"llama|mistral|mixtral|qwen|gemma|deepseek|olmo|swiglu|gpt.?oss|kimi|glm|phi"


@dataclass(frozen=True)
class RowRun:
    """What a row describes."""

    model: ModelCosts
    layout: Layout
    device: Device
    engine: Engine
    gain: float


def run_of(row: Row) -> RowRun:
    """Model, layout, device and engine of a row. Raises ValueError with what is wrong."""
    engine = engine_named(_engine(row))
    device = find_device(row["gpu"])
    network = _network(row.get("notes", ""))
    if network is not None:
        device = with_network(device, network / device.devices_per_node)
    precision = _words(row, "precision")
    single = re.search(r"\b(fp32|float32|tf32)\b", precision.split(",")[0]) is not None
    if single and "tf32" in precision:
        device = replace(device, float32_flops=device.peak_flops / 2)
    model = _model(row, engine, 4 if single else 2)
    layout = _layout(row, engine, model, device, 4 if single else 2)
    fast = re.search(r"fp8|float8|fp4", f"{precision} {_words(row, 'notes')}") is not None
    gain = max(1.0, device.float8_gain * engine.float8) if fast else 1.0
    return RowRun(model, layout, device, engine, gain)


def _words(row: Row, *names: str) -> str:
    return " ".join((row.get(name) or "") for name in names).lower()


def _number(row: Row, name: str, default: int | None = None) -> int:
    text = (row.get(name) or "").strip().replace(",", "")
    if text.lower() in _NOTHING:
        if default is not None:
            return default
        raise ValueError(f"{name} is empty")
    value = float(text)
    if not 1 <= value <= _MOST or value != int(value):
        raise ValueError(f"{name} = {text} is not a count")
    return int(value)


def _degree(row: Row, name: str) -> int:
    """A degree of parallelism; tables write 0 for what is not used."""
    return 1 if (row.get(name) or "").strip() in ("0", "0.0") else _number(row, name, 1)


def _engine(row: Row) -> str:
    """By the words of the page; "compile" is told from "eager"."""
    words = _words(row, "notes", "source")
    found = next((name for pattern, name in _ENGINES if re.search(pattern, words)), "deepspeed")
    if found == "fsdp" and "compile" in words:
        return "fsdp_compiled"
    # Fused attention came to Megatron with what is called Megatron-Core since.
    if found == "megatron" and re.search(r"flash|transformer.?engine|fp8", words):
        return "megatron_core"
    return found


def _model(row: Row, engine: Engine, element_bytes: int) -> ModelCosts:
    words = _words(row, "model", "notes")
    known = known_figures(row["model"])

    def figure(column: str, default: int | None = None) -> int:
        return _number(row, column, known.get(column, default))

    layers, hidden = figure("layers"), figure("hidden")
    if layers > _MOST // 1000:
        raise ValueError(f"layers = {layers} is not a count")
    heads = figure("heads", max(1, hidden // 128))
    head_size = known.get("head_size") if known.get("heads") == heads else None
    if hidden % heads and not head_size:
        raise ValueError(f"hidden = {hidden} is not divided by heads = {heads}")
    gated = known.get("gated", bool(known) or bool(re.search(_GATED, words)))
    experts = _experts(row, known, hidden)
    ffn = known["ffn"] if known and experts else figure("ffn", 4 * hidden)
    dense = DenseShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_key_value_heads=figure("kv_heads", heads),
        intermediate_size=ffn,
        vocabulary_size=figure("vocab", 32000 if gated else 50257),
        gated=gated,
        tied="tied" in words or known.get("tied", not gated),
        dropout=engine.score_passes is not None,
        fused_attention=engine.score_passes is None or "flash" in words,
        head_size=head_size,
    )
    if experts is None and not known:
        experts = _guessed_experts(row, words, dense)
    latent = Latent(*known["latent"]) if "latent" in known else None
    window = known.get("window")
    shape = ModelShape(dense, experts, latent, window, known.get("window_every", 1))
    model = costs_of(shape, element_bytes)
    if re.search(r"\bq?lora\b|\bpeft\b", _words(row, "model", "notes", "source", "precision")):
        rank = re.search(r"(?:rank|\br|dim)\W{0,3}(\d+)", words)
        model = with_adapters(model, of_all_linear(model, int(rank.group(1)) if rank else 16))
    return model


def _experts(row: Row, known: Mapping[str, object], hidden: int) -> Experts | None:
    """Of a model that is known by name; those of a proxy are narrower as its layers are."""
    if "experts" not in known:
        return None
    figures = {name: value for name, value in known.items() if isinstance(value, int)}
    scale = hidden / figures["hidden"]
    return Experts(
        num=figures["experts"],
        per_token=figures["experts_per_token"],
        inner=max(1, round(figures["expert_ffn"] * scale)),
        shared_inner=round(figures.get("shared_ffn", 0) * scale),
        num_dense_layers=figures.get("dense_layers", 0),
        every=figures.get("expert_every", 1),
    )


def _guessed_experts(row: Row, words: str, dense: DenseShape) -> Experts | None:
    """Of a model that no table here knows: from words such as "8x7B", "64 experts", "top-2" and
    "A3B", and from how many parameters it has (`params_b`) beyond those of `dense`, whose `ffn` is
    then an expert's."""
    times = re.search(r"\b(\d+)x\d+(?:\.\d+)?b\b", words)
    told = re.search(r"(\d+)\s*(?:routed\s*)?experts", words)
    number = int((times or told).group(1)) if times or told else 0  # type: ignore[union-attr]
    each = (3 if dense.gated else 2) * dense.hidden_size * dense.intermediate_size
    per_expert = each * dense.num_layers
    rest = costs_of(ModelShape(dense)).num_parameters - per_expert
    text = (row.get("params_b") or "").strip()
    try:
        whole = float(text) * 1e9
    except ValueError:
        whole = 0.0
    speaks = bool(number) or "moe" in words or "expert" in words or _degree(row, "ep") > 1
    if not number and speaks and whole > 1.3 * (rest + per_expert):
        number = round((whole - rest) / per_expert)
    if number < 2:
        return None
    chosen = re.search(r"top.?(\d+)", words)
    active = re.search(r"-a(\d+(?:\.\d+)?)b", words)
    met = int(chosen.group(1)) if chosen else 2
    if active and not chosen:
        met = max(1, round((float(active.group(1)) * 1e9 - rest) / per_expert))
    return Experts(number, min(met, number), dense.intermediate_size)


def _layout(row: Row, engine: Engine, model: ModelCosts, device: Device, size: int) -> Layout:
    notes = row.get("notes", "")
    tp, pp, cp = _degree(row, "tp"), _degree(row, "pp"), _degree(row, "cp")
    dp = _replicas(row, tp, pp, cp)
    ep = _degree(row, "ep")
    if ep == 1 and "deepep" in notes.lower():
        ep = math.gcd(model.num_experts, dp * cp)  # a library for nothing but that
    virtual = re.search(r"(?:interleav\w*|\bvpp?\b|virtual)[^0-9]{0,20}(\d+)", notes, re.I)
    words = _words(row, "zero", "notes")
    zero = _zero(row, engine)
    layout = Layout(
        data_size=dp,
        tensor_size=tp,
        pipeline_size=min(pp, len(model.layers)),
        sequence_size=cp,
        expert_size=min(ep, model.num_experts),
        zero_stage=zero,
        sequence_length=_number(row, "seq"),
        recompute=_recompute(row),
        tensor_sequence="REDUCE_SCATTER" in notes
        or "sequence parallel" in notes.lower()
        or (tp > 1 and engine.name in _SEQUENCE_PARALLEL),
        num_virtual_stages=int(virtual.group(1)) if virtual else 1,
        parameter_bytes=size,
        gradient_bytes=4 if size == 4 or "fp32 gradient" in row["precision"] else 2,
        offload_optimizer=zero > 0 and re.search(r"(?<!no )offload", words) is not None,
        offload_parameters=zero == 3 and re.search(r"param\w* offload|infinity", words) is not None,
    )
    return _with_batch(row, layout, engine, model, device)


_SEQUENCE_PARALLEL = ("megatron_core", "automodel", "fsdp", "fsdp_compiled")
"""Engines that cut norms and residuals along the sequence wherever they have tensor parallelism."""


def _replicas(row: Row, tp: int, pp: int, cp: int) -> int:
    """Data-parallel size. Some tables leave it out, count context-parallel ranks among it, leave
    expert-parallel ones out of it, or name the ranks that share one copy of the states (HSDP)."""
    world, told = _number(row, "num_gpus"), _number(row, "dp", 0)
    if not told:
        if world % (tp * pp * cp):
            raise ValueError(f"tp x pp x cp = {tp * pp * cp} does not divide num_gpus = {world}")
        return world // (tp * pp * cp)
    product = told * tp * pp * cp
    if product == world:
        return told
    replicas, rest = divmod(world, tp * pp * cp)
    if rest or (replicas % told and told % replicas):
        raise ValueError(f"dp x tp x pp x cp = {product} is not num_gpus = {row['num_gpus']}")
    return replicas


def _with_batch(
    row: Row, layout: Layout, engine: Engine, model: ModelCosts, device: Device
) -> Layout:
    """`layout` with its batch. A micro-batch that no column tells is the largest power of two that
    fits the device and divides the batch, as people set it; a batch that none tells is one
    micro-batch, or four for each pipeline stage."""
    dp, p = layout.data_size, layout.pipeline_size
    micro, batch = _number(row, "micro_batch", 0), _number(row, "global_batch", 0)
    if not micro:
        for tried in _powers(batch // dp if batch else 64):
            larger = replace(layout, micro_batch_size=tried)
            if peak_memory(model, larger, engine).total > device.memory_bytes and micro:
                break
            micro = tried
    if batch and batch < micro * dp:
        raise ValueError(f"global_batch = {batch} is less than micro_batch x dp = {micro * dp}")
    if batch % (micro * dp):
        raise ValueError(f"global_batch = {batch} is no multiple of micro_batch x dp")
    number = batch // (micro * dp) if batch else 4 * p if p > 1 else 1
    layout = replace(layout, micro_batch_size=micro, num_accumulation=number)
    if (row.get("recompute") or "").strip().lower() in _NOTHING - {"none"}:
        # Of a page that says nothing: it was trained, so what is a tenth too much was not kept.
        if peak_memory(model, layout, engine).total > 1.1 * device.memory_bytes:
            layout = replace(layout, recompute="full")
    return layout


def _powers(number: int) -> Iterator[int]:
    """1, 2, 4 and so on, as long as they divide `number`."""
    power = 1
    while number % power == 0 and power <= max(1, number):
        yield power
        power *= 2


def _recompute(row: Row) -> Recompute:
    text = (row.get("recompute") or "").strip().lower()
    if text in _NOTHING or text in ("no", "false", "0", "off"):
        return "none"
    if re.search(r"full|yes|true|block|uniform|^1$|^on$|^all", text):
        return "full"
    if text in ("selective", "attention") or "core_attn" in text or "core attention" in text:
        return "attention"
    # Experts' or norms' activations alone: a few percent of a layer's work.
    return "none" if re.search(r"^(mla|moe|norm|layernorm|act)", text) else "operators"


def _zero(row: Row, engine: Engine) -> int:
    """The stage, also by FSDP's and Megatron's names; where none is told, what the engine has."""
    text, notes = (row.get("zero") or "").strip().lower(), row.get("notes", "")
    # FSDP's name of what ZeRO 2 does: parameters stay whole between the passes.
    if "SHARD_GRAD_OP" in notes or "grad_op" in text:
        return 2
    if re.search(r"full.?shard|hybrid.?shard|hsdp|fsdp", text):
        return 3
    if re.search(r"no.?shard|ddp", text):
        return 0
    if "dist" in text:  # Megatron's distributed optimizer
        return 1
    if text in _NOTHING:
        usual = {"fsdp": 3, "fsdp_compiled": 3, "automodel": 3, "megatron_core": 1}
        said = re.search(r"zero[- ]?(?:stage[- ]?)?([0-3])\b", notes, re.I)
        stage = int(said.group(1)) if said else usual.get(engine.name, 0)
        # FSDP beside a pipeline keeps what it has gathered until the step ends, or it would gather
        # anew for each micro-batch.
        return 2 if stage == 3 and not said and _degree(row, "pp") > 1 else stage
    named = re.search(r"(?:zero|stage)\D{0,8}([0-3])\b", text)
    try:
        number = float(named.group(1) if named else text)
    except ValueError:
        number = math.nan
    if number not in (0, 1, 2, 3):
        raise ValueError(f"zero = {row['zero']} is no stage")
    return int(number)


def _network(notes: str) -> float | None:
    """Bits a second that leave a node, where the page says."""
    cards = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", notes)
    if cards:
        return int(cards.group(1)) * int(cards.group(2)) * 1e9
    whole = re.search(r"(\d+)\s*Gbps node", notes)
    return int(whole.group(1)) * 1e9 if whole else None
