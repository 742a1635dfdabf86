"""Packing loses and repeats no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigtrain.data.packing import PackedWindows, TokenStream, split_stream
from bigtrain.data.shards import Shard, ShardWriter, open_dataset
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset


def write_stream(directory: Path, lengths: list[int]) -> tuple[TokenStream, np.ndarray]:
    """Shards of the given numbers of tokens, 0, 1, 2, ... through all of them."""
    shards = []
    position = 0
    for number, length in enumerate(lengths):
        with ShardWriter(directory, f"s{number}", "int32") as writer:
            writer.add(np.arange(position, position + length), np.array([length]), length)
            writer.close()
        shards.append(Shard(directory / f"s{number}"))
        position += length
    return TokenStream(shards, max(1, position)), np.arange(position)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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
    assert windows.num_windows == (len(tokens) - 1) // sequence_length
    inputs, labels = [], []
    for index in range(windows.num_windows):
        out = np.full(sequence_length + 1, -1, dtype=np.int64)
        windows.read_into(index, out)
        inputs += out[:-1].tolist()
        labels += out[1:].tolist()
    assert inputs == tokens[: len(inputs)].tolist()
    assert labels == tokens[1 : len(labels) + 1].tolist()
    assert len(tokens) - 1 - len(labels) < sequence_length


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d", vocab_size=50))
    stream = split_stream(dataset, "train")
    path = tmp_path / "d" / "train_00000.bin"
    content = np.fromfile(path, "<u2")
    content[3] = 50
    path.write_bytes(content.tobytes())
    with pytest.raises(DataError, match=r"is damaged: .* the vocabulary has 50"):
        stream.read_into(0, np.zeros(10, dtype=np.int64))
