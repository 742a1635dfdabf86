"""Samples of user code that differ among ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.data.samples.source import with_source
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import DataError
from bigtrain.run.segment_start import refuse_other_samples, with_position
from bigtrain.run.state import TrainState
from tests.support.datasets import write_dataset
from tests.unit.data.samples.test_sample_stream import GLOBAL_BATCH_SIZE, Counter, opened
from tests.unit.data.samples.test_source import config


def context_of(*others: str) -> Any:
    """Context of rank 0; `others`: what the other ranks answer."""

    def on_every_rank(answer: Callable[[], str]) -> list[str]:
        return [answer(), *others]

    return SimpleNamespace(long_work=SimpleNamespace(on_every_rank=on_every_rank))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", vocab_size=64)


class Pairs:
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> list[int]:
        return [1, 1 + index]


@pytest.mark.parametrize(
    ("samples", "what"), [(Counter(), "its first items"), (Pairs(), "its items")]
)
def test_ranks_that_have_read_other_items_are_refused(
    shards: Path, samples: Any, what: str
) -> None:
    """Also of samples of another kind than a stream."""
    dataset = with_source(config(shards), open_dataset(shards), samples)
    inputs: Any = SimpleNamespace(datasets=[dataset], data_hash="a1")
    refuse_other_samples(context_of("a1", "a1"), inputs)
    with pytest.raises(DataError) as caught:
        refuse_other_samples(context_of("a1", "b2"), inputs)
    name = type(samples).__name__
    text = f"data = {name}: {what} are others on rank 2 (checksum b2) than on rank 0 (a1)"
    assert str(caught.value).startswith(text)
    assert "/tests/unit/" in str(caught.value)


def test_shards_are_not_compared(shards: Path) -> None:
    inputs: Any = SimpleNamespace(datasets=[open_dataset(shards)], data_hash="a1")
    refuse_other_samples(context_of("b2"), inputs)


def test_a_position_that_is_not_that_of_all_ranks_is_not_saved(shards: Path) -> None:
    batches = opened(shards, ranks=1)
    batches.step(0)
    state = TrainState(step=1, samples=GLOBAL_BATCH_SIZE)
    saved = with_position(context_of(), batches, state)
    assert saved.stream is not None
    assert saved.stream.sample == GLOBAL_BATCH_SIZE
    assert with_position(context_of(saved.stream.checksum), batches, state) == saved
    with pytest.raises(DataError, match="the items before 6 are others on rank 1"):
        with_position(context_of("f" * 16), batches, state)
    batches.close()
