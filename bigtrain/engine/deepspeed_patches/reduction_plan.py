"""Reduction plan of a bucket of gradients under ZeRO 1 and 2, made once for a row of parameters:
the collectives that DeepSpeed 0.19.8 makes of it (runtime/zero/stage_1_and_2.py, `average_tensor`,
`allreduce_and_scatter`), and the range of this rank's partitions for each of its elements; or the
rank that owns each of them (`OwnerPlan`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter. This rank owns `count` of its `size` elements, from `start` on; they are in
    the group's partition from `begin` on. shares: how many elements each of its ranks owns, in
    order. step: the last one in which its gradient was taken. offset: of the parameter in the flat
    tensor that the partitions of the group divide. is_written: whether the partition has a
    gradient of it in this step."""

    parameter: Any
    group: int
    size: int
    shares: list[int]
    start: int = 0
    begin: int = 0
    count: int = 0
    step: int = 0
    offset: int = 0
    is_written: bool = False


@dataclass(slots=True)
class Target:
    """`count` elements of a group's partition from `begin` on: these pieces of the bucket, which
    are of the parameters with these numbers in it, in the partition's order."""

    group: int
    begin: int
    count: int
    pieces: list[int]
    slots: list[int]

    def is_before(self, group: int, begin: int) -> bool:
        """Return whether it ends where `begin` of a group's partition is."""
        return (self.group, self.begin + self.count) == (group, begin)


@dataclass(frozen=True)
class ReductionPlan:
    """Reduction of a bucket of `slots`: `reduced`, the elements per collective, in order; `pieces`,
    the elements per piece that the reduced bucket is split into."""

    slots: list[Slot]
    reduced: list[int]
    pieces: list[int]
    targets: list[Target]


def plan_of(slots: list[Slot], bucket_size: int) -> ReductionPlan:
    """Return the plan of a bucket that holds the concatenated gradients of `slots`. `bucket_size`:
    elements; only a single parameter may be larger."""
    # Pieces are runs of elements that are contiguous in the bucket and in a partition, and gaps
    # that other ranks own.
    runs: list[Target] = []
    pieces: list[int] = []
    end = total = 0
    for number, slot in enumerate(slots):
        source = total + slot.start
        if slot.count:
            if runs and source == end and runs[-1].is_before(slot.group, slot.begin):
                runs[-1].count += slot.count
                runs[-1].slots.append(number)
                pieces[-1] += slot.count
            else:
                if source > end:
                    pieces.append(source - end)
                runs.append(Target(slot.group, slot.begin, slot.count, [len(pieces)], [number]))
                pieces.append(slot.count)
            end = source + slot.count
        total += slot.size
    if total > end:
        pieces.append(total - end)
    # Ranges of partitions as long as the runs make them: one copy fills each.
    targets: list[Target] = []
    for run in sorted(runs, key=lambda run: (run.group, run.begin)):
        if targets and targets[-1].is_before(run.group, run.begin):
            targets[-1].count += run.count
            targets[-1].pieces += run.pieces
            targets[-1].slots += run.slots
        else:
            targets.append(run)
    # Elements per collective: shares are added until they exceed a bucket, as in
    # `allreduce_and_scatter`, which only a parameter larger than a bucket reaches.
    shares = slots[0].shares if total > bucket_size else [total]
    sizes = [0]
    for share in shares:
        sizes[-1] += share
        if sizes[-1] > bucket_size:
            sizes.append(0)
    return ReductionPlan(slots, [size for size in sizes if size], pieces, targets)


@dataclass(slots=True)
class RunPiece:
    """`count` elements of the bucket's gradient number `number`, from `start` on."""

    number: int
    start: int
    count: int


@dataclass(slots=True)
class OwnedRun:
    """Adjacent `pieces` of a group's flat tensor that rank `owner` of the replicas owns: `count`
    elements of its partition from `begin` on."""

    group: int
    owner: int
    begin: int
    count: int = 0
    pieces: list[RunPiece] = field(default_factory=list)

    def add(self, piece: RunPiece) -> None:
        """Append what is next in the partition."""
        self.pieces.append(piece)
        self.count += piece.count


@dataclass(frozen=True)
class OwnerPlan:
    """Reduction of a bucket of `slots` to the ranks that own its elements: `runs`, in order."""

    slots: list[Slot]
    runs: list[OwnedRun]


def owner_plan_of(slots: list[Slot], partition_sizes: list[int]) -> OwnerPlan:
    """Return the plan of a bucket of `slots`, in as few runs as possible: the same runs in the same
    order on every rank. partition_sizes: elements of a rank's partition, by group."""
    runs: list[OwnedRun] = []
    numbered_slots = sorted(enumerate(slots), key=lambda item: (item[1].group, item[1].offset))
    for number, slot in numbered_slots:
        size = partition_sizes[slot.group]
        start = 0
        while start < slot.size:
            owner, begin = divmod(slot.offset + start, size)
            count = min(slot.size - start, size - begin)
            last = runs[-1] if runs else None
            if (
                last is None
                or (last.group, last.owner) != (slot.group, owner)
                or last.begin + last.count != begin
            ):
                last = OwnedRun(slot.group, owner, begin)
                runs.append(last)
            last.add(RunPiece(number, start, count))
            start += count
    return OwnerPlan(slots, runs)
