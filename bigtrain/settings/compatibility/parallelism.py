"""Rules about parallel degrees: illegal combinations, and sizes that do not divide. Pure.

Comments name the line of DeepSpeed 0.19.8 that a rule is based on, or the reason.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bigtrain.settings.compatibility import features as has
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.compatibility.rule import Feature, Rule
from bigtrain.settings.degrees import largest_divisor

_MAX_TENSOR_SIZE = 1024
_FOUR_RANKS = Facts(world_size=4)
_ANY_LENGTH = Feature(Facts.sequence_length, 1 << 12, when=lambda run: True)  # `Rule.when` decides


def _divides(size: int, number: int | None) -> bool:
    """Return whether `size` divides `number`; True if the number is unknown (None)."""
    return number is None or number % size == 0


def _nearest_text(size: int, legal: list[int]) -> str:
    """Return the text that names the neighbors of `size` in `legal`, which is sorted."""
    smaller, larger = [n for n in legal if n < size], [n for n in legal if n > size]
    neighbors = [*smaller[-1:], *larger[:1]]
    return f"nearest: {' or '.join(map(str, neighbors))}"


def _sample_divisor(run: Facts) -> int:
    """Return the number of equal parts of a sample: one for each rank, or two in a ring."""
    return math.lcm(run.sequence_size, 2 * run.ring_size if run.ring_size > 1 else 1)


def _fitting_sequence_size(run: Facts) -> int:
    return largest_divisor(run.sequence_length, run.sequence_size)


def _experts_dividing_replicas(run: Facts) -> int:
    return largest_divisor(run.num_replicas, min(run.num_replicas, run.expert_size))


def _ulysses_size(run: Facts) -> int:
    """Return the ranks that share samples and divide the heads."""
    return max(1, run.sequence_size // run.ring_size)


def _heads_per_rank(run: Facts) -> int:
    """Return the heads of a tensor-parallel rank, which sequence-parallel ranks divide; 1 if tensor
    parallelism does not divide the heads."""
    heads = run.attention_heads or 1
    return 1 if heads % run.tensor_size else heads // run.tensor_size


def _smaller_ulysses_size(run: Facts) -> int:
    """Return the largest smaller size of Ulysses that divides the attention heads."""
    return largest_divisor(_heads_per_rank(run), max(1, _ulysses_size(run) - 1))


def _ulysses_ring_setting(run: Facts) -> str:
    """Return ``parallel.sequence`` for the run's number of ranks, with the largest size of Ulysses
    that divides the heads, and a ring for the other factor."""
    ulysses_size = math.gcd(_heads_per_rank(run), run.sequence_size)
    return f"{{ulysses: {ulysses_size}, ring: {run.sequence_size // ulysses_size}}}"


def _has_complete_heads(run: Facts, size: int) -> bool:
    """Return whether each of `size` tensor-parallel ranks gets complete heads; several may share a
    key-value head."""
    heads, key_heads = run.cut_heads, run.cut_key_heads
    fits_key_heads = key_heads is None or key_heads % size == 0 or size % key_heads == 0
    return heads is None or (heads % size == 0 and fits_key_heads)


def _legal_tensor_sizes(run: Facts) -> list[int]:
    """Return the tensor-parallel sizes that divide the heads. If the run's size divides the world,
    also the others must."""
    world_size = 0 if run.world_size % run.tensor_size else run.world_size  # any size divides 0
    sizes = [n for n in range(1, _MAX_TENSOR_SIZE) if _has_complete_heads(run, n)]
    return [n for n in sizes if world_size % n == 0]


def _heads_text(run: Facts) -> str:
    key_heads = run.cut_key_heads
    shared = "" if key_heads is None else f" and num_key_value_heads = {key_heads}"
    return f"num_attention_heads = {run.cut_heads}{shared}"


def _legal_expert_sizes(run: Facts) -> list[int]:
    return [n for n in range(1, (run.num_experts or 1) + 1) if _divides(n, run.num_experts)]


def _experts_dividing_model(run: Facts) -> int:
    """Return the largest expert-parallel size that divides the experts and the replicas."""
    common_divisor = math.gcd(run.num_experts or 1, run.num_replicas)
    return largest_divisor(common_divisor, min(common_divisor, run.expert_size))


def _max_sample_length(run: Facts) -> int:
    return (run.max_positions or 1) - run.unused_positions


PARALLEL: Mapping[str, Rule] = {
    # runtime/zero/partition_parameters.py: each rank has another part of every parameter
    "compared replicas under ZeRO 3": Rule(
        (has.COMPARED_REPLICAS, has.ZERO_3), "no two ranks hold the same parameters"
    ),
    # utils/groups.py, _create_zero_param_parallel_group: neighbours in the full world
    "secondary partition with tensor parallelism": Rule(
        (has.SECONDARY_PARTITION, has.TENSOR),
        "DeepSpeed makes its groups of neighbouring ranks, which hold different shards with "
        "parallel.tensor above 1",
        fix="1, or parallel.tensor=1",
    ),
    # utils/groups.py, _get_local_all_to_all_group: likewise
    "quantized gradients with tensor parallelism": Rule(
        (has.QUANTIZED_GRADIENTS, has.TENSOR),
        "DeepSpeed reduces them over neighbouring ranks, which hold different shards with "
        "parallel.tensor above 1",
        fix="omit it, or parallel.tensor=1",
        example=_FOUR_RANKS,
    ),
    "samples that do not divide": Rule(
        (_ANY_LENGTH,),
        "every rank of parallel.sequence computes an equal part of each sample, in a ring two "
        "equal chunks of it",
        fix=lambda run: (
            f"{math.ceil(run.sequence_length / _sample_divisor(run)) * _sample_divisor(run)}, or "
            f"parallel.sequence={_fitting_sequence_size(run)}"
        ),
        when=lambda run: not _divides(_sample_divisor(run), run.sequence_length),
        example=Facts(world_size=3, sequence_size=3, sequence_length=16),
        instead=lambda run: Facts(sequence_size=_fitting_sequence_size(run), ring_size=1),
    ),
    # runtime/pipe/engine.py:76, which raises only after the full model is built
    "ZeRO 2 and 3 with pipeline": Rule(
        (Feature(Facts.zero_stage, 2, when=lambda run: run.zero_stage > 1), has.PIPELINE),
        "pipeline stages need unpartitioned gradients: DeepSpeed's pipeline runs with ZeRO 0 and 1 "
        "only",
        fix="ds_configs/pipeline_zero1.json, or parallel.pipeline=1",
        instead=Facts(zero_stage=1),
    ),
    # samples would have to be divided over stages and tokens at once; neither engine does
    "sequence parallelism with pipeline": Rule(
        (has.SEQUENCE, has.PIPELINE),
        "pipeline stages exchange full samples",
        fix="parallel.sequence=1, or parallel.pipeline=1",
        example=_FOUR_RANKS,
    ),
    # engine.py:2310, bf16_optimizer.py; fp16/unfused_optimizer.py:214 with utils.py:575
    "16-bit pipeline with ZeRO 0": Rule(
        (has.ZERO_0, has.PIPELINE, has.SIXTEEN_BITS),
        "DeepSpeed's ZeRO 0 sums the micro-batches of a pipeline in 16 bits and takes the norm of "
        "that sum (off by 3% when measured), in float16 of the first stage only; ZeRO 1 does it in "
        "float32 and takes no more memory",
        fix="ds_configs/pipeline_zero1.json",
    ),
    # zero/stage_1_and_2.py:971 leaves to hooks what :2294 does not do in a pipeline
    "overlapped reduction with pipeline": Rule(
        (Feature(Facts.overlap_comm, True), has.PIPELINE),
        "DeepSpeed's ZeRO 1 would never reduce the gradients of a pipeline over its replicas",
        fix="false, as in ds_configs/pipeline_zero1.json",
    ),
    # pipe/engine.py:135 reads a few of its keys, pipe/module.py takes the others
    "pipeline block with settings": Rule(
        (Feature(Facts.pipeline_settings, ("partition", "stages")),),
        "bigtrain splits the model itself, recomputes as model.gradient_checkpointing sets, and "
        "stages exchange full tensors; the block may only contain pipe_partitioned and "
        "grad_partitioned, both false",
        fix="omit these keys",
        example=Facts(world_size=2, zero_stage=1, pipeline_size=2, pipeline_block=True),
    ),
    "pipeline block without pipeline": Rule(
        (Feature(Facts.pipeline_block, True),),
        "the block does nothing: the run has parallel.pipeline = 1",
        fix="ds_configs/zero1.json, or omit the block",
        when=lambda run: run.pipeline_size == 1,
        value=lambda run: None,
        instead=Facts(pipeline_block=False, pipeline_settings=()),
    ),
    # runtime/engine.py prints from step(), which a pipeline engine never calls
    "FLOPs profiler with pipeline": Rule(
        (Feature(Facts.flops_profiler, True), has.PIPELINE),
        "DeepSpeed's pipeline engine never prints the profile",
        fix="omit the block; metrics.jsonl has model FLOPs utilization",
    ),
}

EXPERT_PARALLEL: Mapping[str, Rule] = {
    "experts that do not divide data x sequence": Rule(
        (has.EXPERTS,),
        lambda run: (
            f"must divide data x sequence = {run.num_replicas}: the ranks that divide the experts "
            "are neighbours there"
        ),
        fix=lambda run: f"parallel.expert={_experts_dividing_replicas(run)}",
        when=lambda run: not _divides(run.expert_size, run.num_replicas),
        example=Facts(world_size=6, zero_stage=1, expert_size=4),
        instead=lambda run: Facts(expert_size=_experts_dividing_replicas(run)),
    ),
    # fp16/unfused_optimizer.py:211 omits the gradients of experts from the norm
    "16-bit experts with ZeRO 0": Rule(
        (has.ZERO_0, has.EXPERTS, has.SIXTEEN_BITS),
        "DeepSpeed's ZeRO 0 in 16 bit omits experts from the gradient norm; ZeRO 1 counts them, "
        "and takes less memory",
        fix="ds_configs/zero1.json, or parallel.expert=1",
    ),
    "secondary partition with experts": Rule(  # runtime/engine.py:2229: their groups ignore experts
        (has.SECONDARY_PARTITION, has.EXPERTS),
        "DeepSpeed makes its groups of neighbouring ranks, which hold different experts",
        fix="1, or parallel.expert=1",
        example=_FOUR_RANKS,
    ),
    "quantized gradients with experts": Rule(  # runtime/engine.py:2227
        (has.QUANTIZED_GRADIENTS, has.EXPERTS),
        "DeepSpeed reduces them over neighbouring ranks, which hold different experts",
        fix="omit it, or parallel.expert=1",
        example=_FOUR_RANKS,
    ),
    "quantized weights with experts": Rule(
        (has.QUANTIZED_WEIGHTS, has.EXPERTS),
        "gathers of quantized experts have not been tested",
        fix="omit it, or parallel.expert=1",
    ),
    # zero/stage_1_and_2.py:861 and :868, two assertions
    "experts without contiguous gradients or reduce-scatter": Rule(
        (has.EXPERTS,),
        "DeepSpeed's ZeRO 1 and 2 reduce experts only with zero_optimization.reduce_scatter and "
        "contiguous_gradients",
        fix="omit both keys, or parallel.expert=1",
        when=lambda run: (
            run.zero_stage in (1, 2) and not (run.reduce_scatter and run.contiguous_gradients)
        ),
        example=Facts(zero_stage=2, contiguous_gradients=False),
        instead=Facts(reduce_scatter=True, contiguous_gradients=True),
    ),
    # zero/stage3.py:1933 divides by the wrong size, stage_1_and_2.py:1688 not at all
    "prescaled gradients with experts": Rule(
        (has.EXPERTS, has.PRESCALED),
        "prescale_gradients counts the ranks that share an expert instead of those that send it "
        "tokens",
        fix="omit it, or parallel.expert=1",
        example=Facts(dtype="float32"),
        instead=Facts(prescale_gradients=False),
    ),
    "experts on NVMe": Rule(
        (has.EXPERTS, has.NVME),
        "swapping of experts to NVMe has not been tested",
        fix="offload to the CPU, or parallel.expert=1",
        example=Facts(offload_param_nvme_path="/disk"),
    ),
    "experts with SuperOffload": Rule(
        (has.SUPER_OFFLOAD, has.EXPERTS),
        "its own optimizer supports only one group of replicas",
        fix="omit it, or parallel.expert=1",
    ),
}

MODEL: Mapping[str, Rule] = {
    "tensor parallelism of a model without a plan": Rule(
        (has.TENSOR,),
        "transformers has no tensor-parallel plan for the layers of this architecture",
        fix="parallel.tensor=1, and ZeRO 3 for models too large for one device",
        when=lambda run: run.has_tensor_plan is not None and not run.has_tensor_plan,
        example=Facts(world_size=2, tensor_size=2, has_tensor_plan=False),
        instead=lambda run: Facts(tensor_size=1),
    ),
    "heads that do not divide among tensor-parallel ranks": Rule(
        (has.TENSOR,),
        lambda run: f"does not divide the model's {_heads_text(run)} into complete heads",
        fix=lambda run: _nearest_text(run.tensor_size, _legal_tensor_sizes(run)),
        when=lambda run: not _has_complete_heads(run, run.tensor_size),
        example=Facts(world_size=3, tensor_size=3, cut_heads=8, cut_key_heads=2),
        instead=lambda run: Facts(
            tensor_size=max(n for n in _legal_tensor_sizes(run) if n < run.tensor_size)
        ),
    ),
    "heads that do not divide among sequence-parallel ranks": Rule(
        (has.SEQUENCE,),
        lambda run: (
            f"does not divide its {run.attention_heads} attention heads"
            + (f" among parallel.tensor = {run.tensor_size}" if run.tensor_size > 1 else "")
        ),
        fix=lambda run: (
            f"parallel.sequence={_smaller_ulysses_size(run)}, or "
            f"parallel.sequence={_ulysses_ring_setting(run)}"
        ),
        when=lambda run: not _divides(_ulysses_size(run) * run.tensor_size, run.attention_heads),
        example=Facts(world_size=4, sequence_size=4, sequence_length=48, attention_heads=6),
        instead=lambda run: Facts(sequence_size=_smaller_ulysses_size(run), ring_size=1),
    ),
    "more stages than layers": Rule(
        (has.PIPELINE,),
        lambda run: f"is more than the model's {run.num_layers} layers",
        fix=lambda run: f"parallel.pipeline={run.num_layers} at most",
        when=lambda run: run.num_layers is not None and run.pipeline_size > run.num_layers,
        example=Facts(world_size=4, zero_stage=1, pipeline_size=4, num_layers=2),
        instead=lambda run: Facts(pipeline_size=run.num_layers or 1),
    ),
    "samples longer than the model's positions": Rule(
        (_ANY_LENGTH,),
        lambda run: (
            f"is more than the model's max_position_embeddings = {run.max_positions}"
            + (
                f", of which its own positions leave {run.unused_positions} unused"
                if run.unused_positions
                else ""
            )
        ),
        fix=lambda run: (
            f"at most {_max_sample_length(run)}, or raise model.overrides.max_position_embeddings "
            "(not of pretrained weights with learned positions, as GPT-2's: they have no more rows)"
        ),
        when=lambda run: (
            run.max_positions is not None and (run.sequence_length > _max_sample_length(run))
        ),
        example=Facts(sequence_length=128, max_positions=64),
        instead=lambda run: Facts(sequence_length=_max_sample_length(run)),
    ),
    "experts that do not divide among expert-parallel ranks": Rule(
        (has.EXPERTS,),
        lambda run: f"does not divide the model's {run.num_experts} experts",
        fix=lambda run: _nearest_text(run.expert_size, _legal_expert_sizes(run)),
        when=lambda run: not _divides(run.expert_size, run.num_experts),
        example=Facts(world_size=3, dtype="float32", expert_size=3, num_experts=8),
        instead=lambda run: Facts(expert_size=_experts_dividing_model(run)),
    ),
}
