"""Rules about options that save time or memory: attention kernels, fused losses, compilation."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.settings.compatibility.facts import Facts, rule

_ATTENTION = "model.attention"
_LOSS = "model.loss"
_KERNELS = "model.kernels"


def may_compile(facts: Facts) -> bool:
    """Return whether the decoder layers only compute: no gathers, collectives or copies inside
    them."""
    return (
        facts.zero_stage < 3
        and facts.tensor_size == facts.sequence_size == facts.expert_size == 1
        and not facts.activation_offload
        and not facts.bias_updates
    )


SPEED_RULES = (
    rule(  # torch/nn/attention/flex_attention.py, _validate_device
        "flex attention on CPU",
        lambda f: f.attention == "flex_attention" and f.device == "cpu",
        (_ATTENTION, lambda f: f.attention),
        "torch's flex attention has no backward pass on a CPU",
        "model.attention=sdpa",
        lambda f: replace(f, attention="sdpa"),
        Facts(attention="flex_attention", device="cpu"),
    ),
    rule(  # later stages would need the document lengths, and parts of samples have other lengths
        "flash attention with split documents",
        lambda f: (
            f.attention.startswith("flash")
            and f.isolates
            and (f.pipeline_size > 1 or f.sequence_size > 1)
        ),
        (_ATTENTION, lambda f: f.attention),
        "flash attention isolates documents with parallel.pipeline = parallel.sequence = 1 only",
        "model.attention=sdpa",
        lambda f: replace(f, attention="sdpa"),
        Facts(attention="flash_attention_2", isolates=True, sequence_size=2),
    ),
    rule(
        "Liger's loss on CPU",
        lambda f: f.loss == "liger" and f.device == "cpu",
        (_LOSS, lambda f: f.loss),
        "Liger's kernels need a CUDA device",
        "model.loss=chunked",
        lambda f: replace(f, loss="chunked"),
        Facts(loss="liger", device="cpu"),
    ),
    rule(
        "Liger's loss with tensor parallelism",
        lambda f: f.loss == "liger" and f.tensor_size > 1,
        (_LOSS, lambda f: f.loss),
        "its kernel needs the full LM head, of which every rank has a shard",
        "model.loss=chunked, or parallel.tensor=1",
        lambda f: replace(f, loss="chunked"),
        Facts(loss="liger", tensor_size=2),
    ),
    rule(
        "Liger's kernels on CPU",
        lambda f: f.kernels == "liger" and f.device == "cpu",
        (_KERNELS, lambda f: f.kernels),
        "Liger's kernels need a CUDA device",
        "model.kernels=none",
        lambda f: replace(f, kernels="none"),
        Facts(kernels="liger", device="cpu"),
    ),
    rule(
        "Liger's kernels in parts of a model",
        lambda f: f.kernels == "liger" and max(f.tensor_size, f.pipeline_size, f.expert_size) > 1,
        (_KERNELS, lambda f: f.kernels),
        "Liger patches all layers of a model, and only unsharded ones",
        "model.kernels=none, or parallel.tensor = parallel.pipeline = parallel.expert = 1",
        lambda f: replace(f, kernels="none"),
        Facts(kernels="liger", zero_stage=1, pipeline_size=2),
    ),
    rule(
        "offloaded activations on CPU",
        lambda f: f.activation_offload and f.device == "cpu",
        ("model.activation_offload", lambda f: f.activation_offload),
        "activations are in host memory already",
        "model.activation_offload=false",
        lambda f: replace(f, activation_offload=False),
        Facts(activation_offload=True, device="cpu"),
    ),
    rule(
        "compiled layers whose forward exchanges",
        lambda f: f.compiles == "on" and not may_compile(f),
        ("model.compile", lambda f: f.compiles),
        "ZeRO 3, parallel.tensor, parallel.sequence, parallel.expert, moe.bias_update_rate and "
        "model.activation_offload run inside the layers and would break their graphs",
        "model.compile=off, or ZeRO 2 at most without them",
        lambda f: replace(f, compiles="off"),
        Facts(zero_stage=3, compiles="on"),
    ),
)
