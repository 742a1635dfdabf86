"""Exchanges of the ranks that share samples: all-to-all of heads within Ulysses' groups, and from
rank to rank around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from bigtrain.models.parallel.ring_attention import Message, RingExchange, Wait
from bigtrain.models.parallel.ring_plan import Range


class Exchange(Protocol):
    """The ranks that share samples, and how they exchange."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """Send ``blocks[i]`` to rank i; block i of the result came from there. Collective."""


@dataclass(frozen=True)
class SequenceExchange:
    """Exchanges of a rank: with all that share its samples, and with those of them that have the
    same rank in the ring (Ulysses) or the same one in Ulysses (the ring). The rank among all is
    ``ring.rank * ulysses.size + ulysses.rank``, so that neighbors exchange heads."""

    everyone: Exchange
    ulysses: Exchange
    ring: RingExchange

    @classmethod
    def of_ulysses(cls, exchange: Exchange) -> Self:
        """Return the exchanges of ranks without a ring."""
        return cls(exchange, exchange, _Alone())


class _Alone:
    """Ring of one rank."""

    size, rank = 1, 0

    def start(self, *_: Any) -> Wait:
        raise AssertionError("a rank alone exchanges nothing")


class GroupExchange:
    """Exchange over a process group: `Exchange` and `RingExchange`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `Exchange`."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received

    def start(self, to: int, sent: Message, source: int, received: Message) -> Wait:
        """See `RingExchange`."""
        operations = [
            dist.P2POp(kind, tensor, group=self.group, group_peer=peer)
            for kind, tensor, peer in ((dist.isend, sent, to), (dist.irecv, received, source))
            if tensor is not None
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


class _AllToAll(torch.autograd.Function):
    """Block i of the first dimension goes to rank i, and comes from it. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, blocks: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.all_to_all(blocks.contiguous())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, all_to_all(ctx.exchange, gradients[0])


def all_to_all(exchange: Exchange, blocks: torch.Tensor) -> torch.Tensor:
    """Return block i from rank i, differentiable. Collective, and so is its backward pass."""
    received: torch.Tensor = _AllToAll.apply(exchange, blocks)  # type: ignore[no-untyped-call]
    return received


class _AllTokens(torch.autograd.Function):
    """The values of all ranks; each takes back the gradient of its own."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, values: torch.Tensor, order: Sequence[Sequence[Range]]
    ) -> torch.Tensor:
        ctx.own = order[exchange.rank]
        copies = values.detach().expand(exchange.size, *values.shape)
        parts = exchange.all_to_all(copies.contiguous())
        whole = values.new_empty(
            values.shape[0], values.shape[1] * exchange.size, *values.shape[2:]
        )
        for part, places in zip(parts, order, strict=True):
            passed = 0
            for start, stop in places:
                whole[:, start:stop] = part[:, passed : passed + stop - start]
                passed += stop - start
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, torch.cat([gradients[0][:, start:stop] for start, stop in ctx.own], 1), None


def all_tokens(
    exchange: Exchange, values: torch.Tensor, order: Sequence[Sequence[Range]]
) -> torch.Tensor:
    """Return [B, T, ...] of `values` [B, t, ...] of each rank; `order`: each rank's ranges of T.
    Collective; its backward pass is not."""
    whole: torch.Tensor = _AllTokens.apply(exchange, values, order)  # type: ignore[no-untyped-call]
    return whole
