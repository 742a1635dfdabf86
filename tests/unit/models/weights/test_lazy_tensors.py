"""Tensors that are read a rectangle at a time give what the same operations give on real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bigtrain.models.weights import lazy_tensors
from bigtrain.models.weights.lazy_tensors import LazyTensor, Offsets, blocks, narrowed


@dataclass
class Stored:
    """A file with one tensor, that counts what is read of it."""

    tensor: torch.Tensor
    num_elements: int = 0

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        self.num_elements += out.numel()
        out.copy_(narrowed(self.tensor, offsets, tuple(out.shape)))

    def sources(self) -> Iterator[object]:
        yield self


A, B, C = torch.randn(4, 6, 5), torch.randn(4, 6, 5), torch.randn(6, 5)

MOVES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "cat": (lambda x, y: torch.cat([x, y], 1), (A, B)),
    "stack": (lambda x, y: torch.stack([x, y], -1), (A, B)),
    "chunk": (lambda x: torch.chunk(x, 3, dim=1), (A,)),
    "uneven chunk": (lambda x: torch.chunk(x, 3, dim=2), (A,)),
    "split": (lambda x: torch.split(x, [1, 2, 3], dim=1), (A,)),
    "transpose": (lambda x: x.transpose(0, 2).contiguous(), (A,)),
    "T": (lambda x: x.T, (C,)),
    "permute": (lambda x: x.permute(2, 0, 1), (A,)),
    "slice": (lambda x: x[1:3, ..., 2:], (A,)),
    "select": (lambda x: x[-2], (A,)),
    "unbind": (lambda x: x.unbind(1), (A,)),
    "squeeze": (lambda x: x[:1].squeeze(0), (A,)),
    "squeeze all": (lambda x: x[:1, :, :1].squeeze(), (A,)),
    "all": (lambda x: x[...], (A,)),
    "to": (lambda x: x.to(device="cpu", dtype=torch.float64), (A,)),
    "parameter": (lambda x: torch.nn.Parameter(x), (A,)),
    "fused experts": (
        lambda x, y: torch.cat([torch.stack([x, y]), torch.stack([y, x])], 1).transpose(1, 2),
        (C, C + 1),
    ),
    "list of experts": (lambda x: [part.squeeze(0) for part in torch.chunk(x, 4)], (A,)),
}
COMPUTED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "step": (lambda x: x[:, ::2], (A,)),
    "rotary order": (lambda x: x.view(4, 2, 3, 5).transpose(1, 2).reshape(24, 5), (A,)),
    "arithmetic": (lambda x, y: x * 2 + y, (A, B)),
}


@pytest.mark.parametrize("name", [*MOVES, *COMPUTED])
def test_every_rectangle_is_that_of_the_real_result(name: str) -> None:
    function, inputs = (MOVES | COMPUTED)[name]
    real = function(*inputs)
    stored = [Stored(tensor) for tensor in inputs]
    lazy = function(*(LazyTensor(s.tensor.shape, s.tensor.dtype, s) for s in stored))
    if torch.is_tensor(real):
        real, lazy = [real], [lazy]
    assert not any(s.num_elements for s in stored)
    for whole, ours in zip(real, lazy, strict=True):
        assert type(ours) is LazyTensor
        assert (ours.shape, ours.dtype) == (whole.shape, whole.dtype)
        assert torch.equal(ours.read(), whole)
        generator = torch.Generator().manual_seed(3)
        for _ in range(10):
            corner = [int(torch.randint(n, (), generator=generator)) for n in whole.shape]
            sizes = tuple(
                int(torch.randint(1, n - o + 1, (), generator=generator))
                for n, o in zip(whole.shape, corner, strict=True)
            )
            before = sum(s.num_elements for s in stored)
            out = torch.empty(sizes, dtype=whole.dtype)
            ours.fill(tuple(corner), out)
            assert torch.equal(out, narrowed(whole, tuple(corner), sizes))
            if name in MOVES:
                assert sum(s.num_elements for s in stored) - before == out.numel()
        assert {id(s) for s in ours.origin.sources()} <= {id(s) for s in stored}


def test_equality_is_found_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensors, "BLOCK_BYTES", 64)
    other = A.clone()
    other[-1, -1, -1] += 1
    lazy = [LazyTensor(t.shape, t.dtype, Stored(t)) for t in (A, A.clone(), other)]
    assert torch.equal(lazy[0], lazy[1])
    assert not torch.equal(lazy[0], lazy[2])


def test_blocks_cover_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_tensors, "BLOCK_BYTES", 40)
    for shape in ((), (7,), (100,), (3, 4), (2, 30), (3, 2, 50)):
        count = torch.zeros(shape)
        for offsets, sizes in blocks(shape, 4):
            part = narrowed(count, offsets, sizes)
            assert part.numel() <= 10
            part += 1
        assert torch.equal(count, torch.ones(shape))
