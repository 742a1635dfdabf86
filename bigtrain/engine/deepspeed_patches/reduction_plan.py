"""Reduction plan of a bucket of gradients under ZeRO 1 and 2, made once for a sequence of
parameters. `ReductionPlan` has the collectives that DeepSpeed 0.19.8 makes for the bucket
(runtime/zero/stage_1_and_2.py, `average_tensor`, `allreduce_and_scatter`), and the ranges of this
rank's partitions that the bucket fills; `OwnerPlan` has the rank that owns each element."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Slot:
    """Parameter in the partitions of a group. This rank owns `count` of the parameter's `size`
    elements, from `start` on; they are in the group's partition from `begin` on. shares: number of
    elements that each owner has, in the order of ranks. step: the last step in which the gradient
    was added to a bucket. offset: of the parameter in the flat tensor that the partitions of the
    group divide. is_written: whether the partition has the parameter's gradient of this step."""

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
    """`count` elements of a group's partition from `begin` on. pieces: indices of the bucket's
    pieces that fill them; slots: indices of the parameters in the bucket; both in the order of the
    partition."""

    group: int
    begin: int
    count: int
    pieces: list[int]
    slots: list[int]

    def is_before(self, group: int, begin: int) -> bool:
        """Return whether this target ends at element `begin` of a group's partition."""
        return (self.group, self.begin + self.count) == (group, begin)


@dataclass(frozen=True)
class ReductionPlan:
    """Reduction of a bucket of `slots`. reduced: number of elements of each collective, in order.
    pieces: number of elements of each piece into which the reduced bucket is split."""

    slots: list[Slot]
    reduced: list[int]
    pieces: list[int]
    targets: list[Target]


def plan_of(slots: list[Slot], bucket_size: int) -> ReductionPlan:
    """Return the plan of a bucket that holds the concatenated gradients of `slots`. `bucket_size`:
    elements; only a single parameter may be larger."""
    # Split the bucket into pieces: runs of this rank's elements, contiguous both in the bucket and
    # in a partition, and gaps between them, which other ranks own.
    runs: list[Target] = []
    pieces: list[int] = []
    pieces_end = bucket_end = 0  # elements of the bucket: in pieces, and of the slots so far
    for number, slot in enumerate(slots):
        slot_begin = bucket_end + slot.start
        if slot.count:
            is_contiguous = slot_begin == pieces_end
            if runs and is_contiguous and runs[-1].is_before(slot.group, slot.begin):
                runs[-1].count += slot.count
                runs[-1].slots.append(number)
                pieces[-1] += slot.count
            else:
                if not is_contiguous:
                    pieces.append(slot_begin - pieces_end)
                runs.append(Target(slot.group, slot.begin, slot.count, [len(pieces)], [number]))
                pieces.append(slot.count)
            pieces_end = slot_begin + slot.count
        bucket_end += slot.size
    if bucket_end > pieces_end:
        pieces.append(bucket_end - pieces_end)
    # Join runs that are adjacent in a partition: one copy fills the joined range.
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
    shares = slots[0].shares if bucket_end > bucket_size else [bucket_end]
    reduced = [0]
    for share in shares:
        reduced[-1] += share
        if reduced[-1] > bucket_size:
            reduced.append(0)
    return ReductionPlan(slots, [size for size in reduced if size], pieces, targets)


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
        """Append the next piece of the partition."""
        self.pieces.append(piece)
        self.count += piece.count

    def is_before(self, group: int, owner: int, begin: int) -> bool:
        """Return whether this run ends at element `begin` of the partition of `owner`."""
        return (self.group, self.owner, self.begin + self.count) == (group, owner, begin)


@dataclass(frozen=True)
class OwnerPlan:
    """Reduction of a bucket of `slots` to the ranks that own its elements: `runs`, in order."""

    slots: list[Slot]
    runs: list[OwnedRun]


def owner_plan_of(slots: list[Slot], partition_sizes: list[int]) -> OwnerPlan:
    """Return the plan of a bucket of `slots`, in as few runs as possible; runs and order are equal
    on every rank. partition_sizes: elements of a rank's partition, by group."""
    runs: list[OwnedRun] = []
    # In the order of the flat tensors, so that neighbors are in one run.
    order = sorted(range(len(slots)), key=lambda n: (slots[n].group, slots[n].offset))
    for number in order:
        slot = slots[number]
        partition_size = partition_sizes[slot.group]
        start = 0
        while start < slot.size:
            owner, begin = divmod(slot.offset + start, partition_size)
            count = min(slot.size - start, partition_size - begin)
            if not runs or not runs[-1].is_before(slot.group, owner, begin):
                runs.append(OwnedRun(slot.group, owner, begin))
            runs[-1].add(RunPiece(number, start, count))
            start += count
    return OwnerPlan(slots, runs)
