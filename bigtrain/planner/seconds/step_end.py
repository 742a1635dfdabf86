"""Seconds of a micro-batch in the head and the loss, and of the end of a step. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.seconds.communication import Group
from bigtrain.planner.seconds.kernels import matmul_seconds, memory_seconds
from bigtrain.planner.seconds.layer import TimedMachine, Work
from bigtrain.planner.stages import PlannedStage, block_bytes, matrix_exchange, stage_sizes

ADAMW_HOST_BYTES = 28
"""Bytes of a parameter that AdamW moves in main memory: it reads the float32 gradient, and reads
and writes the master and two moments."""


LOGIT_PASSES = {"compiled": 3.0, "liger": 4.0}
"""How often a fused cross-entropy reads or writes its logits, or gradients as wide: it reads them
for the sum of their exponentials, reads them again, and writes the gradient. Liger's kernel reads
them twice for the sum where a row is too wide for one block; for compiled kernels: Inductor's
schedule for sm_90 and 128,256 tokens (`benchmarks/gpu_roofline/fused_layer.py`)."""


def head_work(model: ModelCosts, layout: Layout, machine: TimedMachine) -> Work:
    """Return the work of logits and losses of a micro-batch, forward and backward. The output head
    is not quantized."""
    device, engine = machine.device, machine.engine
    num_losses = 1 + model.num_further_losses
    num_tokens, element_bytes = layout.tokens_per_micro_batch, model.element_bytes
    hidden_size, num_columns = model.hidden_size, model.vocabulary_size // layout.tensor_size
    work = Work(host=engine.step_seconds)

    # Logits, gradient of the hidden states, gradient of the head, of every chunk.
    chunk_tokens = layout.loss_chunk_tokens or num_tokens
    num_full, last_tokens = divmod(num_tokens, chunk_tokens)
    for num_rows, num_chunks in ((chunk_tokens, num_full), (last_tokens, 1)):
        for rows, in_size, out_size in (
            (num_rows, hidden_size, num_columns),
            (num_rows, num_columns, hidden_size),
            (hidden_size, num_rows, num_columns),
        ):
            seconds = matmul_seconds(
                device, rows, in_size, out_size, element_bytes, gain=engine.products
            )
            work.matmul += num_losses * num_chunks * seconds

    if layout.tensor_size > 1:
        tensor = machine.groups.tensor
        work.tensor = tensor.all_reduce(device, num_tokens * hidden_size * element_bytes)
        if engine.is_deepspeed:
            # Each rank gathers all columns and computes the full loss.
            num_columns = model.vocabulary_size
            work.tensor += tensor.all_gather(device, num_tokens * num_columns * element_bytes)
        else:
            # Maximum, sum and the target's logit by token, in float32.
            work.tensor += tensor.all_reduce(device, 3 * 4 * num_tokens)
        work.tensor *= num_losses

    loss_bytes = engine.loss_bytes
    if layout.loss_kernels != "operators":
        loss_bytes = LOGIT_PASSES[layout.loss_kernels] * element_bytes
    # Further losses are computed by operators.
    bytes_of_losses = loss_bytes + model.num_further_losses * engine.loss_bytes
    moved_bytes = bytes_of_losses * num_tokens * num_columns
    if layout.loss_chunk_tokens is not None and model.trains_head:
        # Each chunk but the first adds its gradient of the head: it is read, and added to a sum in
        # float32. A fused loss adds it to a sum in 16 bits inside of the product.
        num_additions = math.ceil(num_tokens / layout.loss_chunk_tokens) - 1
        head_parameters = model.vocabulary_size // layout.tensor_size * hidden_size
        is_sum_in_16_bits = layout.loss_kernels == "liger"
        bytes_of_sum = 2 * element_bytes if is_sum_in_16_bits else 8 + element_bytes
        moved_bytes += num_losses * num_additions * head_parameters * bytes_of_sum
    work.memory_bound = memory_seconds(device, moved_bytes)
    return work


def gradient_seconds(
    stage: PlannedStage, model: ModelCosts, layout: Layout, machine: TimedMachine, stage_work: Work
) -> float:
    """Return the exposed seconds of reducing gradients and gathering updated parameters, ZeRO 0 to
    2. `stage_work`: work of a micro-batch, which hides the reduction."""
    if layout.partition_size == 1 or layout.zero_stage == 3:
        return 0.0
    device, engine, groups = machine.device, machine.engine, machine.groups
    sizes = stage_sizes(stage, model, layout)
    num_expert = sizes.trained_expert
    num_dense = sizes.trained - num_expert
    scatter_seconds = groups.gather(device, num_dense, num_expert, layout.gradient_bytes)
    gather_seconds = groups.gather(device, num_dense, num_expert, layout.parameter_bytes)
    if engine.is_deepspeed and layout.zero_stage:
        # Each bucket is a collective; the buckets of ZeRO 0 are not configurable.
        latency = groups.partition.latency(device)
        num_reductions = math.ceil(sizes.trained / layout.reduce_bucket_elements)
        num_gathers = math.ceil(sizes.trained / layout.gather_bucket_elements)
        scatter_seconds += latency * max(0, num_reductions - 1)
        gather_seconds += latency * max(0, num_gathers - 1)
    # In a pipeline gradients are summed after the last micro-batch, also by FSDP.
    reduces_often = engine.reduces_every_micro_batch and layout.pipeline_size == 1
    is_repeated = reduces_often and layout.zero_stage == 2
    num_exchanges = layout.num_accumulation if is_repeated else 1
    # Two thirds of a micro-batch are its backward pass.
    backward_seconds = engine.overlap * stage_work.device * 2 / 3
    exposed_seconds = num_exchanges * max(
        scatter_seconds * engine.exposed_gradients, scatter_seconds - backward_seconds
    )
    last_seconds = scatter_seconds if layout.zero_stage == 0 else gather_seconds
    return exposed_seconds + last_seconds * engine.exposed_gradients


@dataclass(frozen=True)
class UpdateSeconds:
    """Seconds of an optimizer's update: of the update, and of the transfers between the device and
    main memory."""

    update: float
    transfer: float = 0.0


def optimizer_seconds(
    stage: PlannedStage, model: ModelCosts, layout: Layout, machine: TimedMachine
) -> UpdateSeconds:
    """Return the seconds of the update of the parameters that a rank of `stage` owns."""
    device = machine.device
    sizes = stage_sizes(stage, model, layout)
    num_updated, num_expert = sizes.trained, sizes.trained_expert
    if layout.zero_stage:
        num_dense = num_updated - num_expert
        num_updated = num_dense / layout.partition_size + num_expert / layout.expert_replicas
    if not layout.offload_optimizer:
        moved_bytes = machine.engine.optimizer_bytes * num_updated
        if machine.engine.is_deepspeed:
            # The gradient of every further micro-batch is added to a sum.
            num_summed = sizes.trained if layout.zero_stage < 2 else num_updated
            bytes_of_sum = 2 * layout.gradient_bytes + layout.parameter_bytes
            moved_bytes += (layout.num_accumulation - 1) * bytes_of_sum * num_summed
        return UpdateSeconds(memory_seconds(device, moved_bytes))
    # Gradients go to main memory, parameters to the device.
    transfer_bytes = num_updated * (layout.gradient_bytes + layout.parameter_bytes)
    rank_bandwidth = device.host_memory_bandwidth / device.devices_per_node
    return UpdateSeconds(
        ADAMW_HOST_BYTES * num_updated / rank_bandwidth, transfer_bytes / device.host_bandwidth
    )


def orthogonalizing_seconds(
    stage: PlannedStage, model: ModelCosts, layout: Layout, machine: TimedMachine
) -> float:
    """Return the seconds of Muon in addition to a pass over its parameters: matrices are sent to
    the ranks that own them, orthogonalized, and sent back."""
    optimizer, device = layout.optimizer, machine.device
    if not optimizer.needs_whole_matrices:
        return 0.0
    product_seconds = 0.0
    for kind, num_layers in stage.counts:
        for matmul in model.kinds[kind].matmuls:
            short, long = sorted((matmul.in_size, matmul.out_size))
            num_matrices = num_layers * matmul.count * matmul.num_groups
            num_iterations = num_matrices * optimizer.num_iterations
            # X X^T, then A A and A X (engine/optimizers/muon.py).
            for rows, in_size, out_size in (
                (short, long, short),
                (short, short, short),
                (short, short, long),
            ):
                seconds = matmul_seconds(device, rows, in_size, out_size, optimizer.wire_bytes)
                product_seconds += num_iterations * seconds
    group = _update_group(layout, machine)
    sent_bytes = [size for size in matrix_exchange(stage, model, layout) if size]
    exchange_seconds = sum(sent_bytes) / group.bandwidth(device)
    exchange_seconds += len(sent_bytes) * group.latency(device)
    return product_seconds / (layout.partition_size * layout.tensor_size) + exchange_seconds


def scale_seconds(
    stage: PlannedStage, model: ModelCosts, layout: Layout, machine: TimedMachine
) -> float:
    """Return the seconds of the all-reduce of the scales of 8-bit moments."""
    scale_bytes = block_bytes(stage_sizes(stage, model, layout), layout)
    if not scale_bytes:
        return 0.0
    return _update_group(layout, machine).all_reduce(machine.device, scale_bytes)


def _update_group(layout: Layout, machine: TimedMachine) -> Group:
    """Return the ranks among which an optimizer exchanges parts of matrices and scales."""
    groups = machine.groups
    return groups.tensor if layout.partition_size == 1 else groups.partition
