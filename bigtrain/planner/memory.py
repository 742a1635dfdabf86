"""What the fullest rank holds at its peak, and what main memory holds. Pure.

States: Rajbhandari et al. 2020, "ZeRO" (arXiv 1910.02054), section 3, with the gradients in the
dtype that they are accumulated in. Activations: of each layer what autograd keeps; under 1F1B stage
``i`` of ``p`` keeps those of ``min(p - i, micro-batches)`` micro-batches (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2; interleaved: Korthikanti et al. 2022, arXiv 2205.05198, appendix C).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bigtrain.planner.engines import Engine
from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import LayerCosts, ModelCosts
from bigtrain.planner.step_time import stage_layers, stage_parameters


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of the fullest rank's device at the peak, by what they are; they add up to `total`.

    `states`: parameters and the optimizer's; `gathered`: of ZeRO 3, whole parameters at a time;
    `buckets`: of collectives; `loss`: logits and their gradient; `saving`: what a save needs
    beside the rest; `context`: of the device's runtime and communicators, and what the allocator
    keeps without using it. `host` is main memory, of the same rank, and not in `total`.
    """

    states: float
    gradients: float
    gathered: float
    buckets: float
    activations: float
    loss: float
    saving: float
    context: float
    host: float
    stage: int

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
        """By name, without what main memory holds."""
        names = [entry.name for entry in fields(self) if entry.name not in ("host", "stage")]
        return {name: float(getattr(self, name)) for name in names}


def peak_memory(model: ModelCosts, layout: Layout, engine: Engine) -> MemoryUse:
    """Of the fullest rank of all stages."""
    ranges = stage_layers(model, layout.pipeline_size, balanced=engine.balances_stages)
    uses = [_stage(stage, ranges, model, layout, engine) for stage in range(len(ranges))]
    return max(uses, key=lambda use: use.total)


def _stage(
    stage: int, ranges: Sequence[range], model: ModelCosts, layout: Layout, engine: Engine
) -> MemoryUse:
    layers = ranges[stage]
    held, _ = stage_parameters(layers, model, layout)
    n = layout.partition_size
    zero = layout.zero_stage
    # Float32 masters beside parameters of 16 bits, and two moments.
    per_state = (4 if layout.parameter_bytes < 4 else 0) + 8
    optimizer = held * per_state / (n if zero else 1)
    parameters = held * layout.parameter_bytes / (n if zero == 3 else 1)
    gradients = held * layout.gradient_bytes / (n if zero >= 2 else 1)
    host = 0.0
    if layout.offload_optimizer:
        host, optimizer = optimizer + gradients, 0.0
        gradients = gradients if zero < 2 else 0.0
    if layout.offload_parameters:
        host, parameters = host + parameters, 0.0
    activations = _activations(stage, layers, model, layout, engine)
    loss = _loss(model, layout, engine) if layers.stop == len(model.layers) else 0.0
    gathered, buckets = _buckets(layers, model, layout, held)
    buckets *= engine.has_buckets
    states = parameters + optimizer
    live = states + gradients + gathered + buckets + activations + loss
    context = engine.context_bytes + (engine.reserved - 1.0) * live
    return MemoryUse(
        states, gradients, gathered, buckets, activations, loss, 0.0, context, host, stage
    )


def _layer_bytes(layer: LayerCosts, model: ModelCosts, layout: Layout, engine: Engine) -> float:
    """Kept of one layer and one micro-batch without recomputation."""
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


def _activations(
    stage: int, layers: range, model: ModelCosts, layout: Layout, engine: Engine
) -> float:
    in_flight = min(layout.pipeline_size - stage, layout.num_accumulation)
    scale = 1.0
    if layout.num_virtual_stages > 1:
        p, v = layout.pipeline_size, layout.num_virtual_stages
        scale = 1.0 + (p - 1) / (p * v)
    sizes = [
        _layer_bytes(model.kinds[model.layers[index]], model, layout, engine) for index in layers
    ]
    hidden = model.element_bytes * model.hidden_size * layout.tokens_per_micro_batch
    if layout.tensor_sequence:
        hidden //= layout.tensor_size
    largest = max(sizes, default=0.0)
    # Of a stage its output is kept too, for the backward pass that comes in from the next one.
    kept_hidden = hidden * (len(layers) + (1 if layout.pipeline_size > 1 else 0))
    if layout.recompute == "full" and layout.recompute_every == 1:
        return scale * in_flight * kept_hidden + largest
    kept = sum(sizes)
    if layout.recompute == "full":
        anew = sum(sizes[:: layout.recompute_every])
        kept += kept_hidden - anew
        return scale * in_flight * kept + largest
    if layout.recompute == "operators":
        # Every second product's output and all elementwise results are computed anew.
        kept = kept / 2 + largest / 2
    return scale * in_flight * kept + 2 * hidden


def _loss(model: ModelCosts, layout: Layout, engine: Engine) -> float:
    tokens = layout.tokens_per_micro_batch
    if layout.loss_chunk_tokens is not None:
        tokens = min(tokens, layout.loss_chunk_tokens)
    bytes_each = engine.logit_bytes_cut / layout.tensor_size + engine.logit_bytes_whole
    return tokens * model.vocabulary_size * bytes_each


def _buckets(layers: range, model: ModelCosts, layout: Layout, held: float) -> tuple[float, float]:
    """What ZeRO 3 has gathered at a time, and the buckets of collectives."""
    if layout.partition_size == 1:
        return 0.0, 0.0
    reduce = min(layout.reduce_bucket_elements, held) * layout.gradient_bytes
    if layout.zero_stage == 3:
        largest = 0.0
        for index in layers:
            kind = model.kinds[model.layers[index]]
            size = kind.num_parameters_whole + kind.num_parameters_cut / layout.tensor_size
            size += kind.num_parameters_expert / (layout.tensor_size * layout.expert_size)
            largest = max(largest, size)
        table = model.embedding_parameters / layout.tensor_size
        live = max(2 * largest, table) * layout.parameter_bytes
        return min(live, held * layout.parameter_bytes), reduce
    if layout.zero_stage == 0:
        return 0.0, 0.0
    twice = 2 if layout.overlap_communication else 1
    gather = min(layout.gather_bucket_elements, held) * layout.parameter_bytes
    return 0.0, max(twice * reduce, gather)
