"""Full matrices for an optimizer whose masters are sharded by ZeRO and tensor parallelism.

Each matrix has one owner among the ranks that hold it, chosen to balance the computation. Its parts
are sent to the owner, which computes once and sends parts of the result back: two all-to-alls, in
rounds that bound the memory, of 2 x elements / ranks x bytes each way if ZeRO divides the matrices.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TypeVar

import torch
import torch.distributed as dist

from bigtrain.engine.optimizers.masters import MasterPart
from bigtrain.models.parallel.hidden_matrices import Matrix
from bigtrain.system.boxes import Box, flat_boxes


@dataclass(frozen=True)
class MatrixBox:
    """Rectangle `box` of matrix number `matrix`."""

    matrix: int
    box: Box


@dataclass(frozen=True)
class MasterRectangle(MatrixBox):
    """Rectangle stored in a master: ``master.view(-1)[begin:end].view(sizes)[slices]``."""

    master: int
    begin: int
    end: int
    sizes: tuple[int, ...]
    slices: tuple[slice, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the view [rows, columns] of a tensor that is shaped like the master."""
        shard = flat.view(-1)[self.begin : self.end].view(self.sizes)
        return shard[self.slices].view(self.box.sizes)


def pieces_of(
    part: MasterPart, master: int, matrices: Mapping[str, Sequence[tuple[int, Matrix]]]
) -> Iterator[MasterRectangle]:
    """Yield the pieces of numbered `matrices` that `part` holds, which is stored in master number
    `master`."""
    candidates = matrices.get(part.name)
    if not candidates:
        return
    begin = part.offset
    for box in flat_boxes(part.shard.local_shape, part.start, part.count):
        end = begin + box.num_elements
        for full, local in part.shard.to_full(box):
            for number, matrix in candidates:
                for outer, corner in matrix.parts():
                    common = full.intersect(outer)
                    if common is None:
                        continue
                    slices = common.relative_to(full).moved(local.offsets).slices
                    offsets = common.relative_to(outer).offsets[-2:]
                    inner = Box(offsets, common.sizes[-2:]).moved(corner)
                    yield MasterRectangle(number, inner, master, begin, end, box.sizes, slices)
        begin = end


ROUND_ELEMENTS = 1 << 25
"""Elements of matrices that an owner has in memory at a time; a larger matrix gets its own
round."""


_Item = TypeVar("_Item", bound=MatrixBox)


@dataclass(frozen=True)
class HeldShard:
    """A piece that this rank holds. is_sent: whether this rank sends the piece to an owner (rank in
    the group); one of the ranks that hold it does."""

    piece: MasterRectangle
    is_sent: Callable[[int], bool]


