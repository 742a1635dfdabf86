"""A run whose data changes: every source goes on where it stands, and nothing is read twice."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.data.samples.mixture import BLOCK_SAMPLES
from bigtrain.data.samples.phases import (
    EpochRemainder,
    Phase,
    SourcePhase,
    differences,
    first_phase,
    next_phase,
)
from bigtrain.data.samples.shuffle import SampleOrder, convert_place, group_size
from bigtrain.errors import CheckpointError
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_config
from tests.support.tiers import examples

CHUNK = 12
LENGTHS = [1, 2, 3, 4, 6, 12]


def source(name: str, num_tokens: int) -> SourcePhase:
    return SourcePhase(path=f"shards/{name}", hash=f"hash of {name}", num_tokens=num_tokens)


def config(
    weights: dict[str, float], sequence_length: int = 4, chunk_length: int | None = None
) -> RunConfig:
    sources = [{"path": f"shards/{name}", "weight": weight} for name, weight in weights.items()]
    data = {"sources": sources, "chunk_length": chunk_length}
    return run_config(data=data, batch={"sequence_length": sequence_length}, seed=5)


def read_pieces(phase: Phase, until: int) -> list[tuple[str, int, list[tuple[int, int]]]]:
    """Samples of the phase until sample `until`: hash of the source, its epoch, and the ranges of
    tokens that it has as inputs."""
    per_chunk, length = phase.windows_per_chunk, phase.sequence_length
    windows = [phase.num_chunks(one) * per_chunk for one in phase.read_sources]
    sizes = [
        size + phase.num_joined(one) for size, one in zip(windows, phase.read_sources, strict=True)
    ]
    ends = np.cumsum(sizes)
    places = [one.start for one in phase.read_sources]
    source_pieces = []
    samples = phase.order(5).windows(phase.first_sample, until - phase.first_sample)
    for sample in samples.tolist():
        number = int(np.searchsorted(ends, sample, side="right"))
        one, own = phase.read_sources[number], sample - int(ends[number]) + sizes[number]
        if own < windows[number]:
            epoch = places[number] // windows[number]
            source_pieces.append((one.hash, epoch, [(own * length, (own + 1) * length)]))
            places[number] += 1
        else:
            assert one.rest is not None
            joined = np.array([own - windows[number]])
            pieces = one.rest.pieces(joined, one.num_tokens, length, 5, one.number)
            ends_at = pieces.starts + pieces.lengths
            ends_at[-1] -= 1  # the label after the last input
            ranges = list(zip(pieces.starts.tolist(), ends_at.tolist(), strict=True))
            source_pieces.append((one.hash, one.rest.epoch, ranges))
    return source_pieces


def read_samples(phase: Phase, until: int) -> list[tuple[str, int, int]]:
    """The same where no sample is joined, with the first token alone."""
    pieces = read_pieces(phase, until)
    assert all(len(ranges) == 1 for _, _, ranges in pieces)
    return [(hash_, epoch, ranges[0][0]) for hash_, epoch, ranges in pieces]


changes = st.lists(
    st.tuples(
        st.integers(1, 600),  # samples of the phase
        st.one_of(st.sampled_from(LENGTHS), st.integers(1, 60)),
        st.sampled_from([None, 1, 2, 3]),  # samples of a chunk, where it is given
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1),
    ),
    min_size=1,
    max_size=6,
)
Change = tuple[int, int, int | None, dict[str, int]]
Ranges = dict[tuple[str, int], list[tuple[int, int]]]


def go_on(changed: list[Change], tokens: list[int]) -> tuple[Ranges, list[Phase]]:
    """What a run reads of each epoch of sources a to d, and its phases."""
    known = {name: source(name, size) for name, size in zip("abcd", tokens, strict=True)}
    phases: list[Phase] = []
    sample = 0
    read: Ranges = defaultdict(list)
    for count, length, per_chunk, weights in changed:
        run = config(weights, length, per_chunk and per_chunk * length)
        sources = [known[name] for name in weights]
        phase = (
            next_phase(phases[-1], run, sources, sample) if phases else first_phase(run, sources)
        )
        # What a checkpoint holds is enough to go on.
        phases.append(Phase.from_json(json.loads(json.dumps(asdict(phase)))))
        samples = read_pieces(phases[-1], sample + count)[sample - phase.first_sample :]
        for hash_, epoch, ranges in samples:
            assert sum(end - begin for begin, end in ranges) == length
            read[hash_, epoch] += ranges
        sample += count
    for ranges in read.values():
        ranges.sort()
    return read, phases


@settings(max_examples=examples(30))
@given(changed=changes, tokens=st.lists(st.integers(3 * 60 + 1, 20_000), min_size=4, max_size=4))
def test_nothing_is_read_twice_in_an_epoch_across_phases(
    changed: list[Change], tokens: list[int]
) -> None:
    read, _ = go_on(changed, tokens)
    for (hash_, _), ranges in read.items():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
        assert ranges[-1][1] < tokens["abcd".index(hash_[-1])]  # there is a label after it


@settings(max_examples=examples(20) // 2)
@given(
    lengths=st.lists(st.integers(10, 60), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    tokens=st.integers(61, 600),  # few enough for groups of one chunk
)
def test_lengths_nobody_declared_leave_less_than_a_sample_unread(
    lengths: list[int], counts: list[int], tokens: int
) -> None:
    """Of an epoch in which the length changed, and what belongs to no chunk as always."""
    weights = {"a": 1}
    changed = [(n, length, None, weights) for n, length in zip(counts, lengths, strict=False)]
    changed.append((2 * tokens // lengths[-1] + 2, lengths[-1], None, weights))  # two epochs more
    read, phases = go_on(changed, [tokens] * 4)
    newest = max(epoch for _, epoch in read)
    for (_, epoch), ranges in read.items():
        if epoch < newest:
            unread = tokens - 1 - sum(end - begin for begin, end in ranges)
            # Less than a sample at the end of the stream, less than one that could not be joined;
            # a chunk that was partly read when the length changed.
            assert 0 <= unread < 3 * max(lengths)
    assert phases[-1].until(10**6, 5).sources[0].rest is None


def test_a_longer_sequence_reads_what_the_epoch_has_left() -> None:
    """100 chunks of 4 of which 30 were read: 17 samples of 16, joined of four each, then others."""
    sources = [source("a", 402)]
    phase = first_phase(config({"a": 1}), sources)
    longer = next_phase(phase, config({"a": 1}, 16), sources, 30)
    assert (longer.chunk_length, longer.windows_per_chunk) == (16, 1)
    assert longer.sources[0].rest == EpochRemainder(chunk_length=4, epoch=0, tokens_read=120)
    assert longer.describe_rests() == [
        "shards/a: 17 samples are joined from pieces of 4 tokens until its epoch ends"
    ]
    before = [window for window in phase.order(5).windows(0, 100).tolist()]
    samples = read_pieces(longer, 30 + 17 + 25)
    for number, (_, epoch, ranges) in enumerate(samples[:17]):
        chunks = before[30 + 4 * number : 34 + 4 * number]
        assert (epoch, ranges) == (0, [(4 * chunk, 4 * chunk + 4) for chunk in chunks])
    assert [epoch for _, epoch, _ in samples[17:]] == [1] * 25
    order = SampleOrder(25, 5, start=25)
    assert [r[0][0] // 16 for _, _, r in samples[17:]] == order.windows(0, 25).tolist()
    assert next_phase(longer, config({"a": 1}, 16), sources, 40) is longer
    # Back, in the middle of it: the rest in pieces of the same chunks, no more joints than there.
    shorter = next_phase(longer, config({"a": 1}), sources, 40)
    assert shorter.sources[0].rest == EpochRemainder(4, 0, 280)
    assert [ranges[0][0] // 4 for _, _, ranges in read_pieces(shorter, 70)] == before[70:]
    assert differences(phase, longer) == [("batch.sequence_length", "4 there, 16 now")]
    other_chunks = next_phase(phase, config({"a": 1}, 4, 8), sources, 30)
    assert differences(phase, other_chunks) == [("data.chunk_length", "4 there, 8 now")]


def test_an_epoch_that_was_not_begun_is_read_in_the_new_length() -> None:
    sources = [source("a", 401)]
    phase = first_phase(config({"a": 1}), sources)
    for sample, epoch in ((0, 0), (100, 1)):
        longer = next_phase(phase, config({"a": 1}, 16), sources, sample)
        assert (longer.sources[0].rest, longer.sources[0].start) == (None, 25 * epoch)


@settings(max_examples=examples(40))
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
)
def test_weights_changed_and_restored_lose_nothing(weights: list[int], cuts: list[int]) -> None:
    """At one sequence length every epoch is whole, however often the proportions changed."""
    names = "abcd"[: len(weights)]
    sources = [source(name, 4 * 97 * (number + 1) + 1) for number, name in enumerate(names)]
    phase = first_phase(config(dict(zip(names, weights, strict=True))), sources)
    sample = 0
    read: dict[tuple[str, int], list[int]] = defaultdict(list)
    for turn, count in enumerate([*cuts, 2000]):
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
        size = next(phase.num_chunks(one) for one in phase.read_sources if one.hash == hash_)
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
    assert [one.start for one in changed.read_sources] == counts
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


def test_what_cannot_be_followed_is_refused() -> None:
    sources = [source("a", 1000)]
    phase = first_phase(config({"a": 1}, 4, 8), sources)
    other = [replace(sources[0], hash="other", num_tokens=1200)]
    there = "1000 tokens, hash hash of a there, 1200 tokens, hash other now"
    with pytest.raises(CheckpointError, match=f"shards/a does not have .* {there}"):
        next_phase(phase, config({"a": 1}), other, 10)


@settings(max_examples=examples(40))
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


@settings(max_examples=examples(200))
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
