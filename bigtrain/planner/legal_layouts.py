"""Legal degrees of a run on a number of devices, and the savings that a layout may have. Pure.

A layout is legal if a run would accept it: by the rules of `bigtrain.settings.compatibility`, the
batch arithmetic, the model's heads and layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bigtrain.planner.layout import Layout
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.teacher_costs import TeacherCosts
from bigtrain.settings.compatibility.check import is_violated
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.degrees import Degrees, ModelDegrees
from bigtrain.settings.fast_path import LayerMachine, choose_fast_path
from bigtrain.settings.sections.model import ModelSection

DerivedFields = Callable[[int, bool, bool], Mapping[str, Any]]
"""Fields of a layout that follow from its ZeRO stage, from whether the optimizer is offloaded, and
from whether there are pipeline stages."""


def _none_derived(zero_stage: int, offloads_optimizer: bool, has_stages: bool) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class SearchSpace:
    """Parameters that determine the layouts of a run. `facts`: facts of the run, for the rules.
    `base`: what all layouts have in common. `varies`: whether loss and buckets may differ from a
    run's defaults. `section`, `machine` and `has_plain_entropies` (of `ObjectiveSection`) decide
    the loss and the kernels. `required`: fields of a layout that are not searched, with their
    values. `derived_fields`: which `base` need not have. `divides_layers`: whether layouts may have
    pipeline stages. `teacher`: in the run, if there is one."""

    model: ModelCosts
    facts: Facts
    base: Layout
    global_batch_size: int
    section: ModelSection
    machine: LayerMachine
    has_plain_entropies: bool = True
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    varies: bool = False
    required: Mapping[str, Any] = field(default_factory=dict)
    derived_fields: DerivedFields = _none_derived
    divides_layers: bool = True
    teacher: TeacherCosts | None = None

    def allows(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a layout may have `fields`."""
        return all(self.required.get(name, value) == value for name, value in fields.items())

    def with_derived_fields(self, layout: Layout) -> Layout:
        """Return `layout` with the fields that follow from its others."""
        has_stages = layout.pipeline_size > 1
        return layout.changed(
            **self.derived_fields(layout.zero_stage, layout.offload_optimizer, has_stages)
        )

    def with_kernels(self, layout: Layout) -> Layout:
        """Return `layout` with the kernels of its layers and its loss."""
        sizes = layout.model_degrees()
        facts = _facts_of(self.facts, layout.zero_stage, layout.world_size, sizes) | Facts(
            tiled_mlp=layout.tiled_mlp, activation_offload=layout.offload_activations
        )
        path = choose_fast_path(self.section, facts, self.machine)
        loss_kernels = path.loss_kernels(
            self.section.loss, has_plain_entropies=self.has_plain_entropies
        )
        return layout.changed(fused_layers=path.fuses_layers, loss_kernels=loss_kernels)


@dataclass(frozen=True, kw_only=True)
class StagedDegrees(Degrees):
    """Degrees of a layout with its ZeRO stage."""

    zero_stage: int


