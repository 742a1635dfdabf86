"""Rules about the optimizers that bigtrain implements itself: all but AdamW with float32 states."""

from __future__ import annotations

from dataclasses import replace

from bigtrain.settings.compatibility.facts import Facts, Rule, rule, rules_of

_OFFLOAD = "ds:zero_optimization.offload_optimizer"


def _own(facts: Facts) -> str:
    """The setting of the run that makes bigtrain, not DeepSpeed, provide the optimizer."""
    if facts.optimizer == "adamw":
        return f"optimizer.state_dtype = {facts.state_dtype}"
    return f"optimizer.type = {facts.optimizer}"


def _is_own(facts: Facts) -> bool:
    return facts.optimizer != "adamw" or facts.state_dtype != "float32"


_refused = rules_of(lambda f: f.optimizer != "adamw", {"optimizer": "muon"})
_UNPROVEN = "optimizers other than AdamW have not been compared with torch's"


OPTIMIZER_RULES: tuple[Rule, ...] = (
    rule(
        "DeepSpeed's Adam under another optimizer",
        lambda f: _is_own(f) and not f.torch_adam,
        ("ds:optimizer.params.torch_adam", lambda f: False),
        lambda f: f"{_own(f)} is not an optimizer that DeepSpeed compiles",
        "torch_adam true, or leave it out",
        lambda f: replace(f, torch_adam=True, super_offload=False),
        Facts(zero_stage=2, optimizer="muon", torch_adam=False),
    ),
    _refused(
        "another optimizer in float16",
        lambda f: f.dtype == "float16",
        ("precision.dtype", lambda f: f.dtype),
        f"{_UNPROVEN} with a loss scale",
        "precision.dtype=bfloat16, or optimizer.type=adamw",
        {"dtype": "bfloat16"},
        Facts(dtype="float16"),
    ),
    _refused(
        "another optimizer with quantized weights",
        lambda f: f.quantized_weights,
        ("ds:zero_optimization.zero_quantized_weights", lambda f: f.quantized_weights),
        f"{_UNPROVEN} where weights are sent quantized (ZeRO++)",
        "ds_configs/zero3.json, or optimizer.type=adamw",
        {"quantized_weights": False},
        Facts(zero_stage=3, quantized_weights=True),
    ),
    _refused(
        "another optimizer with quantized gradients",
        lambda f: f.quantized_gradients,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: f.quantized_gradients),
        f"{_UNPROVEN} where gradients are sent quantized (ZeRO++)",
        "ds_configs/zero3.json, or optimizer.type=adamw",
        {"quantized_gradients": False},
        Facts(zero_stage=3, quantized_gradients=True),
    ),
    _refused(
        "another optimizer with a secondary partition",
        lambda f: f.partition_size > 1,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        f"{_UNPROVEN} with a secondary partition of weights (ZeRO++'s hpZ)",
        "ds_configs/zero3.json, or optimizer.type=adamw",
        {"partition_size": 1},
        Facts(zero_stage=3, partition_size=2, world_size=4),
    ),
)
