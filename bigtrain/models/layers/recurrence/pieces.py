"""Pieces of documents, and functions of tokens that run on each piece.

A recurrence starts from nothing at each document if it is called for each document. Pieces of
similar lengths are calls of one batch, padded at their ends, where a causal function passes nothing
on: a sample of T tokens takes at most log2(T) + 1 calls, on less than twice as many tokens.

`VectorScan` passes a state from piece to piece for a function that takes none (Mamba 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from bigtrain.models.layers.document_masks import edges_of_documents

Tensors = Mapping[str, torch.Tensor]
"""Tensors of tokens by a function's parameters: [tokens, ...]."""


@dataclass(frozen=True)
class PieceBatch:
    """Pieces that a function computes together. starts, lengths: of the pieces, in the flattened
    tokens of the samples."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Tokens of the longest piece, and of the shorter pieces with their padding."""
        return max(self.lengths)

    def tokens(self) -> torch.Tensor:
        """Return the number of each token, int64 [pieces, width]. The padding repeats the last
        token of the piece."""
        offsets = torch.arange(self.width)
        last = torch.tensor(self.lengths)[:, None] - 1
        return torch.tensor(self.starts)[:, None] + offsets.minimum(last)

    def is_token(self) -> torch.Tensor:
        """Return what is not padding: bool [pieces, width]."""
        return torch.arange(self.width) < torch.tensor(self.lengths)[:, None]


def batches_of(starts: Sequence[int], lengths: Sequence[int]) -> list[PieceBatch]:
    """Return pieces in batches of similar lengths: none is twice as long as another piece."""
    pieces_by_width: dict[int, list[tuple[int, int]]] = {}
    for start, length in zip(starts, lengths, strict=True):
        pieces_by_width.setdefault(length.bit_length(), []).append((start, length))
    return [
        PieceBatch(*map(tuple, zip(*pieces, strict=True))) for pieces in pieces_by_width.values()
    ]


