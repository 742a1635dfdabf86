"""Rows of rated answers: the answer to its prompt, and the one before it to the same prompt."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bigtrain.data.loading.collator import BatchOptions, BatchReader
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.mixture import MixedSamples, labels_of
from bigtrain.data.samples.rated import RatedSamples
from bigtrain.data.samples.token_stream import PackedWindows, split_stream
from bigtrain.data.shards.dataset import TokenDataset, open_dataset
from bigtrain.errors import DataError
from tests.support.rated import write_rated

LENGTH = 32


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    directory = tmp_path_factory.mktemp("data") / "rated"
    return open_dataset(write_rated(directory, vocab_size=64, longest=LENGTH + 1))


def row_of(prompt: list[int], answer: list[int], length: int) -> list[int]:
    tokens = (prompt + answer)[: length + 1]
    labels = ([-100] * len(prompt) + answer)[: length + 1]
    padding = length + 1 - len(tokens)
    return [*(tokens + [0] * padding)[:-1], -1, *(labels + [-100] * padding)[1:]]


def expected_rows(dataset: TokenDataset, number: int, length: int) -> list[list[int]]:
    """By TRL: completions rotated by one, `[completions[-1], *completions[:-1]]`."""
    prompts, answers = [], []
    for document in dataset:
        tokens = document["input_ids"].tolist()[: length + 1]
        learned = (document["labels"] != -100).tolist()[: length + 1]
        prompts.append([t for t, is_target in zip(tokens, learned, strict=True) if not is_target])
        answers.append([t for t, is_target in zip(tokens, learned, strict=True) if is_target])
    rotated = [answers[-1], *answers[:-1]]
    prompt = prompts[number]
    return [row_of(prompt, answers[number], length), row_of(prompt, rotated[number], length)]


@pytest.mark.parametrize("length", [LENGTH, 12])
def test_rows_are_the_answer_and_the_one_before_it(dataset: TokenDataset, length: int) -> None:
    samples = RatedSamples(split_stream(dataset, "train"), length, truncates=True)
    assert samples.num_samples == len(dataset) == 32
    assert bool(samples.length_note) == (length < LENGTH)
    reader = BatchReader(samples, BatchOptions())
    several, ones = [20, 0, 21, 31, 5], [[number] for number in range(32)]
    for numbers in [several, *ones]:
        batch = reader.read(np.array(numbers), len(numbers)).of_pairs()
        rows_read = [
            [*ids, -1, *labels]
            for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
        ]
        expected = [expected_rows(dataset, number, length) for number in numbers]
        assert rows_read == [row for rows in expected for row in rows]


def test_one_answer_has_no_other_prompt(tmp_path: Path) -> None:
    path = write_rated(tmp_path / "one", vocab_size=64, shards=(1,))
    with pytest.raises(DataError, match="1 answers have no other prompt"):
        RatedSamples(split_stream(open_dataset(path), "train"), 64)


def test_labels_of_a_mixture_are_those_of_its_sources(
    dataset: TokenDataset, tmp_path: Path
) -> None:
    other = open_dataset(write_rated(tmp_path / "other", vocab_size=64, shards=(5,)))
    sources = [RatedSamples(split_stream(one, "train"), LENGTH) for one in (dataset, other)]
    labels = labels_of(MixedSamples(sources))
    assert labels is not None
    files = [p for one in (dataset, other) for p in sorted(one.path.glob("train*.labels"))]
    written = np.concatenate([np.fromfile(path, np.uint8) for path in files]).tolist()
    assert labels.tolist() == written
    assert 0 < sum(written) < len(written) == 37
    windows = PackedWindows(split_stream(other, "train"), 2 * LENGTH + 1)
    assert labels_of(windows) is None
    assert labels_of(MixedSamples([sources[1], windows])) is None


def test_parts_of_a_micro_batch_keep_what_belongs_to_their_rows() -> None:
    ids = torch.arange(24).view(8, 3)
    likes = torch.tensor([True, True, False, False, False, False, True, True])
    whole = MicroBatch(ids, ids + 1, ids % 3, reference=torch.arange(8.0), desirable=likes)
    parts = [whole.split(4)[1], whole.every_second(1), whole.moved(torch.clone)]
    for part, rows in zip(parts, ([4, 5, 6, 7], [1, 3, 5, 7], list(range(8))), strict=True):
        assert part.tokens is None
        for name in ("input_ids", "labels", "position_ids", "reference", "desirable"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[rows]), name