@dataclass
class _ExchangeRound:
    """Per rank of the group: pieces to send and rectangles to receive; then pieces to get back and
    rectangles of results to return."""

    size: int
    sent: list[list[MasterRectangle]] = field(default_factory=list)
    received: list[list[MatrixBox]] = field(default_factory=list)
    updates: list[list[MasterRectangle]] = field(default_factory=list)
    returned: list[list[MatrixBox]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for lists in (self.sent, self.received, self.updates, self.returned):
            lists.extend([] for _ in range(self.size))


class MatrixExchange:
    """Gathers matrices at their owners, computes, and scatters the results. num_elements_sent: that
    this rank sends to others in one `run`, there and back."""

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]],
        cost: Callable[[tuple[int, int]], int],
        holdings: Sequence[HeldShard],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Plan the rounds. Collective over `group`, whose ranks give equal `shapes` by number.
        cost: of computing on a shape, in any unit. holdings: of this rank; over the group each
        element is sent by one rank. device: of the full matrices, one that the group's backend
        takes."""
        self._shapes = shapes
        self._group = group
        self._device = device
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        owners = assign({number: cost(shape) for number, shape in shapes.items()}, size)
        numbers = _rounds(shapes, owners, size)
        self._rounds = [_ExchangeRound(size) for _ in range(max(numbers.values(), default=-1) + 1)]
        for holding in holdings:
            number = holding.piece.matrix
            plan, owner = self._rounds[numbers[number]], owners[number]
            plan.updates[owner].append(holding.piece)
            if holding.is_sent(owner):
                plan.sent[owner].append(holding.piece)
        for plan in self._rounds:
            plan.received = self._announce(plan.sent)
            plan.returned = self._announce(plan.updates)
        self._owned: list[list[int]] = [[] for _ in self._rounds]
        for number, owner in owners.items():
            if owner == rank:
                self._owned[numbers[number]].append(number)
        # Every element of a matrix reaches the owner once.
        received: dict[int, int] = defaultdict(int)
        for plan in self._rounds:
            for box in chain.from_iterable(plan.received):
                received[box.matrix] += box.box.num_elements
        for number in chain.from_iterable(self._owned):
            counts = (number, shapes[number], received[number])
            assert received[number] == math.prod(shapes[number]), counts
        self.num_elements_sent = 0
        for plan in self._rounds:
            for peer in set(range(size)) - {rank}:
                self.num_elements_sent += _numel(plan.sent[peer]) + _numel(plan.returned[peer])

    def run(
        self,
        dtype: torch.dtype,
        read: Callable[[MasterRectangle, torch.Tensor], object],
        compute: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        write: Callable[[MasterRectangle, torch.Tensor], object],
    ) -> None:
        """Compute on every matrix once. Collective over the group. `dtype`: of matrices and
        messages; `read` fills a tensor [rows, columns] with a piece; `compute` returns equally
        shaped matrices; `write` gets every piece of this rank and its part of the result."""
        for plan, owned in zip(self._rounds, self._owned, strict=True):
            # Send pieces to the owners of matrices.
            out = torch.empty(sum(map(_numel, plan.sent)), dtype=dtype, device=self._device)
            for piece, part in _parts(out, plan.sent):
                read(piece, part)
            incoming = self._exchange(out, plan.sent, plan.received)
            matrices = {
                n: torch.empty(self._shapes[n], dtype=dtype, device=self._device) for n in owned
            }
            for rectangle, part in _parts(incoming, plan.received):
                matrices[rectangle.matrix][rectangle.box.slices].copy_(part)
            # Compute, and send every rank the results of its pieces.
            results = dict(zip(owned, compute([matrices[n] for n in owned]), strict=True))
            out = torch.empty(sum(map(_numel, plan.returned)), dtype=dtype, device=self._device)
            for rectangle, part in _parts(out, plan.returned):
                part.copy_(results[rectangle.matrix][rectangle.box.slices])
            incoming = self._exchange(out, plan.returned, plan.updates)
            for piece, part in _parts(incoming, plan.updates):
                write(piece, part)

    def _exchange(
        self,
        out: torch.Tensor,
        sent: Sequence[Sequence[MatrixBox]],
        received: Sequence[Sequence[MatrixBox]],
    ) -> torch.Tensor:
        if len(sent) == 1:
            return out
        counts = [_numel(items) for items in received]
        incoming = out.new_empty(sum(counts))
        dist.all_to_all_single(
            incoming, out, counts, [_numel(items) for items in sent], group=self._group
        )
        return incoming

    def _announce(self, lists: Sequence[Sequence[MasterRectangle]]) -> list[list[MatrixBox]]:
        """Exchange the lists: what each rank of the group lists for this one. Collective."""
        rows = torch.tensor(
            [[p.matrix, *p.box.offsets, *p.box.sizes] for p in chain.from_iterable(lists)],
            dtype=torch.int64,
            device=self._device,
        ).view(-1, 5)
        counts = [len(items) for items in lists]
        if len(lists) > 1:
            num_sent = torch.tensor(counts, device=self._device)
            num_received = torch.empty_like(num_sent)
            dist.all_to_all_single(num_received, num_sent, group=self._group)
            counts = num_received.tolist()
            incoming = rows.new_empty(sum(counts), 5)
            sizes = [len(items) for items in lists]
            dist.all_to_all_single(incoming, rows, counts, sizes, group=self._group)
            rows = incoming
        boxes = [MatrixBox(n, Box((y, x), (h, w))) for n, y, x, h, w in rows.tolist()]
        ends = list(accumulate(counts))
        return [boxes[end - count : end] for end, count in zip(ends, counts, strict=True)]


def assign(costs: Mapping[int, int], num_owners: int) -> dict[int, int]:
    """Return the owner per matrix: the most expensive first, to the rank with the least work so
    far."""
    loads = [(0, owner) for owner in range(num_owners)]
    owners = {}
    for number in sorted(costs, key=lambda n: (-costs[n], n)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + costs[number], owner))
        owners[number] = owner
    return owners


def _rounds(
    shapes: Mapping[int, tuple[int, int]], owners: Mapping[int, int], num_owners: int
) -> dict[int, int]:
    """Return the round per matrix."""
    rounds, filled = [0] * num_owners, [0] * num_owners
    numbers = {}
    for number, (rows, columns) in shapes.items():
        owner = owners[number]
        if filled[owner] and filled[owner] + rows * columns > ROUND_ELEMENTS:
            rounds[owner] += 1
            filled[owner] = 0
        filled[owner] += rows * columns
        numbers[number] = rounds[owner]
    return numbers


def _numel(items: Sequence[MatrixBox]) -> int:
    return sum(item.box.num_elements for item in items)


def _parts(
    buffer: torch.Tensor, lists: Sequence[Sequence[_Item]]
) -> list[tuple[_Item, torch.Tensor]]:
    """Return each item with its part [rows, columns] of a buffer that has them one after the
    other."""
    items = list(chain.from_iterable(lists))
    sizes = [item.box.num_elements for item in items]
    return [
        (item, part.view(item.box.sizes))
        for item, part in zip(items, buffer.split(sizes), strict=True)
    ]
