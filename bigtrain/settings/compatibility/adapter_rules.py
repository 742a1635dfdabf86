"""Rules about adapters, about bigtrain's own optimizers, 4-bit bases (QLoRA) and sites.

Adapters run only in combinations that have been compared with plain peft. Optimizers of bigtrain
are all but AdamW with float32 states. A 4-bit base must be complete on every rank. Sites
run only in combinations that have been compared with a plain loop.
"""

from __future__ import annotations

from dataclasses import replace

from bigtrain.settings.compatibility.facts import Facts, Rule, rule, rules_of, unproven_engines

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


_OFFLOAD = "ds:zero_optimization.offload_optimizer"


def _own(facts: Facts) -> str:
    """Return the setting of the run that makes bigtrain, not DeepSpeed, provide the optimizer."""
    if facts.optimizer == "adamw":
        return f"optimizer.state_dtype = {facts.state_dtype}"
    return f"optimizer.type = {facts.optimizer}"


def _is_own(facts: Facts) -> bool:
    return facts.optimizer != "adamw" or facts.state_dtype != "float32"


_refused_with_optimizer = rules_of(lambda f: f.optimizer != "adamw", {"optimizer": "muon"})
_OPTIMIZER_UNPROVEN = "optimizers other than AdamW have not been compared with torch's"


OPTIMIZER_RULES: tuple[Rule, ...] = (
    rule(
        "DeepSpeed's Adam under another optimizer",
        lambda f: _is_own(f) and not f.torch_adam,
        ("ds:optimizer.params.torch_adam", lambda f: False),
        lambda f: f"{_own(f)} is not an optimizer that DeepSpeed compiles",
        "torch_adam true, or omit it",
        lambda f: replace(f, torch_adam=True, super_offload=False),
        Facts(zero_stage=2, optimizer="muon", torch_adam=False),
    ),
    _refused_with_optimizer(
        "another optimizer in float16",
        lambda f: f.dtype == "float16",
        ("precision.dtype", lambda f: f.dtype),
        f"{_OPTIMIZER_UNPROVEN} with a loss scale",
        "precision.dtype=bfloat16, or optimizer.type=adamw",
        {"dtype": "bfloat16"},
        Facts(dtype="float16"),
    ),
    _refused_with_optimizer(
        "another optimizer with quantized weights",
        lambda f: f.quantized_weights,
        ("ds:zero_optimization.zero_quantized_weights", lambda f: f.quantized_weights),
        f"{_OPTIMIZER_UNPROVEN} where weights are sent quantized (ZeRO++)",
        "ds_configs/zero3.json, or optimizer.type=adamw",
        {"quantized_weights": False},
        Facts(zero_stage=3, quantized_weights=True),
    ),
    _refused_with_optimizer(
        "another optimizer with quantized gradients",
        lambda f: f.quantized_gradients,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: f.quantized_gradients),
        f"{_OPTIMIZER_UNPROVEN} where gradients are sent quantized (ZeRO++)",
        "ds_configs/zero3.json, or optimizer.type=adamw",
        {"quantized_gradients": False},
        Facts(zero_stage=3, quantized_gradients=True),
    ),
    _refused_with_optimizer(
        "another optimizer with a secondary partition",
        lambda f: f.partition_size > 1,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        f"{_OPTIMIZER_UNPROVEN} with a secondary partition of weights (ZeRO++'s hpZ)",
        "ds_configs/zero3.json, or optimizer.type=adamw",
        {"partition_size": 1},
        Facts(zero_stage=3, partition_size=2, world_size=4),
    ),
)


_refused_with_quantization = rules_of(
    lambda f: f.adapters is not None and f.quantization != "none",
    {"adapters": "lora", "quantization": "nf4"},
)