def legal_degrees(
    request: SearchSpace, world_size: int, devices_per_node: int
) -> Iterator[StagedDegrees]:
    """Yield parallel degrees that pass the compatibility rules and divide the batch.

    A run checks plans on a proxy model. A trace shows beforehand: a model without a plan
    is not divided by tensor parallelism, and if a layer has neither attention nor a recurrence
    whose state passes from rank to rank, ranks cannot divide a sample. Sequence parallelism is
    Ulysses, and a ring of as few ranks as the heads need, or one with Ulysses inside of nodes.
    """
    layer_types = request.model.kinds
    has_plan = any(layer.num_parameters_cut for layer in layer_types)
    divides = all(layer.attention is not None or layer.passes_states for layer in layer_types)
    # Degrees that divide the model and the batch.
    shapes: list[Degrees] = []
    for t in divisors(world_size):
        if t > 1 and not (has_plan and all(layer.divides_among(t) for layer in layer_types)):
            continue
        for p in divisors(world_size // t):
            if p > (len(request.model.layers) if request.divides_layers else 1):
                continue
            for s in divisors(world_size // t // p):
                if (s > 1 and not divides) or request.base.sequence_length % s:
                    continue
                sizes = ModelDegrees(tensor_size=t, pipeline_size=p, sequence_size=s)
                degrees = Degrees.of_world(world_size, sizes)
                if request.global_batch_size % degrees.data_size:
                    continue
                shared_size = math.gcd(degrees.partition_size, request.model.num_experts)
                shapes += [
                    replace(degrees, ring_size=ring_size, expert_size=expert_size)
                    for ring_size in _rings(request, t, s, devices_per_node)
                    for expert_size in divisors(shared_size)
                ]
    # Rules differ by stage.
    for zero_stage in request.zero_stages:
        if not request.allows({"zero_stage": zero_stage}):
            continue
        for degrees in shapes:
            if request.allows(degrees.degrees()) and is_legal(request.facts, zero_stage, degrees):
                yield StagedDegrees(zero_stage=zero_stage, **degrees.degrees())


def _rings(
    request: SearchSpace, tensor_size: int, sequence_size: int, devices_per_node: int
) -> list[int]:
    """Return the sizes of the ring to search among `sequence_size` ranks."""
    if "ring_size" in request.required:
        return [request.required["ring_size"]]
    heads = request.facts.attention_heads
    heads_per_rank = sequence_size if heads is None else heads // math.gcd(heads, tensor_size)
    needed = sequence_size // math.gcd(sequence_size, heads_per_rank)
    ranks_per_node = math.gcd(sequence_size, max(1, devices_per_node // tensor_size))
    nodes = sequence_size // ranks_per_node
    # Both divide the number of ranks, and so does their least common multiple.
    return sorted({needed, math.lcm(needed, nodes)})


def is_legal(facts: Facts, zero_stage: int, degrees: Degrees) -> bool:
    """Return whether a run with `degrees` would be accepted."""
    sizes: dict[str, Any] = degrees.model_degrees()
    return not is_violated(_facts_of(facts, zero_stage, degrees.world_size, sizes))


def _facts_of(facts: Facts, zero_stage: int, world_size: int, sizes: Mapping[str, Any]) -> Facts:
    """Return the facts of a run in a layout with the degrees."""
    return facts | Facts(
        zero_stage=zero_stage,
        world_size=world_size,
        **sizes,
    )


def legal_savings(layout: Layout, request: SearchSpace) -> list[dict[str, Any]]:
    """Return the options with which `layout` may fit where recomputation is not enough: MLPs in
    tiles, and offload, in increasing order of offloaded state; with the layers that each fuses."""
    if layout.zero_stage < 1 or layout.pipeline_size > 1:
        return []

    def legal(changes: Facts) -> bool:
        return is_legal(request.facts | changes, layout.zero_stage, layout)

    full = {"recompute": "full"}
    tiles = {**full, "tiled_mlp": "auto"}
    activations = {**full, "offload_activations": True}
    layer_savings: list[dict[str, Any]] = []
    if request.base.tiled_mlp == "off" and legal(Facts(tiled_mlp="auto")):
        layer_savings.append(tiles)
    if legal(Facts(activation_offload=True)):
        layer_savings += [activations, *({**activations, **changes} for changes in layer_savings)]
    for changes in layer_savings:
        with_kernels = request.with_kernels(layout.changed(**changes))
        changes["fused_layers"] = with_kernels.fused_layers
        changes["loss_kernels"] = with_kernels.loss_kernels
    options = list(layer_savings)
    derived = request.derived_fields(layout.zero_stage, True, False)
    optimizer = {"offload_optimizer": True, **derived}
    if legal(Facts(offload_optimizer="cpu")):
        options += [{**optimizer, **changes} for changes in ({}, full, *layer_savings)]
    offloaded = Facts(offload_optimizer="cpu", offload_param="cpu")
    if layout.zero_stage == 3 and legal(offloaded):
        everything = {**optimizer, "offload_parameters": True}
        options += [{**everything, **changes} for changes in (full, *layer_savings)]
    return [changes for changes in options if request.allows(changes)]


def micro_batches(request: SearchSpace, degrees: Degrees) -> list[tuple[int, int]]:
    """Return the micro-batch sizes of layouts with `degrees`, ascending, each with the accumulation
    steps. With more stages than micro-batches a pipeline is mostly bubble."""
    per_rank = request.global_batch_size // degrees.data_size
    least_accumulation = degrees.pipeline_size if degrees.pipeline_size > 1 else 0
    is_held = "micro_batch_size" in request.required
    return [
        (micro, per_rank // micro)
        for micro in divisors(per_rank)
        if (micro <= _MOST_SEARCHED or is_held)
        and per_rank // micro >= least_accumulation
        and request.allows({"micro_batch_size": micro, "num_accumulation": per_rank // micro})
    ]


_MOST_SEARCHED = 64  # samples of a micro-batch, of layouts that no override holds to another


def legal_values(
    request: SearchSpace, num_devices: int, devices_per_node: int, name: str
) -> list[Any]:
    """Return the values of the required field `name` that layouts with all further required fields
    have. name: of a degree, the ZeRO stage or the micro-batch; other fields have no values."""
    required = {key: value for key, value in request.required.items() if key != name}
    if name == "sequence_size":
        required.pop("ring_size", None)
    free, values = replace(request, required=required), set()
    for degrees in legal_degrees(free, num_devices, devices_per_node):
        if name == "micro_batch_size":
            values |= {micro for micro, _ in micro_batches(free, degrees)}
        elif hasattr(degrees, name):
            values.add(getattr(degrees, name))
    return sorted(values)


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
