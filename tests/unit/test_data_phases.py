"""A run whose data changes: every source goes on where it stands, and nothing is read twice."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.config import RunConfig
from bigtrain.data.identity import SourceIdentity
from bigtrain.data.mixture import BLOCK_SAMPLES
from bigtrain.data.phases import Phase, differences, first_phase, next_phase
from bigtrain.data.sampling import SampleOrder, convert_place, group_size
from bigtrain.errors import CheckpointError

CHUNK = 12
LENGTHS = [1, 2, 3, 4, 6, 12]


def source(name: str, num_tokens: int) -> SourceIdentity:
    return SourceIdentity(f"shards/{name}", f"hash of {name}", num_tokens)


def config(
    weights: dict[str, float], sequence_length: int = 4, chunk_length: int | None = None
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "sources": [
                    {"path": f"shards/{name}", "weight": weight} for name, weight in weights.items()
                ],
                "chunk_length": chunk_length,
            },
            "batch": {"sequence_length": sequence_length, "global_samples": 4},
            "train": {"steps": 2},
            "optimizer": {"lr": 1e-3},
            "output": {"directory": "unused"},
            "seed": 5,
        }
    )


def read_samples(phase: Phase, until: int) -> list[tuple[str, int, int]]:
    """Samples of the phase until sample `until`: hash of the source, its epoch, first token."""
    per_chunk = phase.windows_per_chunk
    sizes = [phase.num_chunks(one) * per_chunk for one in phase.read]
    ends = np.cumsum(sizes)
    places = [one.start for one in phase.read]
    found = []
    windows = phase.order(5).windows(phase.first_sample, until - phase.first_sample)
    for window in windows.tolist():
        number = int(np.searchsorted(ends, window, side="right"))
        own = window - int(ends[number]) + sizes[number]
        epoch = places[number] // sizes[number]
        found.append((phase.read[number].hash, epoch, own * phase.sequence_length))
        places[number] += 1
    return found


changes = st.lists(
    st.tuples(
        st.integers(1, 1500),  # samples of the phase
        st.sampled_from(LENGTHS),
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(
    changes=changes,
    tokens=st.lists(st.integers(CHUNK + 1, 20_000), min_size=4, max_size=4),
)
def test_nothing_is_read_twice_in_an_epoch_across_phases(
    changes: list[tuple[int, int, dict[str, int]]], tokens: list[int]
) -> None:
    known = {name: source(name, size) for name, size in zip("abcd", tokens, strict=True)}
    phase: Phase | None = None
    sample = 0
    read: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for count, length, weights in changes:
        run, sources = config(weights, length, CHUNK), [known[name] for name in weights]
        phase = (
            first_phase(run, sources) if phase is None else next_phase(phase, run, sources, sample)
        )
        # What a checkpoint holds is enough to go on.
        phase = Phase.from_json(json.loads(json.dumps(asdict(phase))))
        for hash_, epoch, first in read_samples(phase, sample + count)[
            sample - phase.first_sample :
        ]:
            read[hash_, epoch].append((first, first + length))
        sample += count
    for ranges in read.values():
        ranges.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))


@settings(max_examples=40, deadline=None)
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
)
def test_weights_changed_and_restored_lose_nothing(weights: list[int], cuts: list[int]) -> None:
    """At one sequence length every epoch is whole, however often the proportions changed."""
    names = "abcd"[: len(weights)]
    sources = [source(name, 4 * 97 * (number + 1) + 1) for number, name in enumerate(names)]
    phase = first_phase(config(dict(zip(names, weights, strict=True))), sources)
    sample = 0
    read: dict[tuple[str, int], list[int]] = defaultdict(list)
    for turn, count in enumerate([*cuts, 5000]):
        turned = weights[turn % len(weights) :] + weights[: turn % len(weights)]
        run = config(dict(zip(names, turned, strict=True)))
        phase = next_phase(phase, run, sources, sample)
        for hash_, epoch, first in read_samples(phase, sample + count)[
            sample - phase.first_sample :
        ]:
            read[hash_, epoch].append(first)
        sample += count
    newest = {hash_: max(epoch for other, epoch in read if other == hash_) for hash_, _ in read}
    for (hash_, epoch), firsts in read.items():
        assert len(set(firsts)) == len(firsts)
        size = next(phase.num_chunks(one) for one in phase.read if one.hash == hash_)
        if epoch < newest[hash_]:
            assert sorted(firsts) == [4 * window for window in range(size)]


def test_unchanged_data_is_the_same_phase_wherever_it_lies() -> None:
    sources = [source("a", 1000), source("b", 500)]
    phase = first_phase(config({"a": 1, "b": 2}), sources)
    assert next_phase(phase, config({"a": 10, "b": 20}), sources, 77) is phase
    moved = [replace(one, path=f"moved/{one.path}") for one in sources]
    assert next_phase(phase, config({"a": 1, "b": 2}), moved, 77) is phase


def test_proportions_hold_from_the_change_on() -> None:
    sources = [source("a", 10**6), source("b", 10**6)]
    phase = first_phase(config({"a": 3, "b": 1}), sources)
    sample = 3 * BLOCK_SAMPLES + 123
    changed = next_phase(phase, config({"a": 1, "b": 3}), sources, sample)
    for blocks in range(1, 4):
        assert changed.order(5).counts(sample + blocks * BLOCK_SAMPLES) == [
            256 * blocks,
            768 * blocks,
        ]
    counts = phase.order(5).counts(sample)
    assert [one.start for one in changed.read] == counts
    read = [hash_ for hash_, _, _ in read_samples(phase, sample)]
    assert counts == [read.count("hash of a"), read.count("hash of b")]


def test_a_source_that_comes_back_goes_on_where_it_stood() -> None:
    known = {name: source(name, 4001) for name in "abc"}
    phases = [first_phase(config({"a": 1, "b": 1}), [known["a"], known["b"]])]
    for sample, names in ((300, "bc"), (500, "c"), (600, "cab")):
        run = config(dict.fromkeys(names, 1.0))
        phases.append(next_phase(phases[-1], run, [known[name] for name in names], sample))
    starts = [{one.path[-1]: one.start for one in phase.sources} for phase in phases]
    first = phases[0].order(5).counts(300)
    assert starts[1] == {"b": first[1], "c": 0, "a": first[0]}
    assert starts[3]["a"] == first[0]
    assert starts[3]["b"] == starts[2]["b"]
    assert starts[3]["c"] == starts[2]["c"] + 100
    # A permutation of its own for each, the same in every phase.
    numbers = [{one.path[-1]: one.number for one in phase.sources} for phase in phases]
    assert numbers[1:] == [{"a": 0, "b": 1, "c": 2}] * 3
    assert differences(phases[2], phases[3]) == [
        ("data.sources", "shards/a is new"),
        ("data.sources", "shards/b is new"),
        ("data.sources", "share of shards/c: 1 there, 0.3333 now"),
    ]


def refused(match: str, *arguments: Any) -> None:
    with pytest.raises(CheckpointError, match=match):
        next_phase(*arguments)


def test_what_cannot_be_followed_is_refused() -> None:
    sources = [source("a", 1000)]
    phase = first_phase(config({"a": 1}, 4, 8), sources)
    refused(
        r"batch\.sequence_length = 16 does not divide the chunks of 8 .* batch\.sequence_length=8",
        *(phase, config({"a": 1}, 16), sources, 10),
    )
    refused("= 3 does not divide .*=2,", phase, config({"a": 1}, 3), sources, 10)
    refused("set data.chunk_length=8", phase, config({"a": 1}, 4, 16), sources, 10)
    other = [replace(sources[0], hash="other", num_tokens=1200)]
    refused(
        "shards/a does not hold .* 1000 tokens, hash hash of a there, 1200 tokens, hash other now",
        *(phase, config({"a": 1}), other, 10),
    )


@settings(max_examples=40, deadline=None)
@given(
    num_chunks=st.integers(1, 1000),
    per_chunk=st.sampled_from([1, 2, 3, 4, 6, 12]),
    epoch=st.integers(0, 2),
    first=st.integers(0, 500),
)
def test_an_epoch_of_chunks_has_no_gap_and_no_repeat(
    num_chunks: int, per_chunk: int, epoch: int, first: int
) -> None:
    size = num_chunks * per_chunk
    order = SampleOrder(size, 3, windows_per_chunk=per_chunk)
    windows = order.windows(epoch * size, size)
    assert sorted(windows.tolist()) == list(range(size))
    later = SampleOrder(size, 3, windows_per_chunk=per_chunk, start=first)
    assert later.windows(7, 20).tolist() == order.windows(first + 7, 20).tolist()
    # Windows of one chunk are a group apart.
    chunks = windows // per_chunk
    near = min(group_size(num_chunks), 50)
    for distance in range(1, min(near, size)):
        assert (chunks[distance:] != chunks[:-distance]).all()


@settings(max_examples=200, deadline=None)
@given(
    num_chunks=st.integers(1, 700),
    before=st.sampled_from(LENGTHS),
    after=st.sampled_from(LENGTHS),
    read=st.integers(0, 20_000),
)
def test_converting_leaves_little_unread(
    num_chunks: int, before: int, after: int, read: int
) -> None:
    old, new = CHUNK // before, CHUNK // after
    place = convert_place(read, num_chunks, old, new)
    # In tokens; of one group at most a window of the old and one of the new length of each chunk.
    skipped = place * after - read * before
    assert 0 <= skipped <= 2 * group_size(num_chunks) * (before + after)
    assert convert_place(read, num_chunks, old, old) == read


def test_seeking_reads_nothing_before() -> None:
    """Of 10^12 chunks after 10^15 samples, in the time of a block."""
    sources = [source("a", 10**16 + 1), source("b", 10**13 + 1)]
    phase = first_phase(config({"a": 5, "b": 1}, 4096, 32768), sources)
    later = next_phase(phase, config({"a": 1, "b": 1}, 8192), sources, 10**15 + 17)
    assert len(later.order(5).windows(10**15 + 5000, 3000)) == 3000
