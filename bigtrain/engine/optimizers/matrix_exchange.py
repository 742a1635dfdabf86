"""Full matrices for an optimizer whose masters are sharded by ZeRO and tensor parallelism.

Each matrix has an owner among the ranks that hold it, chosen to balance the computation. The ranks
send the parts of the matrix to the owner, which computes once and sends parts of the result back:
two all-to-alls, in rounds that limit the memory. If ZeRO divides the matrices, a rank sends 2 x
elements / ranks x bytes each way.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
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
    """Rectangle stored in master number `master`, as
    ``master.view(-1)[begin:end].view(sizes)[slices]``."""

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
    """Yield the pieces of `matrices` in `part`, which is stored in master number `master`.
    matrices: for each parameter, its matrices with their numbers."""
    candidates = matrices.get(part.name)
    if not candidates:
        return
    begin = part.offset
    for box in flat_boxes(part.shard.local_shape, part.start, part.count):
        end = begin + box.num_elements
        for full, local in part.shard.to_full(box):
            for number, matrix in candidates:
                # A rectangle of the parameter, and its corner in the matrix.
                for parameter_box, corner in matrix.parts():
                    common = full.intersect(parameter_box)
                    if common is None:
                        continue
                    slices = common.relative_to(full).moved(local.offsets).slices
                    offsets = common.relative_to(parameter_box).offsets[-2:]
                    matrix_box = Box(offsets, common.sizes[-2:]).moved(corner)
                    yield MasterRectangle(number, matrix_box, master, begin, end, box.sizes, slices)
        begin = end


ROUND_ELEMENTS = 1 << 25
"""Elements of matrices that an owner has in memory at a time; a larger matrix has a separate
round."""


_Item = TypeVar("_Item", bound=MatrixBox)


@dataclass(frozen=True)
class HeldShard:
    """Piece that this rank holds. is_sent: returns whether this rank sends the piece to an owner (a
    rank of the group); of the ranks that hold the piece, one sends it."""

    piece: MasterRectangle
    is_sent: Callable[[int], bool]


@dataclass
class _ExchangeRound:
    """Round of an exchange; each list has an entry for each rank of the group. To the owner: pieces
    that this rank sends, and rectangles that it receives as an owner. Back: pieces whose updates
    this rank gets, and rectangles of results that it returns as an owner."""

    size: int
    sent: list[list[MasterRectangle]] = field(default_factory=list)
    received: list[list[MatrixBox]] = field(default_factory=list)
    updates: list[list[MasterRectangle]] = field(default_factory=list)
    returned: list[list[MatrixBox]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for lists in (self.sent, self.received, self.updates, self.returned):
            lists.extend([] for _ in range(self.size))


class MatrixExchange:
    """Exchange that gathers matrices at their owners, computes, and scatters the results.
    num_elements_sent: elements that this rank sends to other ranks in a `run`, in both
    directions."""

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
        round_of_matrix = _rounds(shapes, owners, size)
        num_rounds = max(round_of_matrix.values(), default=-1) + 1
        self._rounds = [_ExchangeRound(size) for _ in range(num_rounds)]
        for holding in holdings:
            number = holding.piece.matrix
            plan, owner = self._rounds[round_of_matrix[number]], owners[number]
            plan.updates[owner].append(holding.piece)
            if holding.is_sent(owner):
                plan.sent[owner].append(holding.piece)
        for plan in self._rounds:
            plan.received = self._announce(plan.sent)
            plan.returned = self._announce(plan.updates)
        # Matrices of this rank by round.
        self._owned: list[list[int]] = [[] for _ in self._rounds]
        for number, owner in owners.items():
            if owner == rank:
                self._owned[round_of_matrix[number]].append(number)
        # Check that every element of a matrix reaches the owner once.
        num_received: dict[int, int] = defaultdict(int)
        for plan in self._rounds:
            for rectangle in chain.from_iterable(plan.received):
                num_received[rectangle.matrix] += rectangle.box.num_elements
        for number in chain.from_iterable(self._owned):
            counts = (number, shapes[number], num_received[number])
            assert num_received[number] == math.prod(shapes[number]), counts
        self.num_elements_sent = 0
        for plan in self._rounds:
            for peer in set(range(size)) - {rank}:
                self.num_elements_sent += _num_elements(plan.sent[peer])
                self.num_elements_sent += _num_elements(plan.returned[peer])

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
            # Send pieces to the owners, and assemble this rank's matrices.
            num_sent = sum(map(_num_elements, plan.sent))
            out = torch.empty(num_sent, dtype=dtype, device=self._device)
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
            out = torch.empty(
                sum(map(_num_elements, plan.returned)), dtype=dtype, device=self._device
            )
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
        received_counts = [_num_elements(items) for items in received]
        sent_counts = [_num_elements(items) for items in sent]
        incoming = out.new_empty(sum(received_counts))
        dist.all_to_all_single(incoming, out, received_counts, sent_counts, group=self._group)
        return incoming

    def _announce(self, lists: Sequence[Sequence[MasterRectangle]]) -> list[list[MatrixBox]]:
        """Send every rank of the group its list; return the lists that the ranks have for this
        rank, as rectangles. Collective."""
        # Rows of five numbers: matrix, offsets and sizes.
        rows = torch.tensor(
            [[p.matrix, *p.box.offsets, *p.box.sizes] for p in chain.from_iterable(lists)],
            dtype=torch.int64,
            device=self._device,
        ).view(-1, 5)
        sent_counts = [len(items) for items in lists]
        received_counts = sent_counts
        if len(lists) > 1:
            num_sent = torch.tensor(sent_counts, device=self._device)
            num_received = torch.empty_like(num_sent)
            dist.all_to_all_single(num_received, num_sent, group=self._group)
            received_counts = num_received.tolist()
            incoming = rows.new_empty(sum(received_counts), 5)
            dist.all_to_all_single(incoming, rows, received_counts, sent_counts, group=self._group)
            rows = incoming
        boxes = iter([MatrixBox(n, Box((y, x), (h, w))) for n, y, x, h, w in rows.tolist()])
        return [list(islice(boxes, count)) for count in received_counts]


def assign(costs: Mapping[int, int], num_owners: int) -> dict[int, int]:
    """Return the owner of each matrix: the matrices, the most expensive first, are assigned to the
    rank with the least work so far."""
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
    """Return the round of each matrix: an owner begins another round if a matrix would exceed
    `ROUND_ELEMENTS`."""
    current_round, round_elements = [0] * num_owners, [0] * num_owners
    round_of_matrix = {}
    for number, (rows, columns) in shapes.items():
        owner = owners[number]
        if round_elements[owner] and round_elements[owner] + rows * columns > ROUND_ELEMENTS:
            current_round[owner] += 1
            round_elements[owner] = 0
        round_elements[owner] += rows * columns
        round_of_matrix[number] = current_round[owner]
    return round_of_matrix


def _num_elements(items: Sequence[MatrixBox]) -> int:
    return sum(item.box.num_elements for item in items)


def _parts(
    buffer: torch.Tensor, lists: Sequence[Sequence[_Item]]
) -> list[tuple[_Item, torch.Tensor]]:
    """Return each item with its part [rows, columns] of a buffer, in which the parts are
    adjacent."""
    items = list(chain.from_iterable(lists))
    sizes = [item.box.num_elements for item in items]
    return [
        (item, part.view(item.box.sizes))
        for item, part in zip(items, buffer.split(sizes), strict=True)
    ]
