"""Packing plans: the pieces of documents in every sample, computed once and stored; and the samples
of complete documents that a plan determines. numpy only.

A plan is a pure function of the dataset, so the file is a cache: if it is missing or its size does
not match its header, it is recreated (`bigtrain.system.user_cache`). It is in ``DATASET/plans/``,
or if that cannot be written in ``plans/`` of the user's cache (`bigtrain.system.user_cache`), or
else in a temporary file of the process.

A file is, little-endian::

    8 bytes  b"BTPLAN1\n"
    uint64   packs P, pieces N
    uint64   the fields of `PackingCounts`, in order
    int64    [P]  end of every pack in the pieces
    int64    [N]  first token of every piece in the stream
    int32    [N]  tokens of every piece
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.samples.best_fit import LongDocuments, PackingCounts, pack_blocks
from bigtrain.data.samples.token_stream import (
    Indices,
    Ranges,
    StreamSamples,
    TokenRows,
    TokenStream,
    split_stream,
)
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import SPLITS, Split
from bigtrain.errors import DataError
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.user_cache import cache_locations, made_once

MAGIC = b"BTPLAN1\n"
HEADER = struct.Struct(f"<8sQQ{len(fields(PackingCounts))}Q")
DIRECTORY = "plans"


@dataclass(frozen=True)
class PackingPlan:
    """Packing plan: memory maps of its file, and packing statistics. `row_ends` int64 [packs],
    `starts` int64 [pieces], `lengths` int32 [pieces]: `best_fit.PackBlock`. `path` is None if it
    could not be stored."""

    row_ends: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    counts: PackingCounts
    sequence_length: int
    path: Path | None = None

    @property
    def num_packs(self) -> int:
        return len(self.row_ends)

    @property
    def padding_fraction(self) -> float:
        """Share of unused positions in all packs."""
        return 1 - self.counts.packed_tokens / max(1, self.num_packs * (self.sequence_length + 1))

    def describe(self) -> str:
        """Return the statistics, human-readable."""
        counts, tokens = self.counts, max(1, self.counts.tokens)
        parts = [
            f"{counts.documents:,} documents in {self.num_packs:,} samples",
            f"padding {self.padding_fraction:.3%}",
        ]
        if counts.cut_documents:
            parts.append(f"{counts.cut_documents:,} longer than a sample are split")
        if counts.truncated_documents:
            share = counts.truncated_tokens / tokens
            num_documents = counts.truncated_documents
            parts.append(f"{num_documents:,} longer than a sample lose {share:.3%} of the tokens")
        if counts.dropped_pieces:
            parts.append(
                f"{counts.dropped_pieces:,} pieces without a target dropped "
                f"({counts.dropped_tokens / tokens:.3%} of the tokens)"
            )
        return ", ".join(parts)


def open_plan(
    dataset: TokenDataset,
    split: Split,
    sequence_length: int,
    long_documents: LongDocuments,
    *,
    packs: bool = True,
) -> PackingPlan:
    """Return the plan of `split`, read from disk or created now (about a microsecond per document).
    Any number of processes may call it at once. `packs`: several documents share a sample. Raises
    DataError if an index is corrupt, and if no location has space for it."""
    # The file name covers all that the plan depends on: lengths, documents and masks.
    plan_settings = f"{sequence_length}:{long_documents}" + ("" if packs else ":none")
    digest = xxhash.xxh3_64(plan_settings.encode())
    shards = dataset.table.splits.get(split)
    if shards is not None:
        masks = shards.hexadecimal("mask_xxh3") if shards.is_masked else [None] * len(shards)
        tokens, sums = shards.rows["tokens"].tolist(), shards.hexadecimal("index_xxh3")
        for num_tokens, index_xxh3, mask_xxh3 in zip(tokens, sums, masks, strict=True):
            digest.update(f"{num_tokens}:{index_xxh3}:{mask_xxh3}".encode())
    name = f"{split}-{digest.hexdigest()}.plan"

    def read(path: Path) -> PackingPlan | None:
        with suppress(OSError), path.open("rb") as file:
            return _map(file, sequence_length, path)
        return None

    def make(file: IO[bytes]) -> None:
        counts = PackingCounts()
        token_shards = dataset.shards(split)
        blocks = pack_blocks(token_shards, sequence_length, long_documents, counts, packs=packs)
        with ExitStack() as stack:
            # The sizes are known at the end only: each array is first written to a file.
            arrays = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
            row_ends, starts, lengths = arrays
            num_packs = num_pieces = 0
            for block in blocks:
                row_ends.write((block.row_ends + num_pieces).astype("<i8").tobytes())
                starts.write(block.starts.astype("<i8").tobytes())
                lengths.write(block.lengths.astype("<i4").tobytes())
                num_packs += len(block.row_ends)
                num_pieces += len(block.starts)
            file.write(HEADER.pack(MAGIC, num_packs, num_pieces, *astuple(counts)))
            for array in arrays:
                array.seek(0)
                shutil.copyfileobj(array, file, 1 << 20)
        file.flush()

    plan = made_once(cache_locations(dataset.path, DIRECTORY, name), read, make)
    if plan is not None:
        return plan
    # No location of the cache can be written: the plan is in a file of this process.
    try:
        with tempfile.TemporaryFile() as unnamed_file:
            make(unnamed_file)
            plan = _map(unnamed_file, sequence_length)
    except OSError as error:
        raise DataError(
            f"the packing plan of {dataset.path} cannot be written anywhere: {error} -> make room "
            "in the dataset's folder, or set TMPDIR"
        ) from error
    assert plan is not None
    return plan


def _map(file: IO[bytes], sequence_length: int, path: Path | None = None) -> PackingPlan | None:
    """Return the plan in `file`; None if it is incomplete."""
    size = os.fstat(file.fileno()).st_size
    file.seek(0)
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    magic, num_packs, num_pieces, *counts = HEADER.unpack(header)
    if magic != MAGIC or size != HEADER.size + 8 * num_packs + (8 + 4) * num_pieces:
        return None

    def array(dtype: str, offset: int, count: int) -> npt.NDArray[Any]:
        if not count:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(file, dtype, "r", offset, (count,)))

    pieces_offset = HEADER.size + 8 * num_packs
    return PackingPlan(
        array("<i8", HEADER.size, num_packs),
        array("<i8", pieces_offset, num_pieces),
        array("<i4", pieces_offset + 8 * num_pieces, num_pieces),
        PackingCounts(*counts),
        sequence_length,
        path,
    )


class PackedDocuments(StreamSamples):
    """Samples of `plan`, whose documents are in `stream`. A row contains its documents one after
    another and then padding, token 0 without loss, which is marked as a separate document."""

    def __init__(self, stream: TokenStream, plan: PackingPlan) -> None:
        super().__init__(stream, plan.sequence_length, plan.num_packs)
        self.plan = plan

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        if not len(samples):
            return
        width = self.sequence_length + 1
        pieces = self._pieces(samples)
        # The end of the last piece of every sample, which padding follows.
        last_pieces = np.flatnonzero(np.diff(pieces.numbers, append=len(samples)))
        row_lengths = pieces.positions[last_pieces] + pieces.lengths[last_pieces]
        if row_lengths.max() > width:
            raise self._corrupt()
        positions, loss_mask = self._read(pieces, rows, out)
        for row, end in zip(rows.tolist(), row_lengths.tolist(), strict=True):
            if end < width:
                out.tokens[row, end:] = 0
                loss_mask[row * width + end : (row + 1) * width] = False
        if out.begins is not None:
            out.begins.append(positions)
            out.begins.append((rows * width + row_lengths)[row_lengths < width])

    def attention_work(self, samples: Indices) -> npt.NDArray[np.float64]:
        """Return the pairs of tokens that attention compares in each sample, twice: the
        sum of the squared lengths of the sample's documents."""
        pieces = self._pieces(samples)
        squares = pieces.lengths.astype(np.float64) ** 2
        return np.bincount(pieces.numbers, squares, minlength=len(samples)).astype(np.float64)

    def stream_positions(self, samples: Indices) -> npt.NDArray[np.int64]:
        """Return where in the stream the tokens of samples are, int64 [samples, sequence_length +
        1]; -1 for padding."""
        pieces = self._pieces(samples)
        width = self.sequence_length + 1
        positions = np.full(len(samples) * width, -1)
        num_tokens = int(pieces.lengths.sum())
        # For every token of the pieces: its offset in the piece, and its index in `positions`.
        piece_begins = np.cumsum(pieces.lengths) - pieces.lengths
        offsets = np.arange(num_tokens) - np.repeat(piece_begins, pieces.lengths)
        row_begins = pieces.numbers * width + pieces.positions
        indices = np.repeat(row_begins, pieces.lengths) + offsets
        positions[indices] = np.repeat(pieces.starts, pieces.lengths) + offsets
        return positions.reshape(len(samples), width)

    def _pieces(self, samples: Indices) -> Ranges:
        """Return the pieces of `samples`. Raise DataError if the plan is inconsistent."""
        assert 0 <= samples.min() <= samples.max() < self.num_samples
        # A sample consists of the pieces `low` to `high` of the plan, from the end of the previous
        # sample on; sample 0 has none.
        plan = self.plan
        high = plan.row_ends[samples]
        low = np.where(samples > 0, plan.row_ends[samples - 1], 0)
        counts = high - low
        if counts.min() < 1 or low.min() < 0 or high.max() > len(plan.starts):
            raise self._corrupt()
        # The numbers low, low + 1, ... of every sample: `arange` counts through all samples, so the
        # pieces of earlier samples are subtracted.
        num_earlier = np.cumsum(counts) - counts
        pieces = np.repeat(low - num_earlier, counts) + np.arange(counts.sum())
        starts, lengths = plan.starts[pieces], plan.lengths[pieces].astype(np.int64)
        if (
            lengths.min() < 1
            or starts.min() < 0
            or (starts + lengths).max() > self.stream.num_tokens
        ):
            raise self._corrupt()
        numbers = np.repeat(np.arange(len(samples)), counts)
        # The position of a piece in its row: the lengths of earlier pieces of the sample.
        begins = np.cumsum(lengths) - lengths
        positions = begins - np.repeat(begins[num_earlier], counts)
        return Ranges(numbers, starts, lengths, positions)

    def _corrupt(self) -> DataError:
        return DataError(f"the packing plan {self.plan.path} is corrupt -> remove it")


