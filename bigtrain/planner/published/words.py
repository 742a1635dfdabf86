"""Parsing of the columns of published measurements: counts, stages, precisions, engines. Pure.

One function per column or subject, from the text of a row to a value; `rows` combines them. Each
accepts many spellings, and treats unknown values as missing when a default exists.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from bigtrain.planner.layout import Recompute

Row = Mapping[str, str]

MOST = 10**8  # of anything that is counted
NOTHING = {"", "-", "--", "?", "not stated", *"n/a na nan none null unknown default".split()}
_ENGINES = (
    (r"megatron[- ]?deepspeed|gpt[- ]?neox", "megatron_deepspeed"),
    (r"nanotron", "nanotron"),
    (r"auto ?model", "automodel"),
    (r"torchtitan|foundry", "fsdp"),
    (r"nemo|megatron[- ]?(bridge|core)|mcore|megascale|mlperf", "megatron_core"),
    (r"fsdp", "fsdp"),
    (r"megatron", "megatron"),
    (r"deepspeed|zero[- ]?[0-3]\b|bigtrain", "deepspeed"),
    (r"max ?text|\bjax\b|levanter|praxis|paxml|nanogpt|nanochat", "fsdp_compiled"),
    (r"\btrl\b|unsloth|axolotl|accelerate|lit-?gpt|olmo|torchtune|composer|mosaic", "fsdp"),
)
"""Patterns of a page's text, and the engine of each; the first match wins."""


def words(row: Row, *names: str) -> str:
    """Return the named columns in lower case, joined."""
    return " ".join((row.get(name) or "") for name in names).lower()


def has_value(row: Row, name: str) -> bool:
    """Return whether a column has a value."""
    return (row.get(name) or "").strip().lower() not in NOTHING


def plain_number(text: str) -> str:
    """Return `text` without the commas and underscores between thousands. Another comma stays, with
    which a text is no number: "32,5" is not 325."""
    return re.sub(r"(?<=\d)[,_](?=\d{3}(?![\d]))", "", text)


def number(row: Row, name: str, default: int | None = None) -> int:
    """Return a count: also "4,096", "8k", "16x" and "8 (per node)". A k is 1024 if that makes a
    power of two, as for tokens, else 1000. Raises ValueError if the value is missing or not a
    count."""
    text = (row.get(name) or "").strip()
    if not has_value(row, name):
        if default is not None:
            return default
        raise ValueError(f"{name} is empty")
    plain = plain_number(text).lower()
    match = re.fullmatch(
        r"x?\s*([-+.\de]*\d\.?)"  # the number
        r"\s*([km]?)\s*x?"  # thousands or millions
        r"(?:\s*[(\[].*|\s*(?:tokens|gpus).*)?",  # a remark
        plain,
    )
    try:
        value = float(match[1] if match else plain)
    except ValueError as error:
        raise ValueError(f"{name} = {text} is not a count") from error
    if match and match[2] and math.isfinite(value):
        is_power_of_two = value == int(value) and int(value) & (int(value) - 1) == 0
        value *= (1024 if is_power_of_two else 1000) ** (2 if match[2] == "m" else 1)
    if not 1 <= value <= MOST or value != int(value):
        raise ValueError(f"{name} = {text} is not a count")
    return int(value)


def degree(row: Row, name: str) -> int:
    """Return a degree of parallelism; tables write 0 for an unused one."""
    text = (row.get(name) or "").strip().lower()
    return 1 if text in ("0", "0.0", "no", "off", "false") else number(row, name, 1)


def engine_name(row: Row) -> str:
    """Return the engine that the page names, in its notes before its source; compiled FSDP is a
    separate engine. Default: Megatron with tensor or pipeline parallelism, else DeepSpeed."""
    said = words(row, "notes", "source")
    # A stage of ZeRO or "FSDP" in the notes is how the engine that the source names divides states.
    notes = re.sub(r"zero[- ]?[0-3]\b|(megatron[- ])?\bfsdp\w*", "", words(row, "notes"))
    named = (
        name for text in (notes, said) for pattern, name in _ENGINES if re.search(pattern, text)
    )
    engine = next(named, None)
    if engine is None:
        # Tables that name their FSDP in the column of stages.
        engine = "fsdp" if re.search(r"fsdp|shard", words(row, "zero")) else "deepspeed"
        if degree(row, "tp") * degree(row, "pp") > 1:
            engine = "megatron_core"
    if engine == "fsdp" and re.search(r"(?<!no )(?<!without )compile", said):
        return "fsdp_compiled"
    # Fused attention came to Megatron with what is called Megatron-Core since.
    if engine == "megatron" and re.search(r"flash|transformer.?engine|fp8", said):
        return "megatron_core"
    return engine


