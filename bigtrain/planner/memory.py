"""Peak memory of the fullest rank, on its device and in main memory. Pure.

States: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 3, with gradients in the dtype
of their accumulation. Activations: what autograd saves in each layer; under 1F1B stage ``i`` of
``p`` keeps the activations of ``min(p - i, micro-batches)`` micro-batches (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2; interleaved: Korthikanti et al. 2022, arXiv 2205.05198, appendix C).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.stages import (
    PlannedStage,
    StageSizes,
    block_bytes,
    sequence_bytes,
    stage_sizes,
    stages_of,
)
from bigtrain.planner.tables.engines import Engine


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the fullest rank's device at the peak, by kind; they add up to `total`.

    `states`: parameters and optimizer states; `gathered`: parameters that ZeRO 3 has gathered at a
    time, or a 4-bit weight dequantized for its product; `buckets`: of collectives; `loss`: logits
    and their gradient; `teacher`: parameters of a teacher in the run; `context`: of the CUDA
    context and communicators, and memory that the
    allocator reserves and does not use. Main memory of the rank is not in `total`:
    `host_offload`: offloaded masters, moments, gradients and parameters; `host_activations`: inputs
    of recomputed layers; `host_checkpoint`: the copy that is written while training continues;
    `host_memory_checkpoints`: checkpoints in shared memory, with the copy that they are written of;
    `host_export`: on the main rank after training, one file and one layer. A save takes no device
    memory: fragments are copied one by one.
    """

    states: float
    gradients: float
    gathered: float
    buckets: float
    activations: float
    loss: float
    context: float
    host_offload: float
    host_checkpoint: float
    host_export: float
    stage: int
    host_memory_checkpoints: float = 0.0
    host_activations: float = 0.0
    teacher: float = 0.0

    @property
    def host(self) -> float:
        """Bytes of main memory at the peak."""
        while_training = self.host_offload + self.host_activations + self.host_checkpoint
        return max(while_training, self.host_export) + self.host_memory_checkpoints

    def host_terms(self) -> dict[str, float]:
        """Return bytes of main memory by kind."""
        return {
            "offload": self.host_offload,
            "activations": self.host_activations,
            "checkpoint": self.host_checkpoint,
            "memory checkpoints": self.host_memory_checkpoints,
            "export": self.host_export,
        }

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.allocated + self.context

    @property
    def allocated(self) -> float:
        """Bytes of live tensors at the peak."""
        tensor_bytes = self.states + self.gradients + self.gathered + self.buckets
        return tensor_bytes + self.activations + self.loss + self.teacher

    def terms(self) -> dict[str, float]:
        """Return bytes by name, without main memory."""
        names = (
            "states", "gradients", "gathered", "buckets", "activations", "loss", "teacher",
            "context",
        )  # fmt: skip
        return {name: float(getattr(self, name)) for name in names}


MARGIN = 0.05
"""Share of a device's memory that is kept free, to cover prediction errors."""


MEMORY_ERROR = 0.04
"""Mean relative error of predicted memory (docs/planner.md). A layout that leaves less of the
usable memory than that is tight: a plan uses it only if it is selected explicitly."""


def usable_memory(memory_bytes: float, margin: float = MARGIN) -> float:
    """Return the bytes of a device that `MemoryUse.total` may use, for plans and for runs."""
    return memory_bytes * (1 - margin)


def peak_memory(model: ModelCosts, layout: Layout, engine: Engine) -> MemoryUse:
    """Return the memory of the fullest rank. Of identical stages the first has the
    most micro-batches in flight."""
    if layout.fused_layers:
        model = model.with_fused_operations
    stages = stages_of(model, layout.pipeline_size, engine.balances_stages)
    uses = [_stage_memory(stage, model, layout, engine) for stage in stages]
    return max(uses, key=lambda use: use.total)


def largest_checkpoint_part(model: ModelCosts, layout: Layout, engine: Engine) -> float:
    """Return the bytes of a checkpoint that a rank of the stage with the most writes."""
    stages = stages_of(model, layout.pipeline_size, engine.balances_stages)
    return max(_checkpoint_part(stage_sizes(stage, model, layout), layout) for stage in stages)


def _checkpoint_part(sizes: StageSizes, layout: Layout) -> float:
    """Return the bytes of masters and moments of a rank's part of a checkpoint
    (docs/checkpoints.md)."""
    moments = layout.optimizer.bytes_per_parameter(sizes.matrix_share)
    part = (4 + moments) * _divided(sizes.trained, sizes.trained_expert, layout)
    return part + block_bytes(sizes, layout) / layout.partition_size


