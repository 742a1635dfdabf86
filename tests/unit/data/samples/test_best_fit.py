"""Best-fit packing: no token lost or repeated, nothing cut that fits, the same plan everywhere."""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, insort
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigtrain.data.samples import best_fit
from bigtrain.data.samples import packing_plan as plans
from bigtrain.data.samples.best_fit import (
    LongDocuments,
    PackBlock,
    PackingCounts,
    best_fit_decreasing,
    pack_blocks,
)
from bigtrain.data.samples.packing_plan import open_plan
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.format import HEADER, TokenShard
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.errors import DataError
from tests.support.datasets import write_dataset
from tests.support.tiers import examples

FRESH_DIRECTORY = settings(
    max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def naive_rooms(lengths: list[int], capacity: int) -> list[int]:
    """Room left in each pack, by the definition: one document at a time."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        room = rooms.pop(place) if place < len(rooms) else capacity
        insort(rooms, room - length)
    return rooms


@settings(max_examples=examples(300))
@given(data=st.data(), capacity=st.integers(1, 40))
def test_it_is_best_fit_decreasing(data: st.DataObject, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    packs, num_packs = best_fit_decreasing(np.array(lengths, np.int64), capacity)
    used = np.bincount(packs, weights=lengths, minlength=num_packs)
    assert sorted((capacity - used).astype(int).tolist()) == naive_rooms(lengths, capacity)


def write_shards(directory: Path, documents: list[list[int]], masked: bool) -> list[TokenShard]:
    """Two shards of documents that are given as mask bits; token i of the stream is i."""
    shards = []
    position = 0
    middle = len(documents) // 2
    for number, part in enumerate((documents[:middle], documents[middle:])):
        with ShardWriter(directory, f"s{number}", "int32", masked=masked) as writer:
            for bits in part:
                tokens = np.arange(position, position + len(bits))
                mask = np.array(bits, bool) if masked else None
                writer.add(tokens, np.array([len(bits)]), 0, mask=mask)
                position += len(bits)
            writer.close()
        shards.append(TokenShard(directory / f"s{number}", masked=masked))
    return shards


def pieces_of(blocks: list[PackBlock]) -> list[list[range]]:
    packs = []
    for block in blocks:
        for low, high in zip([0, *block.row_ends[:-1]], block.row_ends, strict=True):
            parts = zip(block.starts[low:high], block.lengths[low:high], strict=True)
            packs.append([range(start, start + length) for start, length in parts])
    return packs


@FRESH_DIRECTORY
@given(
    documents=st.lists(st.lists(st.integers(0, 1), max_size=25), max_size=30),
    sequence_length=st.integers(1, 12),
    masked=st.booleans(),
    long_documents=st.sampled_from(["cut", "truncate"]),
    block_pieces=st.integers(1, 40),
    read_documents=st.integers(1, 9),
)
def test_every_target_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    documents: list[list[int]],
    sequence_length: int,
    masked: bool,
    long_documents: LongDocuments,
    block_pieces: int,
    read_documents: int,
) -> None:
    monkeypatch.setattr(best_fit, "BLOCK_PIECES", block_pieces)
    monkeypatch.setattr(best_fit, "READ_DOCUMENTS", read_documents)
    monkeypatch.setattr(best_fit, "MASK_READ_BYTES", 3)
    shards = write_shards(tmp_path, documents, masked)
    counts = PackingCounts()
    blocks = list(pack_blocks(shards, sequence_length, long_documents, counts))
    packs = pieces_of(blocks)
    room = sequence_length + 1
    assert all(0 < sum(map(len, pack)) <= room for pack in packs)
    pieces = [piece for pack in packs for piece in pack]
    predicted = sorted(token for piece in pieces for token in piece[1:])
    assert len(set(predicted)) == len(predicted)
    mask = [bit or not masked for bits in documents for bit in bits]
    begin, expected, whole = 0, set(), set()
    for bits in documents:
        kept = len(bits) if long_documents == "cut" else min(len(bits), room)
        expected |= {t for t in range(begin + 1, begin + kept) if mask[t]}
        if len(bits) <= room:
            whole.add(range(begin, begin + len(bits)))
        begin += len(bits)
    assert {token for token in predicted if mask[token]} == expected
    # Each piece has a target, and a document that would fit in a sample is one piece of it.
    assert all(any(mask[token] for token in piece[1:]) for piece in pieces)
    assert all(piece in whole or len(piece) > 1 for piece in pieces)
    assert not [w for w in whole for p in pieces if p != w and set(p) & set(w)]
    assert counts.documents == len(documents)
    assert counts.tokens == begin
    assert counts.packed_tokens == sum(map(len, pieces))
    overlap = counts.packed_tokens + counts.dropped_tokens + counts.truncated_tokens - begin
    assert overlap >= 0
    if long_documents == "truncate":
        assert overlap == 0
        assert counts.truncated_documents == sum(len(bits) > room for bits in documents)
    else:
        assert counts.cut_documents == sum(len(bits) > room for bits in documents)


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    (shard, _) = write_shards(tmp_path, [[1] * 3, [1] * 4, [1] * 2, [1] * 5], masked=False)
    content = bytearray(shard.index_path.read_bytes())
    assert (shard.num_sequences, shard.num_documents) == (2, 2)
    # One document of both sequences and an empty one.
    content[-24:] = np.array([0, 2, 2], "<i8").tobytes()
    shard.index_path.write_bytes(content)
    counts = PackingCounts()
    blocks = list(pack_blocks([TokenShard(tmp_path / "s0")], 10, "cut", counts))
    assert pieces_of(blocks) == [[range(7)]]
    assert (counts.documents, counts.dropped_pieces) == (2, 1)


@pytest.mark.parametrize(
    ("offset", "entry", "what"),
    [
        *((-24, entry, "documents from 0 on") for entry in ([0, 2, 1], [0, 1, 9], [-1, 1, 2])),
        *((HEADER.size + 8, ends, "sequences 0 to 2") for ends in ([8, 0], [0, 999], [-4, 12])),
    ],
)
def test_corrupt_entries_are_refused(
    tmp_path: Path, offset: int, entry: list[int], what: str
) -> None:
    (shard, _) = write_shards(tmp_path, [[1] * 3, [1] * 4, [1] * 2, [1] * 5], masked=False)
    assert shard.num_sequences == 2
    content = bytearray(shard.index_path.read_bytes())
    offset %= len(content)
    content[offset : offset + 8 * len(entry)] = np.array(entry, "<i8").tobytes()
    shard.index_path.write_bytes(content)
    with pytest.raises(DataError, match=rf"s0\.idx is corrupt: {what} are out of order"):
        list(pack_blocks([TokenShard(tmp_path / "s0")], 10, "cut", PackingCounts()))


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_dataset(tmp_path / "set", vocab_size=50)


def content_of(plan: plans.PackingPlan) -> list[Any]:
    return [plan.row_ends.tolist(), plan.starts.tolist(), plan.lengths.tolist(), plan.counts]


def never(*_: object, **__: object) -> None:
    raise AssertionError("the plan is made again")


def test_plan_is_kept(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_dataset(dataset)
    first = open_plan(opened, "train", 40, "cut")
    (file,) = (dataset / "plans").iterdir()
    content = file.read_bytes()
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    # What a process that was as quick would have written.
    file.unlink()
    assert content_of(open_plan(opened, "train", 40, "cut")) == content_of(first)
    assert file.read_bytes() == content
    monkeypatch.setattr(plans, "pack_blocks", never)
    assert content_of(open_plan(opened, "train", 40, "cut")) == content_of(first)
    for other in (("train", 41, "cut"), ("train", 40, "truncate"), ("held_out", 40, "cut")):
        with pytest.raises(AssertionError, match="made again"):
            open_plan(opened, *other)  # type: ignore[arg-type]


def test_corrupt_plan_is_made_again(dataset: Path) -> None:
    opened = open_dataset(dataset)
    first = content_of(open_plan(opened, "train", 40, "cut"))
    (file,) = (dataset / "plans").iterdir()
    content = file.read_bytes()
    for corrupt in (content[:-1], b"", b"X" + content[1:], content + b"\0"):
        file.write_bytes(corrupt)
        assert content_of(open_plan(opened, "train", 40, "cut")) == first
        assert file.read_bytes() == content


def no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")  # as in some containers


@pytest.mark.parametrize("cache", ["named", "writable", "not writable", "no home"])
def test_read_only_dataset(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    opened = open_dataset(dataset)
    expected = content_of(open_plan(opened, "train", 40, "cut"))
    (name,) = os.listdir(dataset / "plans")
    for file in (dataset / "plans").iterdir():
        file.unlink()
    (dataset / "plans").rmdir()
    # A file where the folder would be refuses root as well.
    (dataset / "plans").touch()
    if cache == "not writable":
        (tmp_path / "cache").touch()
    elif cache == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", no_home)
        monkeypatch.chdir(tmp_path)
    if cache == "named":
        monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "named"))
    else:
        monkeypatch.delenv("BIGTRAIN_CACHE")
    assert content_of(open_plan(opened, "train", 40, "cut")) == expected
    kept = tmp_path / "cache" / "bigtrain" / "plans" / name
    assert kept.exists() == (cache == "writable")
    assert (tmp_path / "named" / "plans" / name).exists() == (cache == "named")
    assert not (tmp_path / "~").exists()


def test_what_is_said_of_a_plan(tmp_path: Path) -> None:
    counts = PackingCounts(4, 100, 0, 1, 25, 2, 10, 65)
    ends = np.array([3, 6])
    plan = plans.PackingPlan(ends, np.zeros(6, np.int64), np.zeros(6, np.int32), counts, 39)
    assert plan.padding_fraction == pytest.approx(1 - 65 / 80)
    assert plan.describe() == (
        "4 documents in 2 samples, padding 18.750%, 1 longer than a sample lose 25.000% of the "
        "tokens, 2 pieces without a target dropped (10.000% of the tokens)"
    )


def test_no_room_for_a_plan(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(DataError, match=r"plan of .*set cannot be written anywhere: .* set TMPDIR"):
        open_plan(open_dataset(dataset), "train", 40, "cut")
