"""Packing loses and repeats no token."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigtrain.data.loading.collator import BatchOptions, BatchReader
from bigtrain.data.samples.token_stream import (
    READS_AFTER_COLD_MAP,
    PackedWindows,
    TokenStream,
    split_stream,
)
from bigtrain.data.shards.dataset import ShardList, open_dataset
from bigtrain.data.shards.format import HEADER, MAGIC, TokenShard
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.errors import DataError
from tests.support.datasets import forget_blocks, write_dataset
from tests.support.tiers import examples


def write_stream(directory: Path, lengths: list[int]) -> tuple[TokenStream, np.ndarray]:
    """Shards of the given numbers of tokens, 0, 1, 2, ... through all of them."""
    shards = []
    position = 0
    for number, length in enumerate(lengths):
        with ShardWriter(directory, f"s{number}", "int32") as writer:
            writer.add(np.arange(position, position + length), np.array([length]), length)
            writer.close()
        shards.append(TokenShard(directory / f"s{number}"))
        position += length
    return TokenStream(ShardList.of(shards), max(1, position)), np.arange(position)


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    sequence_length=st.integers(1, 40),
)
def test_windows_are_the_stream(tmp_path: Path, lengths: list[int], sequence_length: int) -> None:
    stream, tokens = write_stream(tmp_path, lengths)
    if len(tokens) <= sequence_length:
        with pytest.raises(DataError, match=f"^{len(tokens)} tokens are too few for one sample"):
            PackedWindows(stream, sequence_length)
        return
    windows = PackedWindows(stream, sequence_length)
    assert windows.num_samples == (len(tokens) - 1) // sequence_length
    inputs, labels = [], []
    for index in range(windows.num_samples):
        out = np.full(sequence_length + 1, -1, dtype=np.int64)
        start, length = np.array([index * sequence_length]), np.array([sequence_length + 1])
        stream.read(start, length, out, np.array([0]))
        inputs += out[:-1].tolist()
        labels += out[1:].tolist()
    assert inputs == tokens[: len(inputs)].tolist()
    assert labels == tokens[1 : len(labels) + 1].tolist()
    assert len(tokens) - 1 - len(labels) < sequence_length
    order = np.random.default_rng(0).permutation(windows.num_samples)
    order = np.concatenate([order] * 6)  # rows enough to copy from maps
    reader = BatchReader(windows, BatchOptions())
    for reads in (-1, 1):  # from memory maps, by reads
        stream._reads_to_map = reads
        batch = reader.read(order, len(order))
        assert batch.input_ids.tolist() == np.reshape(inputs, (-1, sequence_length))[order].tolist()
        assert batch.labels.tolist() == np.reshape(labels, (-1, sequence_length))[order].tolist()


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """Of a dataset that was made before there were checksums of blocks."""
    dataset = open_dataset(forget_blocks(write_dataset(tmp_path / "d", vocab_size=50)))
    stream = split_stream(dataset, "train")
    path = tmp_path / "d" / "train_00000.bin"
    content = np.fromfile(path, "<u2")
    content[3] = 50
    path.write_bytes(content.tobytes())
    reader = BatchReader(PackedWindows(stream, 10), BatchOptions())
    assert reader.read(np.array([1, 2]), 2).input_ids.shape == (2, 10)
    expected = r"tokens 0 to 11 of .*train_00000\.bin are corrupt: one of them is .* or 50, the voc"
    with pytest.raises(DataError, match=expected):
        reader.read(np.array([2, 0]), 2)


def test_a_file_that_shrinks_is_an_error_also_where_it_is_mapped(tmp_path: Path) -> None:
    stream, _ = write_stream(tmp_path, [4000])
    reader = BatchReader(PackedWindows(stream, 100), BatchOptions())
    order = np.array([38, 0, 37, 5])
    assert reader.read(order, 4).labels[:, -1].tolist() == [3900, 100, 3800, 600]
    assert stream._reads_to_map < 0
    os.truncate(tmp_path / "s0.bin", 8000)
    with pytest.raises(DataError, match=r"s0\.bin ends at byte 8000; it was longer"):
        reader.read(order, 4)


def test_where_maps_are_cold_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, tokens = write_stream(tmp_path, [4000])
    out, starts = np.empty((4, 10), "<i4"), np.array([5, 3000, 17, 0])
    rows = np.array([2, 0, 3, 1])
    monkeypatch.setattr("bigtrain.data.samples.token_stream.COLD_PAGES_OF_ROW", -1)
    stream.read_rows(starts, out, rows)
    assert stream._reads_to_map == READS_AFTER_COLD_MAP
    monkeypatch.setattr(stream, "_copy_mapped", None)
    for _ in range(READS_AFTER_COLD_MAP):
        out[:] = 0
        stream.read_rows(starts, out, rows)
        assert out[rows].tolist() == [tokens[start : start + 10].tolist() for start in starts]
    assert stream._reads_to_map == 0


def write_documents(directory: Path, shards: list[list[int]]) -> tuple[TokenStream, list[int]]:
    """Shards of documents of the given lengths, and each token's distance from its document's."""
    opened, positions = [], []
    for number, lengths in enumerate(shards):
        with ShardWriter(directory, f"p{number}", "int32") as writer:
            writer.add(np.zeros(sum(lengths), np.int64), np.array(lengths, np.int64), 0)
            writer.close()
        opened.append(TokenShard(directory / f"p{number}"))
        positions += [position for length in lengths for position in range(length)]
    return TokenStream(ShardList.of(opened), 1), positions


@settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    shards=st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=4),
    sequence_length=st.integers(1, 12),
)
def test_positions_restart_where_documents_begin(
    tmp_path: Path, shards: list[list[int]], sequence_length: int
) -> None:
    stream, expected = write_documents(tmp_path, shards)
    if len(expected) <= sequence_length:
        return
    windows = PackedWindows(stream, sequence_length)
    order = np.random.default_rng(0).permutation(windows.num_samples)
    batch = BatchReader(windows, BatchOptions(isolate=True)).read(order, len(order) + 1)
    assert batch.position_ids is not None
    for index, positions, labels in zip(
        [*order.tolist(), None], batch.position_ids.tolist(), batch.labels.tolist(), strict=True
    ):
        if index is None:  # padding
            assert positions == list(range(sequence_length))
            assert set(labels) == {-100}
            continue
        begin = index * sequence_length
        row = expected[begin : begin + sequence_length + 1]
        assert positions == [min(position, place) for place, position in enumerate(row[:-1])]
        assert labels == [-100 if position == 0 else 0 for position in row[1:]]


def test_documents_of_several_sequences_have_one_beginning(tmp_path: Path) -> None:
    """As Megatron's index of a text split into sentences: document entries skip sequences."""
    lengths, starts = np.array([3, 2, 4, 1], "<i4"), np.array([0, 2, 2, 4], "<i8")
    pointers = np.array([0, 3, 5, 9], "<i8") * 4
    header = HEADER.pack(MAGIC, 1, 4, len(lengths), len(starts))
    (tmp_path / "s.idx").write_bytes(
        header + lengths.tobytes() + pointers.tobytes() + starts.tobytes()
    )
    (tmp_path / "s.bin").write_bytes(np.zeros(10, "<i4").tobytes())
    assert TokenShard(tmp_path / "s").document_begins(0, 10) == [0, 20]
    assert TokenShard(tmp_path / "s").document_begins(1, 5) == []


@settings(
    max_examples=examples(80),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    places=st.lists(st.tuples(st.integers(34, 300), st.integers(0, 255)), min_size=1, max_size=20)
)
def test_a_corrupt_index_gives_positions_or_an_error(
    tmp_path: Path, places: list[tuple[int, int]]
) -> None:
    """Whatever stands in it, nothing outside of the window is read or written."""
    write_documents(tmp_path, [[3, 4, 2, 5, 1, 1, 7, 3]])
    content = bytearray((tmp_path / "p0.idx").read_bytes())
    for place, value in places:
        if place < len(content):
            content[place] = value
    (tmp_path / "p0.idx").write_bytes(content)
    stream = TokenStream(ShardList.of([TokenShard(tmp_path / "p0")]), 1)
    for start in range(0, 20, 3):
        try:
            begins = stream.begins(np.array([start]), np.array([6]), np.array([100]))
        except DataError:
            continue
        assert ((begins >= 100) & (begins < 106)).all()
        assert (np.diff(begins) >= 0).all()
