"""Peak memory of the fullest rank, on its device and in main memory. Pure.

States: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 3, with gradients in the dtype
of their accumulation. Activations: what autograd saves in each layer; under 1F1B stage
``i`` of ``p`` keeps those of ``min(p - i, micro-batches)`` micro-batches (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2; interleaved: Korthikanti et al. 2022, arXiv 2205.05198, appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.step_time import (
    matrix_share,
    stage_layers,
    stage_parameters,
    trained_of_stage,
)
from bigtrain.planner.tables.engines import Engine


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the fullest rank's device at the peak, by kind; they add up to `total`.

    `states`: parameters and optimizer states; `gathered`: parameters that ZeRO 3 has gathered at a
    time; `buckets`: of collectives; `loss`: logits and their gradient; `context`: of the CUDA
    context and communicators, and memory that the allocator reserves without using it. Main memory
    of the same rank is not in `total`: `host_offload`; `host_checkpoint`: the copy that is written
    while training continues; `host_export`: on the main rank after training, one file and one
    layer. A save takes no device memory: fragments are copied one by one.
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

    @property
    def host(self) -> float:
        """Bytes of main memory at the peak."""
        return max(self.host_offload + self.host_checkpoint, self.host_export)

    def host_terms(self) -> dict[str, float]:
        """Bytes of main memory by kind."""
        return {
            "offload": self.host_offload,
            "checkpoint": self.host_checkpoint,
            "export": self.host_export,
        }

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.allocated + self.context

    @property
    def allocated(self) -> float:
        """Bytes of live tensors at the peak."""
        named = self.terms()
        return sum(value for name, value in named.items() if name != "context")

    def terms(self) -> dict[str, float]:
        """Bytes on the device by kind."""
        names = [
            entry.name for entry in fields(self) if not entry.name.startswith(("host", "stage"))
        ]
        return {name: float(getattr(self, name)) for name in names}


def peak_memory(model: ModelCosts, layout: Layout, engine: Engine) -> MemoryUse:
    """The memory of the fullest rank of all stages."""
    ranges = stage_layers(model, layout.pipeline_size, balanced=engine.balances_stages)
    uses = [_stage(stage, ranges, model, layout, engine) for stage in range(len(ranges))]
    return max(uses, key=lambda use: use.total)


def _stage(
    stage: int, ranges: Sequence[range], model: ModelCosts, layout: Layout, engine: Engine
) -> MemoryUse:
    layers = ranges[stage]
    held, expert = stage_parameters(layers, model, layout)
    zero = layout.zero_stage
    trained, trained_expert = trained_of_stage(layers, model, layout)
    present = held + trained if model.is_frozen else held

    def share(total: float, of_experts: float) -> float:
        rest = (total - of_experts) / layout.partition_size
        return rest + of_experts / layout.expert_replicas

    divided = share(trained, trained_expert)
    # Moments, and float32 masters where parameters have 16 bits or ZeRO partitions.
    moments = layout.optimizer.bytes_per_parameter(matrix_share(layers, model))
    per_state = moments + (4 if layout.parameter_bytes < 4 or zero else 0)
    optimizer = per_state * (divided if zero else trained)
    parameters = layout.parameter_bytes * (share(present, expert) if zero == 3 else present)
    gradients = layout.gradient_bytes * (divided if zero >= 2 else trained)
    if engine.is_deepspeed and zero == 1 and layout.gradient_bytes > layout.parameter_bytes:
        # BF16_Optimizer adds 16-bit gradients up in float32 and keeps both.
        gradients += trained * layout.parameter_bytes
    host = 0.0
    if layout.offload_optimizer:
        host, optimizer = optimizer + gradients, 0.0
        gradients = gradients if zero < 2 else 0.0
    if layout.offload_parameters:
        host, parameters = host + parameters, 0.0
    is_last = layers.stop == len(model.layers)
    activations, loss = _activations_and_loss(stage, layers, model, layout, engine, is_last)
    gathered, buckets = _buckets(layers, model, layout, engine, held)
    states = parameters + optimizer
    live = states + gradients + gathered + buckets + activations + loss
    context = engine.context_bytes + (engine.reserved - 1.0) * live
    return MemoryUse(
        states,
        gradients,
        gathered,
        buckets,
        activations,
        loss,
        context,
        host,
        # Masters and moments, of what this rank writes (docs/checkpoints.md).
        (4 + moments) * divided if engine.is_deepspeed else 0.0,
        _export(model) if engine.is_deepspeed else 0.0,
        stage,
    )


def _export(model: ModelCosts) -> float:
    """Bytes of one file's masters and of the largest layer, with which an export is verified."""
    if model.is_frozen:  # adapters are verified on the full base (models/export/adapters.py)
        return float(model.element_bytes * model.num_parameters)
    largest = max((kind.num_parameters for kind in model.kinds), default=0)
    table = model.embedding_parameters
    return 4.0 * min(model.num_parameters, _FILE_BYTES / 2) + 4.0 * max(largest, table)


def _layer_bytes(layer: LayerCosts, model: ModelCosts, layout: Layout, engine: Engine) -> float:
    """Bytes that autograd saves of one layer and one micro-batch without recomputation."""
    t = layout.tensor_size
    whole = layer.saved_bytes_whole / (t if layout.tensor_sequence else 1)
    per_token = whole + layer.saved_bytes_cut / t
    if layer.score_bytes and layer.attention is not None and layout.recompute != "attention":
        per_token += (
            layer.score_bytes
            * layer.attention.num_heads
            * layout.sequence_length
            / (t * layout.sequence_size)
        )
    return engine.saved * per_token * layout.tokens_per_micro_batch


