"""Rules about adapters: only combinations that have been compared with plain peft may run."""

from __future__ import annotations

from bigtrain.settings.compatibility.facts import Facts, Rule, rules_of

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
        "DoRA with tensor parallelism",
        lambda f: f.dora and f.tensor_size > 1,
        ("adapters.dora", lambda f: f.dora),
        "the length of an output's weights would have to be added up over the ranks that hold them",
        "adapters.dora=false or parallel.tensor=1",
        {"tensor_size": 1},
        Facts(tensor_size=2, dora=True),
    ),
    _refused(
        "DoRA under ZeRO 3",
        lambda f: f.dora and f.zero_stage == 3,
        ("adapters.dora", lambda f: f.dora),
        "its layers look at the weights beside them, which ZeRO 3 has gathered for their products "
        "alone",
        "ds_configs/zero2.json, or adapters.dora=false",
        {"zero_stage": 2},
        Facts(zero_stage=3, dora=True),
    ),
    _refused(
        "modules_to_save with tensor parallelism",
        lambda f: bool(f.saved_modules) and f.tensor_size > 1,
        ("adapters.modules_to_save", lambda f: list(f.saved_modules)),
        f"{_UNPROVEN} where a copied module is cut",
        "parallel.tensor=1, or adapters of targets alone",
        {"tensor_size": 1},
        Facts(tensor_size=2, saved_modules=("lm_head",)),
    ),
    _refused(
        "adapters of stacked weights with tensor parallelism",
        lambda f: bool(f.adapted_stacks) and f.tensor_size > 1,
        ("adapters.target_parameters", lambda f: list(f.adapted_stacks)),
        f"{_UNPROVEN} where experts are cut",
        "parallel.tensor=1, or adapters of targets alone",
        {"tensor_size": 1},
        Facts(tensor_size=2, adapted_stacks=("experts.gate_up_proj",)),
    ),
    _refused(
        "adapters of stacked weights under ZeRO 3",
        lambda f: bool(f.adapted_stacks) and f.zero_stage == 3,
        ("adapters.target_parameters", lambda f: list(f.adapted_stacks)),
        "peft computes the sum of stack and adapters outside of the layers that ZeRO 3 gathers "
        "parameters for",
        "ds_configs/zero2.json, or adapters of targets alone",
        {"zero_stage": 2},
        Facts(zero_stage=3, adapted_stacks=("experts.gate_up_proj",)),
    ),
    _refused(
        "adapters of mlp in a mixture of experts with tensor parallelism",
        lambda f: f.adapts_experts and f.tensor_size > 1,
        ("adapters.targets", lambda f: "mlp"),
        f"the experts' weights are stacked, and {_UNPROVEN} where those are cut",
        "parallel.tensor=1, or adapters.targets=attention",
        {"tensor_size": 1},
        Facts(tensor_size=2, adapts_experts=True),
    ),
    _refused(
        "adapters of mlp in a mixture of experts under ZeRO 3",
        lambda f: f.adapts_experts and f.zero_stage == 3,
        ("adapters.targets", lambda f: "mlp"),
        "the experts' weights are stacked, and peft computes the sum of stack and adapters outside "
        "of the layers that ZeRO 3 gathers parameters for",
        "ds_configs/zero2.json, or adapters.targets=attention",
        {"zero_stage": 2},
        Facts(zero_stage=3, adapts_experts=True),
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
    _refused(
        "adapters in float16",
        lambda f: f.dtype == "float16",
        ("precision.dtype", lambda f: f.dtype),
        f"{_UNPROVEN} with a loss scale",
        "precision.dtype=bfloat16",
        {"dtype": "bfloat16"},
        Facts(dtype="float16"),
    ),
    _refused(
        "adapters over quantized or secondary partitions",
        lambda f: f.quantized_weights or f.quantized_gradients or f.partition_size > 1,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        f"{_UNPROVEN} under ZeRO++, whose quantized weights would be the base's",
        "ds_configs/zero3.json",
        {"quantized_weights": False, "quantized_gradients": False, "partition_size": 1},
        Facts(zero_stage=3, partition_size=2, world_size=4),
    ),
    _refused(
        "adapters with parameters on NVMe",
        lambda f: f.offload_param == "nvme",
        ("ds:zero_optimization.offload_param.device", lambda f: f.offload_param),
        f"{_UNPROVEN} where parameters lie in files",
        'device "cpu" (ds_configs/zero3_offload.json)',
        {"offload_param": "cpu"},
        Facts(zero_stage=3, offload_param="nvme", offload_param_nvme_path="/local-disk"),
    ),
    _refused(
        "adapters with SuperOffload",
        lambda f: f.super_offload,
        ("ds:zero_optimization.offload_optimizer.super_offload", lambda f: True),
        f"{_UNPROVEN} under SuperOffload",
        "leave super_offload out; states of adapters are small",
        {"super_offload": False},
        Facts(zero_stage=3, offload_optimizer="cpu", super_offload=True, torch_adam=False),
    ),
)
