"""One of several ranks that have flat ranges of matrices, and bring them together in rounds."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.optimizers import matrix_exchange as module
from bigtrain.engine.optimizers.masters import MasterPart
from bigtrain.engine.optimizers.matrix_exchange import HeldShard, MatrixExchange, pieces_of
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.parallel.hidden_matrices import HiddenMatrix, matrices_of
from bigtrain.models.parallel.sharding import Shard
from bigtrain.settings.sections.optimizer import SplitSection
from bigtrain.system.world import read_world

SHAPES = {"wide": (6, 20), "tall": (40, 3), "stack": (3, 4, 10), "fused": (24, 5)}
SPLITS = {"fused": SplitSection(parts=(2, 4), interleaved=4)}


def num_away(numbered: Any, full: Any, shapes: Any, num_ranks: int) -> int:
    """Elements that are not at the owner of their matrix."""
    owners = module.assign({n: rows * columns for n, (rows, columns) in shapes.items()}, num_ranks)
    flat_owners = []
    for name, tensor in full.items():
        owner = torch.zeros_like(tensor)
        for number, matrix in numbered[name]:
            for box in matrix.boxes:
                pairs = zip(box.offsets, box.sizes, strict=True)
                owner[tuple(slice(low, low + size) for low, size in pairs)] = owners[number]
        flat_owners.append(owner.flatten())
    at = torch.cat(flat_owners)
    edges = [at.numel() * rank // num_ranks for rank in range(num_ranks + 1)]
    return sum(int((at[edges[rank] : edges[rank + 1]] != rank).sum()) for rank in range(num_ranks))


def main(directory: Path, round_elements: int) -> None:
    world = read_world(os.environ)
    module.ROUND_ELEMENTS = round_elements
    hidden = [HiddenMatrix(name, shape, len(shape) - 2) for name, shape in SHAPES.items()]
    matrices = matrices_of(hidden, SPLITS)
    numbered: dict[str, list[tuple[int, Any]]] = {}
    for number, matrix in enumerate(matrices):
        numbered.setdefault(matrix.parameter, []).append((number, matrix))
    full = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
        for name, shape in SHAPES.items()
    }
    # Ranges of all parameters together, as ZeRO 1 cuts them: some ranks have nothing of some.
    total = sum(tensor.numel() for tensor in full.values())
    low, high = (total * rank // world.size for rank in (world.rank, world.rank + 1))
    master = torch.cat([tensor.flatten() for tensor in full.values()])[low:high].clone()
    holdings, begin = [], 0
    for name, tensor in full.items():
        first, last = max(low, begin), min(high, begin + tensor.numel())
        if first < last:
            shard = Shard(tuple(tensor.shape), primary=True)
            place = first - low, last - first, first - begin
            part = MasterPart(master, *place, name=name, shard=shard)
            holdings += [
                HeldShard(piece, lambda _owner: True) for piece in pieces_of(part, 0, numbered)
            ]
        begin += tensor.numel()
    with process_group(world):
        group = dist.group.WORLD
        shapes = {number: matrix.shape for number, matrix in enumerate(matrices)}
        exchange = MatrixExchange(
            shapes, lambda shape: shape[0] * shape[1], holdings, group, torch.device("cpu")
        )
        seen: list[torch.Tensor] = []

        def compute(whole: list[torch.Tensor]) -> list[torch.Tensor]:
            seen.extend(whole)
            held = sum(matrix.numel() for matrix in whole)
            assert held <= round_elements or len(whole) == 1
            return [matrix * matrix.shape[0] for matrix in whole]

        exchange.run(
            torch.float32,
            lambda piece, part: part.copy_(piece.of(master)),
            compute,
            lambda piece, part: piece.of(master).copy_(part),
        )
        counts = torch.tensor([len(seen), exchange.num_elements_sent])
        dist.all_reduce(counts)
        assert int(counts[0]) == len(matrices) == 3 + 2 + 2
        # What an owner has of its own matrices stays where it is.
        assert int(counts[1]) == 2 * num_away(numbered, full, shapes, world.size)
    expected = []
    for number, matrix in enumerate(matrices):
        if matrix.parameter != "fused":
            continue
        assert shapes[number] == ((8, 5), (16, 5))[number - len(matrices) + 2]
    for name, tensor in full.items():
        if name == "fused":
            rows = torch.tensor([8 if row % 6 < 2 else 16 for row in range(24)])
            expected.append((tensor * rows[:, None]).flatten())
        else:
            expected.append((tensor * tensor.shape[-2]).flatten())
    assert torch.equal(master, torch.cat(expected)[low:high])
    (directory / f"{world.rank}.done").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