@dataclass
class SampleDocuments:
    """Documents of the samples of a micro-batch. positions: int64 [B, T] on the host, counted from
    0 in each document."""

    positions: torch.Tensor
    _tokens: dict[torch.device, tuple[list[torch.Tensor], torch.Tensor]] = field(
        default_factory=dict
    )

    def edges_by_sample(self) -> list[list[int]]:
        """Return the starts of the documents of each sample, and its end."""
        return [edges_of_documents(row[None]).tolist() for row in self.positions]

    def numbers_on(self, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the tokens of each batch of documents, and the place of each token among the
        tokens of the batches, int64 [B * T]. Copied to `device` once."""
        if device not in self._tokens:
            edges = edges_of_documents(self.positions)
            batches = batches_of(edges[:-1].tolist(), edges.diff().tolist())
            order = torch.cat([batch.tokens()[batch.is_token()] for batch in batches])
            filled = torch.cat([batch.is_token().flatten() for batch in batches])
            token_places = filled.nonzero().flatten()[order.argsort()]
            tokens = [batch.tokens().to(device, non_blocking=True) for batch in batches]
            self._tokens[device] = tokens, token_places.to(device, non_blocking=True)
        return self._tokens[device]


_DOCUMENTS: ContextVar[SampleDocuments | None] = ContextVar("documents", default=None)


def current_documents() -> SampleDocuments | None:
    """Return the documents of the forward pass that is running; None: each sample is one."""
    return _DOCUMENTS.get()


def current_positions() -> torch.Tensor | None:
    """Return the positions of `current_documents`, int64 [B, T] on the host."""
    documents = current_documents()
    return None if documents is None else documents.positions


@contextmanager
def documents_in_samples(documents: SampleDocuments | None) -> Iterator[None]:
    """Inside, recurrent layers start afresh at each of `documents`."""
    token = _DOCUMENTS.set(documents)
    try:
        yield
    finally:
        _DOCUMENTS.reset(token)


def keep_documents(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """Return `checkpoint`, a function such as `torch.utils.checkpoint.checkpoint`, whose layers
    have the documents of the forward pass when they are computed again. That happens in the
    backward pass, when the samples of another forward pass may have been the last."""

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        documents = current_documents()

        def with_documents(*args: Any, **kwargs: Any) -> Any:
            with documents_in_samples(documents):
                return function(*args, **kwargs)

        return checkpoint(with_documents, *args, **kwargs)

    return run


def by_document(
    function: Callable[[dict[str, torch.Tensor]], Sequence[torch.Tensor | None]],
    tensors: Tensors,
    documents: SampleDocuments,
) -> list[torch.Tensor | None]:
    """Return what `function` returns for each document: [B * T, ...], of `tensors` [B * T, ...].
    `function` takes and returns tensors [pieces, width, ...]; None for pieces of any width is None
    for all."""
    device = next(iter(tensors.values())).device
    batches, token_places = documents.numbers_on(device)
    outputs = [
        function(
            {
                name: x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)
                for name, x in tensors.items()
            }
        )
        for tokens in batches
    ]
    results: list[torch.Tensor | None] = []
    for parts in zip(*outputs, strict=True):
        rows = [x.flatten(0, 1) for x in parts if x is not None]
        is_complete = len(rows) == len(parts)
        results.append(torch.cat(rows).index_select(0, token_places) if is_complete else None)
    return results


class Scan(Protocol):
    """A call of the function."""

    def __call__(self, tensors: Mapping[str, torch.Tensor], **changes: Any) -> torch.Tensor:
        """Return the output for `tensors` [n, width, ...]; `changes`: of other arguments."""


class VectorScan:
    """``S_t = exp(dt_t A) S_{t-1} + dt_t u_t B_t^T`` elementwise, ``y_t = (S_t C_t + D u_t)
    silu(z_t)``, of `tensors` [n, width, ...] with the other arguments `options`.

    The function takes no state to start from, and the CUDA kernel's last state has no gradient. So
    N tokens after the tokens of the piece, with dt = 0 and ``C = e_n``, read the state as ordinary
    outputs, and N tokens before, with ``B = e_n``, write it. Memory grows with the tokens only.
    """

    def __init__(
        self, scan: Scan, tensors: Mapping[str, torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        self._scan = scan
        self._gate = tensors.get("z")
        self._dtype = tensors["hidden_states"].dtype
        steps = tensors["dt"].float()
        if options.get("delta_bias") is not None:
            steps = steps + options["delta_bias"].float()
        self._steps = F.softplus(steps) if options.get("delta_softplus") else steps
        self._decay = options["A"].float()  # [D, N]
        self._inputs = tensors["hidden_states"].float()
        self._write, self._read = tensors["B"].float(), tensors["C"].float()  # [n, width, N]
        unit = torch.eye(self._decay.shape[1], device=steps.device)
        self._unit = unit.expand(len(steps), -1, -1)

    @property
    def factor(self) -> torch.Tensor:
        """What the tokens multiply a state by: [n, D, N]."""
        return torch.exp(self._steps.sum(1)[..., None] * self._decay)

    def run(self, incoming: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output [n, width, D] without the gate, and the last state [n, D, N], of a scan
        that starts from the state `incoming` [n, D, N]; None: from nothing."""
        num_states, width = self._unit.shape[1], self._steps.shape[1]

        def with_reads(x: torch.Tensor) -> torch.Tensor:
            return F.pad(x, (0, 0, 0, num_states))

        inputs, steps = with_reads(self._inputs), with_reads(self._steps)
        write, read = with_reads(self._write), torch.cat([self._read, self._unit], 1)
        if incoming is None:
            output = self._compute(inputs, steps, write, read)
        else:
            output = self._continue(incoming, (inputs, steps, write, read))
        return output[:, :width], output[:, width:].transpose(1, 2)

    def correction(self, incoming: torch.Tensor) -> torch.Tensor:
        """Return what a scan from `incoming` adds to the gated output of a scan from nothing."""
        zero_inputs = torch.zeros_like(self._inputs)
        tensors = (zero_inputs, self._steps, self._write, self._read)
        return self.gated(self._continue(incoming, tensors))

    def gated(self, output: torch.Tensor) -> torch.Tensor:
        """Return `output` [n, width, D] with the gate, in the dtype of the function's output."""
        if self._gate is not None:
            output = output * F.silu(self._gate.float())
        return output.to(self._dtype)

    def _continue(self, incoming: torch.Tensor, tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the output of `tensors` after tokens that write the state `incoming`. Writing
        token n decays by the tokens that write after it, which is undone in what it writes; steps
        are so short that this is at most a factor of e."""
        num_states = self._unit.shape[1]
        step = 1 / (num_states * self._decay.detach().abs().max().clamp_min(1e-6))
        later = torch.arange(num_states - 1, -1, -1, device=incoming.device)
        written = (incoming * torch.exp(-step * self._decay * later) / step).transpose(1, 2)
        before = (written, step.expand_as(written), self._unit, torch.zeros_like(self._unit))
        joined = (torch.cat([first, x], 1) for first, x in zip(before, tensors, strict=True))
        return self._compute(*joined)[:, num_states:]

    def _compute(self, *tensors: torch.Tensor) -> torch.Tensor:
        named_tensors = dict(zip(("hidden_states", "dt", "B", "C"), tensors, strict=True))
        plain: dict[str, Any] = {"delta_bias": None, "delta_softplus": False, "z": None}
        return self._scan(named_tensors, **plain)
