"""AdamW with moments of 8 bits, bit for bit as bitsandbytes in one process, however cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.fragments import Fragment
from bigtrain.engine.optimizers.adamw_8bit import CODES, AdamW8bit
from bigtrain.engine.optimizers.masters import MasterPart
from bigtrain.engine.optimizers.update_rule import ALLOCATES, Master
from bigtrain.models.parallel.sharding import Shard
from tests.support.tiers import FULL
from tests.unit.models.parallel.test_tensor import shards_of

library = pytest.importorskip("bitsandbytes")

SHAPES = {"matrix": (70, 97), "stack": (4, 42, 50), "vector": (5001,)}
BETAS, EPS, STEPS = (0.9, 0.95), 1e-8, 12 if FULL else 6
GROUP = {"names": list(SHAPES), "lr": 3e-3, "weight_decay": 0.1}
PIECE = 1 << 10  # smaller than the parameters, and not in whole blocks of rows


@dataclass
class Rank:
    """One rank's flat master, as ZeRO 1 and 2 make it of the shards of all parameters."""

    rule: AdamW8bit
    parts: list[MasterPart]
    master: torch.Tensor
    state: dict[str, Any]

    @classmethod
    def of(cls, shards: dict[str, Shard], flat: torch.Tensor, begin: int, end: int) -> Rank:
        master, parts, offset = flat[begin:end].clone(), [], 0
        for name, shard in shards.items():
            size = math.prod(shard.local_shape)
            low, high = max(begin, offset), min(end, offset + size)
            if low < high:
                parts.append(
                    MasterPart(
                        master, low - begin, high - low, low - offset, name=name, shard=shard
                    )
                )
            offset += size
        rule = AdamW8bit(BETAS, EPS, SHAPES, torch.device("cpu"))
        rule.attach(parts)
        rank = cls(rule, parts, master, {})
        rule.update([Master(master, torch.zeros_like(master), rank.state)], GROUP | {ALLOCATES: 1})
        rank.state["step"].zero_()
        return rank

    def cut(self, full: dict[str, torch.Tensor]) -> torch.Tensor:
        own = torch.zeros_like(self.master)
        for part in self.parts:
            local = part.shard.take(full[part.name]).reshape(-1)
            part.of(own).copy_(local[part.start : part.start + part.count])
        return own

    def put(self, tensor: torch.Tensor, kind: str, full: dict[str, torch.Tensor]) -> None:
        for part in self.parts:
            fragment = Fragment(part.name, part.shard, part.start, {kind: part.of(tensor)})
            for box, view in fragment.parts(kind):
                full[part.name][box.slices] = view


def world(values: dict[str, torch.Tensor], dims: dict[str, int], degree: int, zero: int) -> Any:
    """Ranks of `degree` tensor-parallel parts along `dims`, each cut in `zero` partitions."""
    ranks = []
    for number in range(degree):
        shards = {
            name: shards_of(shape, dims[name], 0, degree)[number]
            if name in dims
            else Shard(shape, primary=number == 0)
            for name, shape in SHAPES.items()
        }
        flat = torch.cat([shard.take(values[name]).view(-1) for name, shard in shards.items()])
        size = -(-flat.numel() // zero)
        flat = torch.cat([flat, flat.new_zeros(size * zero - flat.numel())])
        ranks += [Rank.of(shards, flat, at * size, (at + 1) * size) for at in range(zero)]
    return ranks


def step(ranks: Sequence[Rank], gradients: dict[str, torch.Tensor]) -> None:
    """One update of all ranks, which agree on scales in between."""
    masters = [[Master(rank.master, rank.cut(gradients), rank.state)] for rank in ranks]
    for (master,) in masters:
        master.step_count().add_(1)
    names = list(SHAPES)
    scales = [r.rule.new_scales(names, own) for r, own in zip(ranks, masters, strict=True)]
    common = torch.stack(scales).amax(0)
    for rank, own in zip(ranks, masters, strict=True):
        rank.rule.finish(names, own, GROUP, common.clone())


@pytest.fixture(scope="module")
def gradients() -> list[dict[str, torch.Tensor]]:
    """Of sizes that differ from element to element; some rows without any."""
    generator = torch.Generator().manual_seed(1)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.randn(shape, generator=generator).mul_(3).exp_()
        gradient = torch.randn(shape, generator=generator) * size
        gradient[:5] = 0
        return gradient

    return [{name: draw(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]


@pytest.fixture(scope="module")
def expected(gradients: list[dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], Any]:
    """Weights after bitsandbytes' updates, and its states."""
    values = initial()
    optimizer = library.optim.AdamW8bit(
        list(values.values()), GROUP["lr"], BETAS, EPS, weight_decay=GROUP["weight_decay"]
    )
    for gradients_by_name in gradients:
        for name, value in values.items():
            value.grad = gradients_by_name[name].clone()
        optimizer.step()
    return values, {name: optimizer.state[value] for name, value in values.items()}


def initial() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


ROWS, COLUMNS = {"matrix": 0, "stack": 1}, {"matrix": 1, "stack": 2}
CUTS = [
    pytest.param({}, 1, 1, id="whole"),
    pytest.param({}, 1, 3, id="zero of 3", marks=pytest.mark.slow),
    pytest.param(ROWS, 2, 1, id="rows", marks=pytest.mark.slow),
    pytest.param(COLUMNS, 2, 3, id="columns, zero of 3"),
    pytest.param({"matrix": 1, "stack": 0}, 4, 2, id="padded columns, experts, zero of 2"),
]


@pytest.mark.parametrize(("dims", "degree", "zero"), CUTS)
def test_equals_bitsandbytes(
    dims: dict[str, int],
    degree: int,
    zero: int,
    gradients: list[dict[str, torch.Tensor]],
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bigtrain.engine.optimizers.adamw_8bit._CHUNK", PIECE)
    values, states = expected
    ranks = world(initial(), dims, degree, zero)
    for gradients_by_name in gradients:
        step(ranks, gradients_by_name)
    for kind, own in (("master", None), *zip(CODES, ("state1", "state2"), strict=True)):
        dtype = torch.float32 if own is None else torch.uint8
        full = {name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()}
        for rank in ranks:
            rank.put(rank.master if own is None else rank.state[kind], kind, full)
        for name, value in values.items():
            assert torch.equal(full[name], value if own is None else states[name][own]), name
    for rank in ranks:
        for name, scales in rank.rule.small_states():
            for scale, absmax in zip(scales.values(), ("absmax1", "absmax2"), strict=True):
                assert torch.equal(scale, states[name][absmax]), name