def zero_stage(row: Row, engine: str) -> int:
    """Return the ZeRO stage, also by FSDP's and Megatron's names; default: the engine's.

    FSDP with a pipeline keeps gathered parameters until the step ends, or it would gather again
    for each micro-batch, and reduces gradients once, as ZeRO 1 does (torch.distributed.pipelining).
    """
    stage = _written_stage(row, engine)
    gathers_once = engine in _FULLY_SHARDED and degree(row, "pp") > 1
    return 1 if gathers_once and stage == 3 else stage


_FULLY_SHARDED = ("fsdp", "fsdp_compiled", "automodel")


def _written_stage(row: Row, engine: str) -> int:
    text, notes = (row.get("zero") or "").strip().lower(), row.get("notes") or ""
    # FSDP's name for ZeRO 2: parameters stay unsharded between the passes.
    if "SHARD_GRAD_OP" in notes or "grad_op" in text:
        return 2
    if re.search(r"full.?shard|hybrid.?shard|hsdp|fsdp", text):
        return 3
    if re.search(r"no.?shard|ddp", text) or text in ("no", "off", "false"):
        return 0
    named = re.search(r"(?:zero|stage|\bz)\D{0,8}([0-3])\b", text) or re.match(r"([0-3])\b", text)
    if named and not re.match(r"\d\.\d*[1-9]", text):
        return int(named[1])
    if "dist" in text:  # Megatron's distributed optimizer
        return 1
    if re.fullmatch(r"[-+.\de]+", text):
        raise ValueError(f"zero = {row['zero']} is not a stage")
    usual = {"fsdp": 3, "fsdp_compiled": 3, "automodel": 3, "megatron_core": 1}
    said = re.search(r"zero[- ]?(?:stage[- ]?)?([0-3])\b", notes, re.I)
    return int(said[1]) if said else usual.get(engine, 0)


def recompute(row: Row, engine: str) -> tuple[Recompute, int]:
    """Return the kind of recomputation and n, if every n-th layer is recomputed: "selective" is
    attention for Megatron, every second product for torchtitan."""
    text = (row.get("recompute") or "").strip().lower()
    if text in NOTHING or re.fullmatch(r"no|false|0|off|w/o|without|no .*", text):
        return "none", 1
    every = re.search(r"(?:every|each|1/|one in|one of)\s*(\d+)|^(\d+)(?:nd|rd|th)?$", text)
    if every and 1 < int(every[1] or every[2]) <= 1000:
        return "full", int(every[1] or every[2])
    if "every other" in text:
        return "full", 2
    if re.search(r"core.?att|attention|attn", text) and not re.search(r"\bop\b|mlp", text):
        return "attention", 1
    if "selective" in text:
        recomputes_operators = engine in ("fsdp", "fsdp_compiled", "automodel") or re.search(
            r"\bops?\b", text
        )
        return ("operators" if recomputes_operators else "attention"), 1
    # Activations of experts or norms only: a few percent of a layer's work.
    if re.search(r"^(mla|moe|norm|layer.?norm|rms|act(?!ivation.?(c|rec))|swiglu|mlp)", text):
        return "none", 1
    full = r"full|yes|true|block|uniform|^1(\.0)?$|^on$|^all|^ac\b|checkpoint|recomp|layer"
    return ("full" if re.search(full, text) else "operators"), 1


def is_single_precision(row: Row) -> bool:
    """Return whether products are of 32-bit floats, unlike in mixed precision."""
    said = words(row, "precision")
    if re.search(r"bf16|fp16|float16|half|16-mixed|16-true|mixed|amp|fp8|float8|fp4|^16\b", said):
        return False
    return re.search(r"fp32|float32|tf32|single|^32\b|32-true", said) is not None


def is_float8(row: Row) -> bool:
    """Return whether products are of 8-bit floats, or fewer bits."""
    return re.search(r"fp8|float8|fp4|8-?bit float", words(row, "precision", "notes")) is not None


def is_float4(row: Row) -> bool:
    """Return whether products are of 4-bit floats, not only weights (QLoRA)."""
    return re.search(r"(?<!q)fp4|float4|4-?bit float", words(row, "precision")) is not None