def _activations_and_loss(
    stage: int,
    layers: range,
    model: ModelCosts,
    layout: Layout,
    engine: Engine,
    is_last: bool,
) -> tuple[float, float]:
    """Bytes that autograd keeps at the peak, and of the logits at that moment.

    The peak is when the loss is computed, or later, when a layer is recomputed and only the logits
    themselves are left of the loss.
    """
    in_flight = min(layout.pipeline_size - stage, layout.num_accumulation)
    if layout.num_virtual_stages > 1:
        p, v = layout.pipeline_size, layout.num_virtual_stages
        in_flight *= 1.0 + (p - 1) / (p * v)  # type: ignore[assignment]
    hidden = model.element_bytes * model.hidden_size * layout.tokens_per_micro_batch
    if layout.tensor_sequence:
        hidden //= layout.tensor_size
    kept, working = _kept(layers, model, layout, engine, hidden)
    kept *= in_flight
    if is_last:
        kept += model.saved_bytes_outside * layout.tokens_per_micro_batch
    else:
        working += 2 * hidden  # gradients received from the next stage and sent to the previous one
    loss, left = _loss(model, layout, engine) if is_last else (0.0, 0.0)
    if loss >= left + working:
        return kept, loss
    return kept + working, left


def _kept(
    layers: range, model: ModelCosts, layout: Layout, engine: Engine, hidden: int
) -> tuple[float, float]:
    """Bytes kept of a micro-batch in `layers`, and bytes that recomputing one of them takes."""
    sizes = [
        _layer_bytes(model.kinds[model.layers[index]], model, layout, engine) for index in layers
    ]
    largest = max(sizes, default=0.0)
    if layout.recompute == "operators":
        # Every second product's output and all elementwise results are recomputed.
        return sum(sizes) / 2, largest / 2
    if layout.recompute != "full":
        return sum(sizes), 0.0
    anew = sizes[:: layout.recompute_every]
    # A stage also keeps its output, for the gradient that the next stage sends.
    inputs = hidden * (len(anew) + (1 if layout.pipeline_size > 1 else 0))
    return sum(sizes) - sum(anew) + inputs, largest


def _loss(model: ModelCosts, layout: Layout, engine: Engine) -> tuple[float, float]:
    """Peak bytes of logits, losses and their gradients; and of the logits only."""
    tokens, head = layout.tokens_per_micro_batch, 0.0
    if layout.loss_chunk_tokens is not None:
        tokens = min(tokens, layout.loss_chunk_tokens)
        if not model.is_frozen or model.num_trained_outside:
            # Gradients of the head are added up over the chunks.
            head = 8.0 * model.vocabulary_size * model.hidden_size / layout.tensor_size
    logits = tokens * model.vocabulary_size
    if not engine.is_deepspeed:
        each = engine.logit_bytes_cut / layout.tensor_size + engine.logit_bytes_whole
        return head + logits * each, 0.0
    # Logits, their logarithms, and the gradients of both; float32 but for 16-bit logits. Every
    # tensor-parallel rank has all columns, besides its own ones and the buffer it gathered into.
    whole = logits * (model.element_bytes + 12.0)
    if layout.tensor_size > 1:
        whole += logits * model.element_bytes * (1 + 1 / layout.tensor_size)
    return head + whole, head + logits * model.element_bytes


def _buckets(
    layers: range, model: ModelCosts, layout: Layout, engine: Engine, held: float
) -> tuple[float, float]:
    """Bytes that ZeRO 3 has gathered at a time, and of the buckets of collectives."""
    if not engine.has_buckets or layout.zero_stage == 0:
        return 0.0, 0.0
    if not engine.is_deepspeed:
        return _usual_buckets(layers, model, layout, held)
    if layout.zero_stage == 1 and layout.gradient_bytes > layout.parameter_bytes:
        return 0.0, 0.0  # BF16_Optimizer reduces gradients in place
    # Full buckets, however small the model; a second one where reduction overlaps computation.
    num_buckets = 2 if layout.overlap_communication and layout.zero_stage == 2 else 1
    bucket = num_buckets * layout.reduce_bucket_elements * layout.gradient_bytes
    if layout.zero_stage < 3:
        return 0.0, bucket
    # A parameter that is reused within so many elements stays gathered (stage3_max_reuse_distance).
    return min(held, _MOST_LIVE) * layout.parameter_bytes, bucket


_FILE_BYTES = 5e9  # of 16-bit weights in a file of an export (models/weights/export_hf.py)
_MOST_LIVE = 1e9  # elements; stage3_max_live_parameters and stage3_max_reuse_distance of DeepSpeed


def _usual_buckets(
    layers: range, model: ModelCosts, layout: Layout, held: float
) -> tuple[float, float]:
    if layout.partition_size == 1:
        return 0.0, 0.0
    reduce = min(layout.reduce_bucket_elements, held) * layout.gradient_bytes
    if layout.zero_stage < 3:
        twice = 2 if layout.overlap_communication else 1
        gather = min(layout.gather_bucket_elements, held) * layout.parameter_bytes
        return 0.0, max(twice * reduce, gather)
    largest = 0.0
    for index in layers:
        kind = model.kinds[model.layers[index]]
        size = kind.num_parameters_whole + kind.num_parameters_cut / layout.tensor_size
        size += kind.num_parameters_expert / layout.expert_parts
        largest = max(largest, size)
    table = model.embedding_parameters / layout.tensor_size
    live = max(2 * largest, table) * layout.parameter_bytes
    return min(live, held * layout.parameter_bytes), reduce