QUANTIZATION_RULES: tuple[Rule, ...] = (
    _refused_with_quantization(
        "a base in 4 bits under ZeRO 3",
        lambda f: f.zero_stage == 3,
        ("adapters.quantization", lambda f: f.quantization),
        "bitsandbytes stores the scales of packed weights outside the parameter, so ZeRO 3 would "
        "shard the weights and not their scales",
        "ds_configs/zero2.json, where each rank holds the base (about half a byte a weight)",
        {"zero_stage": 2},
        Facts(zero_stage=3),
    ),
    _refused_with_quantization(
        "a base in 4 bits with tensor parallelism",
        lambda f: f.tensor_size > 1,
        ("adapters.quantization", lambda f: f.quantization),
        "every 64 consecutive weights share a scale: the blocks of a shard would differ from those "
        "of the full weight, and so would its values",
        "parallel.tensor=1",
        {"tensor_size": 1},
        Facts(tensor_size=2, world_size=2),
    ),
    _refused_with_quantization(
        "a base in 4 bits with experts",
        lambda f: bool(f.num_experts) or bool(f.adapted_stacks),
        ("adapters.quantization", lambda f: f.quantization),
        "the experts' weights are stacked, and bitsandbytes quantizes only linear layers: "
        "most of the model would stay in its dtype",
        "adapters.quantization=none",
        {"quantization": "none"},
        Facts(num_experts=8),
    ),
)


_SITES_UNPROVEN = "the outer step of sites has not been compared with a plain loop"


_refused_with_sites = rules_of(lambda f: f.num_sites > 0, {"num_sites": 2})

SITE_RULES: tuple[Rule, ...] = (
    _refused_with_sites(
        "sites with adapters",
        lambda f: f.adapters is not None,
        ("sites.count", lambda f: f.num_sites),
        f"{_SITES_UNPROVEN} where adapters alone are trained",
        "leave out sites: adapters are small enough to be averaged at every step",
        {"num_sites": 0},
        Facts(adapters="lora"),
    ),
    _refused_with_sites(
        "sites with expert parallelism",
        lambda f: f.expert_size > 1,
        ("parallel.expert", lambda f: f.expert_size),
        f"{_SITES_UNPROVEN} where ranks divide the experts",
        "parallel.expert=1",
        {"expert_size": 1},
        Facts(zero_stage=1, world_size=2, expert_size=2),
    ),
    _refused_with_sites(
        "sites with biases of experts",
        lambda f: f.bias_updates,
        ("moe.bias_update_rate", lambda f: "set"),
        "the biases of experts are no weights: each site would move its own, and they would differ",
        "moe.bias_update_rate=0",
        {"bias_updates": False},
        Facts(bias_updates=True),
    ),
    _refused_with_sites(
        "sites that stop early",
        lambda f: f.stops_early,
        ("evaluation.early_stopping", lambda f: "set"),
        "each site measures by itself, and the others would wait for one that has stopped",
        "evaluation.early_stopping=null",
        {"stops_early": False},
        Facts(stops_early=True),
    ),
    *unproven_engines(_refused_with_sites, "sites", _SITES_UNPROVEN),
    _refused_with_sites(
        "sites under accelerate's own settings",
        lambda f: f.accelerate,
        ("sites.count", lambda f: f.num_sites),
        "a run of sites has not been tried with an engine that accelerate's answers configure",
        "name a DeepSpeed JSON (engine.deepspeed_config), or start it by another launcher",
        {"accelerate": False},
        Facts(accelerate=True),
    ),
    rule(
        "fragments without a layer",
        lambda f: f.num_layers is not None and f.site_fragments > f.num_layers > 0,
        ("sites.fragments", lambda f: f.site_fragments),
        lambda f: (
            f"layers are dealt to fragments in turn, and the model has {f.num_layers}, so that "
            "some would be empty"
        ),
        lambda f: f"sites.fragments={f.num_layers} or less that divides sites.inner_steps",
        lambda f: replace(f, site_fragments=f.num_layers or 1),
        Facts(num_sites=2, site_fragments=8, num_layers=4),
    ),
)
