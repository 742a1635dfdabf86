"""Ring attention: each rank keeps its queries, and gets the keys and values of the other ranks one
rank at a time, while it computes with those it has (Liu et al. 2023, arXiv 2310.01889).

The outputs of blocks are merged by their log-sum-exp in float32. In the backward pass keys and
values are exchanged again, and each rank sends the gradients of the keys that it got back to their
rank, in float32. Sent in step s of R: from rank r to r + s, from which the gradients return.

Shapes: B = samples, H = query heads, K = key heads, t = tokens of a rank, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bigtrain.models.layers.attention_kernels import (
    Band,
    ScoreScaling,
    attend,
    finite,
    gradients,
    merge,
)
from bigtrain.models.parallel.ring_plan import AttentionRectangle, Range, RingBlock, RingPlan

Message = torch.Tensor | None
"""Tensor to send or to receive; None for none."""
Wait = Callable[[], None]
"""Waits until an exchange is done."""


class RingExchange(Protocol):
    """The ranks of a ring, and how two of them exchange."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def start(self, to: int, sent: Message, source: int, received: Message) -> Wait:
        """Begin to send `sent` to rank `to` and to receive `received` from `source`.
        Returns a function that waits for both. Every rank calls it equally often."""


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    plan: RingPlan,
    exchange: RingExchange,
    scores: ScoreScaling,
) -> torch.Tensor:
    """Return the attention of a rank's queries [B, H, t, D] to the keys of all ranks, of which it
    has [B, K, t, D]: [B, H, t, Dv] in the dtype of `query`. `sinks` [H]: scores of a key without a
    value (gpt-oss). Collective over the ring, and so is its backward pass."""
    result: torch.Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, plan, exchange, scores
    )
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: RingPlan,
        exchange: RingExchange,
        scores: ScoreScaling,
    ) -> torch.Tensor:
        shape = (*query.shape[:3], value.shape[-1])
        out = query.new_zeros(shape, dtype=torch.float32)
        lse = query.new_full(shape[:3], -torch.inf, dtype=torch.float32)
        keys = _Keys(key, value, plan, exchange)
        for step in range(exchange.size):
            block = plan.block(exchange.rank, keys.source(step))
            for piece, (k, v) in _with_columns(block, keys.get(step)):
                part = attend(_rows(query, piece), k, v, _band(piece), scores)
                merge(_rows(out, piece), _rows(lse, piece), *part)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.float()[None, :, None])
            out.mul_((lse - total).exp()[..., None])
            lse = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.plan, ctx.exchange, ctx.scores = plan, exchange, scores
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        plan, exchange, (grad_out,) = ctx.plan, ctx.exchange, grads
        of_query, of_key, of_value = (
            torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)
        )
        keys = _Keys(key, value, plan, exchange)
        returns = _Returns(of_key, of_value, plan, exchange)
        for step in range(exchange.size):
            block = plan.block(exchange.rank, keys.source(step))
            states = keys.get(step)
            block_gradients = tuple(torch.zeros_like(x, dtype=torch.float32) for x in states)
            for piece, (k, v) in _with_columns(block, states):
                of_rows, *of_columns = gradients(
                    *(_rows(grad_out, piece), _rows(query, piece), k, v),
                    *(_rows(out, piece), _rows(lse, piece), _band(piece), ctx.scores),
                )
                _rows(of_query, piece).add_(of_rows)
                for total, more in zip(block_gradients, of_columns, strict=True):
                    _columns(total, piece).add_(more)
            returns.put(step, block_gradients)
        returns.finish()
        of_sinks = None
        if sinks is not None:
            delta = (grad_out.float() * out.float()).sum(-1)
            weights = (sinks.float()[None, :, None] - finite(lse)).exp()
            of_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        own = (of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype))
        return *own, of_sinks, None, None, None


