"""The parts of a stage's matrices that a rank holds, and where in its masters they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from bigtrain.engine.optimizers.masters import MasterPart, rectangles
from bigtrain.models.parallel.hidden_matrices import Box, Matrix


@dataclass(frozen=True)
class Piece:
    """A rectangle of matrix number `matrix` at (row, column), stored in a master.

    It is ``master.view(-1)[begin:end].view(sizes)[where]``.
    """

    matrix: int
    row: int
    column: int
    shape: tuple[int, int]
    master: int
    begin: int
    end: int
    sizes: tuple[int, ...]
    where: tuple[slice, ...]

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view [rows, columns] of a tensor that is shaped like the master."""
        return flat.view(-1)[self.begin : self.end].view(self.sizes)[self.where].view(self.shape)


def pieces_of(
    part: MasterPart, master: int, matrices: Mapping[str, Sequence[tuple[int, Matrix]]]
) -> Iterator[Piece]:
    """The pieces of its parameter's numbered `matrices` that `part`, stored in master number
    `master`, holds."""
    candidates = matrices.get(part.name, ())
    for cut in rectangles(part.shard.local_shape, part.start, part.count) if candidates else ():
        for sub in part.shard.cuts(cut.offsets, cut.sizes):
            for number, matrix in candidates:
                for box in matrix.boxes:
                    common = _common(sub.offsets, sub.sizes, box)
                    if common is None:
                        continue
                    lows, highs = common
                    where = tuple(
                        slice(outer.start + low - offset, outer.start + high - offset)
                        for outer, low, high, offset in zip(
                            sub.where, lows, highs, sub.offsets, strict=True
                        )
                    )
                    row, column = lows[-2] - box.offsets[-2], lows[-1] - box.offsets[-1]
                    if matrix.output_dim == -2:
                        row += box.place
                    else:
                        column += box.place
                    shape = (highs[-2] - lows[-2], highs[-1] - lows[-1])
                    begin, end = part.offset + cut.begin, part.offset + cut.end
                    yield Piece(number, row, column, shape, master, begin, end, cut.sizes, where)


def _common(
    offsets: tuple[int, ...], sizes: tuple[int, ...], box: Box
) -> tuple[list[int], list[int]] | None:
    """[low, high) along each dimension of what a rectangle and a box share; None for nothing."""
    lows = [max(a, b) for a, b in zip(offsets, box.offsets, strict=True)]
    highs = [
        min(a + m, b + n) for a, m, b, n in zip(offsets, sizes, box.offsets, box.sizes, strict=True)
    ]
    return (lows, highs) if all(a < b for a, b in zip(lows, highs, strict=True)) else None
