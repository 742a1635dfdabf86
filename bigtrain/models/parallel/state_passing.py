"""Recurrent layers of sequence-parallel ranks: states pass from rank to rank, and convolutions get
the tokens before a rank's tokens.

Every rank computes its tokens from a zero state. All ranks exchange a state and a factor for each
span in one all-gather, whose bytes do not depend on the number of tokens, and every rank corrects
the outputs of the documents that it continues (`bigtrain.models.parallel.transfers`).

The backward pass of an all-gather is an all-to-all, in which every rank must take part. So a rank's
results pass through the all-gather, whether or not the rank uses the received values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any, TypeVar

import torch

from bigtrain.models.layers.recurrence.functions import CONVOLUTION, Call
from bigtrain.models.layers.recurrence.pieces import batches_of, current_documents
from bigtrain.models.parallel.ring_attention import Exchange
from bigtrain.models.parallel.ring_plan import Range
from bigtrain.models.parallel.span_plan import SpanPiece, SpanPlan
from bigtrain.models.parallel.transfers import (
    Transfer,
    advance,
    factor_shape,
    from_nothing,
    transfer,
)

KeyT = TypeVar("KeyT")


class StatePassing:
    """Computes the functions of recurrent layers on the tokens of a rank of `exchange`. places:
    maps the length of a sample to every rank's ranges in the sample. All calls are collective."""

    def __init__(
        self, exchange: Exchange, places: Callable[[int], Sequence[Sequence[Range]]]
    ) -> None:
        self._exchange = exchange
        self._places = places

    def run(self, call: Call) -> torch.Tensor:
        """Return the output of `call` for this rank's tokens: [B * t, ...]."""
        num_samples, num_tokens = call.shape
        length = num_tokens * self._exchange.size
        documents = current_documents()
        edges = [[0, length]] * num_samples if documents is None else documents.edges_by_sample()
        plan = SpanPlan(self._places(length), edges)
        outputs = _Outputs(call)
        if not plan.crosses:  # equal on every rank, so that no rank exchanges
            outputs.compute_first_pieces(plan.pieces(self._exchange.rank))
            return outputs.joined()
        if call.function.kind == CONVOLUTION:
            return self._convolve(call, plan, outputs)
        return self._scan(call, plan, outputs)

    def _convolve(self, call: Call, plan: SpanPlan, outputs: _Outputs) -> torch.Tensor:
        """Return the output of a convolution: pieces that continue a document get the tokens before
        them from other ranks."""
        pieces = plan.pieces(self._exchange.rank)
        num_before: int = call.rest["weight"].shape[-1] - 1
        # The last inputs of every span: [B, spans, kernel size - 1, C], or all of shorter spans.
        ((name, x),) = call.tensors.items()
        ends = [piece.start + piece.length for piece in pieces if piece.is_last]
        span_tokens = min(stop - start for start, stop in plan.places[0])
        tail_tokens = min(num_before, span_tokens)
        tokens = torch.tensor([range(end - tail_tokens, end) for end in ends])
        tokens = tokens.to(x.device, non_blocking=True)
        tails = x.index_select(0, tokens.flatten()).unflatten(0, (call.shape[0], -1, tail_tokens))
        gathered, x = gather(self._exchange, tails, x)
        call.tensors[name] = x
        outputs.compute_first_pieces([piece for piece in pieces if not piece.depth])

        # Pieces of equal length with equally many tokens before them (halos) are computed together.
        continuing = [piece for piece in pieces if piece.depth]
        order = plan.order
        for (num_halo, _), group in _grouped(
            continuing, lambda piece: (min(num_before, piece.depth), piece.length)
        ):
            halos = []
            for piece in group:
                index_of_rank = order.index((self._exchange.rank, piece.span))
                before = [gathered[rank, piece.row, span] for rank, span in order[:index_of_rank]]
                halos.append(torch.cat(before)[-num_halo:])
            tensors_with_halo = outputs.tensors_of(group)
            tensors_with_halo[name] = torch.cat([torch.stack(halos), tensors_with_halo[name]], 1)
            outputs.add(group, call.output(tensors_with_halo)[:, num_halo:])
        return outputs.joined()

    def _scan(self, call: Call, plan: SpanPlan, outputs: _Outputs) -> torch.Tensor:
        """Return the output of a function with a state: compute all pieces from a zero state, and
        correct the pieces that continue a document."""
        function_kind, rank = call.function.kind, self._exchange.rank
        num_samples, num_spans = call.shape[0], len(plan.places[rank])
        pieces = plan.pieces(rank)
        # Last state, and factor if the document began before, by sample and span.
        states: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor | None]] = {}
        transfers: list[tuple[list[SpanPiece], Transfer]] = []
        for _, group in _grouped([p for p in pieces if p.depth], lambda piece: piece.length):
            moved = transfer(call, outputs.tensors_of(group))
            outputs.add(group, moved.output)
            transfers.append((group, moved))
            for piece, state, factor in zip(group, moved.state, moved.factor, strict=True):
                if piece.is_last:
                    states[piece.row, piece.span] = state, factor
        first_and_last = [piece for piece in pieces if piece.is_last and not piece.depth]
        for _, group in _grouped(first_and_last, lambda piece: piece.length):
            output, group_states = from_nothing(call, outputs.tensors_of(group))
            outputs.add(group, output)
            states |= {(p.row, p.span): (s, None) for p, s in zip(group, group_states, strict=True)}
        outputs.compute_first_pieces([p for p in pieces if not p.depth and not p.is_last])

        # Exchange the state and factor of every span. The factor is 0 where a document begins.
        any_state, _ = next(iter(states.values()))
        shape = factor_shape(function_kind, any_state[None])
        zero = any_state.new_zeros(shape)
        packed_spans = []
        for row, span in product(range(num_samples), range(num_spans)):
            state, span_factor = states[row, span]
            factor = zero if span_factor is None else span_factor
            packed_spans.append(torch.cat([state.flatten(), factor.flatten()]))
        packed = torch.stack(packed_spans).unflatten(0, (num_samples, num_spans))
        gathered, joined = gather(self._exchange, packed, outputs.joined())

        # Follow the state [B, ...] along the sample to the start of each span of this rank.
        incoming: dict[int, torch.Tensor] = {}
        current: torch.Tensor | None = None
        for span_rank, span in plan.order:
            if span_rank == rank and current is not None:
                incoming[span] = current
            span_state, factor = gathered[span_rank, :, span].split(
                (any_state.numel(), zero.numel()), 1
            )
            span_state = span_state.unflatten(1, any_state.shape)
            if current is None:
                current = span_state
            else:
                current = advance(function_kind, factor.unflatten(1, shape), current) + span_state
        for group, moved in transfers:
            start_states = torch.stack([incoming[piece.span][piece.row] for piece in group])
            correction = moved.correction(start_states).flatten(0, 1).to(joined.dtype)
            joined = joined.index_add(0, outputs.tokens_of(group).flatten(), correction)
        return joined


