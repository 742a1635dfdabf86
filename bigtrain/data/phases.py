"""What a run has read when its data changes, so that nothing is read twice in an epoch.

A phase is a stretch of a run with the same sources, weights and sequence length. Sample ``i`` of
the run is a pure function of the seed, ``i`` and the phases until then; the last of them is enough
to go on. A phase costs a few numbers for each source, whatever the size of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.config import RunConfig, SourceSection
from bigtrain.data.identity import SourceIdentity
from bigtrain.data.mixture import MixtureOrder, SourceOrder, integer_weights
from bigtrain.data.packing import count_windows
from bigtrain.data.sampling import convert_place
from bigtrain.errors import CheckpointError


@dataclass(frozen=True)
class SourcePhase:
    """A source in a phase.

    path, hash: as in `SourceIdentity`. number: which of the run's sources it was when it first
    appeared, counted from 0. weight: its integer share, 0 where it is not read any more. start:
    its samples that count as read when the phase begins, in the phase's sequence length, epochs
    included.
    """

    path: str
    hash: str
    number: int
    weight: int
    num_tokens: int
    start: int


@dataclass(frozen=True)
class Phase:
    """A stretch of a run that begins with sample `first_sample` of it.

    sources: those that are read, in the order of the configuration, then those that once were.
    chunk_length: tokens of the chunks that are permuted (`bigtrain.data.sampling`).
    """

    first_sample: int
    sequence_length: int
    chunk_length: int
    sources: tuple[SourcePhase, ...]

    @property
    def windows_per_chunk(self) -> int:
        return self.chunk_length // self.sequence_length

    @property
    def read(self) -> tuple[SourcePhase, ...]:
        """The sources that are read."""
        return tuple(source for source in self.sources if source.weight)

    def order(self, seed: int) -> MixtureOrder:
        """The order of the phase's samples."""
        return MixtureOrder(
            [
                SourceOrder(
                    self.num_chunks(source) * self.windows_per_chunk,
                    source.weight,
                    source.number,
                    source.start,
                )
                for source in self.read
            ],
            seed,
            windows_per_chunk=self.windows_per_chunk,
            first_sample=self.first_sample,
        )

    def num_chunks(self, source: SourcePhase) -> int:
        """Chunks of one of its sources."""
        return count_windows(source.num_tokens, self.chunk_length)

    def until(self, sample: int, seed: int) -> Phase:
        """The same phase as if it began with `sample`, a later one."""
        counts = self.order(seed).counts(sample)
        read = [
            replace(source, start=source.start + count)
            for source, count in zip(self.read, counts, strict=True)
        ]
        rest = [source for source in self.sources if not source.weight]
        return replace(self, first_sample=sample, sources=(*read, *rest))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Phase:
        """Of what `dataclasses.asdict` gave."""
        sources = tuple(SourcePhase(**source) for source in tree["sources"])
        return cls(**{**tree, "sources": sources})


def first_phase(
    config: RunConfig, sources: Sequence[SourceIdentity], sequence_length: int | None = None
) -> Phase:
    """The phase that a run begins with. `sources` are those of ``config.data.mixture``.

    `sequence_length`: of a run that began without phases and with another one than now.
    """
    length = sequence_length or config.batch.sequence_length
    chunk_length = length if sequence_length else config.data.chunk_length or length
    read = _appear(config.data.mixture, sources, length, chunk_length, ())
    return Phase(0, length, chunk_length, read)


def next_phase(
    last: Phase, config: RunConfig, sources: Sequence[SourceIdentity], sample: int
) -> Phase:
    """The phase in which a run goes on at `sample` after `last`; `last` itself where nothing of
    the data has changed.

    A source is continued where it stands, also one that was left out for a while. Raises
    CheckpointError where that is not possible: a sequence longer than the chunks, or other tokens
    at the same path.
    """
    length = config.batch.sequence_length
    _refuse_other_chunks(last, config)
    _refuse_other_contents(last, sources)
    stands = last.until(sample, config.seed)
    known = [
        replace(
            source,
            weight=0,
            start=convert_place(
                source.start,
                stands.num_chunks(source),
                last.windows_per_chunk,
                last.chunk_length // length,
            ),
        )
        for source in stands.sources
    ]
    read = _appear(config.data.mixture, sources, length, last.chunk_length, known)
    following = Phase(sample, length, last.chunk_length, read)
    return following if differences(last, following) else last


