"""Streams of samples of user code: order, positions in checkpoints, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigtrain.data.loading.loader import TrainingBatches, open_training_data
from bigtrain.data.samples.sample_stream import StreamPosition
from bigtrain.data.samples.source import with_source
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import BigtrainError, DataError
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.sample_stream import check_stream
from tests.support.datasets import write_dataset
from tests.unit.data.samples.test_source import LENGTH, config

GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 6, 3


class Counter:
    """Item `number` is made of that number."""

    def __init__(self, end: int | None = None) -> None:
        self.number, self.end = 0, end

    def __iter__(self) -> Iterator[Any]:
        while self.end is None or self.number < self.end:
            number, self.number = self.number, self.number + 1
            yield [1 + number % 60] * (2 + number % LENGTH)

    def state_dict(self) -> Any:
        return {"number": self.number}

    def load_state_dict(self, state: Any) -> None:
        self.number = state["number"]


class Late(Counter):
    """Its state changes after the item was returned, so that a resume would repeat one."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield [1 + self.number % 60] * 3
            self.number += 1


class Different(Counter):
    """Each object begins elsewhere."""

    begins = itertools.count(step=7)

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.begins)


class WithoutState(Counter):
    def load_state_dict(self, state: Any) -> None:
        pass


class Arrays(Counter):
    def state_dict(self) -> Any:
        return {"seen": np.arange(self.number)}


class Large(Counter):
    def state_dict(self) -> Any:
        return {"number": self.number, "seen": "x" * (1 << 20)}


class Failing(Counter):
    def state_dict(self) -> Any:
        raise RuntimeError("no state yet")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", vocab_size=64)


def opened(
    shards: Path, rank: int = 0, ranks: int = 2, position: StreamPosition | None = None
) -> TrainingBatches:
    run = config(shards)
    plan, _ = plan_batch(run.batch, ranks)
    assert plan is not None
    dataset = with_source(run, open_dataset(shards), Counter())
    return open_training_data(run, plan, rank, None, position, datasets=[dataset])


def first_tokens(batches: TrainingBatches, step: int) -> list[int]:
    parts = batches.step(step * GLOBAL_BATCH_SIZE)
    return [int(token) for part in parts for token in part.input_ids[:, 0]]


def test_ranks_share_the_items_of_each_step_in_order(shards: Path) -> None:
    ranks = [opened(shards, rank) for rank in (0, 1)]
    for step in range(4):
        tokens = [token for rank in ranks for token in first_tokens(rank, step)]
        begin = step * GLOBAL_BATCH_SIZE
        assert tokens == [1 + number % 60 for number in range(begin, begin + GLOBAL_BATCH_SIZE)]
    for rank in ranks:
        rank.close()


def test_a_position_is_that_of_its_step_and_not_of_what_is_read_ahead(shards: Path) -> None:
    """As every rank has it, also one whose rows are not the last of the step."""
    ranks = [opened(shards, rank) for rank in (0, 1)]
    for step in range(3):
        for rank in ranks:
            first_tokens(rank, step)
        end = (step + 1) * GLOBAL_BATCH_SIZE
        positions = [rank.position_at(end) for rank in ranks]
        assert positions[0] == positions[1]
        assert (positions[0].sample, positions[0].state) == (end, {"number": end})
    stored = StreamPosition.from_json(json.loads(json.dumps(asdict(positions[0]))))
    assert stored == positions[0]
    expected = [first_tokens(ranks[0], step) for step in (3, 4)]
    again = opened(shards, 0, position=stored)
    assert [first_tokens(again, step) for step in (3, 4)] == expected
    assert again.position_at(5 * GLOBAL_BATCH_SIZE) == ranks[0].position_at(5 * GLOBAL_BATCH_SIZE)
    alone = opened(shards, 0, 1, stored)
    assert first_tokens(alone, 3)[:MICRO_BATCH_SIZE] == expected[0]
    again.restart(stored)
    assert first_tokens(again, 3) == expected[0]
    for batches in (*ranks, again, alone):
        batches.close()


@pytest.mark.parametrize(
    ("stream", "rule"),
    [
        (Late(), "item 4 is another one when a new stream gets the state from before item 4"),
        (WithoutState(), "item 0 is another one when the stream is made again"),
        (Counter(3), "the stream ended after 3 items"),
        (Arrays(), "state['seen'] is of type numpy.ndarray"),
        (Large(), "bytes as JSON; checkpoints hold 1,048,576"),
        (Failing(), "state_dict raised RuntimeError: no state yet"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Counter) else "",
)
def test_a_stream_that_could_not_resume_is_refused(shards: Path, stream: Any, rule: str) -> None:
    with pytest.raises(BigtrainError) as caught:
        with_source(config(shards), open_dataset(shards), stream)
    text = str(caught.value)
    assert rule in text
    assert "test_sample_stream.py" in text
    assert " -> " in text


def test_a_class_that_begins_elsewhere_each_time_is_refused(shards: Path) -> None:
    run = config(shards)
    name = f"{__name__}:Different"
    samples = run.data.samples.model_copy(update={"type": name})
    run = run.model_copy(update={"data": run.data.model_copy(update={"samples": samples})})
    with pytest.raises(DataError, match="item 0 is another one when the stream is made again"):
        with_source(run, open_dataset(shards))


def test_what_a_stream_cannot_have(shards: Path) -> None:
    run = config(shards)
    assert check_stream(run, Counter) == []
    more = {
        "train": run.train.model_copy(update={"epochs": 2.0}),
        "data": run.data.model_copy(update={"workers": 2}),
    }
    keys = [problem.key for problem in check_stream(run.model_copy(update=more), Counter)]
    assert keys == ["train.epochs", "data.workers"]
    assert check_stream(run.model_copy(update=more), list) == []
