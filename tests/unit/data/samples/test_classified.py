"""Samples with a label: complete documents, and their labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bigtrain.data.loading.collator import BatchOptions, BatchReader
from bigtrain.data.samples.documents import ClassifiedSamples
from bigtrain.data.samples.mixture import labels_of
from bigtrain.data.samples.token_stream import split_stream
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import DataError
from tests.support.rated import write_rated


def test_rows_are_complete_documents_with_their_labels(tmp_path: Path) -> None:
    labels = ("low", "middle", "high")
    dataset = open_dataset(write_rated(tmp_path / "rated", vocab_size=64, labels=labels))
    assert dataset.table.labels == labels
    stream = split_stream(dataset, "train")
    documents = [document["input_ids"].tolist() for document in dataset]
    longest = max(map(len, documents))
    with pytest.raises(DataError, match=f"documents are longer .*sequence_length={longest}, or"):
        ClassifiedSamples(stream, longest - 1)
    for length, truncates in ((longest, False), (longest + 3, False), (9, True)):
        samples = ClassifiedSamples(stream, length, truncates=truncates)
        assert bool(samples.length_note) == truncates
        numbers = np.array([5, 0, samples.num_samples - 1, 20])
        batch = BatchReader(samples, BatchOptions()).read(numbers, 5)
        counts = (batch.labels != -100).sum(-1).tolist()
        rows = [ids[:n].tolist() for ids, n in zip(batch.input_ids, counts, strict=True)]
        assert rows == [*(documents[number][:length] for number in numbers), []]
        known = labels_of(samples)
        assert known is not None
        assert known.tolist() == np.concatenate([s.labels for s in stream.shards]).tolist()
        assert set(known.tolist()) == {0, 1, 2}