def _divided(total: float, num_expert: float, layout: Layout) -> float:
    """Return a rank's share of `total` parameters that ZeRO partitions."""
    return (total - num_expert) / layout.partition_size + num_expert / layout.expert_replicas


def _stage_memory(
    stage: PlannedStage, model: ModelCosts, layout: Layout, engine: Engine
) -> MemoryUse:
    """Return the memory of a rank of `stage`."""
    sizes, zero = stage_sizes(stage, model, layout), layout.zero_stage
    num_trained = sizes.trained
    num_divided = _divided(num_trained, sizes.trained_expert, layout)

    # Moments, and float32 masters: of 16-bit parameters, and of any parameters that ZeRO
    # partitions.
    state_bytes = layout.optimizer.bytes_per_parameter(sizes.matrix_share)
    state_bytes += 4 if layout.parameter_bytes < 4 or zero else 0
    optimizer = state_bytes * (num_divided if zero else num_trained)

    # Parameters, 4-bit weights among them, and gradients.
    num_parameters = sizes.total + num_trained if model.is_frozen else sizes.total
    if zero == 3:
        num_stored = _divided(num_parameters, sizes.total_expert, layout)
    else:
        num_stored = num_parameters - sizes.packed
    parameters = layout.parameter_bytes * num_stored + sizes.packed_bytes
    gradients = layout.gradient_bytes * (num_divided if zero >= 2 else num_trained)
    if engine.is_deepspeed and zero == 1 and layout.gradient_bytes > layout.parameter_bytes:
        # BF16_Optimizer adds 16-bit gradients up in float32 and keeps both.
        gradients += num_trained * layout.parameter_bytes

    # Offload moves states to main memory.
    host_offload = offload_buffer = 0.0
    if layout.offload_optimizer:
        offload_buffer = _offload_buffer(model, layout)
        # Masters, moments and float32 gradients; then the accumulated gradients (like the
        # parameters), and the buffer through which the gradient of a parameter is copied.
        host_offload, optimizer = optimizer + 4 * num_divided + offload_buffer, 0.0
        if zero == 3 or layout.num_accumulation > 1:
            host_offload += layout.parameter_bytes * num_divided
        if zero >= 2:
            gradients = layout.parameter_bytes * num_divided if zero == 2 else 0.0
    if layout.offload_parameters:
        host_offload, parameters = host_offload + parameters, 0.0

    # Activations and loss, and the buffers of collectives.
    passes = _pass_bytes(stage, model, layout, engine)
    collectives = _collective_bytes(sizes, model, layout, engine)
    buckets = collectives.buckets
    if _plans_reduction(layout, engine):
        # A bucket is assembled when it is full; by then the backward pass has freed as much memory.
        buckets = max(0.0, buckets - passes.activations - passes.loss)
    elif engine.is_deepspeed and zero == 1 and layout.pipeline_size > 1:
        # DeepSpeed's `reduce_gradients` takes a second bucket after the last backward pass.
        buckets = max(buckets, 2 * buckets - passes.activations - passes.loss)
    buckets += offload_buffer
    gathered = collectives.gathered + model.packed.largest * model.element_bytes

    states = parameters + optimizer + block_bytes(sizes, layout)
    tensor_bytes = states + gradients + gathered + buckets + passes.activations + passes.loss
    checkpoint_bytes = _checkpoint_part(sizes, layout)
    return MemoryUse(
        states=states,
        gradients=gradients,
        gathered=gathered,
        buckets=buckets,
        activations=passes.activations,
        loss=passes.loss,
        context=engine.context_bytes + (engine.reserved - 1.0) * tensor_bytes,
        host_offload=host_offload,
        host_checkpoint=checkpoint_bytes if engine.is_deepspeed and layout.copies_states else 0.0,
        host_export=_export_bytes(model) if engine.is_deepspeed else 0.0,
        stage=stage.index,
        host_memory_checkpoints=checkpoint_bytes * layout.memory_copies,
        host_activations=passes.host_inputs,
    )


