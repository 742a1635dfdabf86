"""Ring attention: each rank keeps its queries, and receives the keys and values of every rank, one
rank at a time, while it computes with the previous rank's (Liu et al. 2023, arXiv 2310.01889).

The outputs of blocks are merged by their log-sum-exp in float32. In the backward pass, ranks
exchange keys and values again, and each rank returns the gradients of received keys and values to
the keys' rank, in float32. In step s of R, rank r sends keys to rank r + s, which returns the
gradients.

Shapes: B = samples, H = query heads, K = key heads, t = tokens of a rank, D = width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bigtrain.models.layers.attention_kernels import (
    AttentionOutput,
    AttentionStates,
    Band,
    ScoreScaling,
    attend,
    finite,
    gradients,
    merge,
)
from bigtrain.models.parallel.ring_plan import AttentionRectangle, Range, RingBlock, RingPlan

Message = torch.Tensor | None
"""Tensor to send or to receive, if any."""
Wait = Callable[[], None]
"""Waits until an exchange is done."""


class Exchange(Protocol):
    """Ranks that share samples, and their exchanges."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def all_to_all(self, blocks: torch.Tensor) -> torch.Tensor:
        """Send ``blocks[i]`` to rank i; block i of the result comes from rank i. Collective."""

    def start(self, destination: int, sent: Message, source: int, received: Message, /) -> Wait:
        """Begin to send `sent` to rank `destination` and to receive `received` from `source`.
        Returns a function that waits for both. Every rank calls `start` equally often."""


@dataclass(frozen=True)
class _Ring:
    """Work of the ranks of a ring, their exchange, and the scaling of scores."""

    plan: RingPlan
    exchange: Exchange
    scores: ScoreScaling

    def source(self, step: int) -> int:
        """Return the rank whose keys are used in step `step`."""
        return (self.exchange.rank - step) % self.exchange.size

    def destination(self, step: int) -> int:
        """Return the rank that uses this rank's keys in step `step`."""
        return (self.exchange.rank + step) % self.exchange.size


def ring_attention(
    states: AttentionStates,
    sinks: torch.Tensor | None,
    plan: RingPlan,
    exchange: Exchange,
    scores: ScoreScaling,
) -> torch.Tensor:
    """Return the attention [B, H, t, Dv] of a rank's queries [B, H, t, D] to the keys of every
    rank, in the dtype of the queries. `states`: the rank's queries, keys [B, K, t, D] and values.
    `sinks` [H]: scores of a key without a value (gpt-oss). Forward and backward pass are collective
    over the ring."""
    ring = _Ring(plan, exchange, scores)
    result: torch.Tensor = _RingAttention.apply(ring, sinks, *states)  # type: ignore[no-untyped-call]
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ring: _Ring, sinks: torch.Tensor | None, *states: torch.Tensor
    ) -> torch.Tensor:
        query, key, value = states
        shape = (*query.shape[:3], value.shape[-1])
        out = query.new_zeros(shape, dtype=torch.float32)
        lse = query.new_full(shape[:3], -torch.inf, dtype=torch.float32)

        # Merge the attention to the keys of one rank after another into `out` and `lse`.
        keys = _RankKeys(key, value, ring)
        for step in range(ring.exchange.size):
            block = ring.plan.block(ring.exchange.rank, ring.source(step))
            rank_keys, rank_values = keys.get(step)
            for piece in block.pieces:
                piece_states = AttentionStates(
                    _rows(query, piece), _columns(rank_keys, piece), _columns(rank_values, piece)
                )
                piece_output = attend(piece_states, _band(piece), ring.scores)
                merge(AttentionOutput(_rows(out, piece), _rows(lse, piece)), piece_output)

        # A sink adds exp(sink) to the softmax's denominator, and nothing to the output.
        if sinks is not None:
            lse_with_sink = torch.logaddexp(lse, sinks.float()[None, :, None])
            out.mul_((lse - lse_with_sink).exp()[..., None])
            lse = lse_with_sink
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        ring, (grad_out,) = ctx.ring, grads
        grad_query, grad_key, grad_value = (
            torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)
        )

        # Queries' gradients stay; gradients of keys and values return to the keys' rank.
        keys = _RankKeys(key, value, ring)
        returned = _ReturnedGradients(grad_key, grad_value, ring)
        for step in range(ring.exchange.size):
            block = ring.plan.block(ring.exchange.rank, ring.source(step))
            rank_states = keys.get(step)
            rank_gradients = tuple(torch.zeros_like(x, dtype=torch.float32) for x in rank_states)
            for piece in block.pieces:
                piece_keys, piece_values = (_columns(x, piece) for x in rank_states)
                grad_rows, *grad_columns = gradients(
                    AttentionStates(_rows(query, piece), piece_keys, piece_values),
                    AttentionOutput(_rows(out, piece), _rows(lse, piece)),
                    _rows(grad_out, piece),
                    _band(piece),
                    ring.scores,
                )
                _rows(grad_query, piece).add_(grad_rows)
                for total, piece_gradient in zip(rank_gradients, grad_columns, strict=True):
                    _columns(total, piece).add_(piece_gradient)
            returned.put(step, rank_gradients)
        returned.finish()

        # d sink = -sum of exp(sink - lse) * (dO . O), since the sink's value is zero.
        grad_sinks = None
        if sinks is not None:
            delta = (grad_out.float() * out.float()).sum(-1)
            weights = (sinks.float()[None, :, None] - finite(lse)).exp()
            grad_sinks = -(weights * delta).sum((0, 2)).to(sinks.dtype)
        grad_keys = grad_key.to(key.dtype), grad_value.to(value.dtype)
        return None, grad_sinks, grad_query.to(query.dtype), *grad_keys