def compiles_loss(row: Row) -> bool:
    """Return whether a page is of 2025 or later: torchtitan compiles the loss since
    pytorch/torchtitan#1033 of March 2025."""
    return re.search(r"\b20(2[5-9]|[3-9]\d)\b", words(row, "source", "notes")) is not None


def has_float32_gradients(row: Row) -> bool:
    """Return whether gradients are accumulated in 32 bits."""
    return re.search(r"(fp|float)32 (grad|acc)", words(row, "precision", "notes")) is not None


def network_bits(notes: str) -> float | None:
    """Return a node's network bandwidth in bits per second; None if not stated."""
    cards = re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", notes)
    if cards:
        return int(cards[1]) * int(cards[2]) * 1e9
    node_rate = re.search(r"(\d+(?:\.\d+)?)\s*([GT])bps (?:per )?node", notes)
    if node_rate is None:
        return None
    return float(node_rate[1]) * {"G": 1e9, "T": 1e12}[node_rate[2]]


def offloads(row: Row) -> frozenset[str]:
    """Return what is in main memory: "activations", "optimizer", "parameters"."""
    said = re.sub(r"\b(no|without) (\w+ )?offload\w*", "", words(row, "zero", "notes"))
    offloaded_parts = set()
    activations = r"(activations? (cpu )?offload\w*|offload\w* (of )?(the )?activations?)"
    if re.search(activations, said):
        offloaded_parts.add("activations")
    said = re.sub(activations, "", said)
    if re.search(r"param\w* offload|infinity", said):
        offloaded_parts.add("parameters")
    if "offload" in said:
        offloaded_parts.add("optimizer")
    return frozenset(offloaded_parts)


def loss_chunks(row: Row) -> int | None:
    """Return the number of chunks of the loss in a row's notes: 8 for chunks without a number, None
    without chunks."""
    said = words(row, "notes")
    if not re.search(r"(?<!no )(?<!without )chunk\w* (cross.?entropy|loss|ce\b|lm.?head)", said):
        return None
    stated = re.search(r"([1-9]\d*) chunks", said)
    return int(stated[1]) if stated else _USUAL_CHUNKS


_USUAL_CHUNKS = 8  # torchtune's and torchtitan's


def has_fused_loss(row: Row) -> bool:
    """Return whether head and loss are one kernel (Liger's, or Cut Cross-Entropy)."""
    pattern = r"fused.?linear.?(cross|ce\b)|\bflce\b|cut.?cross.?entropy|\bcce\b|liger.{0,20}loss"
    return re.search(pattern, words(row, "notes")) is not None


def virtual_stages(notes: str) -> int:
    """Return the stages per rank of an interleaved pipeline."""
    pattern = r"(?:interleav\w*|\bvpp?\b|virtual)[^0-9]{0,20}(\d+)(?!\s*f1b)"
    match = re.search(pattern, notes, re.I)
    if match:
        return max(1, int(match[1]))
    # If no number is stated, the smallest possible one.
    return 2 if re.search(r"(?<!non[- ])(?<!no )(?<!not )interleav", notes, re.I) else 1


def sequence_length(row: Row) -> int:
    """Return the tokens of a sample, from the column, else the notes, else 2048."""
    said = re.search(
        r"(?:seq\w*(?: length)?|context)\D{0,6}(\d[\d,]*\s*k?)\b", words(row, "notes", "model")
    )
    noted_length = number({"seq": said[1]}, "seq") if said and not has_value(row, "seq") else 2048
    return number(row, "seq", noted_length)


def billions(row: Row) -> float:
    """Return the parameters from the column or the model's name ("7B", "350M"); 0 if unknown."""
    text = (row.get("params_b") or "").strip().lower().removesuffix("b")
    try:
        value = float(text)
    except ValueError:
        match = re.search(
            r"(?<![\w.])(\d+(?:\.\d+)?)\s*([bmt])\b",  # not "4bit"
            words(row, "model").replace("_", " ").replace("-", " "),
        )
        value = float(match[1]) * {"b": 1.0, "m": 1e-3, "t": 1e3}[match[2]] if match else 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def active_billions(row: Row) -> float:
    """Return the parameters that a token is multiplied with, if the page states FLOPs (six per
    parameter and token); 0 if it does not."""
    try:
        flops = float(row.get("tflops_per_gpu") or "") * 1e12
        tokens = float(row.get("tokens_per_s_per_gpu") or "")
    except ValueError:
        return 0.0
    value = flops / (6e9 * tokens) if tokens > 0 else 0.0
    return value if math.isfinite(value) and 0 < value < 1e5 else 0.0