@functools.lru_cache(maxsize=64)
def _export_bytes(model: ModelCosts) -> float:
    """Return the bytes of a file's masters and of the largest layer, with which an export is
    verified."""
    if model.is_frozen:  # adapters are verified on the full base (models/export/adapters.py)
        packed = model.packed
        plain = model.num_parameters - packed.num_weights + packed.largest
        return float(model.element_bytes * plain + packed.num_bytes)
    largest = max((layer.num_parameters for layer in model.kinds), default=0)
    table = model.embedding_parameters
    return 4.0 * min(model.num_parameters, _FILE_BYTES / 2) + 4.0 * max(largest, table)


def _layer_bytes(layer: LayerCosts, model: ModelCosts, layout: Layout, engine: Engine) -> float:
    """Return the bytes that autograd saves per layer and micro-batch if the layer as a whole is not
    recomputed."""
    t = layout.tensor_size
    undivided_bytes = layer.saved_bytes_whole / (t if layout.tensor_sequence else 1)
    per_token = undivided_bytes + layer.saved_bytes_cut / t
    if layout.num_tiles(model.hidden_size):  # MLPs in tiles keep nothing
        per_token -= _mlp_bytes(layer, layout)
    keeps_scores = layer.score_bytes and layout.recompute != "attention" and layout.ring_size == 1
    if keeps_scores and layer.attention is not None:
        per_token += (
            layer.score_bytes
            * layer.attention.num_heads
            * layout.sequence_length
            / (t * layout.sequence_size)
        )
    if layout.sequence_size > 1:
        per_token += 4.0 * _SAVED_PER_COLUMN * layer.state_columns / t
    summed = layer.others.summed / t * model.element_bytes
    return engine.saved * per_token * layout.tokens_per_micro_batch + summed


_SAVED_PER_COLUMN = 5
"""Tensors that are as wide as the values and that the gated delta rule saves: values, their product
with the inverse of the triangular system, what is written to the state, the output, and what the
correction reads (models/parallel/transfers.py)."""


def _mlp_bytes(layer: LayerCosts, layout: Layout) -> float:
    """Return the bytes per token that autograd saves inside the MLPs that can be tiled."""
    t, mlp = layout.tensor_size, layer.mlp
    return mlp.saved_bytes_whole / (t if layout.tensor_sequence else 1) + mlp.saved_bytes_cut / t


def _tile_bytes(layer: LayerCosts, model: ModelCosts, layout: Layout, engine: Engine) -> float:
    """Return the bytes of the backward pass of an MLP in tiles (models/layers/tiled_mlp.py): what
    autograd saves for a tile and two gradients of the same width, the gradient of the MLP's input,
    and a tile's gradient of the parameters with its sum in float32."""
    num_tiles = layout.num_tiles(model.hidden_size)
    if num_tiles == 0 or not layer.mlp.products:
        return 0.0
    tokens = layout.tokens_per_micro_batch
    tile = engine.saved * _mlp_bytes(layer, layout) * math.ceil(tokens / num_tiles)
    mlp, size = layer.mlp, model.element_bytes
    weights = 0.0
    if not model.is_frozen:
        dense, expert = mlp.num_parameters, mlp.num_parameters_expert
        bytes_per_parameter = size if num_tiles == 1 else size + 4
        weights = bytes_per_parameter * max(
            dense / layout.tensor_size, expert / layout.expert_parts
        )
    return _TILE_GRADIENTS * tile + size * model.hidden_size * tokens + weights


_TILE_GRADIENTS = 1.5
"""Bytes of a tile in the backward pass, relative to those that are saved for it: of four tensors
that a gated MLP saves there are two gradients at a time."""


@dataclass(frozen=True)
class _PassBytes:
    """Bytes that autograd keeps at the peak of a step: activations, logits with their gradients,
    and inputs of recomputed layers in main memory."""

    activations: float
    loss: float
    host_inputs: float


def _pass_bytes(
    stage: PlannedStage, model: ModelCosts, layout: Layout, engine: Engine
) -> _PassBytes:
    """Return what autograd keeps at the peak.

    The peak is when the loss is computed, or later, when a layer is recomputed and only the logits
    remain of the loss.
    """
    num_micro_batches: float = min(layout.pipeline_size - stage.index, layout.num_accumulation)
    if layout.num_virtual_stages > 1:
        p, v = layout.pipeline_size, layout.num_virtual_stages
        num_micro_batches *= 1.0 + (p - 1) / (p * v)
    hidden_bytes = model.element_bytes * model.hidden_size * layout.tokens_per_micro_batch
    if layout.tensor_sequence:
        hidden_bytes //= layout.tensor_size
    layers = _layers_bytes(stage, model, layout, engine, hidden_bytes)
    saved, host_inputs = layers.saved * num_micro_batches, layers.host_inputs * num_micro_batches
    if not stage.is_last:  # received from the next stage, and sent to the previous one
        return _PassBytes(saved + layers.working + 2 * hidden_bytes, 0.0, host_inputs)
    loss = _loss_bytes(model, layout, engine, hidden_bytes)
    # What follows the layers saves tensors that are freed before the layers' backward pass.
    head_bytes = model.saved_bytes_outside * layout.tokens_per_micro_batch
    if head_bytes + loss.peak >= loss.remaining + layers.working:
        return _PassBytes(saved + head_bytes, loss.peak, host_inputs)
    return _PassBytes(saved + layers.working, loss.remaining, host_inputs)


