"""Recurrent layers of threads that act as sequence-parallel ranks, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.equivalence.trial import RankThreads, RankThreadsOfGroup
from bigtrain.models.layers.recurrence.pieces import SampleDocuments, documents_in_samples
from bigtrain.models.parallel import state_passing
from bigtrain.models.parallel.ring_plan import tokens_of
from bigtrain.models.parallel.sequence import SequenceParallel
from bigtrain.models.parallel.sequence_exchange import SequenceExchange
from bigtrain.models.parallel.span_plan import SpanPlan
from tests.unit.models.layers.test_chunked_loss import gradients
from tests.unit.models.layers.test_recurrence import errors, hybrid, limit

T = 160
LAYOUTS = {
    "one document": ((T,), (T,)),
    # at the borders 40, 80 and 120 of ranks: begins there, one token before, one after, inside
    "borders": ((40, 39, 42, 39), (1, 38, 2, 118, 1)),
    "one token each": ((1,) * T, (2,) * (T // 2)),
}
FAMILIES = ("qwen3_5_text", "kimi_linear", "bamba", "jamba", "lfm2", "recurrent_gemma")
"""A family for each kind of function."""


def exchange_of(size: int, ring_size: int) -> tuple[RankThreads, SequenceExchange]:
    threads, ranks, stride = RankThreads(size), range(size), size // ring_size
    neighbors = [ranks[first : first + stride] for first in ranks[::stride]]
    rings = [ranks[offset::stride] for offset in range(stride)]
    return threads, SequenceExchange(
        threads, RankThreadsOfGroup(threads, neighbors), RankThreadsOfGroup(threads, rings)
    )


def whole_and_divided(
    model: PreTrainedModel, lengths: Any, size: int, ring_size: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Logits and gradients of isolated documents in one process, and divided over threads."""
    ids = torch.randint(3, 64, (2, T), generator=torch.Generator().manual_seed(0))
    weights = torch.randn(2, T, 64, generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    isolation, reason = find_isolation(model.config, "auto", T)
    assert reason == ""
    undo = isolation.install(model)
    with isolation.document_mask(positions):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    wanted = {"logits": logits.detach(), **gradients(model, (logits * weights).sum())}
    undo()
    wanted = {name: x.clone() for name, x in wanted.items()}
    model.zero_grad()
    threads, exchange = exchange_of(size, ring_size)
    sequence = SequenceParallel(model, exchange)

    def compute(rank: int) -> tuple[list[tuple[int, int]], torch.Tensor]:
        with documents_in_samples(SampleDocuments(positions)):
            part = model(**sequence.inputs(ids, positions), use_cache=False).logits
            (part * sequence.part(weights)).sum().backward()
            return sequence.places(T), part.detach()

    parts = threads.run(compute)
    sequence.close()
    order = torch.cat([torch.arange(*span) for spans, _ in parts for span in spans])
    found = {"logits": torch.cat([part for _, part in parts], 1)[:, order.argsort()]}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return wanted, found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("size", "ring_size"),
    [*(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 1), (2, 2), (4, 4))), (4, 2)],
)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_divided_samples_are_whole_samples(
    model_type: str, size: int, ring_size: int, layout: str
) -> None:
    """Logits and every gradient, with Ulysses or rings in the attention layers."""
    model = hybrid(model_type)
    worst = errors(*whole_and_divided(model, LAYOUTS[layout], size, ring_size))
    assert {name: error for name, error in worst.items() if error > limit(model_type, name)} == {}


Gathered = tuple[torch.Tensor, torch.Tensor]


def wrong_rank(gathered: torch.Tensor) -> torch.Tensor:
    return gathered.roll(1, 0)


@pytest.mark.parametrize("change", [torch.Tensor.detach, torch.zeros_like, wrong_rank])
@pytest.mark.parametrize("model_type", ["bamba", "lfm2"])
def test_a_broken_exchange_shows(
    model_type: str, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and tokens before that are detached (only gradients show it), lost, or another
    rank's."""
    gather = state_passing.gather

    def broken(*args: Any) -> Gathered:
        gathered, through = gather(*args)
        return change(gathered), through

    monkeypatch.setattr(state_passing, "gather", broken)
    worst = errors(*whole_and_divided(hybrid(model_type), LAYOUTS["one document"], 2, 1))
    is_detached = change is torch.Tensor.detach
    assert (worst["logits"] < 1e-5) == is_detached
    assert max(worst.values()) > 0.02


def test_documents_that_end_at_borders_need_no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_passing, "gather", None)
    model = hybrid("bamba")
    worst = errors(*whole_and_divided(model, ((T // 2,) * 2, (T // 4,) * 4), 2, 1))
    assert max(worst.values()) < 2e-5


@pytest.mark.parametrize("length", [16, 64])
def test_bytes_do_not_depend_on_the_length(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba 2: H P N + H floats for a state and its factor, (k - 1) C for a convolution."""
    sent = []
    gather = state_passing.gather

    def counted(exchange: Any, values: torch.Tensor, through: torch.Tensor) -> Gathered:
        sent.append(values.numel())
        return gather(exchange, values, through)

    monkeypatch.setattr(state_passing, "gather", counted)
    model = hybrid("bamba")
    threads, exchange = exchange_of(2, 1)
    sequence = SequenceParallel(model, exchange)
    ids = torch.full((1, length), 5)

    def compute(rank: int) -> None:
        with torch.no_grad():
            model(**sequence.inputs(ids, None), use_cache=False)

    threads.run(compute)
    sequence.close()
    heads, width, states, kernel, groups = 4, 16, 8, 4, 2
    channels = heads * width + 2 * groups * states
    of_scan, of_convolution = heads * width * states + heads, (kernel - 1) * channels
    assert sorted(sent) == sorted(2 * [of_scan, of_convolution])


def test_pieces_of_a_zigzag_ring() -> None:
    places = [tokens_of(16, 1, 2, rank) for rank in range(2)]
    plan = SpanPlan(places, [[0, 6, 16], [0, 4, 8, 12, 16]])
    assert plan.order == [(0, 0), (1, 0), (1, 1), (0, 1)]
    assert plan.crosses
    assert not SpanPlan(places, [[0, 4, 8, 12, 16]]).crosses
    found = [(p.row, p.span, p.start, p.length, p.depth, p.is_last) for p in plan.pieces(1)]
    assert found[:3] == [(0, 0, 0, 2, 4, False), (0, 0, 2, 2, 0, True), (0, 1, 4, 4, 2, True)]
    assert [p.depth for p in plan.pieces(1)[3:]] == [0, 0]


def test_frozen_parameters_hold_up_no_rank() -> None:
    """Only the decay of the first layer has a gradient, so that no rank's input has one."""
    model = hybrid("qwen3_5_text").requires_grad_(False)
    decay = model.get_parameter("model.layers.0.linear_attn.A_log").requires_grad_(True)
    wanted, found = whole_and_divided(model, LAYOUTS["borders"], 2, 1)
    assert float(decay.detach().abs().max()) > 0
    assert set(found) == {"logits", "model.layers.0.linear_attn.A_log"}
    assert max(errors(wanted, found).values()) < 2e-5