def balanced(
    samples: Indices, work: npt.NDArray[np.float64], data_size: int, micro_batch_size: int
) -> Indices:
    """Return the samples of steps [steps, samples of a step] in another order within each step, so
    that all ranks have about as much `work`, of equal shape, in every micro-step. Samples are
    read in the order micro-step, rank, row (`bigtrain.settings.batch_plan.BatchPlan`): the largest
    come first, the samples of a micro-step are neighbors by work, and rows are dealt to the ranks
    forth and back."""
    order = np.argsort(-work, axis=1, kind="stable")  # the largest first
    # [steps, micro-steps, rows, ranks]: every second row is dealt in the order of falling ranks.
    dealt = order.reshape(len(samples), -1, micro_batch_size, data_size).copy()
    dealt[:, :, 1::2] = dealt[:, :, 1::2, ::-1]
    sample_order = dealt.swapaxes(2, 3).reshape(samples.shape)
    return np.take_along_axis(samples, sample_order, axis=1)


@dataclass(frozen=True)
class PackingReport:
    """Packing result of a split of a dataset, human-readable and for ``environment.json``."""

    path: str
    split: Split
    plan: PackingPlan

    def __str__(self) -> str:
        return f"packing of {self.path}, {self.split}: {self.plan.describe()}"

    def to_json(self) -> dict[str, Any]:
        counts = self.plan.counts
        tokens = max(1, counts.tokens)
        return {
            "path": self.path,
            "split": self.split,
            "samples": self.plan.num_packs,
            "padding_fraction": self.plan.padding_fraction,
            "truncated_fraction": counts.truncated_tokens / tokens,
            "dropped_fraction": counts.dropped_tokens / tokens,
            **asdict(counts),
        }


