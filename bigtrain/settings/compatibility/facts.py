"""Facts of a run that rules check, and the definition of a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Literal

from bigtrain.errors import Problem
from bigtrain.settings.degrees import ModelDegrees

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Facts(ModelDegrees):
    """Facts of a run that the rules check.

    None means unknown, and rules about an unknown fact pass: ``device`` and ``async_io`` (whether
    libaio is installed) are unknown on a login node. ``gradient_dtype``: None where the run leaves
    it to the engine. ``pipeline_settings``: keys of the JSON's pipeline block that differ from its
    defaults. ``communication_dtype``: the JSON's, None without. ``source`` names the DeepSpeed
    JSON in problems. ``accelerate``: the engine is configured by the answers to accelerate, without
    a JSON.

    From the run YAML: ``attention``, ``loss``, ``kernels``, ``compiles`` (model.compile) and
    ``activation_offload`` of section model; ``freezes``: whether some weights are not trained;
    ``isolates``: whether documents are isolated; ``auxiliary_loss``, ``z_loss`` (its coefficient)
    and ``bias_updates`` (whether the rate is positive) of section moe; ``optimizer`` and
    ``state_dtype`` of section optimizer; ``adapters``: their type, None without, with
    ``adapted_stacks`` (target_parameters) and ``quantization`` of their base; ``num_sites``: 0
    without section sites; ``site_fragments``: in which they exchange the model.

    From the model's configuration, once it is read: ``attention_heads``; ``cut_heads`` and
    ``cut_key_heads``, the heads that its tensor-parallel plan divides among ranks; ``num_layers``
    that can be divided into stages; ``num_experts`` of a layer; ``max_positions``.
    """

    zero_stage: int = 0
    world_size: int = 1
    sequence_length: int = 1 << 12
    dtype: str = "bfloat16"
    gradient_dtype: str | None = None
    offload_optimizer: str | None = None
    offload_optimizer_ratio: float = 1.0
    offload_param: str | None = None
    offload_param_nvme_path: str | None = None
    super_offload: bool = False
    torch_adam: bool = True
    optimizer: str = "adamw"
    state_dtype: str = "float32"
    partition_size: int = 1
    quantized_weights: bool = False
    quantized_gradients: bool = False
    communication_dtype: str | None = None
    prescale_gradients: bool = False
    reduce_scatter: bool = True
    contiguous_gradients: bool = True
    overlap_comm: bool = False
    compute_grad_norm: bool = True
    use_gds: bool = False
    pipeline_block: bool = False
    pipeline_settings: tuple[str, ...] = ()
    flops_profiler: bool = False
    attention: str = "auto"
    isolates: bool = False
    loss: str = "auto"
    kernels: str = "none"
    compiles: str = "off"
    activation_offload: bool = False
    freezes: bool = False
    auxiliary_loss: str = "micro_batch"
    z_loss: float = 0.0
    bias_updates: bool = False
    adapters: str | None = None
    adapted_stacks: tuple[str, ...] = ()
    quantization: str = "none"
    num_sites: int = 0
    site_fragments: int = 1
    stops_early: bool = False
    accelerate: bool = False
    device: Device | None = None
    async_io: bool | None = None
    attention_heads: int | None = None
    cut_heads: int | None = None
    cut_key_heads: int | None = None
    num_layers: int | None = None
    num_experts: int | None = None
    max_positions: int | None = None
    source: str = "DeepSpeed JSON"

    def changed(self, **changes: Any) -> Facts:
        """Return a changed copy, ten times faster than `dataclasses.replace`: a plan makes
        thousands."""
        other = object.__new__(Facts)
        vars(other).update(vars(self), **changes)
        return other


@dataclass(frozen=True)
class Rule:
    """One illegal combination: its condition, the key that is reported, the reason, the fix.

    nearest: maps violating facts to the nearest ones that satisfy this rule. example: facts that
    violate this rule and no other.
    """

    name: str
    violated: Callable[[Facts], bool]
    key: str  # of the run YAML, or of the DeepSpeed JSON with a leading "ds:"
    value: Callable[[Facts], object]
    reason: Callable[[Facts], str]
    remedy: Callable[[Facts], str]
    nearest: Callable[[Facts], Facts]
    example: Facts

    def problem(self, facts: Facts) -> Problem:
        """Return the problem to report for `facts`, which violate this rule."""
        key = self.key
        if key.startswith("ds:"):
            key = f"{facts.source}: {key.removeprefix('ds:')}"
        return Problem(key, self.value(facts), self.reason(facts), self.remedy(facts))


def rule(
    name: str,
    violated: Callable[[Facts], bool],
    blamed: tuple[str, Callable[[Facts], object]],
    reason: str | Callable[[Facts], str],
    remedy: str | Callable[[Facts], str],
    nearest: Callable[[Facts], Facts],
    example: Facts,
) -> Rule:
    """Return a `Rule`; texts may be functions of the facts."""
    key, value = blamed
    return Rule(name, violated, key, value, _text(reason), _text(remedy), nearest, example)


def rules_of(applies: Callable[[Facts], bool], example: dict[str, Any]) -> Callable[..., Rule]:
    """Return a maker of rules that hold only where a method is used.

    Args:
        applies: whether a run uses the method.
        example: facts that a rule's `example` needs in addition to use it.
    """

    def make(
        name: str,
        holds: Callable[[Facts], bool],
        blamed: tuple[str, Callable[[Facts], object]],
        reason: str,
        remedy: str,
        changes: dict[str, Any],
        facts: Facts,
    ) -> Rule:
        return rule(
            name,
            lambda f: applies(f) and holds(f),
            blamed,
            reason,
            remedy,
            lambda f: replace(f, **changes),
            replace(facts, **example),
        )

    return make


def unproven_engines(refused: Callable[..., Rule], method: str, unproven: str) -> tuple[Rule, ...]:
    """Return the rules of a method that has not been compared with plain training where DeepSpeed
    scales the loss or keeps parameters in other ways than most.

    Args:
        refused: a function made by `rules_of`.
        method: its name in the names of the rules.
        unproven: the first words of their reasons.
    """
    return (
        refused(
            f"{method} in float16",
            lambda f: f.dtype == "float16",
            ("precision.dtype", lambda f: f.dtype),
            f"{unproven} with a loss scale",
            "precision.dtype=bfloat16",
            {"dtype": "bfloat16"},
            Facts(dtype="float16"),
        ),
        refused(
            f"{method} with parameters on NVMe",
            lambda f: f.offload_param == "nvme",
            ("ds:zero_optimization.offload_param.device", lambda f: f.offload_param),
            f"{unproven} with parameters in files",
            'device "cpu" (ds_configs/zero3_offload.json)',
            {"offload_param": "cpu"},
            Facts(zero_stage=3, offload_param="nvme", offload_param_nvme_path="/local-disk"),
        ),
        refused(
            f"{method} with SuperOffload",
            lambda f: f.super_offload,
            ("ds:zero_optimization.offload_optimizer.super_offload", lambda f: True),
            f"{unproven} under SuperOffload",
            "omit super_offload",
            {"super_offload": False, "torch_adam": True},
            Facts(zero_stage=3, offload_optimizer="cpu", super_offload=True, torch_adam=False),
        ),
        refused(
            f"{method} over quantized or secondary partitions",
            lambda f: f.quantized_weights or f.quantized_gradients or f.partition_size > 1,
            ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
            f"{unproven} under ZeRO++",
            "ds_configs/zero3.json",
            {"quantized_weights": False, "quantized_gradients": False, "partition_size": 1},
            Facts(zero_stage=3, partition_size=2, world_size=4),
        ),
    )


def _text(text: str | Callable[[Facts], str]) -> Callable[[Facts], str]:
    return text if callable(text) else lambda _facts: text


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`.

    Beyond 1e12 only divisors that have a factor up to 1e6 are searched, to bound the time.
    """
    small = [n for n in range(1, min(isqrt(number), 1_000_000) + 1) if number % n == 0]
    return max(n for d in small for n in (d, number // d) if n <= at_most)
