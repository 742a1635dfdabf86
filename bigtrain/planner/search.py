"""Search for the legal layouts of a run on a number of devices, with their costs, best first.
Pure.

Offload is only considered if no micro-batch size of the same degrees fits without offload.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.planner.layout import Layout, Recompute
from bigtrain.planner.legal_layouts import (
    SearchSpace,
    StagedDegrees,
    legal_degrees,
    legal_savings,
    micro_batches,
)
from bigtrain.planner.memory import MARGIN, MEMORY_ERROR, MemoryUse, peak_memory, usable_memory
from bigtrain.planner.memory_checkpoints import MemoryCheckpointCosts, memory_checkpoint_costs
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.run_prediction import auto_loss_chunk
from bigtrain.planner.step_time import StepTime, step_time
from bigtrain.planner.tables.engines import Engine
from bigtrain.planner.tables.hardware import Device
from bigtrain.planner.teacher_costs import TeacherCosts
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.sections.model import LossKind, chunk_tokens


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
    not fit, and their time is never needed. `varied`: words on loss and buckets that differ from a
    run's defaults; `loss`: another ``model.loss`` than the run's."""

    layout: Layout
    memory: MemoryUse
    fits: bool
    _time: Callable[[], StepTime]
    varied: str = ""
    loss: LossKind | None = None
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
        return self.layout.tokens_per_step / self.time.total

    @property
    def limit(self) -> str:
        """Name of the step's largest term."""
        terms = self.time.terms()
        return max(terms, key=lambda name: terms[name])


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
    for degrees in legal_degrees(request, cluster.num_devices, per_node):
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
BUCKET_FIELDS = ("reduce_bucket_elements", "gather_bucket_elements")