def packing_reports(
    config: RunConfig, datasets: Sequence[TokenDataset]
) -> tuple[PackingReport, ...]:
    """Return reports on `datasets` (the mixture's, in its order) if the run packs; else none."""
    if not config.data.has_complete_documents:
        return ()
    reports = []
    for source, dataset in zip(config.data.mixture, datasets, strict=True):
        for split in SPLITS:
            if dataset.table.num_tokens(split):
                plan = plan_of(config, dataset, split)
                reports.append(PackingReport(source.path, split, plan))
    return tuple(reports)


def plan_of(config: RunConfig, dataset: TokenDataset, split: Split) -> PackingPlan:
    """Return the packing plan by which a run reads `split`."""
    packs = config.data.packing == "best_fit"
    length, long_documents = config.batch.sequence_length, config.data.long_documents
    return open_plan(dataset, split, length, long_documents, packs=packs)


def packed_documents(config: RunConfig, dataset: TokenDataset, split: Split) -> PackedDocuments:
    """Return the samples of `split` in a run that packs. Raise DataError if there are none."""
    plan = plan_of(config, dataset, split)
    if not plan.num_packs:
        raise DataError(f"no document has a target: {plan.describe()} -> tokenize more text")
    return PackedDocuments(split_stream(dataset, split), plan)
