"""Exchanges of the ranks that share samples: all-to-all of heads within Ulysses' groups, and from
rank to rank around a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.models.parallel.ring_attention import Exchange, Message, Wait
from bigtrain.models.parallel.ring_plan import Range


@dataclass(frozen=True)
class SequenceExchange:
    """Exchanges of a rank: with all ranks that share its samples, with the ranks of equal rank in
    the ring (Ulysses), and with the ranks of equal rank in Ulysses (the ring). The rank among all
    is ``ring.rank * ulysses.size + ulysses.rank``, so that neighbors exchange heads."""

    everyone: Exchange
    ulysses: Exchange
    ring: Exchange


class GroupExchange:
    """`Exchange` over a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """See `Exchange`."""
        received = torch.empty_like(blocks)
        dist.all_to_all_single(received, blocks, group=self.group)
        return received

    def start(self, destination: int, sent: Message, source: int, received: Message) -> Wait:
        """See `Exchange`."""
        operations = [
            dist.P2POp(operation, tensor, group=self.group, group_peer=peer)
            for operation, tensor, peer in (
                (dist.isend, sent, destination),
                (dist.irecv, received, source),
            )
            if tensor is not None
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


class _AllToAll(torch.autograd.Function):
    """Sends block i of the first dimension to rank i, and receives block i from there. The backward
    pass is another `all_to_all`."""

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
    """Values of every rank, which gets the values' gradient."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, values: torch.Tensor, order: Sequence[Sequence[Range]]
    ) -> torch.Tensor:
        ctx.ranges = order[exchange.rank]
        copies = values.detach().expand(exchange.size, *values.shape)
        parts = exchange.all_to_all(copies.contiguous())
        all_values = values.new_empty(
            values.shape[0], values.shape[1] * exchange.size, *values.shape[2:]
        )
        for part, ranges in zip(parts, order, strict=True):
            passed = 0
            for start, stop in ranges:
                all_values[:, start:stop] = part[:, passed : passed + stop - start]
                passed += stop - start
        return all_values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, torch.cat([gradients[0][:, start:stop] for start, stop in ctx.ranges], 1), None


def all_tokens(
    exchange: Exchange, values: torch.Tensor, order: Sequence[Sequence[Range]]
) -> torch.Tensor:
    """Return [B, T, ...] from the `values` [B, t, ...] of every rank; `order`: the ranks' ranges of
    T. Collective; its backward pass is not."""
    tokens: torch.Tensor = _AllTokens.apply(exchange, values, order)  # type: ignore[no-untyped-call]
    return tokens
