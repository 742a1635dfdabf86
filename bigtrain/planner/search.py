"""Search for the legal layouts of a run on a number of devices, with their costs, best first.
Pure.

A layout is legal if a run would accept it: by the rules of `bigtrain.settings.compatibility`, the
batch arithmetic, the model's heads and layers. Offload is only considered if no micro-batch size of
the same degrees fits without offload.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bigtrain.planner.layout import Layout, Recompute
from bigtrain.planner.memory import MARGIN, MEMORY_ERROR, MemoryUse, peak_memory, usable_memory
from bigtrain.planner.memory_checkpoints import MemoryCheckpointCosts, memory_checkpoint_costs
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.run_prediction import auto_loss_chunk
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device
from bigtrain.settings.compatibility.check import is_violated
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.degrees import Degrees, ModelDegrees
from bigtrain.settings.fast_path import LayerMachine, choose_fast_path
from bigtrain.settings.sections.model import ModelSection, chunk_tokens


@dataclass(frozen=True)
class Cluster:
    """Devices to plan for. `host_memory`: bytes of a node's main memory; `margin`: share of a
    device's memory that a plan keeps free."""

    device: Device
    num_devices: int
    host_memory: float
    margin: float = MARGIN

    @property
    def usable_memory(self) -> float:
        """Bytes of a device that a layout may take."""
        return usable_memory(self.device.memory_bytes, self.margin)

    @property
    def num_nodes(self) -> int:
        """Nodes with these devices."""
        return self.num_devices // self.ranks_of_host

    @property
    def ranks_of_host(self) -> int:
        """Ranks of a node."""
        return min(self.num_devices, self.device.devices_per_node)

    @property
    def host_memory_per_rank(self) -> float:
        """Bytes of main memory for each rank."""
        return self.host_memory / self.ranks_of_host


@dataclass(frozen=True)
class Candidate:
    """Layout with its costs. The step time is computed lazily: most of thousands of layouts do
    not fit, and their time is never needed."""

    layout: Layout
    memory: MemoryUse
    fits: bool
    _time: Callable[[], StepTime]
    varied: str = ""
    memory_checkpoints: MemoryCheckpointCosts | None = None

    def is_tight(self, cluster: Cluster) -> bool:
        """Return whether the free part of the usable memory is below the mean prediction error."""
        return self.memory.total * (1 + MEMORY_ERROR) > cluster.usable_memory

    def describe(self) -> str:
        """Return a short description of the layout, including non-default loss and buckets."""
        return self.layout.describe() + self.varied

    @functools.cached_property
    def time(self) -> StepTime:
        """Seconds of an optimizer step."""
        return self._time()

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all ranks."""
        rows = self.layout.global_batch_size * self.layout.rows_per_sample
        return rows * self.layout.sequence_length / self.time.total

    @property
    def limit(self) -> str:
        """Name of the step's largest term."""
        terms = self.time.terms()
        return max(terms, key=lambda name: terms[name])


@dataclass(frozen=True)
class SearchSpace:
    """Parameters that determine the layouts of a run. `facts`: facts of the run, for the rules.
    `base`: what all layouts have in common. `varies`: whether loss and buckets may differ from a
    run's defaults. `section`, `machine`: decide
    loss and kernels. `required`: fields of a layout that are not searched, with their values."""

    model: ModelCosts
    facts: Facts
    base: Layout
    global_batch_size: int
    section: ModelSection
    machine: LayerMachine
    zero_stages: Sequence[int] = (0, 1, 2, 3)
    varies: bool = False
    required: Mapping[str, Any] = field(default_factory=dict)

    def allows(self, fields: Mapping[str, Any]) -> bool:
        """Return whether a layout may have `fields`."""
        return all(self.required.get(name, value) == value for name, value in fields.items())

    def with_kernels(self, layout: Layout) -> Layout:
        """Return `layout` with fused layers if a run with the layout fuses them."""
        sizes = layout.model_degrees()
        facts = _facts_of(self.facts, layout.zero_stage, layout.world_size, sizes) | Facts(
            tiled_mlp=layout.tiled_mlp, activation_offload=layout.offload_activations
        )
        fuses = choose_fast_path(self.section, facts, self.machine).fuses_layers
        return layout.changed(fused_layers=fuses)


@dataclass(frozen=True)
class Ranking:
    """Result of a search: feasible layouts, fastest first; rejected layouts, smallest first; and
    the number of larger micro-batches of the rejected ones, which need even more memory and were
    not assessed."""

    fitting: list[Candidate]
    others: list[Candidate]
    num_larger: int

    @property
    def num_others(self) -> int:
        """Number of layouts that do not fit."""
        return len(self.others) + self.num_larger