class _Outputs:
    """Outputs of a call's pieces, in any order."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._device = next(iter(call.tensors.values())).device
        self._tokens: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []

    def tokens_of(self, pieces: Sequence[SpanPiece]) -> torch.Tensor:
        """Return the numbers of the tokens of equally long pieces: int64 [pieces, length]."""
        rows = [range(piece.start, piece.start + piece.length) for piece in pieces]
        return torch.tensor(rows).to(self._device, non_blocking=True)

    def tensors_of(self, pieces: Sequence[SpanPiece]) -> dict[str, torch.Tensor]:
        """Return the arguments of equally long pieces, [pieces, length, ...]."""
        return self._take(self.tokens_of(pieces))

    def _take(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments [..., C] of the tokens with numbers `tokens` [...]."""
        return {
            name: x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
            for name, x in self._call.tensors.items()
        }

    def add(self, pieces: Sequence[SpanPiece], output: torch.Tensor) -> None:
        """Add the output [pieces, length, ...] of equally long pieces."""
        self._tokens.append(self.tokens_of(pieces).flatten())
        self._outputs.append(output.flatten(0, 1))

    def compute_first_pieces(self, pieces: Sequence[SpanPiece]) -> None:
        """Add the outputs of pieces that begin a document, and so start from a zero state. The
        states after the pieces are dropped."""
        starts, lengths = [p.start for p in pieces], [p.length for p in pieces]
        for batch in batches_of(starts, lengths):
            padded_tokens = batch.tokens()
            arguments = self._take(padded_tokens.to(self._device, non_blocking=True))
            padded_output = self._call.output(arguments).flatten(0, 1)
            # Padding is removed by indices from the host: `nonzero` on a device makes the host
            # wait.
            is_token = batch.is_token()
            tokens = padded_tokens[is_token].to(self._device, non_blocking=True)
            rows = is_token.flatten().nonzero().flatten().to(self._device, non_blocking=True)
            self._tokens.append(tokens)
            self._outputs.append(padded_output.index_select(0, rows))

    def joined(self) -> torch.Tensor:
        """Return the outputs in the order of the tokens: [B * t, ...]."""
        order = torch.cat(self._tokens).argsort()
        return torch.cat(self._outputs).index_select(0, order)


def _grouped(
    pieces: Iterable[SpanPiece], key: Callable[[SpanPiece], KeyT]
) -> Iterable[tuple[KeyT, list[SpanPiece]]]:
    """Return the groups of `pieces` with an equal `key`, each with the key."""
    groups: dict[KeyT, list[SpanPiece]] = {}
    for piece in pieces:
        groups.setdefault(key(piece), []).append(piece)
    return groups.items()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        leaf: torch.Tensor,
        exchange: Exchange,
        values: torch.Tensor,
        through: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        copies = values.detach().expand(exchange.size, *values.shape).contiguous()
        return exchange.all_to_all(copies), through.view_as(through)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        received = ctx.exchange.all_to_all(gradients[0].contiguous())
        return None, None, received.sum(0), gradients[1]


def gather(
    exchange: Exchange, values: torch.Tensor, through: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `values` of every rank, [ranks, ...], and `through` unchanged. Forward and
    backward pass are collective. The backward pass runs on every rank whose loss depends on
    `through`, also if all earlier parameters are frozen."""
    # A leaf with a gradient, without which autograd would skip the backward pass.
    leaf = torch.zeros((), device=values.device, requires_grad=True)
    gathered, passed = _Gather.apply(leaf, exchange, values, through)  # type: ignore[no-untyped-call]
    return gathered, passed