@dataclass(frozen=True)
class _LayersBytes:
    """Bytes of the layers of a stage: saved per micro-batch, of the backward pass per layer, and
    inputs of recomputed layers in main memory."""

    saved: float
    working: float
    host_inputs: float = 0.0


def _layers_bytes(
    stage: PlannedStage, model: ModelCosts, layout: Layout, engine: Engine, hidden_bytes: int
) -> _LayersBytes:
    saved_by_type = {
        layer_type: _layer_bytes(model.kinds[layer_type], model, layout, engine)
        for layer_type, _ in stage.counts
    }
    all_saved = sum(count * saved_by_type[layer_type] for layer_type, count in stage.counts)
    largest = max(saved_by_type.values(), default=0.0)

    # Memory of a layer's backward pass, inside a ring, a norm, or an MLP in tiles.
    working = 0.0
    if engine.is_deepspeed:
        tokens = layout.tokens_per_micro_batch
        for layer in (model.kinds[layer_type] for layer_type in saved_by_type):
            is_tiled = layout.num_tiles(model.hidden_size)  # MLPs in tiles keep nothing
            mlp_bytes = 0.0 if is_tiled else _mlp_bytes(layer, layout)
            # Before the backward pass of attention the layer has freed what its MLPs saved, and
            # half of what is saved outside of MLPs and not divided by tensor parallelism.
            outside_bytes = layer.saved_bytes_whole - layer.mlp.saved_bytes_whole
            freed = tokens * (mlp_bytes + outside_bytes / 2)
            ring = _ring_bytes(layer, model, layout) - freed
            # The norm before the MLPs has four tensors of the hidden size in float32.
            norm = tokens * (4 * 4.0 * model.hidden_size - mlp_bytes)
            if layout.recompute == "operators":
                norm = 0.0
            working = max(working, ring, norm, _tile_bytes(layer, model, layout, engine))

    if layout.recompute == "operators":
        results = sum(
            count * _results_kept(model.kinds[layer_type], model, layout)
            for layer_type, count in stage.counts
        )
        return _LayersBytes(results, largest / 2 + working)
    if layout.recompute != "full":
        return _LayersBytes(all_saved, working)

    # Recomputed layers save their inputs only. The output of a stage is saved too, for the
    # backward pass from the next stage. `largest` includes the input of the layer that is
    # recomputed: as much as the gradient of the output.
    recomputed = stage.every(layout.recompute_every)
    num_inputs = sum(count for _, count in recomputed) + (1 if layout.pipeline_size > 1 else 0)
    inputs = hidden_bytes * num_inputs
    saved = all_saved - sum(count * saved_by_type[layer_type] for layer_type, count in recomputed)
    if recomputed is stage.counts:
        saved = 0.0
    if layout.offload_activations:
        # On the device are the inputs of the layer that is recomputed and of the next one.
        return _LayersBytes(saved, largest + working + 2 * hidden_bytes, float(inputs))
    return _LayersBytes(saved + inputs, largest + working)