def search(
    request: SearchSpace, cluster: Cluster, engine: Engine, *, prunes: bool = True
) -> Ranking:
    """Return all legal layouts. A micro-batch that does not fit is the last of these degrees to be
    assessed: every term of memory grows with it (`prunes` False assesses all)."""
    ranking = Ranking([], [], 0)
    larger = 0
    per_node = cluster.device.devices_per_node
    for degrees in _degrees(request, cluster.num_devices, per_node):
        larger += _of_degrees(degrees, request, cluster, engine, ranking, prunes=prunes)
    ranking.fitting.sort(key=_preference)
    if request.varies:
        _vary(ranking, request, cluster, engine)
    ranking.others.sort(key=lambda candidate: candidate.memory.total)
    return replace(ranking, num_larger=larger)


def longest_sample(request: SearchSpace, cluster: Cluster, engine: Engine) -> tuple[int, Ranking]:
    """Return the most tokens of a sample that fit, to a hundredth, and the layouts for them, with
    the fewest samples a step that the devices can share; or 0 tokens and the layouts that do not
    fit. `request` tells everything but these two. Memory grows with the tokens of a sample."""
    grain = math.lcm(_GRAIN, 2 * cluster.num_devices)
    divisors = [n for n in range(1, cluster.num_devices + 1) if cluster.num_devices % n == 0]
    facts = request.facts | Facts(max_positions=None)  # the model's overrides can extend them

    def at(num_grains: int) -> Ranking:
        ranking = Ranking([], [], 0)
        for samples in divisors:
            base = request.base.changed(sequence_length=num_grains * grain)
            longer = replace(request, facts=facts, base=base, global_batch_size=samples)
            ranking = search(longer, cluster, engine)
            if ranking.fitting or ranking.others:
                break
        return ranking

    low, most_grains = 1, _MOST_TOKENS // grain
    best = at(low)
    if not best.fitting:
        return 0, best
    while 2 * low <= most_grains and (larger := at(2 * low)).fitting:
        low, best = 2 * low, larger
    high = 2 * low
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        between = at(middle)
        if between.fitting:
            low, best = middle, between
        else:
            high = middle
    return low * grain, best


_GRAIN = 1024  # tokens
_MOST_TOKENS = 2**30

BUCKETS = (10_000_000, 500_000_000)  # elements, in addition to the run's own


def _vary(ranking: Ranking, request: SearchSpace, cluster: Cluster, engine: Engine) -> None:
    """Test other buckets, and the loss that `auto` would not choose, for layouts within a tenth of
    the fastest; a variant replaces a layout if it is more than a percent faster. If nothing fits,
    test variants of the smallest."""
    least_tokens_per_second = 0.9 * ranking.fitting[0].tokens_per_second if ranking.fitting else 0.0
    for index, candidate in enumerate(ranking.fitting[:_VARIED]):
        if candidate.tokens_per_second < least_tokens_per_second:
            break
        variants = [
            assess(request.model, layout, cluster, engine)
            for layout in _variants(candidate.layout, request)
        ]
        best = max(
            (variant for variant in variants if variant.fits),
            key=lambda c: c.tokens_per_second,
            default=None,
        )
        if best is not None and best.tokens_per_second > 1.01 * candidate.tokens_per_second:
            ranking.fitting[index] = _with_variant_note(best, candidate.layout)
    if not ranking.fitting:
        for candidate in sorted(ranking.others, key=lambda c: c.memory.total)[:_VARIED]:
            for layout in _variants(candidate.layout, request):
                smaller = assess(request.model, layout, cluster, engine)
                if smaller.fits:
                    ranking.fitting.append(_with_variant_note(smaller, candidate.layout))
    ranking.fitting.sort(key=_preference)


_VARIED = 100


def _with_variant_note(candidate: Candidate, usual: Layout) -> Candidate:
    words, layout = "", candidate.layout
    if layout.loss_chunk_tokens != usual.loss_chunk_tokens:
        words += ", plain loss" if layout.loss_chunk_tokens is None else ", chunked loss"
    if layout.reduce_bucket_elements != usual.reduce_bucket_elements:
        words += f", buckets of {layout.reduce_bucket_elements // 10**6}M"
    return replace(candidate, varied=words)


def _variants(layout: Layout, request: SearchSpace) -> Iterator[Layout]:
    """Yield `layout` with each other size of buckets and kind of loss."""
    losses = [layout.loss_chunk_tokens]
    buckets = [request.base.reduce_bucket_elements]
    if "reduce_bucket_elements" not in request.required:
        buckets += BUCKETS
    if request.section.loss == "auto" and not request.model.num_further_losses:
        losses.append(
            chunk_tokens(request.model.vocabulary_size, request.section.loss_chunk_tokens)
            if layout.loss_chunk_tokens is None
            else None
        )
    for loss in losses:
        for bucket in buckets:
            variant = replace(
                layout,
                loss_chunk_tokens=loss,
                reduce_bucket_elements=bucket,
                gather_bucket_elements=bucket,
            )
            if variant != layout:
                yield variant


