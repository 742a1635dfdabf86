"""Keys of a DeepSpeed JSON that the run YAML owns, and blocks that the JSON may not contain.

Pure. An owned key must be absent, ``"auto"`` or equal to the run's value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigtrain.errors import Problem
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.accepted import REFUSED_BLOCKS
from bigtrain.settings.deepspeed.keys import AUTO, value_at
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.optimizer import OPTIMIZERS

_ABSENT = object()

_DTYPE_SPELLINGS = {
    "float32": ("fp32", "float32", "torch.float32", "float"),
    "bfloat16": ("bf16", "bfloat16", "torch.bfloat16"),
    "float16": ("fp16", "float16", "torch.float16", "half"),
}

OPTIMIZER_PARAMETERS: Mapping[str, str] = {
    "lr": "the run's",
    "betas": "the run's",
    "eps": "the run's",
    "weight_decay": "the run's",
    "torch_adam": "torch.optim.AdamW instead of DeepSpeed's own Adam",
    "fused": "torch's fused kernel",
    "foreach": "torch's loop over lists of tensors",
    "adam_w_mode": "decoupled weight decay",
    "fp32_optimizer_states": "float32 moments",
    "bias_correction": "moments divided by 1 - beta^t",
    "amsgrad": "off",
}

_ADAM_NAMES = ("adamw", "adam")
"""Names of AdamW in a DeepSpeed JSON: "Adam" is AdamW too, unless adam_w_mode is false (deepspeed
0.19.8, runtime/engine.py:2489)."""

_KERNELS = ("torch_adam", "fused", "foreach")
"""Parameters that choose how AdamW is computed, not what it computes."""


@dataclass(frozen=True)
class Owned:
    """One key of the JSON whose value the run YAML owns.

    ``run_value``: the value of ``run_key``, as errors show it; ``value``: what DeepSpeed must be
    given; ``settable``: whether a user can change ``run_key``; ``spelling``: what a fix suggests to
    write instead of "auto"; empty: only "auto".
    """

    key: str
    run_key: str
    run_value: object
    value: object
    settable: bool = True
    spelling: str = ""

    def contradiction(self, raw: Mapping[str, Any], source: str) -> Problem | None:
        """Return the problem, naming both keys, if `raw` has another value than the run."""
        json_value = value_at(raw, self.key, _ABSENT)
        if json_value is _ABSENT or json_value == AUTO or _same(json_value, self.value):
            return None
        written = f'"{self.spelling}" or "auto"' if self.spelling else '"auto"'
        remedy = f"remove it from {source} or write {written}"
        if self.settable:
            remedy += f", or change {self.run_key} in the run YAML"
        return Problem(
            f"{source}: {self.key}",
            json_value,
            f"contradicts {self.run_key} = {self.run_value} of the run, which owns it",
            remedy,
        )


def _fixed(key: str, run_key: str, run_value: object, value: object) -> Owned:
    """Return a key for whose value the run has no setting."""
    return Owned(key, run_key, run_value, value, settable=False)


def _same(json_value: Any, value: Any) -> bool:
    """Return whether a value of the JSON means `value`: 1 is 1.0 but not true; bf16 is bfloat16."""
    if isinstance(json_value, bool) or isinstance(value, bool):
        return json_value is value
    if isinstance(json_value, (int, float)) and isinstance(value, (int, float)):
        return float(json_value) == float(value)
    if isinstance(json_value, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(json_value) == len(value) and all(map(_same, json_value, value))
    if isinstance(json_value, str) and isinstance(value, str):
        return json_value.lower() in _DTYPE_SPELLINGS.get(value, (value.lower(),))
    return bool(json_value == value)


def owned_values(
    config: RunConfig, plan: BatchPlan | None, raw: Mapping[str, Any], stage: int
) -> list[Owned]:
    """Return every key of the JSON that the run owns, with the value it must have."""
    return [
        *_owned_batch(config, plan),
        *_owned_optimizer(config, raw),
        *_owned_precision(config, stage),
        _fixed("gradient_allreduce_op", "batch (loss is the mean over it)", "mean", "mean"),
    ]


def _owned_batch(config: RunConfig, plan: BatchPlan | None) -> list[Owned]:
    """Return the keys of the batch; none without a plan."""
    if plan is None:
        return []
    # The global batch in the unit of the setting: samples or tokens.
    batch_key = "batch.global_tokens" if config.batch.global_tokens else "batch.global_batch_size"
    shown_key = batch_key
    shown_size = config.batch.global_tokens or plan.global_batch_size
    if plan.num_sites > 1:  # an engine gets the batch of its site
        has_equal_shares = plan.site_batch_size * plan.num_sites == plan.global_batch_size
        shown_key = f"this site's of sites.shares of {batch_key}"
        if has_equal_shares:
            shown_key = f"{batch_key} / sites.count"
        shown_size = shown_size * plan.site_batch_size // plan.global_batch_size
    quotient = f"{plan.site_batch_size} / ({plan.micro_batch_size} x {plan.data_size})"
    return [
        Owned("train_batch_size", shown_key, shown_size, plan.site_batch_size),
        Owned(
            "train_micro_batch_size_per_gpu",
            "batch.micro_batch_size",
            plan.micro_batch_size,
            plan.micro_batch_size,
        ),
        _fixed(
            "gradient_accumulation_steps",
            f"{shown_key} / (batch.micro_batch_size x data-parallel size)",
            f"{quotient} = {plan.accumulation}",
            plan.accumulation,
        ),
    ]


def _owned_optimizer(config: RunConfig, raw: Mapping[str, Any]) -> list[Owned]:
    """Return the keys of the optimizer; `raw` has its type, which may be a placeholder."""
    optimizer = config.optimizer
    betas = list(optimizer.betas)
    masters = "precision (masters and optimizer states)"
    # DeepSpeed must accept an optimizer of bigtrain, and not replace it by its CPU optimizer.
    optimizer_keys = []
    if optimizer.is_own:
        optimizer_keys.append(
            _fixed("zero_allow_untested_optimizer", "optimizer.type", optimizer.type, True)
        )
        if value_at(raw, "zero_optimization.offload_optimizer.device", "none") != "none":
            optimizer_keys.append(
                _fixed("zero_force_ds_cpu_optimizer", "optimizer.type", optimizer.type, False)
            )
    # The JSONs of ds_configs/ name AdamW without values, for HF Trainer. This is a placeholder for
    # any optimizer of the run.
    name, params = value_at(raw, "optimizer.type"), value_at(raw, "optimizer.params", {})
    is_placeholder = (
        isinstance(name, str)
        and isinstance(params, Mapping)
        and name.lower() in _ADAM_NAMES
        and all(value == AUTO for key, value in params.items() if key not in _KERNELS)
    )
    is_adamw = optimizer.type == "adamw" and isinstance(name, str) and name.lower() in _ADAM_NAMES
    return [
        *optimizer_keys,
        Owned("gradient_clipping", "optimizer.clip_norm", optimizer.clip_norm, optimizer.clip_norm),
        Owned(
            "optimizer.type",
            "optimizer.type",
            optimizer.type,
            name if is_placeholder or is_adamw else optimizer.type,
            spelling="AdamW" if optimizer.type == "adamw" else optimizer.type,
        ),
        Owned("optimizer.params.lr", "optimizer.lr", optimizer.lr, optimizer.lr),
        Owned("optimizer.params.betas", "optimizer.betas", betas, betas),
        Owned("optimizer.params.eps", "optimizer.eps", optimizer.eps, optimizer.eps),
        Owned(
            "optimizer.params.weight_decay",
            "optimizer.weight_decay",
            optimizer.weight_decay,
            optimizer.weight_decay,
        ),
        Owned("optimizer.params.adam_w_mode", "optimizer.type", optimizer.type, True),
        _fixed("optimizer.params.bias_correction", "optimizer.type", optimizer.type, True),
        _fixed("optimizer.params.amsgrad", "optimizer.type", optimizer.type, False),
        _fixed("optimizer.params.fp32_optimizer_states", masters, "float32", True),
    ]


def _owned_precision(config: RunConfig, stage: int) -> list[Owned]:
    """Return the keys of dtypes and of loss scaling."""
    precision = config.precision
    dtype, gradients = precision.dtype, precision.gradient_dtype
    masters = "precision (masters and optimizer states)"
    owned = [
        Owned("bf16.enabled", "precision.dtype", dtype, dtype == "bfloat16"),
        Owned("fp16.enabled", "precision.dtype", dtype, dtype == "float16"),
        Owned("data_types.param_dtype", "precision.dtype", dtype, dtype),
        _fixed("fp16.loss_scale", "precision (loss scaling)", "dynamic", 0),
        _fixed("bf16.bf16_master_weights_and_grads", masters, "float32", False),
        _fixed("bf16.bf16_optimizer_states", masters, "float32", False),
        _fixed("fp16.fp16_master_weights_and_grads", masters, "float32", False),
    ]
    if dtype == "float16":
        power = precision.initial_loss_scale_power
        owned.append(
            Owned("fp16.initial_scale_power", "precision.initial_loss_scale_power", power, power)
        )
    # Gradients are accumulated in float32 wherever DeepSpeed supports it (`gradient_dtype_of`).
    default = "float32" if dtype == "bfloat16" and stage > 0 else dtype
    shown_dtype = gradients if gradients is not None else f"{default} (the default)"
    owned.append(
        Owned(
            "data_types.grad_accum_dtype",
            "precision.gradient_dtype",
            shown_dtype,
            gradients or default,
        )
    )
    return owned


def check_refused_blocks(
    raw: Mapping[str, Any], source: str, suggest: Callable[[str], str]
) -> list[Problem]:
    """Return a problem for each block or optimizer parameter that is not allowed. suggest: returns
    the fix for an unknown dotted key."""
    problems = [
        Problem(f"{source}: {path}", None, reason, remedy)
        for path, (reason, remedy) in REFUSED_BLOCKS.items()
        if value_at(raw, path, _ABSENT) is not _ABSENT
    ]
    dtype = raw.get("communication_data_type", AUTO)
    if dtype not in (AUTO, "fp32", "bf16", "fp16"):
        key = f"{source}: communication_data_type"
        problems.append(Problem(key, dtype, "must be one of fp32, bf16, fp16"))
    params = value_at(raw, "optimizer.params", {})
    if not isinstance(params, Mapping) or has_other_optimizer(raw):
        return problems
    for name, value in params.items():
        key = f"{source}: optimizer.params.{name}"
        if name == "max_grad_norm":
            rule = "is refused by DeepSpeed as a parameter of an optimizer"
            problems.append(Problem(key, value, rule, "write gradient_clipping in its place"))
        elif name not in OPTIMIZER_PARAMETERS:
            remedy = suggest(f"optimizer.params.{name}")
            problems.append(Problem(key, value, "unknown parameter of AdamW", remedy))
        elif name in _KERNELS and not isinstance(value, bool):
            problems.append(Problem(key, value, "must be true or false"))
    problems.extend(_optimizer_conflicts(raw, params, source))
    return problems


def has_other_optimizer(raw: Mapping[str, Any]) -> bool:
    """Return whether the JSON has an optimizer that no run has, as "OneBitAdam". Callers then
    report only its type, and do not check its parameters."""
    name = value_at(raw, "optimizer.type", AUTO)
    return isinstance(name, str) and name.lower() not in (*_ADAM_NAMES, AUTO, *OPTIMIZERS)


def _optimizer_conflicts(
    raw: Mapping[str, Any], params: Mapping[str, Any], source: str
) -> list[Problem]:
    """Return problems of optimizer parameters that contradict each other, or another key."""
    problems = []
    torch_adam = optimizer_is_torch(
        raw.get("optimizer", {}), raw, value_at(raw, "zero_optimization", {})
    )
    for name in ("fused", "foreach"):
        if name in params and not torch_adam:
            key = f"{source}: optimizer.params.{name}"
            rule = "is a parameter of torch's AdamW, and torch_adam is false"
            problems.append(Problem(key, params[name], rule, "remove it"))
    if params.get("fused") is True and params.get("foreach") is True:
        key = f"{source}: optimizer.params.foreach"
        problems.append(
            Problem(key, True, "torch's AdamW is fused or foreach, not both", "remove one")
        )
    if params.get("torch_adam") is True and raw.get("zero_force_ds_cpu_optimizer") is True:
        problems.append(
            Problem(
                f"{source}: zero_force_ds_cpu_optimizer",
                True,
                "contradicts optimizer.params.torch_adam = True",
                "remove one of them",
            )
        )
    return problems


def optimizer_is_torch(
    optimizer: Mapping[str, Any], tree: Mapping[str, Any], zero: Mapping[str, Any]
) -> bool:
    """Return whether the run uses ``torch.optim.AdamW``: yes, unless the JSON sets ``torch_adam:
    false``, or ``zero_force_ds_cpu_optimizer: true`` with an offloaded optimizer."""
    torch_adam = value_at(optimizer, "params.torch_adam")
    if isinstance(torch_adam, bool):
        return torch_adam
    is_offloaded = value_at(zero, "offload_optimizer.device", "none") != "none"
    is_deepspeed_forced = is_offloaded and tree.get("zero_force_ds_cpu_optimizer") is True
    return not is_deepspeed_forced