def _ring_bytes(layer: LayerCosts, model: ModelCosts, layout: Layout) -> float:
    """Return the bytes that the backward pass of a ring takes in one layer
    (models/parallel/ring_attention.py): keys and values received, arriving (none in the last of
    two steps) and, half of them, sent; the gradient of the output; in float32 the gradients of
    queries, of keys and values, and of a rank's keys and values as they are computed, sent and, by
    halves, received; and what the kernel of a piece, half of the queries and keys, takes:
    copies, and gradients."""
    if layout.ring_size == 1 or layer.attention is None:
        return 0.0
    attention, element_bytes = layer.attention, model.element_bytes
    num_tokens = layout.tokens_per_micro_batch
    sent_bytes = sequence_bytes(
        attention,
        num_tokens,
        element_bytes,
        tensor_size=layout.tensor_size,
        ulysses_size=layout.ulysses_size,
    )
    num_queries = num_tokens * attention.num_heads * attention.head_size / layout.tensor_size
    query_bytes = element_bytes * num_queries
    kernel_bytes = query_bytes + 1.5 * (query_bytes + sent_bytes.keys)
    bytes_for_queries = (4 + element_bytes) * num_queries
    if layout.ring_size == 2:
        # Gradients are sent when the last kernel has ended.
        kernel_bytes = max(kernel_bytes, 1.5 * sent_bytes.gradients)
        return bytes_for_queries + 1.5 * sent_bytes.keys + 2 * sent_bytes.gradients + kernel_bytes
    return bytes_for_queries + 2.5 * sent_bytes.keys + 3.5 * sent_bytes.gradients + kernel_bytes


def _results_kept(layer: LayerCosts, model: ModelCosts, layout: Layout) -> float:
    """Return the bytes kept per layer and micro-batch under torchtitan's selective activation
    checkpointing by operator: every second product and all operations other than products and
    attention are recomputed; the layer's input and all remaining results are kept."""
    t, width = layout.tensor_size, 0.0
    for m in layer.matmuls:
        width += (
            m.out_size * m.share * m.count / (t if m.cut == "out" or layout.tensor_sequence else 1)
        )
    width /= 2
    width += model.hidden_size / (t if layout.tensor_sequence else 1)
    if layer.attention is not None:
        width += layer.attention.num_heads * layer.attention.value_size / t
    return model.element_bytes * width * layout.tokens_per_micro_batch


@dataclass(frozen=True)
class _LossBytes:
    """Bytes of logits, losses and their gradients at the peak, and of the part that remains in the
    backward pass of the layers."""

    peak: float
    remaining: float


def _loss_bytes(model: ModelCosts, layout: Layout, engine: Engine, hidden_bytes: int) -> _LossBytes:
    """Return the bytes of the loss. Full logits remain in the layers' backward pass. A loss in
    chunks also computes the gradient of the hidden states, of `hidden_bytes`, while it has
    logits."""
    num_tokens, head_sum_bytes = layout.tokens_per_micro_batch, 0.0
    # Gradients of hidden states and head that each further loss, of multi-token prediction, keeps
    # until the backward pass.
    further_bytes = hidden_bytes + model.element_bytes * model.vocabulary_size * model.hidden_size
    further_bytes *= model.num_further_losses
    # Further losses are computed in chunks, also where one chunk has all tokens.
    is_chunked = layout.loss_chunk_tokens is not None or model.num_further_losses > 0
    if is_chunked:
        chunk_tokens = layout.loss_chunk_tokens or num_tokens
        sums_chunks = num_tokens > chunk_tokens or model.num_further_losses > 0
        num_tokens = min(num_tokens, chunk_tokens)
        if model.trains_head:
            # Gradients of the head are added up over the chunks.
            head_elements = model.vocabulary_size * model.hidden_size / layout.tensor_size
            # Of several chunks: the sum and a chunk's gradient, both in float32. Of one chunk, and
            # of Liger's kernel: one gradient in the dtype of the head.
            has_sum = sums_chunks and layout.loss_kernels != "liger"
            head_sum_bytes = (4.0 + 4.0 if has_sum else model.element_bytes) * head_elements
    num_logits = num_tokens * model.vocabulary_size
    if not engine.is_deepspeed:  # as fitted to published runs of other engines
        logit_bytes = engine.logit_bytes_cut / layout.tensor_size + engine.logit_bytes_whole
        return _LossBytes(head_sum_bytes + num_logits * logit_bytes, 0.0)
    # Bytes of a logit in addition to the logit itself.
    added_bytes = {
        # In float32: a copy, its logarithm of the softmax, and the gradient.
        "operators": 12.0,
        # The gradient, in the dtype of the logit.
        "compiled": float(model.element_bytes),
        # The gradient is written over the logit.
        "liger": 0.0,
    }
    # Further losses are not compiled.
    kernels = layout.loss_kernels
    if kernels == "compiled" and model.num_further_losses > 0:
        kernels = "operators"
    logits_bytes = num_logits * (model.element_bytes + added_bytes[kernels])
    if layout.tensor_size > 1:
        # Every rank gathers all columns: the buffer of the gather, and the rank's own columns.
        logits_bytes += num_logits * model.element_bytes * (1 + 1 / layout.tensor_size)
    if is_chunked:
        peak = head_sum_bytes + logits_bytes + hidden_bytes + further_bytes
        return _LossBytes(peak, float(further_bytes))
    return _LossBytes(logits_bytes, num_logits * model.element_bytes)