class _Keys:
    """Keys and values of the ranks of a ring; those of the next rank arrive while the caller works
    with the current ones, so that two sets exist besides a rank's own."""

    def __init__(
        self, key: torch.Tensor, value: torch.Tensor, plan: RingPlan, exchange: RingExchange
    ) -> None:
        self._own, self._plan, self._exchange = (key, value), plan, exchange
        self._next: tuple[torch.Tensor, torch.Tensor] = self._own
        self._wait: Wait = _nothing
        self._sent: torch.Tensor | None = None

    def source(self, step: int) -> int:
        """Return the rank whose keys are used in step `step`."""
        return (self._exchange.rank - step) % self._exchange.size

    def get(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [B, K, n, D] and values of a step, of the columns of its block, and begin to
        exchange those of the next step."""
        self._wait()
        states = self._next
        if step == 0:
            block = self._plan.block(self._exchange.rank, self._exchange.rank)
            states = (_chosen(self._own[0], block.columns), _chosen(self._own[1], block.columns))
        if step + 1 < self._exchange.size:
            self._start(step + 1)
        return states

    def _start(self, step: int) -> None:
        rank, size = self._exchange.rank, self._exchange.size
        to, source = (rank + step) % size, self.source(step)
        (key, value), sent, received = self._own, None, None
        wanted = self._plan.block(to, rank)
        if wanted.pieces:
            sent = torch.cat([_chosen(x, wanted.columns).flatten() for x in self._own])
        shapes = [
            (*x.shape[:2], self._plan.block(rank, source).num_columns, x.shape[3])
            for x in (key, value)
        ]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        buffer = key.new_empty(sum(sizes))
        if buffer.numel():
            received = buffer
        first, second = buffer.split(sizes)
        self._next = (first.view(shapes[0]), second.view(shapes[1]))
        self._sent = sent  # until it has been waited for
        self._wait = self._exchange.start(to, sent, source, received)


class _Returns:
    """Gradients of keys and values on their way back to the rank whose keys they are."""

    def __init__(
        self,
        of_key: torch.Tensor,
        of_value: torch.Tensor,
        plan: RingPlan,
        exchange: RingExchange,
    ) -> None:
        self._own, self._plan, self._exchange = (of_key, of_value), plan, exchange
        self._arriving: tuple[RingBlock, torch.Tensor] | None = None
        self._sent: torch.Tensor | None = None
        self._wait: Wait = _nothing

    def put(self, step: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the keys of step `step` to their rank, and begin to receive those
        that another rank has found for this one's keys."""
        rank, size = self._exchange.rank, self._exchange.size
        if step == 0:
            self._add(self._plan.block(rank, rank), gradients)
            return
        self.finish()
        to, source = (rank - step) % size, (rank + step) % size
        block = self._plan.block(source, rank)
        widths = sum(x.shape[3] for x in self._own)
        samples, heads = self._own[0].shape[:2]
        arriving = self._own[0].new_empty(samples * heads * block.num_columns * widths)
        sent = torch.cat([x.flatten() for x in gradients]) if gradients[0].numel() else None
        self._arriving, self._sent = (block, arriving), sent
        self._wait = self._exchange.start(to, sent, source, arriving if arriving.numel() else None)

    def finish(self) -> None:
        """Wait for what is on its way and add it to this rank's gradients."""
        self._wait()
        self._wait, self._sent = _nothing, None
        if self._arriving is None:
            return
        (block, arrived), self._arriving = self._arriving, None
        shapes = [(*x.shape[:2], block.num_columns, x.shape[3]) for x in self._own]
        parts = arrived.split([torch.Size(shape).numel() for shape in shapes])
        self._add(block, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def _add(self, block: RingBlock, gradients: Sequence[torch.Tensor]) -> None:
        for total, more in zip(self._own, gradients, strict=True):
            passed = 0
            for start, stop in block.columns:
                total[:, :, start:stop] += more[:, :, passed : passed + stop - start]
                passed += stop - start


def _nothing() -> None:
    pass


def _chosen(states: torch.Tensor, columns: Sequence[Range]) -> torch.Tensor:
    """Return the tokens in `columns` of `states` [B, K, t, D]."""
    parts = [states[:, :, start:stop] for start, stop in columns]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 2) if parts else states[:, :, :0]


def _with_columns(block: RingBlock, states: tuple[torch.Tensor, torch.Tensor]) -> Any:
    """Yield each piece of `block` with its keys and values of `states`."""
    key, value = states
    for piece in block.pieces:
        yield piece, (_columns(key, piece), _columns(value, piece))


def _rows(states: torch.Tensor, piece: AttentionRectangle) -> torch.Tensor:
    (first, last), (start, stop) = piece.samples, piece.rows
    return states[first:last, :, start:stop]


def _columns(states: torch.Tensor, piece: AttentionRectangle) -> torch.Tensor:
    (first, last), (start, stop) = piece.samples, piece.columns
    return states[first:last, :, start:stop]


def _band(piece: AttentionRectangle) -> Band:
    return Band(piece.diagonal, piece.window, piece.is_full, piece.is_causal)
