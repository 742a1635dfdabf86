"""Rules about adapters: only combinations that have been compared with plain peft may run."""

from __future__ import annotations

from bigtrain.settings.compatibility.facts import Facts, Rule, rules_of, unproven_engines

_UNPROVEN = "adapters have not been compared with plain peft's"


_refused = rules_of(lambda f: f.adapters is not None, {"adapters": "lora"})


def _parallel(axis: str, reason: str, example: Facts) -> Rule:
    return _refused(
        f"adapters with {axis} parallelism",
        lambda f: getattr(f, f"{axis}_size") > 1,
        (f"parallel.{axis}", lambda f: getattr(f, f"{axis}_size")),
        reason,
        f"parallel.{axis}=1, with ZeRO 3 where the model is too large for a device",
        {f"{axis}_size": 1},
        example,
    )


ADAPTER_RULES: tuple[Rule, ...] = (
    _parallel(
        "expert",
        f"{_UNPROVEN} where ranks divide the experts",
        Facts(zero_stage=1, world_size=2, expert_size=2),
    ),
    _refused(
        "adapters of compiled layers",
        lambda f: f.compiles != "off",
        ("model.compile", lambda f: f.compiles),
        f"{_UNPROVEN} in compiled layers",
        "model.compile=off",
        {"compiles": "off"},
        Facts(compiles="auto"),
    ),
    _refused(  # liger_kernel/transformers/swiglu.py calls the projections; peft has replaced them
        "adapters with Liger's kernels",
        lambda f: f.kernels == "liger",
        ("model.kernels", lambda f: f.kernels),
        f"{_UNPROVEN} under Liger's kernels",
        "model.kernels=none",
        {"kernels": "none"},
        Facts(kernels="liger"),
    ),
    _refused(
        "adapters with Liger's loss",
        lambda f: f.loss == "liger",
        ("model.loss", lambda f: f.loss),
        f"{_UNPROVEN} under Liger's loss",
        "model.loss=chunked",
        {"loss": "chunked"},
        Facts(loss="liger"),
    ),
    _refused(
        "adapters with activations in host memory",
        lambda f: f.activation_offload,
        ("model.activation_offload", lambda f: f.activation_offload),
        f"{_UNPROVEN} where activations leave the device",
        "model.activation_offload=false",
        {"activation_offload": False},
        Facts(activation_offload=True),
    ),
    _refused(
        "adapters with another optimizer",
        lambda f: f.optimizer != "adamw" or f.state_dtype != "float32",
        ("optimizer.type", lambda f: f.optimizer),
        f"{_UNPROVEN} under any optimizer but AdamW with states in float32",
        "optimizer.type=adamw and optimizer.state_dtype=float32; states of adapters are small",
        {"optimizer": "adamw", "state_dtype": "float32"},
        Facts(optimizer="lion"),
    ),
    *unproven_engines(_refused, "adapters", _UNPROVEN),
)