def _of_degrees(
    degrees: _Degrees,
    request: SearchSpace,
    cluster: Cluster,
    engine: Engine,
    ranking: Ranking,
    *,
    prunes: bool,
) -> int:
    """Add the layouts of `degrees` to `ranking`; return how many were not assessed."""
    too_large: set[Recompute | int] = set()
    roomy, skipped = False, 0
    # Micro-batch sizes, ascending, and their accumulation steps. With more stages than
    # micro-batches a pipeline is mostly bubble.
    per_rank = request.global_batch_size // degrees.data_size
    least_accumulation = degrees.pipeline_size if degrees.pipeline_size > 1 else 0
    micro_sizes = [
        (micro, per_rank // micro)
        for micro in _divisors(per_rank)
        if micro <= 64
        and per_rank // micro >= least_accumulation
        and request.allows({"micro_batch_size": micro})
    ]
    sizes = {**degrees.degrees(), "zero_stage": degrees.zero_stage}
    base = request.base.changed(**{**request.required, **sizes})
    # Which kernels a layout has does not depend on its micro-batch.
    first = request.with_kernels(base)
    savings = [
        {**changes, "fused_layers": request.with_kernels(base.changed(**changes)).fused_layers}
        for changes in _savings(degrees, request)
    ]
    for index, (micro, accumulation) in enumerate(micro_sizes):
        layout = first.changed(
            micro_batch_size=micro,
            num_accumulation=accumulation,
            loss_chunk_tokens=auto_loss_chunk(
                request.section,
                request.model,
                micro * request.base.sequence_length // degrees.sequence_size,
            ),
        )
        candidates = list(_recomputed(layout, request, cluster, engine, too_large))
        if prunes:
            skipped += 2 - sum(1 for c in candidates if c.layout.recompute_every == 1)
        else:
            too_large.clear()
        roomy = roomy or any(candidate.fits for candidate in candidates)
        # Micro-batches of the same degrees ascend. A larger micro-batch that needs offload to fit
        # saves less than the prediction error: 4% of a 70B's step on 64 H100, where the error is
        # 6%.
        if not roomy:
            for smaller in _smaller(layout, savings, request):
                candidate = assess(request.model, smaller, cluster, engine)
                candidates.append(candidate)
                if candidate.fits:
                    break
        for candidate in candidates:
            ranked = ranking.fitting if candidate.fits else ranking.others
            ranked.append(candidate)
        if prunes and not any(candidate.fits for candidate in candidates):
            for larger, _ in micro_sizes[index + 1 :]:
                larger_layout = layout.changed(micro_batch_size=larger)
                skipped += 2 + (0 if roomy else len(_smaller(larger_layout, savings, request)))
            return skipped
    return skipped


def _smaller(
    layout: Layout, savings: Sequence[dict[str, Any]], request: SearchSpace
) -> list[Layout]:
    """Return `layout` with each of `savings`; with tiles only where there is more than one."""
    changed = [layout.changed(**changes) for changes in savings]
    width = request.model.hidden_size
    return [
        smaller_layout
        for smaller_layout in changed
        if smaller_layout.tiled_mlp != "auto" or smaller_layout.num_tiles(width)
    ]


def _recomputed(
    layout: Layout,
    request: SearchSpace,
    cluster: Cluster,
    engine: Engine,
    too_large: set[Recompute | int],
) -> Iterator[Candidate]:
    """Yield `layout` without recomputation and with full recomputation; if only full recomputation
    fits, also with the fewest recomputed layers that fit. `too_large`: recomputation that did not
    fit smaller micro-batches; that which does not fit this one is added."""

    def fits(recompute: Recompute | int, recomputed_layout: Layout) -> Candidate | None:
        if recompute in too_large:
            return None
        candidate = assess(request.model, recomputed_layout, cluster, engine)
        if not candidate.fits:
            too_large.add(recompute)
        return candidate

    if "recompute" in request.required:
        yield assess(request.model, layout, cluster, engine)
        return
    full = layout.changed(recompute="full")
    plain, everything = fits("none", layout), fits("full", full)
    if plain is not None:
        yield plain
    if everything is not None:
        yield everything
    if "none" not in too_large or "full" in too_large:
        return
    for every in _EVERY:
        some = fits(every, full.changed(recompute_every=every))
        if some is not None and some.fits:
            yield some
            return


_EVERY = (4, 3, 2)  # every n-th layer is recomputed


def _preference(candidate: Candidate) -> tuple[int, float, float]:
    """Sort faster layouts first; among layouts within one percent, which predictions cannot
    distinguish, the layout with less memory first."""
    percents = round(math.log(candidate.tokens_per_second) * 100)
    return -percents, candidate.memory.total, -candidate.tokens_per_second


def assess(model: ModelCosts, layout: Layout, cluster: Cluster, engine: Engine) -> Candidate:
    """Return memory and time of a layout."""
    memory = peak_memory(model, layout, engine)
    fits = memory.total <= cluster.usable_memory and memory.host <= cluster.host_memory_per_rank
    time = functools.partial(step_time, model, layout, cluster.device, engine)
    costs = memory_checkpoint_costs(model, layout, cluster.device, engine)
    return Candidate(layout, memory, fits, time, memory_checkpoints=costs)


@dataclass(frozen=True, kw_only=True)
class _Degrees(Degrees):
    zero_stage: int


def _degrees(request: SearchSpace, world_size: int, devices_per_node: int) -> Iterator[_Degrees]:
    """Yield parallel degrees that pass the compatibility rules and divide the batch.

    A run checks plans on a proxy model. A trace shows beforehand: a model without a plan
    is not divided by tensor parallelism, and if a layer has neither attention nor a recurrence
    whose state passes from rank to rank, ranks cannot divide a sample. Sequence parallelism is
    Ulysses, and a ring of as few ranks as the heads need, or one with Ulysses inside of nodes.
    """
    layer_types = request.model.kinds
    has_plan = any(layer.num_parameters_cut for layer in layer_types)
    divides = all(layer.attention is not None or layer.passes_states for layer in layer_types)
    shapes: list[Degrees] = []
    for t in _divisors(world_size):
        if t > 1 and not (has_plan and all(layer.divides_among(t) for layer in layer_types)):
            continue
        for p in _divisors(world_size // t):
            if p > len(request.model.layers):
                continue
            for s in _divisors(world_size // t // p):
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
                    for expert_size in _divisors(shared_size)
                ]
    for zero_stage in request.zero_stages:
        if not request.allows({"zero_stage": zero_stage}):
            continue
        for degrees in shapes:
            if request.allows(degrees.degrees()) and is_legal(request.facts, zero_stage, degrees):
                yield _Degrees(zero_stage=zero_stage, **degrees.degrees())


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
        pipeline_block=False,
        pipeline_settings=(),
    )


def _savings(degrees: _Degrees, request: SearchSpace) -> list[dict[str, Any]]:
    """Return the options with which a layout of `degrees` may fit where recomputation is not
    enough: MLPs in tiles, and offload, in increasing order of offloaded state."""
    if degrees.zero_stage < 1 or degrees.pipeline_size > 1:
        return []

    def legal(changes: Facts) -> bool:
        return is_legal(request.facts | changes, degrees.zero_stage, degrees)

    full = {"recompute": "full"}
    tiles = {**full, "tiled_mlp": "auto"}
    activations = {**full, "offload_activations": True}
    layer_savings: list[dict[str, Any]] = []
    if request.base.tiled_mlp == "off" and legal(Facts(tiled_mlp="auto")):
        layer_savings.append(tiles)
    if legal(Facts(activation_offload=True)):
        layer_savings += [activations, *({**activations, **changes} for changes in layer_savings)]
    options, optimizer = list(layer_savings), {"offload_optimizer": True}
    if legal(Facts(offload_optimizer="cpu")):
        options += [{**optimizer, **changes} for changes in ({}, full, *layer_savings)]
    offloaded = Facts(offload_optimizer="cpu", offload_param="cpu")
    if degrees.zero_stage == 3 and legal(offloaded):
        everything = {**optimizer, "offload_parameters": True}
        options += [{**everything, **changes} for changes in (full, *layer_savings)]
    return [changes for changes in options if request.allows(changes)]


def legal_values(request: SearchSpace, cluster: Cluster, name: str) -> list[Any]:
    """Return the values of the required field `name` that layouts with the other required fields
    have, of a degree, the ZeRO stage or the micro-batch; none of other fields."""
    required = {key: value for key, value in request.required.items() if key != name}
    if name == "sequence_size":
        required.pop("ring_size", None)
    free, values = replace(request, required=required), set()
    for degrees in _degrees(free, cluster.num_devices, cluster.device.devices_per_node):
        if name == "micro_batch_size":
            values |= set(_divisors(request.global_batch_size // degrees.data_size))
        elif hasattr(degrees, name):
            values.add(getattr(degrees, name))
    return sorted(values)


@functools.lru_cache(maxsize=1024)
def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
