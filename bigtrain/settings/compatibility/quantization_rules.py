"""Rules about a base in 4 bits beside adapters (QLoRA): one process holds all of it."""

from __future__ import annotations

from bigtrain.settings.compatibility.facts import Facts, Rule, rules_of

_refused = rules_of(
    lambda f: f.adapters is not None and f.quantization != "none",
    {"adapters": "lora", "quantization": "nf4"},
)

QUANTIZATION_RULES: tuple[Rule, ...] = (
    _refused(
        "a base in 4 bits under ZeRO 3",
        lambda f: f.zero_stage == 3,
        ("adapters.quantization", lambda f: f.quantization),
        "bitsandbytes keeps the scales of packed weights beside the parameter, so ZeRO 3 would "
        "divide the one among the ranks and not the other",
        "ds_configs/zero2.json, where each rank holds the base (about half a byte a weight)",
        {"zero_stage": 2},
        Facts(zero_stage=3),
    ),
    _refused(
        "a base in 4 bits with tensor parallelism",
        lambda f: f.tensor_size > 1,
        ("adapters.quantization", lambda f: f.quantization),
        "every 64 weights in a row have a scale: those of a part would be other blocks, of other "
        "values than those of the whole weight",
        "parallel.tensor=1",
        {"tensor_size": 1},
        Facts(tensor_size=2, world_size=2),
    ),
    _refused(
        "a base in 4 bits with experts",
        lambda f: bool(f.num_experts) or bool(f.adapted_stacks),
        ("adapters.quantization", lambda f: f.quantization),
        "the experts' weights are stacked, and bitsandbytes has linear layers in 4 bits alone: "
        "most of the model would stay as it is",
        "adapters.quantization=none",
        {"quantization": "none"},
        Facts(num_experts=8),
    ),
)
