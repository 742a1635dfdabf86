"""Batches: the same samples for every division over processes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bigtrain.data.loading.collator
from bigtrain.data.loading import loader
from bigtrain.data.loading.collator import BatchOptions, BatchReader
from bigtrain.data.loading.loader import (
    HeldOutBatches,
    MicroBatch,
    TrainingBatches,
    open_held_out,
    open_training_data,
)
from bigtrain.data.samples.mixture import MixedSamples
from bigtrain.data.samples.shuffle import SampleOrder
from bigtrain.data.samples.token_stream import Indices, TokenRows
from bigtrain.errors import DataError
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from tests.support.datasets import write_dataset
from tests.support.run_trees import llama, run_config
from tests.support.samples import Numbered
from tests.support.tiers import examples

LENGTH = 4


def make_plan(data_size: int, micro_batch_size: int, accumulation: int) -> BatchPlan:
    samples = data_size * micro_batch_size * accumulation
    return BatchPlan(samples, micro_batch_size, data_size, accumulation, LENGTH)


def training(
    plan: BatchPlan,
    rank: int,
    num_windows: int,
    workers: int = 1,
    failing: int | None = None,
    **options: Any,
) -> TrainingBatches:
    dataset = Numbered(num_windows, LENGTH, failing=failing)
    order = SampleOrder(num_windows, 3)
    return TrainingBatches(dataset, plan, rank, order, BatchOptions(**options), workers=workers)


def rows(batches: list[MicroBatch]) -> list[list[int]]:
    return [(batch.input_ids[:, 0] // 10).tolist() for batch in batches]


@settings(max_examples=examples(30))
@given(
    data_size=st.integers(1, 16),
    micro_batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    num_windows=st.integers(1, 300),
    resume_step=st.integers(0, 5),
    workers=st.integers(1, 3),
)
def test_global_order_is_the_same_for_every_division(
    data_size: int,
    micro_batch_size: int,
    accumulation: int,
    num_windows: int,
    resume_step: int,
    workers: int,
) -> None:
    plan = make_plan(data_size, micro_batch_size, accumulation)
    expected = SampleOrder(num_windows, 3)
    with pytest.MonkeyPatch.context() as patched:
        # 64 steps of 16 ranks are up to 12,288 samples, each of an epoch of its own.
        patched.setattr(loader, "STEPS_AT_ONCE", 2)
        ranks = [training(plan, rank, num_windows, workers) for rank in range(data_size)]
    try:
        for step in range(resume_step, resume_step + 3):
            first = step * plan.global_batch_size
            per_rank = [rows(batches.step(first)) for batches in ranks]
            in_order = [
                row
                for micro_step in range(accumulation)
                for rank in range(data_size)
                for row in per_rank[rank][micro_step]
            ]
            assert in_order == expected.windows(first, plan.global_batch_size).tolist()
    finally:
        for batches in ranks:
            batches.close()


def test_shapes_labels_and_any_order_of_steps() -> None:
    plan = make_plan(1, 2, 3)
    with closing(training(plan, 0, 50)) as batches:
        straight = [batches.step(first) for first in (0, 6, 12)]
        again = [batches.step(first) for first in (12, 0, 6)]
    assert [len(step) for step in straight] == [3, 3, 3]
    batch = straight[0][0]
    assert batch.input_ids.shape == batch.labels.shape == (2, LENGTH)
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    # One copy of the tokens, for a micro-batch and for a part of it, wherever it goes.
    for same in (batch, batch.split(1)[0], batch.moved(torch.clone)):
        assert same.tokens is not None
        assert same.input_ids.data_ptr() == same.tokens.data_ptr()
        assert torch.equal(same.input_ids, same.tokens[:, :-1])
        assert torch.equal(same.labels, same.tokens[:, 1:])
    assert torch.equal(batch.labels, batch.input_ids + 1)
    for first, second in zip((straight[2], straight[0], straight[1]), again, strict=True):
        assert all(
            torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, second, strict=True)
        )


@pytest.mark.parametrize("workers", [1, 3])
def test_a_batch_stays_as_it_is_while_others_are_read(workers: int) -> None:
    """Through several requests of many steps each, whose memory is used again, and a jump."""
    plan, order = make_plan(1, 2, 1), SampleOrder(50, 3)
    first_samples = [*range(0, 600, 2), *range(100, 500, 2)]
    with closing(training(plan, 0, 50, workers, isolate=True)) as batches:
        steps = [batches.step(first) for first in first_samples]
    for first, (batch,) in zip(first_samples, steps, strict=True):
        assert rows([batch]) == [order.windows(first, 2).tolist()]
        assert torch.equal(batch.labels, batch.input_ids + 1)


def test_no_loss_after_the_end_of_a_document() -> None:
    with closing(training(make_plan(1, 1, 1), 0, 1, end_of_document_id=2)) as batches:
        (batch,) = batches.step(0)
    assert batch.input_ids.tolist() == [[0, 1, 2, 3]]
    assert batch.labels.tolist() == [[1, 2, -100, 4]]
    failing = training(make_plan(1, 700, 1), 0, 700, failing=666)
    with closing(failing), pytest.raises(DataError, match="sample 666"):
        failing.step(0)


class Masked(Numbered):
    """Only every third token is to be predicted, and documents begin at every fourth."""

    masks_loss = True
    weighs_loss = False

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        super().fill(samples, rows, out)
        assert out.loss_mask is not None
        assert out.loss_mask[rows].all()
        out.loss_mask[rows] = np.arange(LENGTH + 1) % 3 == 0
        if out.begins is not None:
            out.begins.append(rows * (LENGTH + 1) + LENGTH)


def test_samples_with_a_loss_mask_mixed_with_others_without() -> None:
    mixed = MixedSamples([Numbered(5, LENGTH), Masked(5, LENGTH)])
    reader = BatchReader(mixed, BatchOptions(isolate=True))
    for order in ([1, 6, 7, 2], [9, 8]):  # the second time in the buffers of the first
        batch = reader.read(np.array(order), len(order) + 1)
        assert batch.position_ids is not None
        for number, ids, labels, positions in zip(
            [*order, None], *(t.tolist() for t in tensors_of(batch)), strict=True
        ):
            assert positions == list(range(LENGTH))
            if number is None:
                assert (ids, labels) == ([0] * LENGTH, [-100] * LENGTH)
                continue
            first = number % 5 * 10
            assert ids == list(range(first, first + LENGTH))
            expected = [token + 1 for token in ids]
            if number >= 5:
                expected = [-100, -100, first + 3, -100]
            assert labels == expected


def test_rows_are_read_in_chunks_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    order = np.random.default_rng(0).permutation(50)
    whole = BatchReader(Masked(50, LENGTH), BatchOptions(isolate=True)).read(order, 53)
    monkeypatch.setattr(bigtrain.data.loading.collator, "CHUNK_TOKENS", 4 * (LENGTH + 1))
    parts = BatchReader(Masked(50, LENGTH), BatchOptions(isolate=True)).read(order, 53)
    for one, other in zip(tensors_of(whole), tensors_of(parts), strict=True):
        assert torch.equal(one, other)


def tensors_of(batch: MicroBatch) -> list[torch.Tensor]:
    """Of documents that are kept apart."""
    assert batch.position_ids is not None
    assert batch.tokens is None
    return [batch.input_ids, batch.labels, batch.position_ids]


@pytest.mark.parametrize("isolate", [False, True])
def test_memory_is_used_again_only_when_no_tensor_uses_it(isolate: bool) -> None:
    reader = BatchReader(Numbered(50, LENGTH), BatchOptions(isolate=isolate))
    first = reader.read(np.array([1, 2]), 2)
    kept = first.split(1)[1].labels  # a view
    values, places = kept.tolist(), {p.data_ptr() for p in parts_of(first)}
    held = kept.untyped_storage().data_ptr()
    del first
    second = reader.read(np.array([3, 4]), 2)
    assert {p.data_ptr() for p in parts_of(second)} & places == places - {held}
    assert kept.tolist() == values
    del kept
    third = reader.read(np.array([5, 6]), 2)
    assert held in {p.data_ptr() for p in parts_of(third)}


def parts_of(batch: MicroBatch) -> list[torch.Tensor]:
    """What has memory of its own."""
    return [batch.tokens] if batch.tokens is not None else tensors_of(batch)


@pytest.mark.parametrize("data_size", [1, 3, 5])
@pytest.mark.parametrize(("samples", "num_windows"), [(11, 40), (1, 40), (50, 13)])
def test_held_out_samples_are_the_same_for_every_size(
    data_size: int, samples: int, num_windows: int
) -> None:
    plan = make_plan(data_size, 2, 1)
    per_rank = [
        list(HeldOutBatches(Numbered(num_windows, LENGTH), plan, rank, samples, BatchOptions()))
        for rank in range(data_size)
    ]
    assert len({len(batches) for batches in per_rank}) == 1
    seen = []
    for batch in (batch for batches in per_rank for batch in batches):
        assert batch.input_ids.shape == (2, LENGTH)
        real = (batch.labels != -100).any(dim=1)
        assert torch.equal(batch.labels[real], batch.input_ids[real] + 1)
        seen += (batch.input_ids[real][:, 0] // 10).tolist()
    expected = SampleOrder(num_windows, 0).windows(0, min(samples, num_windows))
    assert sorted(seen) == sorted(expected.tolist())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("loader") / "d", vocab_size=50)


def config_for(dataset: Path, sequence_length: int = LENGTH, **data: Any) -> RunConfig:
    batch = {"sequence_length": sequence_length, "micro_batch_size": 2}
    data = {"path": str(dataset), **data}
    return run_config(model=llama(50), data=data, batch=batch, evaluation={"samples": 6})


def test_from_a_run_configuration(dataset: Path) -> None:
    plan = BatchPlan(4, 2, 1, 2, LENGTH)
    config = config_for(dataset, mask_end_of_document=True)
    with closing(open_training_data(config, plan, 0)) as batches:
        steps = [batches.step(first) for first in range(0, 40, 4)]
    after_end = 0
    for batch in (batch for step in steps for batch in step):
        masked = batch.labels == -100
        assert torch.equal(masked, batch.input_ids == 0)
        after_end += int(masked.sum())
    assert after_end > 0
    (held_out,) = open_held_out(config, plan, 0)
    assert held_out.name == dataset.name
    assert len(held_out.batches) == 3
    assert [batch.input_ids.shape for batch in held_out.batches] == [(2, LENGTH)] * 3


def test_isolated_documents(dataset: Path) -> None:
    """Positions restart after every end of document, and no label crosses one, padding included."""
    plan = BatchPlan(8, 8, 1, 1, 24)
    config = config_for(dataset, 24, document_boundaries="isolate")
    with closing(open_training_data(config, plan, 0)) as batches:
        (batch,) = batches.step(0)
    (held_out,) = open_held_out(config, plan, 0)
    crossings = 0
    for some in (batch, *held_out.batches):
        assert some.position_ids is not None
        for ids, labels, positions in zip(
            some.input_ids.tolist(), some.labels.tolist(), some.position_ids.tolist(), strict=True
        ):
            if set(labels) == {-100}:
                continue  # a row of padding
            expected = 0
            for token, label, position in zip(ids, labels, positions, strict=True):
                assert position == expected
                expected = 0 if token == 0 else expected + 1
                assert (label == -100) == (token == 0)
                crossings += token == 0
    assert crossings > 5


def test_held_out_split_too_short(dataset: Path) -> None:
    plan = BatchPlan(4, 2, 1, 2, 900)
    with pytest.raises(DataError, match=r"the held-out split of .*: \d+ tokens are too few"):
        open_held_out(config_for(dataset, 900), plan, 0)
