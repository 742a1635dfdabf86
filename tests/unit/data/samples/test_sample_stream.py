"""Streams of samples of user code: order, positions in checkpoints, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bigtrain.data.loading.dataset_checks import check_given_stream
from bigtrain.data.loading.loader import TrainingBatches, open_training_data
from bigtrain.data.samples.sample_stream import StreamPosition
from bigtrain.data.samples.source import with_source
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import BigtrainError, ConfigError, DataError, ExtensionError
from bigtrain.run.length import with_steps
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.sample_stream import check_stream
from bigtrain.settings.sections.sites import SitesSection
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


class OtherState(Counter):
    def load_state_dict(self, state: Any) -> None:
        self.number = state["position"]


class NotANumber(Counter):
    def state_dict(self) -> Any:
        return {"number": self.number, "loss": [0.5, float("nan")]}


class NumberedKeys(Counter):
    def state_dict(self) -> Any:
        return {self.number: self.number}


class Items(Counter):
    """Gives some items as they are, after `before` good ones."""

    def __init__(self, *items: Any, before: int = 2) -> None:
        super().__init__()
        self.items, self.before = items, before

    def __iter__(self) -> Iterator[Any]:
        while True:
            number, self.number = self.number, self.number + 1
            bad = number - self.before
            yield self.items[bad] if 0 <= bad < len(self.items) else [1, 2]


class Raising(Counter):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            self.number += 1
            yield [1, 2]
        raise OSError("disk is gone")


class Unopened(Counter):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("no such bucket")


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


def position_at(batches: TrainingBatches, sample: int) -> StreamPosition:
    assert batches.stream is not None
    return batches.stream.position_at(sample)


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
        positions = [position_at(rank, end) for rank in ranks]
        assert positions[0] == positions[1]
        assert (positions[0].sample, positions[0].state) == (end, {"number": end})
    stored = StreamPosition.from_json(json.loads(json.dumps(asdict(positions[0]))))
    assert stored == positions[0]
    expected = [first_tokens(ranks[0], step) for step in (3, 4)]
    again = opened(shards, 0, position=stored)
    assert [first_tokens(again, step) for step in (3, 4)] == expected
    end = 5 * GLOBAL_BATCH_SIZE
    assert position_at(again, end) == position_at(ranks[0], end)
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
        (NotANumber(), "state['loss'][1] is nan"),
        (NumberedKeys(), "state has the key 0, and keys of JSON are texts"),
        (OtherState(), "load_state_dict raised KeyError: 'position'"),
        (Raising(), "item 3 raised OSError: disk is gone"),
        (Unopened(), "__iter__ raised OSError: no such bucket"),
        (Items([]), "item 2 has 0 tokens; a sample has 2 to 9"),
        (Items([1.0, 2.0]), "item 2 input_ids is of type float64 and shape [2]"),
        (Items([1, -2]), "item 2 has input_ids[1] = -2; ids are 0 to 63"),
        (Items([1, 64]), "item 2 has input_ids[1] = 64; ids are 0 to 63"),
        (Items({"input_ids": [1, 2], "loss_weights": [1, -1]}), "item 2 loss_weights[1] is -1"),
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


def streamed(shards: Path, stream: Any) -> TrainingBatches:
    """Batches of the only rank, of 6 samples."""
    run = config(shards)
    plan, _ = plan_batch(run.batch, 1)
    assert plan is not None
    dataset = with_source(run, open_dataset(shards), stream)
    return open_training_data(run, plan, 0, datasets=[dataset])


def test_weights_are_part_of_the_identity_and_of_positions(shards: Path) -> None:
    def items(weight: float) -> Items:
        return Items({"input_ids": [1, 2], "loss_weights": [1, weight]})

    datasets = [with_source(config(shards), open_dataset(shards), items(w)) for w in (0.5, 0.25)]
    assert len({one.table.splits["train"].rows["xxh3"][0] for one in datasets}) == 2
    positions = []
    for weight in (0.5, 0.5, 0.25):
        batches = streamed(shards, items(weight))
        [first] = [batch.weights[2, 0].item() for batch in batches.step(0)[:1]]
        assert first == weight
        positions.append(position_at(batches, GLOBAL_BATCH_SIZE).checksum)
        batches.close()
    assert positions[0] == positions[1] != positions[2]


@pytest.mark.parametrize(
    ("stream", "rule"),
    [
        (Counter(20), "the stream ended after 20 items, and the run needs more"),
        (Items([3] * 10, before=20), "item 20 has 10 tokens; a sample has 2 to 9"),
        (
            Items({"input_ids": [1, 2], "loss_weights": [1, 0.5]}, before=20),
            "item 20 has loss_weights, and the items that were read before the run have none",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Counter) else "",
)
def test_an_error_of_a_later_item_is_that_of_its_step_and_stays(
    shards: Path, stream: Any, rule: str
) -> None:
    """Also when the stream would go on: the number of the next item is not known any more."""
    batches = streamed(shards, stream)
    for step in range(3):
        batches.step(step * GLOBAL_BATCH_SIZE)
    assert position_at(batches, 18).sample == 18  # the item was read ahead
    with pytest.raises(DataError, match=re.escape(rule)) as caught:
        batches.step(18)
    assert "test_sample_stream.py" in str(caught.value)
    with pytest.raises(DataError, match=re.escape(rule)):
        position_at(batches, 24)
    batches.close()


def test_a_state_of_another_version_is_refused(shards: Path) -> None:
    """As when the class has changed since the checkpoint."""
    position = StreamPosition(6, "0" * 16, {"place": 6})
    with pytest.raises(ExtensionError, match="load_state_dict raised KeyError: 'number'") as caught:
        opened(shards, position=position)
    assert "test_sample_stream.py" in str(caught.value)


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
    more["sites"] = SitesSection.model_construct()
    run = run.model_copy(update=more)
    problems = check_stream(run, Counter)
    assert [problem.key for problem in problems] == ["train.epochs", "data.workers", "sites"]
    assert "can only continue at a state that it has returned" in problems[-1].rule
    assert check_stream(run, list) == []
    given = with_source(run, open_dataset(shards), Counter())
    assert check_given_stream(run, [given]) == problems


def test_epochs_of_a_given_stream_are_refused_before_they_are_counted(shards: Path) -> None:
    run = config(shards)
    train = run.train.model_copy(update={"epochs": 2.0, "steps": None})
    resolved = resolve_run(run.model_copy(update={"train": train}), 1)
    with pytest.raises(ConfigError, match="a stream of samples has no length"):
        with_steps(resolved, [with_source(run, open_dataset(shards), Counter())])