def _appear(
    mixture: Sequence[SourceSection],
    sources: Sequence[SourceIdentity],
    sequence_length: int,
    chunk_length: int,
    known: Sequence[SourcePhase],
) -> tuple[SourcePhase, ...]:
    """The `sources` of a phase with their weights, and those of the `known` that it leaves out."""
    windows = chunk_length // sequence_length
    sizes = [count_windows(source.num_tokens, chunk_length) * windows for source in sources]
    weights = integer_weights(mixture, sizes)
    left = list(known)
    read = []
    for source, weight in zip(sources, weights, strict=True):
        before = next((old for old in left if old.hash == source.hash), None)
        if before is not None:
            left.remove(before)
            read.append(replace(before, path=source.path, weight=weight))
        else:
            number = len(known) + sum(new.number >= len(known) for new in read)
            read.append(SourcePhase(source.path, source.hash, number, weight, source.num_tokens, 0))
    return (*read, *left)


def _refuse_other_chunks(last: Phase, config: RunConfig) -> None:
    length, chunk_length = config.batch.sequence_length, last.chunk_length
    if config.data.chunk_length not in (None, chunk_length):
        raise CheckpointError(
            f"data.chunk_length = {config.data.chunk_length}: this run permutes chunks of "
            f"{chunk_length} tokens from its beginning -> set data.chunk_length={chunk_length}"
        )
    if chunk_length % length:
        below = max(n for n in range(1, min(length, chunk_length) + 1) if chunk_length % n == 0)
        raise CheckpointError(
            f"batch.sequence_length = {length} does not divide the chunks of {chunk_length} tokens "
            "that this run permutes, so that it cannot be told what of the epoch was not read "
            f"yet -> batch.sequence_length={below}, or export the weights and begin a new run with "
            "them; data.chunk_length declares the longest sequence when a run begins"
        )


def _refuse_other_contents(last: Phase, sources: Sequence[SourceIdentity]) -> None:
    known = {source.hash for source in last.sources}
    for source in sources:
        there = next((old for old in last.read if old.path == source.path), None)
        if there is not None and source.hash not in known:
            raise CheckpointError(
                f"{source.path} does not hold the training tokens that this run has read: "
                f"{there.num_tokens} tokens, hash {there.hash} there, {source.num_tokens} tokens, "
                f"hash {source.hash} now -> restore it; documents that were added can go on as a "
                "source of their own in data.sources, with checkpoint.allow_changes=[data]"
            )


def differences(before: Phase, now: Phase) -> list[tuple[str, str]]:
    """What differs between two phases, each with the key that it is set by."""
    found = []
    if before.sequence_length != now.sequence_length:
        text = f"{before.sequence_length} there, {now.sequence_length} now"
        found.append(("batch.sequence_length", text))
    there = {source.hash: source for source in before.read}
    here = {source.hash for source in now.read}
    key = "data.sources"
    found += [(key, f"{source.path} is new") for source in now.read if source.hash not in there]
    found += [
        (key, f"{source.path} is left out") for source in before.read if source.hash not in here
    ]
    total_there, total_here = (sum(s.weight for s in phase.read) for phase in (before, now))
    for source in now.read:
        weight = there[source.hash].weight if source.hash in there else 0
        if weight and weight * total_here != source.weight * total_there:
            shares = f"{weight / total_there:.4g} there, {source.weight / total_here:.4g} now"
            found.append((key, f"share of {source.path}: {shares}"))
    if not found and [s.hash for s in before.read] != [s.hash for s in now.read]:
        found.append((key, "in another order"))
    return found