class _RankKeys:
    """Keys and values of the ranks of a ring. The next rank's keys arrive while the caller works
    with the current rank's, so that two sets exist in addition to this rank's keys."""

    def __init__(self, key: torch.Tensor, value: torch.Tensor, ring: _Ring) -> None:
        self._local, self._ring = (key, value), ring
        self._next: tuple[torch.Tensor, torch.Tensor] = self._local
        self._wait: Wait = _no_wait
        self._sent: torch.Tensor | None = None

    def get(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [B, K, n, D] and values of step `step` in the columns of the step's
        block, and begin to exchange the keys of the next step. Called for each step in order."""
        self._wait()
        (key, value), states = self._local, self._next
        ring, rank = self._ring, self._ring.exchange.rank
        if step == 0:
            columns = ring.plan.block(rank, rank).columns
            states = (_select_tokens(key, columns), _select_tokens(value, columns))
        next_step = step + 1
        if next_step == ring.exchange.size:
            return states

        # Send the keys that the destination needs, and receive into one buffer.
        destination, source = ring.destination(next_step), ring.source(next_step)
        sent_block = ring.plan.block(destination, rank)
        sent = None
        if sent_block.pieces:
            parts = [_select_tokens(x, sent_block.columns).flatten() for x in self._local]
            sent = torch.cat(parts)
        num_columns = ring.plan.block(rank, source).num_columns
        shapes = [torch.Size((*x.shape[:2], num_columns, x.shape[3])) for x in self._local]
        sizes = [shape.numel() for shape in shapes]
        buffer = key.new_empty(sum(sizes))
        received = buffer if buffer.numel() else None
        next_key, next_value = buffer.split(sizes)
        self._next = (next_key.view(shapes[0]), next_value.view(shapes[1]))
        self._sent = sent  # keeps the memory until the exchange is complete
        self._wait = ring.exchange.start(destination, sent, source, received)
        return states


class _ReturnedGradients:
    """Gradients of keys and values: sends those of other ranks' keys, and adds received gradients
    to `grad_key` and `grad_value` of this rank."""

    def __init__(self, grad_key: torch.Tensor, grad_value: torch.Tensor, ring: _Ring) -> None:
        self._local, self._ring = (grad_key, grad_value), ring
        self._arriving: tuple[RingBlock, torch.Tensor] | None = None
        self._sent: torch.Tensor | None = None
        self._wait: Wait = _no_wait

    def put(self, step: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of the keys of step `step` to their rank, and begin to receive the
        gradients that another rank has computed for this rank's keys."""
        ring, rank = self._ring, self._ring.exchange.rank
        if step == 0:
            self._add(ring.plan.block(rank, rank), gradients)
            return
        self.finish()
        # Gradients go in the opposite direction of the keys.
        destination, source = ring.source(step), ring.destination(step)
        block = ring.plan.block(source, rank)
        width_of_both = sum(x.shape[3] for x in self._local)
        num_samples, num_heads = self._local[0].shape[:2]
        num_elements = num_samples * num_heads * block.num_columns * width_of_both
        arriving = self._local[0].new_empty(num_elements)
        sent = torch.cat([x.flatten() for x in gradients]) if gradients[0].numel() else None
        received = arriving if arriving.numel() else None
        self._arriving, self._sent = (block, arriving), sent
        self._wait = ring.exchange.start(destination, sent, source, received)

    def finish(self) -> None:
        """Wait for arriving gradients, and add them to this rank's gradients."""
        self._wait()
        self._wait, self._sent = _no_wait, None
        if self._arriving is None:
            return
        (block, arrived), self._arriving = self._arriving, None
        shapes = [torch.Size((*x.shape[:2], block.num_columns, x.shape[3])) for x in self._local]
        parts = arrived.split([shape.numel() for shape in shapes])
        self._add(block, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])

    def _add(self, block: RingBlock, gradients: Sequence[torch.Tensor]) -> None:
        """Add `gradients`, which have only the columns of `block`, to this rank's gradients."""
        for total, gradient in zip(self._local, gradients, strict=True):
            parts = gradient.split([stop - start for start, stop in block.columns], dim=2)
            for (start, stop), part in zip(block.columns, parts, strict=True):
                total[:, :, start:stop] += part


def _no_wait() -> None:
    """Stands for the wait of an exchange that has not begun."""


def _select_tokens(states: torch.Tensor, columns: Sequence[Range]) -> torch.Tensor:
    """Return the tokens in `columns` of `states` [B, K, t, D]."""
    parts = [states[:, :, start:stop] for start, stop in columns]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, 2) if parts else states[:, :, :0]


def _rows(states: torch.Tensor, piece: AttentionRectangle) -> torch.Tensor:
    """Return the view of `states` [B, H, t, ...] in the samples and rows (queries) of `piece`."""
    return states[slice(*piece.samples), :, slice(*piece.rows)]


def _columns(states: torch.Tensor, piece: AttentionRectangle) -> torch.Tensor:
    """Return the view of `states` [B, K, n, D] in the samples and columns (keys) of `piece`."""
    return states[slice(*piece.samples), :, slice(*piece.columns)]


def _band(piece: AttentionRectangle) -> Band:
    return Band(piece.diagonal, piece.window, piece.is_full, piece.is_causal)
