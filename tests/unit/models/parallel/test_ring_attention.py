"""Attention around a ring, played by threads, against one softmax in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from bigtrain.models.equivalence.trial import RankThreads
from bigtrain.models.layers import attention_kernels
from bigtrain.models.layers.attention_kernels import (
    AttentionStates,
    ScoreScaling,
)
from bigtrain.models.parallel import ring_attention as ring
from bigtrain.models.parallel.ring_attention import ring_attention
from bigtrain.models.parallel.ring_plan import RingPlan, chunks_of
from bigtrain.planner.model_costs import Attention
from bigtrain.planner.stages import sequence_bytes

SCALE = 0.5


@dataclass(frozen=True)
class Case:
    """Samples of `length` tokens around a ring. edges: of the documents of both samples."""

    size: int
    length: int = 48
    key_heads: int = 2
    value_size: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    edges: tuple[int, ...] = ()

    @property
    def documents(self) -> list[list[int]]:
        return [[0, *self.edges, self.length], [0, self.length]]


CASES = [
    Case(2),
    Case(3, edges=(5, 6, 30)),
    Case(4, window=7, key_heads=1),
    Case(4, window=20, edges=(11, 40), sinks=True),
    Case(2, sinks=True, softcap=2.0),
    Case(3, value_size=6, edges=(24,)),
    Case(1, window=3, sinks=True),
]


@dataclass(frozen=True)
class Inputs:
    """Queries, keys and values [2, heads, T, width], sinks, and the gradient of the output."""

    states: list[torch.Tensor]
    sinks: torch.Tensor | None
    gradient: torch.Tensor


def inputs_of(case: Case) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        # Scores of tens, so that a maximum that is not subtracted or corrected shows.
        return 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    heads = 2 * case.key_heads
    states = [
        normal(2, number, case.length, width)
        for number, width in ((heads, 8), (case.key_heads, 8), (case.key_heads, case.value_size))
    ]
    sinks = normal(heads) if case.sinks else None
    return Inputs(states, sinks, normal(2, heads, case.length, case.value_size) / 3)


def expected_of(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """Return output and gradients of one softmax over all tokens, float64."""
    query, key, value = (x.clone().requires_grad_() for x in inputs.states)
    sinks = None if inputs.sinks is None else inputs.sinks.clone().requires_grad_()
    scores = query @ key.repeat_interleave(2, 1).mT * SCALE
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    position = torch.arange(case.length)
    distance = position[:, None] - position
    near = (distance >= 0) & (distance < (case.window or case.length))
    place = torch.stack([torch.bucketize(position, torch.tensor(e), right=True)
                         for e in case.documents])  # fmt: skip
    visible = near & (place[:, :, None] == place[:, None])
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(2, -1, case.length, 1)], -1)
    weights = scores.softmax(-1)[..., : case.length]
    output = weights @ value.repeat_interleave(2, 1)
    leaves = [query, key, value, *([] if sinks is None else [sinks])]
    return [output.detach(), *torch.autograd.grad(output, leaves, inputs.gradient)]


class Watched(RankThreads):
    """Threads as ranks, that note the bytes that each sends and when it begins to."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sent = [0] * size
        self.events: list[list[str]] = [[] for _ in range(size)]

    def start(self, to: int, sent: Any, source: int, received: Any) -> Callable[[], None]:
        self.sent[self.rank] += 0 if sent is None else sent.nbytes
        self.events[self.rank].append("start")
        wait = super().start(to, sent, source, received)
        return lambda: (self.events[self.rank].append("wait"), wait())[1]  # type: ignore[func-returns-value]


def around(case: Case, inputs: Inputs, threads: Watched) -> list[torch.Tensor]:
    """Return output and gradients of the ring, in the order of the sample's tokens."""
    plan = RingPlan(case.size, case.length, case.documents, case.window)

    def compute(rank: int) -> list[torch.Tensor]:
        order = torch.tensor([t for place in chunks_of(case.length, case.size, rank)
                              for t in range(*place)])  # fmt: skip
        states = [x[:, :, order].float().requires_grad_() for x in inputs.states]
        sinks = None if inputs.sinks is None else inputs.sinks.float().requires_grad_()
        output = ring_attention(
            AttentionStates(*states),
            sinks,
            plan,
            threads,
            ScoreScaling(SCALE, case.softcap),
        )
        leaves = [*states, *([] if sinks is None else [sinks])]
        gradient = inputs.gradient[:, :, order].float()
        gradients = torch.autograd.grad(output, leaves, gradient)
        return [order, output.detach(), *gradients]

    orders, *parts = zip(*threads.run(compute), strict=True)
    inverse = torch.cat(orders).argsort()
    joined = [torch.cat(part, 2)[:, :, inverse] for part in parts[:4]]
    return joined + [torch.stack(part).sum(0) for part in parts[4:]]


def largest_error(case: Case) -> float:
    """Return the largest difference of output and gradients, relative to the largest value."""
    inputs = inputs_of(case)
    tensors, expected = around(case, inputs, Watched(case.size)), expected_of(case, inputs)
    return max(
        float((one - other).abs().max() / other.abs().max())
        for one, other in zip(tensors, expected, strict=True)
    )


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernels, "TILE", 8)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_softmax(case: Case) -> None:
    assert largest_error(case) < 1e-5


@pytest.mark.parametrize("size", [1, 3])
def test_sent_bytes_are_those_of_the_planner(size: int) -> None:
    case = Case(size)
    threads = Watched(size)
    around(case, inputs_of(case), threads)
    heads = Attention(2 * case.key_heads, case.key_heads, 8, case.value_size)
    tokens = 2 * case.length // size
    planned = sequence_bytes(heads, tokens, 4, tensor_size=1, ulysses_size=1)
    plan = RingPlan(size, case.length, [[0, case.length]] * 2, None)
    keys = sum(
        plan.block(rank, source).num_columns
        for rank in range(size)
        for source in range(size)
        if rank != source
    )
    per_key = 2 * case.key_heads * (8 + case.value_size) * 4
    assert sum(threads.sent) == 3 * keys * per_key
    # Three of four chunks of the other ranks: keys in both passes, gradients once.
    needed = 0.75 * (size - 1)
    assert sum(threads.sent) == size * needed * (2 * planned.keys + planned.gradients)


def test_the_next_keys_arrive_during_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block but the last is computed between the start of an exchange and its wait."""
    threads = Watched(3)
    own = ring.attend

    def noted(*arguments: Any) -> Any:
        threads.events[threads.rank].append("attend")
        return own(*arguments)

    monkeypatch.setattr(ring, "attend", noted)
    around(Case(3), inputs_of(Case(3)), threads)
    for events in threads.events:
        forward = [event for i, event in enumerate(events) if i == 0 or events[i - 1] != event]
        assert forward[:7] == ["start", "attend", "wait", "start", "attend", "wait", "attend"]
