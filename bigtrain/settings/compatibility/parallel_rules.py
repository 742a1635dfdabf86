"""Rules about parallel degrees, including expert parallelism.

They relate the degrees to each other, to the engine and to the model.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from bigtrain.settings.compatibility.facts import Facts, Rule, largest_divisor, rule

_STAGE = "ds:zero_optimization.stage"
_MOST_RANKS = 1024

PARALLEL_RULES: tuple[Rule, ...] = (
    rule(  # utils/groups.py, _create_zero_param_parallel_group: neighbours in the full world
        "secondary partition with tensor parallelism",
        lambda f: f.tensor_size > 1 and f.partition_size > 1,
        ("ds:zero_optimization.zero_hpz_partition_size", lambda f: f.partition_size),
        "DeepSpeed makes its groups of neighbouring ranks, which hold different shards with "
        "parallel.tensor above 1",
        "1, or parallel.tensor=1",
        lambda f: replace(f, partition_size=1),
        Facts(zero_stage=3, tensor_size=2, world_size=4, partition_size=2),
    ),
    rule(  # utils/groups.py, _get_local_all_to_all_group: likewise
        "quantized gradients with tensor parallelism",
        lambda f: f.tensor_size > 1 and f.quantized_gradients,
        ("ds:zero_optimization.zero_quantized_gradients", lambda f: True),
        "DeepSpeed reduces them over neighbouring ranks, which hold different shards with "
        "parallel.tensor above 1",
        "omit it, or parallel.tensor=1",
        lambda f: replace(f, quantized_gradients=False),
        Facts(zero_stage=3, tensor_size=2, world_size=4, quantized_gradients=True),
    ),
    rule(
        "samples that do not divide",
        lambda f: f.sequence_length % f.sequence_size != 0,
        ("batch.sequence_length", lambda f: f.sequence_length),
        "every rank of parallel.sequence computes an equal part of each sample",
        lambda f: (
            f"{-(-f.sequence_length // f.sequence_size) * f.sequence_size}, or parallel.sequence="
            f"{largest_divisor(f.sequence_length, f.sequence_size)}"
        ),
        lambda f: replace(f, sequence_size=largest_divisor(f.sequence_length, f.sequence_size)),
        Facts(world_size=3, sequence_size=3, sequence_length=16),
    ),
    rule(  # runtime/pipe/engine.py:76, which raises only after the full model is built
        "ZeRO 2 and 3 with pipeline",
        lambda f: f.pipeline_size > 1 and f.zero_stage >= 2,
        (_STAGE, lambda f: f.zero_stage),
        "pipeline stages need unpartitioned gradients: DeepSpeed's pipeline runs with ZeRO 0 and 1 "
        "only",
        "ds_configs/pipeline_zero1.json, or parallel.pipeline=1",
        lambda f: replace(f, zero_stage=1),
        Facts(world_size=2, pipeline_size=2, zero_stage=2),
    ),
    rule(  # samples would have to be divided over stages and tokens at once; neither engine does
        "sequence parallelism with pipeline",
        lambda f: f.pipeline_size > 1 and f.sequence_size > 1,
        ("parallel.sequence", lambda f: f.sequence_size),
        "pipeline stages exchange full samples",
        "parallel.sequence=1, or parallel.pipeline=1",
        lambda f: replace(f, sequence_size=1),
        Facts(world_size=4, zero_stage=1, pipeline_size=2, sequence_size=2),
    ),
    rule(  # engine.py:2310, bf16_optimizer.py; fp16/unfused_optimizer.py:214 with utils.py:575
        "16-bit pipeline with ZeRO 0",
        lambda f: f.pipeline_size > 1 and f.zero_stage == 0 and f.dtype != "float32",
        (_STAGE, lambda f: f.zero_stage),
        "DeepSpeed's ZeRO 0 sums the micro-batches of a pipeline in 16 bits and takes the norm of "
        "that sum (off by 3% when measured), in float16 of the first stage only; ZeRO 1 does it in "
        "float32 and takes no more memory",
        "ds_configs/pipeline_zero1.json",
        lambda f: replace(f, zero_stage=1),
        Facts(world_size=2, pipeline_size=2, dtype="bfloat16"),
    ),
    rule(  # zero/stage_1_and_2.py:971 leaves to hooks what :2294 does not do in a pipeline
        "overlapped reduction with pipeline",
        lambda f: f.pipeline_size > 1 and f.overlap_comm,
        ("ds:zero_optimization.overlap_comm", lambda f: True),
        "DeepSpeed's ZeRO 1 would never reduce the gradients of a pipeline over its replicas",
        "false, as in ds_configs/pipeline_zero1.json",
        lambda f: replace(f, overlap_comm=False),
        Facts(world_size=2, pipeline_size=2, zero_stage=1, overlap_comm=True),
    ),
    rule(  # pipe/engine.py:135 reads a few of its keys, pipe/module.py takes the others
        "pipeline block with settings",
        lambda f: bool(f.pipeline_settings),
        ("ds:pipeline", lambda f: ", ".join(f.pipeline_settings)),
        "bigtrain splits the model itself, recomputes as model.gradient_checkpointing sets, and "
        "stages exchange full tensors; the block may only contain pipe_partitioned and "
        "grad_partitioned, both false",
        "omit these keys",
        lambda f: replace(f, pipeline_settings=()),
        Facts(
            world_size=2,
            zero_stage=1,
            pipeline_size=2,
            pipeline_block=True,
            pipeline_settings=("partition", "stages"),
        ),
    ),
    rule(
        "pipeline block without pipeline",
        lambda f: f.pipeline_block and f.pipeline_size == 1,
        ("ds:pipeline", lambda f: None),
        "the block does nothing: the run has parallel.pipeline = 1",
        "ds_configs/zero1.json, or omit the block",
        lambda f: replace(f, pipeline_block=False, pipeline_settings=()),
        Facts(pipeline_block=True),
    ),
    rule(  # runtime/engine.py prints from step(), which a pipeline engine never calls
        "FLOPs profiler with pipeline",
        lambda f: f.pipeline_size > 1 and f.flops_profiler,
        ("ds:flops_profiler.enabled", lambda f: True),
        "DeepSpeed's pipeline engine never prints the profile",
        "omit the block; metrics.jsonl has model FLOPs utilization",
        lambda f: replace(f, flops_profiler=False),
        Facts(world_size=2, pipeline_size=2, zero_stage=1, flops_profiler=True),
    ),
)


def _divides_heads(size: int, heads: int, key_heads: int | None) -> bool:
    """Return whether each of `size` ranks gets complete heads; several may share a key-value
    head."""
    shared = key_heads is None or key_heads % size == 0 or size % key_heads == 0
    return heads % size == 0 and shared


def _nearest_degrees(f: Facts) -> list[int]:
    """Return the next tensor-parallel sizes below and above that divide the heads, and also the
    world size where the current one divides it."""
    assert f.cut_heads is not None
    legal = [n for n in range(1, _MOST_RANKS) if _divides_heads(n, f.cut_heads, f.cut_key_heads)]
    if f.world_size % f.tensor_size == 0:
        legal = [n for n in legal if f.world_size % n == 0]
    below = [n for n in legal if n < f.tensor_size]
    return [*below[-1:], *[n for n in legal if n > f.tensor_size][:1]]


def _fitting_sequence_size(f: Facts) -> int:
    assert f.attention_heads is not None
    heads = f.attention_heads
    if heads % f.tensor_size:
        return 1
    return largest_divisor(heads // f.tensor_size, f.sequence_size - 1)


MODEL_RULES: tuple[Rule, ...] = (
    rule(
        "heads that do not divide among tensor-parallel ranks",
        lambda f: (
            f.cut_heads is not None
            and not _divides_heads(f.tensor_size, f.cut_heads, f.cut_key_heads)
        ),
        ("parallel.tensor", lambda f: f.tensor_size),
        lambda f: (
            f"does not divide the model's num_attention_heads = {f.cut_heads}"
            + ("" if f.cut_key_heads is None else f" and num_key_value_heads = {f.cut_key_heads}")
            + " into complete heads"
        ),
        lambda f: f"nearest: {' or '.join(map(str, _nearest_degrees(f)))}",
        lambda f: replace(f, tensor_size=_nearest_degrees(f)[0]),
        Facts(world_size=3, tensor_size=3, cut_heads=8, cut_key_heads=2),
    ),
    rule(
        "heads that do not divide among sequence-parallel ranks",
        lambda f: (
            f.sequence_size > 1
            and f.attention_heads is not None
            and f.attention_heads % (f.sequence_size * f.tensor_size) != 0
        ),
        ("parallel.sequence", lambda f: f.sequence_size),
        lambda f: (
            f"does not divide its {f.attention_heads} attention heads"
            + (f" among parallel.tensor = {f.tensor_size}" if f.tensor_size > 1 else "")
        ),
        lambda f: f"parallel.sequence={_fitting_sequence_size(f)}",
        lambda f: replace(f, sequence_size=_fitting_sequence_size(f)),
        Facts(world_size=4, sequence_size=4, sequence_length=48, attention_heads=6),
    ),
    rule(
        "more stages than layers",
        lambda f: f.num_layers is not None and f.pipeline_size > f.num_layers,
        ("parallel.pipeline", lambda f: f.pipeline_size),
        lambda f: f"is more than the model's {f.num_layers} layers",
        lambda f: f"parallel.pipeline={f.num_layers} at most",
        lambda f: replace(f, pipeline_size=f.num_layers or 1),
        Facts(world_size=4, zero_stage=1, pipeline_size=4, num_layers=2),
    ),
    rule(
        "samples longer than the model's positions",
        lambda f: f.max_positions is not None and f.sequence_length > f.max_positions,
        ("batch.sequence_length", lambda f: f.sequence_length),
        lambda f: f"is more than the model's max_position_embeddings = {f.max_positions}",
        lambda f: (
            f"at most {f.max_positions}, or raise model.overrides.max_position_embeddings "
            "(not of pretrained weights with learned positions, as GPT-2's: they have no more rows)"
        ),
        lambda f: replace(f, sequence_length=f.max_positions or f.sequence_length),
        Facts(sequence_length=128, max_positions=64),
    ),
)


_EXPERT = "parallel.expert"
_NO_EXPERT = "parallel.expert=1"


def _num_replicas(f: Facts) -> int:
    """Return the number of ranks of data x sequence; 0 where the degrees do not divide the world,
    which is refused."""
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
    rule(  # fp16/unfused_optimizer.py:211 omits the gradients of experts from the norm
        "16-bit experts with ZeRO 0",
        lambda f: f.expert_size > 1 and f.zero_stage == 0 and f.dtype != "float32",
        ("ds:zero_optimization.stage", lambda f: f.zero_stage),
        "DeepSpeed's ZeRO 0 in 16 bit omits experts from the gradient norm; ZeRO 1 counts them, "
        "and takes less memory",
        "ds_configs/zero1.json, or parallel.expert=1",
        lambda f: replace(f, zero_stage=1),
        Facts(world_size=2, expert_size=2),
    ),
    rule(  # runtime/engine.py:2229: their groups ignore experts
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
        "omit it, or parallel.expert=1",
        lambda f: replace(f, quantized_gradients=False),
        Facts(zero_stage=3, world_size=4, expert_size=2, quantized_gradients=True),
    ),
    rule(
        "quantized weights with experts",
        lambda f: f.expert_size > 1 and f.quantized_weights,
        ("ds:zero_optimization.zero_quantized_weights", lambda f: True),
        "gathers of quantized experts have not been tested",
        "omit it, or parallel.expert=1",
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
        "DeepSpeed's ZeRO 1 and 2 reduce experts only with zero_optimization.reduce_scatter and "
        "contiguous_gradients",
        "omit both keys, or parallel.expert=1",
        lambda f: replace(f, reduce_scatter=True, contiguous_gradients=True),
        Facts(zero_stage=2, world_size=2, expert_size=2, contiguous_gradients=False),
    ),
    rule(  # zero/stage3.py:1933 divides by the wrong size, stage_1_and_2.py:1688 not at all
        "prescaled gradients with experts",
        lambda f: f.expert_size > 1 and f.prescale_gradients,
        (_EXPERT, lambda f: f.expert_size),
        "prescale_gradients counts the ranks that share an expert instead of those that send it "
        "tokens",
        "omit it, or parallel.expert=1",
        lambda f: replace(f, prescale_gradients=False),
        Facts(world_size=2, dtype="float32", expert_size=2, prescale_gradients=True),
    ),
    rule(
        "experts on NVMe",
        lambda f: f.expert_size > 1 and f.offload_param == "nvme",
        (_EXPERT, lambda f: f.expert_size),
        "swapping of experts to NVMe has not been tested",
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
        "its own optimizer supports only one group of replicas",
        "omit it, or parallel.expert=1",
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
    """Return the next expert-parallel sizes below and above that divide the experts."""
    assert f.num_experts is not None
    divisors = [n for n in range(1, f.num_experts + 1) if f.num_experts % n == 0]
    below = [n for n in divisors if n < f.expert_size][-1:]
    above = [n for n in divisors if n > f.expert_size][:1]
    return " or ".join(map(str, below + above))
