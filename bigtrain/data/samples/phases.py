"""Phases of a run: its position across changes of its data, so that no epoch reads anything twice.

A phase is a part of a run with constant sources, weights and sequence length. Sample ``i`` of
the run is a pure function of the seed, ``i`` and the last phase, a few numbers for each source.

Chunks of tokens, by default as long as a sample, are permuted. If a new sequence length divides
them, the position in the order is converted. Otherwise chunks of the new length are permuted from
the next epoch of every source on, and the remainder of the current epoch is joined to samples: the
chunks in permuted order form one stream of tokens, of which a run has read a prefix, and samples of
any length are taken from the remainder, so that less than one sample is skipped. If a sample
continues in the next chunk, that position counts as the beginning of a document and is not a
target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from bigtrain.data.samples.mixture import MixtureOrder, integer_weights
from bigtrain.data.samples.packing_plan import plan_of
from bigtrain.data.samples.shuffle import SampleOrder, convert_place, permute
from bigtrain.data.samples.token_stream import (
    Indices,
    PackedWindows,
    Ranges,
    StreamSamples,
    TokenRows,
    count_windows,
)
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import LABELED
from bigtrain.data.shards.shard_table import ShardTable
from bigtrain.errors import CheckpointError
from bigtrain.settings.extensions import import_named, location
from bigtrain.settings.run_config import DataSection, RunConfig, SourceSection
from bigtrain.settings.sections.extensions import GIVEN


@dataclass(frozen=True)
class EpochRemainder:
    """Remainder of epoch `epoch` of a source, in chunks of `chunk_length` tokens: all but the first
    `tokens_read` in the order of that epoch."""

    chunk_length: int
    epoch: int
    tokens_read: int

    def num_samples(self, num_tokens: int, sequence_length: int) -> int:
        """Return the number of samples that can be joined, for a source of `num_tokens`."""
        total = count_windows(num_tokens, self.chunk_length) * self.chunk_length
        return (total - self.tokens_read) // sequence_length

    def pieces(
        self, samples: Indices, num_tokens: int, sequence_length: int, seed: int, source: int
    ) -> Ranges:
        """Return the pieces from which `samples`, counted from 0, are joined. `seed` and `source`
        determine the order of the epoch (`bigtrain.data.samples.shuffle`)."""
        chunk_length, num_chunks = self.chunk_length, count_windows(num_tokens, self.chunk_length)
        begins = self.tokens_read + samples * sequence_length
        # The chunks in permuted order form a stream, of which `begins`, `low` and `high` are token
        # positions. A sample has a piece in every chunk that it touches.
        first_chunk = begins // chunk_length
        counts = (begins + sequence_length - 1) // chunk_length - first_chunk + 1
        first_pieces = np.cumsum(counts) - counts
        sample_of_piece = np.repeat(np.arange(len(samples)), counts)
        # By piece: its sample, its chunk in permuted order, and its tokens `low` to `high`.
        chunk = np.arange(len(sample_of_piece)) + np.repeat(first_chunk - first_pieces, counts)
        sample_begins = begins[sample_of_piece]
        low = np.maximum(sample_begins, chunk * chunk_length)
        high = np.minimum(sample_begins + sequence_length, (chunk + 1) * chunk_length)
        lengths = high - low
        lengths[first_pieces + counts - 1] += 1  # the last label of the sample
        permuted = permute(chunk, num_chunks, seed, self.epoch, source)
        starts = (permuted - chunk) * chunk_length + low
        return Ranges(sample_of_piece, starts, lengths, low - sample_begins)


class JoinedWindows(StreamSamples):
    """Samples of `windows`, then samples joined from `remainder`; see `EpochRemainder.pieces`."""

    def __init__(
        self, windows: PackedWindows, remainder: EpochRemainder, seed: int, source: int
    ) -> None:
        self.windows = windows
        self.remainder = remainder
        self.seed = seed
        self.source = source
        length = windows.sequence_length
        num_samples = windows.num_samples + remainder.num_samples(windows.stream.num_tokens, length)
        super().__init__(windows.stream, length, num_samples)

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        is_joined = samples >= self.windows.num_samples
        self.windows.fill(samples[~is_joined], rows[~is_joined], out)
        if not is_joined.any():
            return
        pieces = self._pieces(samples[is_joined])
        positions, loss_mask = self._read(pieces, rows[is_joined], out)
        # A piece after the first of its sample begins like a document.
        joints = positions[pieces.positions > 0]
        loss_mask[joints] = False
        if out.begins is not None:
            out.begins += [self.stream.begins(pieces.starts, pieces.lengths, positions), joints]

    def describe(self, sample: int) -> str:
        is_joined = sample >= self.windows.num_samples
        return super().describe(sample) if is_joined else self.windows.describe(sample)

    def _pieces(self, samples: Indices) -> Ranges:
        assert samples.max() < self.num_samples
        return self.remainder.pieces(
            samples - self.windows.num_samples,
            self.stream.num_tokens,
            self.sequence_length,
            self.seed,
            self.source,
        )


@dataclass(frozen=True, kw_only=True)
class SourcePhase:
    """Source, and its position in a phase. path: for messages. hash: of its tokenizer and its
    training tokens in order. number: its index among the run's sources when it first appeared,
    counted from 0. weight: its integer share, 0 if it is no longer read. num_tokens: of packed
    documents, the length of a stream with an equal number of samples. start: its samples that count
    as read at the start of the phase, in the phase's sequence length, including epochs. rest:
    remainder of the epoch before `start`, which is read first."""

    path: str
    hash: str
    number: int = 0
    weight: int = 0
    num_tokens: int
    start: int = 0
    rest: EpochRemainder | None = None

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> SourcePhase:
        """Build from the output of `dataclasses.asdict`."""
        remainder = tree.get("rest")
        rest = None if remainder is None else EpochRemainder(**remainder)
        return cls(**{**tree, "rest": rest})


@dataclass(frozen=True)
class Phase:
    """Part of a run that begins with its sample `first_sample`. sources: current sources, in the
    order of the configuration, then former sources. chunk_length: tokens of the chunks that are
    permuted (`bigtrain.data.samples.shuffle`)."""

    first_sample: int
    sequence_length: int
    chunk_length: int
    sources: tuple[SourcePhase, ...]

    @property
    def windows_per_chunk(self) -> int:
        return self.chunk_length // self.sequence_length

    @property
    def read_sources(self) -> tuple[SourcePhase, ...]:
        """Sources that this phase reads, in the order of the configuration."""
        return tuple(source for source in self.sources if source.weight)

    def order(self, seed: int) -> MixtureOrder:
        """Return the order in which this phase reads its sources."""
        orders = [
            SampleOrder(
                self.num_chunks(source) * self.windows_per_chunk,
                seed,
                source.number,
                windows_per_chunk=self.windows_per_chunk,
                start=source.start,
                num_joined=self.num_joined(source),
            )
            for source in self.read_sources
        ]
        weights = [source.weight for source in self.read_sources]
        return MixtureOrder(orders, weights, seed, self.first_sample)

    def num_chunks(self, source: SourcePhase) -> int:
        return count_windows(source.num_tokens, self.chunk_length)

    def num_joined(self, source: SourcePhase) -> int:
        """Return the number of samples of the epoch remainder with which a source begins."""
        if source.rest is None:
            return 0
        return source.rest.num_samples(source.num_tokens, self.sequence_length)

    def describe_rests(self) -> list[str]:
        """Return a log line for each source that begins with the remainder of an epoch."""
        return [
            f"{source.path}: {self.num_joined(source)} samples are joined from pieces of "
            f"{source.rest.chunk_length} tokens until its epoch ends"
            for source in self.read_sources
            if source.rest is not None
        ]

    def until(self, sample: int, seed: int) -> Phase:
        """Return this phase as if it began at the later `sample`."""
        counts = self.order(seed).counts(sample)
        sources = []
        for source, count in zip(self.read_sources, counts, strict=True):
            num_joined, remainder = self.num_joined(source), source.rest
            if remainder is not None and count < num_joined:
                tokens_read = remainder.tokens_read + count * self.sequence_length
                source = replace(source, rest=replace(remainder, tokens_read=tokens_read))
            else:  # the joined samples are read, and samples after `start`
                source = replace(source, start=source.start + count - num_joined, rest=None)
            sources.append(source)
        sources += [source for source in self.sources if not source.weight]
        return replace(self, first_sample=sample, sources=tuple(sources))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Phase:
        """Build from the output of `dataclasses.asdict`."""
        sources = tuple(SourcePhase.from_json(source) for source in tree["sources"])
        return cls(**{**tree, "sources": sources})


def first_phase(
    config: RunConfig, sources: Sequence[SourcePhase], sequence_length: int | None = None
) -> Phase:
    """Return the first phase of a run. `sources`: of ``config.data.mixture``, at their start.
    `sequence_length`: for a run that began without phases and with a different sequence length."""
    length = sequence_length or config.batch.sequence_length
    chunk_length = length if sequence_length else config.data.chunk_length or length
    read = _with_weights(config.data.mixture, sources, length, chunk_length, ())
    return Phase(0, length, chunk_length, read)


def next_phase(
    last: Phase, config: RunConfig, sources: Sequence[SourcePhase], sample: int
) -> Phase:
    """Return the phase in which a run continues at `sample` after `last`; `last` itself if the data
    has not changed. A source continues at its position, also one that was removed temporarily.
    Raises CheckpointError if the path of a source now has other tokens."""
    length = config.batch.sequence_length
    # Other tokens at a known path are refused: their position would be unknown.
    read_hashes = {source.hash for source in last.sources}
    for source in sources:
        previous = next((old for old in last.read_sources if old.path == source.path), None)
        if previous is None or source.hash in read_hashes:
            continue
        if config.data.samples is not None:
            name = config.data.samples.type
            file = "" if name == GIVEN else location(import_named("data.samples.type", name))
            file_note = f" ({file})" if file else ""
            raise CheckpointError(
                f"data.samples.type = {name!r} does not have the training tokens that this run has "
                f"read: hash {previous.hash} there, {source.hash} now, of its first items, length "
                f"and settings{file_note} -> restore the code, its settings and its "
                "data; or begin another run: another output.directory"
            )
        raise CheckpointError(
            f"{source.path} does not have the training tokens that this run has read: "
            f"{previous.num_tokens} tokens, hash {previous.hash} there, {source.num_tokens} "
            f"tokens, hash {source.hash} now -> restore it; added documents can be used as a "
            "separate source in data.sources, with checkpoint.allow_changes=[data]"
        )
    # Convert the position of every source to chunks of the new phase, then add the new sources.
    last_now = last.until(sample, config.seed)
    default_chunk_length = last.chunk_length if last.chunk_length % length == 0 else length
    new_phase = Phase(sample, length, config.data.chunk_length or default_chunk_length, ())
    former_sources = [_converted(source, last_now, new_phase) for source in last_now.sources]
    mixture, chunk_length = config.data.mixture, new_phase.chunk_length
    read = _with_weights(mixture, sources, length, chunk_length, former_sources)
    new_phase = replace(new_phase, sources=read)
    return new_phase if differences(last, new_phase) else last


def _converted(source: SourcePhase, last: Phase, following: Phase) -> SourcePhase:
    """Convert a source of `last` at its position to a source of `following` with weight 0."""
    windows_per_epoch = following.num_chunks(source) * following.windows_per_chunk
    remainder, num_chunks = source.rest, last.num_chunks(source)
    # Equal chunks: the position in their order is converted.
    if remainder is None and following.chunk_length == last.chunk_length:
        per_chunk = last.windows_per_chunk, following.windows_per_chunk
        start = convert_place(source.start, num_chunks, *per_chunk)
        return replace(source, weight=0, start=start)
    # Other chunks begin with the next epoch, after the remainder of the current epoch.
    if remainder is None:
        chunks_read = convert_place(source.start, num_chunks, last.windows_per_chunk, 1)
        epoch, chunk = divmod(chunks_read, num_chunks)
        if not chunk and windows_per_epoch:
            return replace(source, weight=0, start=epoch * windows_per_epoch)
        remainder = EpochRemainder(last.chunk_length, epoch, chunk * last.chunk_length)
    next_epoch = (remainder.epoch + 1) * windows_per_epoch
    return replace(source, weight=0, start=next_epoch, rest=remainder)


def _with_weights(
    mixture: Sequence[SourceSection],
    sources: Sequence[SourcePhase],
    sequence_length: int,
    chunk_length: int,
    former_sources: Sequence[SourcePhase],
) -> tuple[SourcePhase, ...]:
    """Return the `sources` of a phase with weights, then the `former_sources` that it does not
    read. A source continues at the position of a former source with equal tokens."""
    per_chunk = chunk_length // sequence_length
    sizes = [count_windows(source.num_tokens, chunk_length) * per_chunk for source in sources]
    weights = integer_weights(mixture, sizes)
    unread_sources = list(former_sources)
    read = []
    for source, weight in zip(sources, weights, strict=True):
        former = next((old for old in unread_sources if old.hash == source.hash), None)
        if former is not None:
            unread_sources.remove(former)
            read.append(replace(former, path=source.path, weight=weight))
        else:
            # Former sources keep their numbers: new sources are numbered after them.
            num_former = len(former_sources)
            number = num_former + sum(earlier.number >= num_former for earlier in read)
            read.append(replace(source, number=number, weight=weight))
    return (*read, *unread_sources)


def differences(before: Phase, after: Phase) -> list[tuple[str, str]]:
    """Return the differences between two phases, each with its configuration key."""
    changes = []
    # Lengths: another sequence length changes the chunks, too, and is the cause.
    if before.sequence_length != after.sequence_length:
        text = f"{before.sequence_length} there, {after.sequence_length} now"
        changes.append(("batch.sequence_length", text))
    elif before.chunk_length != after.chunk_length:
        text = f"{before.chunk_length} there, {after.chunk_length} now"
        changes.append(("data.chunk_length", text))
    # Sources, by their tokens: a source may have another path now.
    read_before, read_after = before.read_sources, after.read_sources
    by_hash = {source.hash: source for source in read_before}
    hashes_after = {source.hash for source in read_after}
    key = "data.sources"
    changes += [(key, f"{s.path} is new") for s in read_after if s.hash not in by_hash]
    changes += [(key, f"{s.path} is removed") for s in read_before if s.hash not in hashes_after]
    # Shares, compared as integers: weight / total is the share of a source.
    total_before, total_after = (sum(s.weight for s in read) for read in (read_before, read_after))
    for source in read_after:
        weight = by_hash[source.hash].weight if source.hash in by_hash else 0
        if weight and weight * total_after != source.weight * total_before:
            shares = f"{weight / total_before:.4g} there, {source.weight / total_after:.4g} now"
            changes.append((key, f"share of {source.path}: {shares}"))
    if not changes and [s.hash for s in read_before] != [s.hash for s in read_after]:
        changes.append((key, "in another order"))
    return changes


def identify_sources(
    config: RunConfig, datasets: Sequence[TokenDataset]
) -> tuple[SourcePhase, ...]:
    """Return the sources of the mixture at their beginnings; `datasets` are in its order. The hash
    of packed documents includes the sequence length: the part that was read in samples of a given
    length does not determine the part in samples of another length."""
    sources = []
    for source, dataset in zip(config.data.mixture, datasets, strict=True):
        digest = xxhash.xxh3_64(dataset.table.tokenizer.hash.encode())
        _add_tokens(digest, dataset.table)
        # n samples of consecutive tokens read n * length + 1 tokens, the last one only as a target;
        # numbers of rows and packs are converted to tokens in the same way.
        num_tokens = dataset.table.num_tokens("train")
        length = config.batch.sequence_length
        if rows := config.objective.kind.rows:
            digest.update(f"{rows.identity}:{length}".encode())
            num_tokens = dataset.table.num_answers("train") * length + 1
        elif config.data.has_complete_documents:
            packing = f"{config.data.packing}:{length}:{config.data.long_documents}"
            digest.update(packing.encode())
            plan = plan_of(config, dataset, "train")
            num_tokens = plan.num_packs * length + 1
        source_hash = digest.hexdigest()
        sources.append(SourcePhase(path=source.path, hash=source_hash, num_tokens=num_tokens))
    return tuple(sources)


def data_hash(data: DataSection, datasets: Sequence[TokenDataset]) -> str:
    """Return the identity of the training data, the mixture's datasets in its order. A mixture's
    includes its weights; a single source has the source's identity."""
    digest = xxhash.xxh3_64(datasets[0].table.tokenizer.hash.encode())
    for source, dataset in zip(data.mixture, datasets, strict=True):
        if len(datasets) > 1:
            digest.update(f"source:{source.weight!r}:{source.epochs!r}".encode())
        _add_tokens(digest, dataset.table)
    return digest.hexdigest()


def _add_tokens(digest: xxhash.xxh3_64, table: ShardTable) -> None:
    """Update `digest` with the training tokens, and with all that changes their losses."""
    shards = table.splits["train"]
    masks = shards.hexadecimal("mask_xxh3") if table.is_masked else [""] * len(shards)
    tokens, sums = shards.rows["tokens"].tolist(), shards.hexadecimal("xxh3")
    for num_tokens, xxh3, mask_xxh3 in zip(tokens, sums, masks, strict=True):
        digest.update(f"{num_tokens}:{xxh3}{mask_xxh3}".encode())
    if shards.have_weights.any():
        digest.update(":".join(["weights", *shards.hexadecimal("weights_xxh3")]).encode())
    if table.rows is not None:
        label_sums = shards.hexadecimal("labels_xxh3") if table.rows in LABELED else []
        digest.update(":".join([table.rows, *label_sums, *table.labels]).encode())
