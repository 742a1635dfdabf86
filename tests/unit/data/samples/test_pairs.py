"""Rows of preference pairs: tokens, targets, order, and pairs that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bigtrain.data.loading.collator import BatchOptions, BatchReader
from bigtrain.data.samples.documents import PairSamples
from bigtrain.data.samples.token_stream import split_stream
from bigtrain.data.shards.dataset import TokenDataset, open_dataset
from bigtrain.errors import DataError
from tests.support.pairs import write_pairs

LENGTH = 32


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    directory = tmp_path_factory.mktemp("data") / "pairs"
    return open_dataset(write_pairs(directory, vocab_size=64, longest=LENGTH + 1))


def rows_of(dataset: TokenDataset, samples: PairSamples, numbers: list[int]) -> list[list[int]]:
    batch = BatchReader(samples, BatchOptions()).read(np.array(numbers), len(numbers)).of_pairs()
    assert list(batch.input_ids.shape) == [2 * len(numbers), samples.sequence_length // 2]
    return [
        [*ids, -1, *labels]
        for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True)
    ]


def expected_row(dataset: TokenDataset, document: int, length: int) -> list[int]:
    tokens = dataset[document]["input_ids"].tolist()[: length + 1]
    labels = dataset[document]["labels"].tolist()[: length + 1]
    padding = length + 1 - len(tokens)
    return [*(tokens + [0] * padding)[:-1], -1, *(labels + [-100] * padding)[1:]]


def test_rows_are_the_documents_chosen_then_rejected(dataset: TokenDataset) -> None:
    samples = PairSamples(split_stream(dataset, "train"), LENGTH)
    assert samples.num_samples == len(dataset) // 2
    assert samples.length_note == ""
    numbers = [5, 0, samples.num_samples - 1]
    documents = [document for number in numbers for document in (2 * number, 2 * number + 1)]
    expected = [expected_row(dataset, document, LENGTH) for document in documents]
    assert rows_of(dataset, samples, numbers) == expected


def test_complete_rows_have_as_many_targets_as_tokens(dataset: TokenDataset) -> None:
    documents = [document["input_ids"].tolist() for document in dataset]
    longest = max(map(len, documents))
    stream = split_stream(dataset, "train")
    with pytest.raises(DataError, match=f"sequence_length={longest}, or data.long_documents"):
        PairSamples(stream, longest - 1, is_complete=True)
    samples = PairSamples(stream, longest, is_complete=True)
    numbers = np.arange(samples.num_samples)
    batch = BatchReader(samples, BatchOptions()).read(numbers, len(numbers)).of_pairs()
    rows = zip(batch.input_ids, (batch.labels != -100).sum(-1).tolist(), strict=True)
    assert [ids[:count].tolist() for ids, count in rows] == documents
    cut = PairSamples(stream, 12, truncates=True, is_complete=True)
    batch = BatchReader(cut, BatchOptions()).read(numbers, len(numbers)).of_pairs()
    assert (batch.labels != -100).sum(-1).tolist() == [min(12, len(one)) for one in documents]


def test_longer_answers_are_refused_or_truncated(dataset: TokenDataset) -> None:
    stream = split_stream(dataset, "train")
    lengths = [len(document["input_ids"]) for document in dataset]
    longest = max(lengths)
    with pytest.raises(DataError, match=f"batch.sequence_length={longest - 1}, or data.long"):
        PairSamples(stream, longest - 2)
    PairSamples(stream, longest - 1)
    samples = PairSamples(stream, longest - 4, truncates=True)
    count = sum(length > longest - 3 for length in lengths)
    assert samples.length_note.startswith(f"{count} of {len(lengths)} answers are truncated")
    number = lengths.index(longest) // 2
    rows = rows_of(dataset, samples, [number])
    assert rows == [expected_row(dataset, 2 * number + n, longest - 4) for n in (0, 1)]


def test_all_pairs_whose_prompt_fills_a_sample_are_named_at_once(dataset: TokenDataset) -> None:
    stream = split_stream(dataset, "train")
    for length in (1, 4):
        labels = [document["labels"].tolist() for document in dataset]
        full = [n for n, own in enumerate(labels) if all(v == -100 for v in own[: length + 1])]
        assert len(full) > 1
        shown = ", ".join(map(str, full[:5]))
        words = rf"^{len(full)} of {len(labels)} documents \({shown}.*--max-prompt-tokens {length},"
        with pytest.raises(DataError, match=words):
            PairSamples(stream, length, truncates=True)


def test_an_odd_number_of_documents(tmp_path: Path) -> None:
    from tests.support.datasets import write_dataset

    path = write_dataset(tmp_path / "odd", vocab_size=64, num_documents=31)
    with pytest.raises(DataError, match="31 documents are not pairs"):
        PairSamples(split_stream(open_dataset(path), "train"), 64)


def test_rows_that_are_mostly_padding_name_the_shorter_length(dataset: TokenDataset) -> None:
    """The named length holds every document, and half of the rows' length is no more than that."""
    stream = split_stream(dataset, "train")
    longest = max(len(document["input_ids"]) for document in dataset) - 1
    shorter = -(-longest // 8) * 8
    note = PairSamples(stream, 2 * shorter).length_note
    assert f"the longest document has {longest} tokens" in note
    assert f"batch.sequence_length={shorter} gives the same losses" in note
    PairSamples(stream, shorter)
    assert PairSamples(stream, 2 * shorter - 1).length_note == ""
