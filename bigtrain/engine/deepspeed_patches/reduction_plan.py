"""Reduction plan of a bucket of gradients under ZeRO 1 and 2, made once for a row of parameters:
the collectives that DeepSpeed 0.19.8 makes of it (runtime/zero/stage_1_and_2.py, `average_tensor`,
`allreduce_and_scatter`), and the range of this rank's partitions for each of its elements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter. This rank owns `count` of its `size` elements, from `start` on; they are in
    the group's partition from `begin` on. shares: how many elements each of its ranks owns, in
    order. step: the last one in which its gradient was taken."""

    parameter: Any
    group: int
    size: int
    shares: list[int]
    start: int = 0
    begin: int = 0
    count: int = 0
    step: int = 0


@dataclass(slots=True)
class CopiedRange:
    """`count` elements of a bucket from `source` on belong to a partition from `begin` on."""

    source: int
    group: int
    begin: int
    count: int
    piece: int = 0


@dataclass(frozen=True)
class Target:
    """`count` elements of a group's partition from `begin` on are these pieces of the bucket."""

    group: int
    begin: int
    count: int
    pieces: list[int]


@dataclass(frozen=True)
class ReductionPlan:
    """Reduction of a bucket of `slots`: `reduced`, the elements per collective, in order; `pieces`,
    the elements per piece that the reduced bucket is split into. sources: the slots per target, by
    number in the bucket, in the target's order."""

    slots: list[Slot]
    reduced: list[int]
    pieces: list[int]
    targets: list[Target]
    sources: list[list[int]] = field(default_factory=list, compare=False)


def plan_of(slots: list[Slot], bucket_size: int) -> ReductionPlan:
    """Return the plan of a bucket that holds the concatenated gradients of `slots`. `bucket_size`:
    elements; only a single parameter may be larger."""
    # Runs of elements that are contiguous in the bucket and in a partition.
    runs: list[CopiedRange] = []
    total = 0
    for slot in slots:
        if slot.count:
            _append_run(runs, CopiedRange(total + slot.start, slot.group, slot.begin, slot.count))
        total += slot.size
    # The bucket is split into runs, and gaps that other ranks own.
    pieces: list[int] = []
    end = 0
    for run in runs:
        pieces += [run.source - end] if run.source > end else []
        run.piece = len(pieces)
        pieces.append(run.count)
        end = run.source + run.count
    pieces += [total - end] if total > end else []
    shares = slots[0].shares if total > bucket_size else [total]
    targets = _targets(runs)
    # The slots that fill a target, in its order.
    sources = []
    for target in targets:
        end = target.begin + target.count
        numbers = [
            number
            for number, slot in enumerate(slots)
            if slot.group == target.group and slot.count and target.begin <= slot.begin < end
        ]
        sources.append(sorted(numbers, key=lambda number: slots[number].begin))
    # Elements per collective: shares are added until they exceed a bucket, as in
    # `allreduce_and_scatter`, which only a parameter larger than a bucket reaches.
    sizes = [0]
    for share in shares:
        sizes[-1] += share
        if sizes[-1] > bucket_size:
            sizes.append(0)
    return ReductionPlan(slots, [size for size in sizes if size], pieces, targets, sources)


def _append_run(runs: list[CopiedRange], run: CopiedRange) -> None:
    """Lengthen the last run if `run` follows in the bucket and in the partition."""
    last = runs[-1] if runs else None
    if (
        last is not None
        and (last.group, last.source + last.count) == (run.group, run.source)
        and last.begin + last.count == run.begin
    ):
        last.count += run.count
    else:
        runs.append(run)


def _targets(runs: Iterable[CopiedRange]) -> list[Target]:
    """Ranges of partitions as long as `runs` make them."""
    targets: list[Target] = []
    for run in sorted(runs, key=lambda run: (run.group, run.begin)):
        last = targets[-1] if targets else None
        if last is not None and (last.group, last.begin + last.count) == (run.group, run.begin):
            pieces = [*last.pieces, run.piece]
            targets[-1] = Target(run.group, last.begin, last.count + run.count, pieces)
        else:
            targets.append(Target(run.group, run.begin, run.count, [run.piece]))
    return targets