def _offload_buffer(model: ModelCosts, layout: Layout) -> float:
    """Return the bytes of DeepSpeed's `temp_grad_buffer_for_gpu_offload` (stage_1_and_2.py), for
    ZeRO 1 and 2 with an offloaded optimizer: as large as the largest parameter, on the device and
    in main memory."""
    if layout.zero_stage > 2:
        return 0.0
    largest = 0.0 if model.is_embedding_frozen else model.embedding_parameters / layout.tensor_size
    for layer in model.kinds:
        for product in layer.matmuls:
            if product.is_frozen:
                continue
            parts = layout.expert_parts if product.num_groups > 1 else layout.tensor_size
            size = product.in_size * product.out_size * product.num_groups
            largest = max(largest, size / (parts if product.cut or product.num_groups > 1 else 1))
    return layout.parameter_bytes * largest


@dataclass(frozen=True)
class _CollectiveBytes:
    """Bytes of parameters that ZeRO 3 has gathered at a time, and of the buckets of collectives."""

    gathered: float
    buckets: float


def _collective_bytes(
    sizes: StageSizes, model: ModelCosts, layout: Layout, engine: Engine
) -> _CollectiveBytes:
    nothing = _CollectiveBytes(0.0, 0.0)
    if not engine.has_buckets or layout.zero_stage == 0:
        return nothing
    if not engine.is_deepspeed:
        return _fsdp_bytes(sizes, model, layout)
    if layout.zero_stage == 1 and layout.gradient_bytes > layout.parameter_bytes:
        return nothing  # BF16_Optimizer reduces gradients in place
    # A second bucket if reduction overlaps computation.
    num_buckets = 2 if layout.overlap_communication and layout.zero_stage == 2 else 1
    elements = layout.reduce_bucket_elements
    if _plans_reduction(layout, engine):
        elements = min(elements, math.ceil(sizes.trained))
        num_buckets += layout.zero_stage == 2  # the gradients themselves; ZeRO 1 keeps all
    # Otherwise full buckets, regardless of the model's size.
    bucket_bytes = num_buckets * elements * layout.gradient_bytes
    if layout.zero_stage < 3:
        return _CollectiveBytes(0.0, bucket_bytes)
    # A parameter that is reused within this many elements stays gathered
    # (stage3_max_reuse_distance).
    gathered = min(sizes.total, _MOST_LIVE) * layout.parameter_bytes
    return _CollectiveBytes(gathered, bucket_bytes)


def _plans_reduction(layout: Layout, engine: Engine) -> bool:
    """Return whether bigtrain's own ZeRO 1 and 2 reduction replaces DeepSpeed's.

    See engine/deepspeed_patches/zero12_reduction.py; pipelines do not use it.
    """
    return (
        engine.is_deepspeed
        and layout.zero_stage in (1, 2)
        and not layout.offload_optimizer
        and layout.expert_size == 1
        and layout.pipeline_size == 1
    )


_FILE_BYTES = 5e9  # of 16-bit weights in a file of an export (models/weights/export_hf.py)
_MOST_LIVE = 1e9  # elements; stage3_max_live_parameters and stage3_max_reuse_distance of DeepSpeed


def _fsdp_bytes(sizes: StageSizes, model: ModelCosts, layout: Layout) -> _CollectiveBytes:
    """Return the bytes of engines that gather layer by layer."""
    if layout.partition_size == 1:
        return _CollectiveBytes(0.0, 0.0)
    reduce_bytes = min(layout.reduce_bucket_elements, sizes.total) * layout.gradient_bytes
    if layout.zero_stage < 3:
        num_buckets = 2 if layout.overlap_communication else 1
        gather_bytes = min(layout.gather_bucket_elements, sizes.total) * layout.parameter_bytes
        return _CollectiveBytes(0.0, max(num_buckets * reduce_bytes, gather_bytes))
    embedding = model.embedding_parameters / layout.tensor_size
    gathered = max(2 * sizes.largest_layer, embedding) * layout.parameter_bytes
    return _CollectiveBytes(min(gathered, sizes.total * layout.parameter_bytes), reduce_bytes)
