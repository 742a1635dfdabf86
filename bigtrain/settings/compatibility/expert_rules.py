"""Rules about expert parallelism: with other degrees, with the engine, and with the model."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from bigtrain.settings.compatibility.facts import Facts, Rule, largest_divisor, rule

_EXPERT = "parallel.expert"
_NO_EXPERT = "parallel.expert=1"


def _num_replicas(f: Facts) -> int:
    """Ranks of data x sequence; 0 where the degrees do not divide the world, which is refused."""
    inner = f.tensor_size * f.pipeline_size * f.sequence_size
    return 0 if f.world_size % inner else f.world_size // inner * f.sequence_size


def _fitting(number: int, f: Facts) -> int:
    return largest_divisor(number, min(number, f.expert_size))


EXPERT_RULES: tuple[Rule, ...] = (
    rule(
        "experts that do not divide data x sequence",
        lambda f: _num_replicas(f) % f.expert_size != 0,
        (_EXPERT, lambda f: f.expert_size),
        lambda f: (
            f"must divide data x sequence = {_num_replicas(f)}: the ranks that divide the experts "
            "are neighbours there"
        ),
        lambda f: f"parallel.expert={_fitting(_num_replicas(f), f)}",
        lambda f: replace(f, expert_size=_fitting(_num_replicas(f), f)),
        Facts(world_size=6, zero_stage=1, expert_size=4),
    ),
    rule(  # fp16/unfused_optimizer.py:211 leaves the gradients of experts out of the norm
        "16-bit experts with ZeRO 0",
        lambda f: f.expert_size > 1 and f.zero_stage == 0 and f.dtype != "float32",
        ("ds:zero_optimization.stage", lambda f: f.zero_stage),
        "DeepSpeed's ZeRO 0 in 16 bit leaves experts out of the gradient norm; ZeRO 1 counts them, "
        "and takes less memory",
        "ds_configs/zero1.json, or parallel.expert=1",
        lambda f: replace(f, zero_stage=1),
        Facts(world_size=2, expert_size=2),
    ),
    rule(  # runtime/engine.py:2229: their groups know nothing of experts
        "secondary partition with experts",
        lambda f: f.expert_size > 1 and f.partition_size > 1,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "DeepSpeed makes its groups of neighbouring ranks, which hold different experts",
        "1, or parallel.expert=1",
        lambda f: replace(f, partition_size=1),
        Facts(zero_stage=3, world_size=4, expert_size=2, partition_size=2),
    ),
    rule(  # runtime/engine.py:2227
        "quantized gradients with experts",
        lambda f: f.expert_size > 1 and f.quantized_gradients,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "DeepSpeed reduces them over neighbouring ranks, which hold different experts",
        "leave it out, or parallel.expert=1",
        lambda f: replace(f, quantized_gradients=False),
        Facts(zero_stage=3, world_size=4, expert_size=2, quantized_gradients=True),
    ),
    rule(
        "quantized weights with experts",
        lambda f: f.expert_size > 1 and f.quantized_weights,
        ("ds:zero_optimization.zero_quantized_weights", lambda f: True),
        "gathers of quantized experts have not been compared with anything",
        "leave it out, or parallel.expert=1",
        lambda f: replace(f, quantized_weights=False),
        Facts(zero_stage=3, world_size=2, expert_size=2, quantized_weights=True),
    ),
    rule(  # zero/stage_1_and_2.py:861 and :868, two assertions
        "experts without contiguous gradients or reduce-scatter",
        lambda f: (
            f.expert_size > 1
            and f.zero_stage in (1, 2)
            and not (f.reduce_scatter and f.contiguous_gradients)
        ),
        (_EXPERT, lambda f: f.expert_size),
        "DeepSpeed's ZeRO 1 and 2 reduce experts with zero_optimization.reduce_scatter and "
        "contiguous_gradients alone",
        "leave both keys out, or parallel.expert=1",
        lambda f: replace(f, reduce_scatter=True, contiguous_gradients=True),
        Facts(zero_stage=2, world_size=2, expert_size=2, contiguous_gradients=False),
    ),
    rule(  # zero/stage3.py:1933 divides by the wrong size, stage_1_and_2.py:1688 not at all
        "prescaled gradients with experts",
        lambda f: f.expert_size > 1 and f.prescale_gradients,
        (_EXPERT, lambda f: f.expert_size),
        "prescale_gradients counts the ranks that share an expert instead of those that its tokens "
        "come from",
        "leave it out, or parallel.expert=1",
        lambda f: replace(f, prescale_gradients=False),
        Facts(world_size=2, dtype="float32", expert_size=2, prescale_gradients=True),
    ),
    rule(
        "experts on NVMe",
        lambda f: f.expert_size > 1 and f.offload_param == "nvme",
        (_EXPERT, lambda f: f.expert_size),
        "swapping of experts to NVMe has not been compared with anything",
        "offload to the CPU, or parallel.expert=1",
        lambda f: replace(f, expert_size=1),
        Facts(
            zero_stage=3,
            world_size=2,
            expert_size=2,
            offload_param="nvme",
            offload_param_nvme_path="/disk",
        ),
    ),
    rule(
        "experts with SuperOffload",
        lambda f: f.expert_size > 1 and f.super_offload,
        ("ds:zero_optimization.offload_optimizer.super_offload", lambda f: True),
        "it has an optimizer of its own, which knows one group of replicas",
        "leave it out, or parallel.expert=1",
        lambda f: replace(f, super_offload=False),
        Facts(
            zero_stage=3,
            world_size=2,
            expert_size=2,
            super_offload=True,
            offload_optimizer="cpu",
            torch_adam=False,
        ),
    ),
)

EXPERT_MODEL_RULES: tuple[Rule, ...] = (
    rule(
        "experts that do not divide among expert-parallel ranks",
        lambda f: f.num_experts is not None and f.num_experts % f.expert_size != 0,
        (_EXPERT, lambda f: f.expert_size),
        lambda f: f"does not divide the model's {f.num_experts} experts",
        lambda f: f"nearest: {_nearest_divisors(f)}",
        lambda f: replace(f, expert_size=_fitting(gcd(f.num_experts or 1, _num_replicas(f)), f)),
        Facts(world_size=3, dtype="float32", expert_size=3, num_experts=8),
    ),
)


def _nearest_divisors(f: Facts) -> str:
    """The next expert-parallel sizes below and above that divide the experts."""
    assert f.num_experts is not None
    divisors = [n for n in range(1, f.num_experts + 1) if f.num_experts % n == 0]
    below = [n for n in divisors if n < f.expert_size][-1:]
    above = [n for n in divisors if n > f.expert_size][:1]
    return " or ".join(map(str, below + above))