def _vary(ranking: Ranking, request: SearchSpace, cluster: Cluster, engine: Engine) -> None:
    """Test other buckets, and the loss that `auto` would not choose, for layouts within a tenth of
    the fastest; a variant replaces a layout if it is more than a percent faster. If nothing fits,
    test variants of the smallest."""
    least_tokens_per_second = 0.9 * ranking.fitting[0].tokens_per_second if ranking.fitting else 0.0
    for index, candidate in enumerate(ranking.fitting[:_VARIED]):
        if candidate.tokens_per_second < least_tokens_per_second:
            break
        variants = [
            assess(request.model, layout, cluster, engine, request.teacher)
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
                smaller = assess(request.model, layout, cluster, engine, request.teacher)
                if smaller.fits:
                    ranking.fitting.append(_with_variant_note(smaller, candidate.layout))
    ranking.fitting.sort(key=_preference)


_VARIED = 100


def _with_variant_note(candidate: Candidate, usual: Layout) -> Candidate:
    words, layout, loss = "", candidate.layout, candidate.loss
    if layout.loss_chunk_tokens != usual.loss_chunk_tokens:
        loss = "plain" if layout.loss_chunk_tokens is None else "chunked"
        words += f", {loss} loss"
    if layout.reduce_bucket_elements != usual.reduce_bucket_elements:
        words += f", buckets of {layout.reduce_bucket_elements // 10**6}M"
    return replace(candidate, varied=words, loss=loss)


def _variants(layout: Layout, request: SearchSpace) -> Iterator[Layout]:
    """Yield `layout` with each other size of buckets and kind of loss."""
    losses = [layout.loss_chunk_tokens]
    buckets: list[dict[str, int]] = [{}]
    if "reduce_bucket_elements" not in request.required and layout.zero_stage > 0:
        # ZeRO 3 gathers by parameters.
        names = BUCKET_FIELDS[: 1 if layout.zero_stage == 3 else 2]
        buckets += [dict.fromkeys(names, size) for size in BUCKETS]
    has_choice = request.section.loss == "auto" and not request.facts.scores_samples
    if has_choice and not request.model.num_further_losses:
        losses.append(
            chunk_tokens(request.model.vocabulary_size, request.section.loss_chunk_tokens)
            if layout.loss_chunk_tokens is None
            else None
        )
    for loss in losses:
        is_plain = loss is None and layout.loss_chunk_tokens is not None
        for sizes in buckets:
            variant = layout.changed(
                loss_chunk_tokens=loss,
                loss_kernels="operators" if is_plain else layout.loss_kernels,
                **sizes,
            )
            if variant != layout:
                yield variant


def _of_degrees(
    degrees: StagedDegrees,
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
    micro_sizes = micro_batches(request, degrees)
    sizes = {**degrees.degrees(), "zero_stage": degrees.zero_stage}
    # Which kernels and savings a layout has does not depend on its micro-batch.
    first = request.base.changed(**{**request.required, **sizes})
    first = request.with_kernels(request.with_derived_fields(first))
    savings: list[dict[str, Any]] | None = None
    for index, (micro, accumulation) in enumerate(micro_sizes):
        layout = first.changed(micro_batch_size=micro, num_accumulation=accumulation)
        layout = _with_loss(layout, request)
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
            savings = legal_savings(first, request) if savings is None else savings
            useful = _useful(layout, savings, request)
            smaller = _with_savings(layout, useful, request, cluster, engine, prunes=prunes)
            candidates += smaller
            if smaller and not smaller[-1].fits:
                skipped += len(useful) - len(smaller)
        for candidate in candidates:
            ranked = ranking.fitting if candidate.fits else ranking.others
            ranked.append(candidate)
        if prunes and not any(candidate.fits for candidate in candidates):
            for larger, _ in micro_sizes[index + 1 :]:
                larger_layout = layout.changed(micro_batch_size=larger)
                skipped += 2 + (0 if roomy else len(_useful(larger_layout, savings or (), request)))
            return skipped
    return skipped


def _with_loss(layout: Layout, request: SearchSpace) -> Layout:
    """Return `layout` with the chunks of the loss that a run with these kernels computes."""
    num_tokens, kernels = layout.tokens_per_micro_batch, layout.loss_kernels
    chunk = auto_loss_chunk(request.section, request.model, num_tokens, kernels)
    return layout.changed(loss_chunk_tokens=chunk)


def _with_savings(
    layout: Layout,
    savings: Sequence[dict[str, Any]],
    request: SearchSpace,
    cluster: Cluster,
    engine: Engine,
    *,
    prunes: bool,
) -> list[Candidate]:
    """Return `layout` with each of `savings` up to the first with which it fits. If the device is
    too small even with all savings at once, which are the last, only that layout is assessed
    (`prunes`)."""

    def saving(changes: dict[str, Any]) -> Candidate:
        saving_layout = _with_loss(layout.changed(**changes), request)
        return assess(request.model, saving_layout, cluster, engine, request.teacher)

    if prunes and savings:
        smallest = saving(savings[-1])
        if smallest.memory.total > cluster.usable_memory:
            return [smallest]
    candidates = []
    for changes in savings:
        candidates.append(saving(changes))
        if candidates[-1].fits:
            break
    return candidates


def _useful(
    layout: Layout, savings: Sequence[dict[str, Any]], request: SearchSpace
) -> list[dict[str, Any]]:
    """Return the `savings` of `layout`; with tiles only where there is more than one."""
    has_tiles = layout.changed(tiled_mlp="auto").num_tiles(request.model.hidden_size)
    return [
        changes
        for changes in savings
        if has_tiles or changes.get("tiled_mlp", layout.tiled_mlp) != "auto"
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
        candidate = assess(request.model, recomputed_layout, cluster, engine, request.teacher)
        if not candidate.fits:
            too_large.add(recompute)
        return candidate

    if "recompute" in request.required:
        yield assess(request.model, layout, cluster, engine, request.teacher)
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


def assess(
    model: ModelCosts,
    layout: Layout,
    cluster: Cluster,
    engine: Engine,
    teacher: TeacherCosts | None = None,
) -> Candidate:
    """Return memory and time of a layout, with those of `teacher`."""
    memory = peak_memory(model, layout, engine)
    if teacher is not None:
        memory = teacher.with_parameters(memory, layout, engine)

    def time() -> StepTime:
        seconds = step_time(model, layout, cluster.device, engine)
        if teacher is None:
            return seconds
        return teacher.with_passes(seconds, layout, cluster.device, engine)

    fits = memory.total <= cluster.usable_memory and memory.host <= cluster.host_memory_per_rank
    costs = memory_checkpoint_costs(model, layout, cluster.device, engine)
    return Candidate(layout, memory, fits, time, memory_checkpoints=costs)
