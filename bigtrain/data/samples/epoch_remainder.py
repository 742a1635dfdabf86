"""Unread remainder of an epoch when a run changes its chunk length: samples joined from pieces.

The chunks of an epoch in permuted order form one stream of tokens, of which a run has read a
prefix. Samples of any length are taken from the rest, so that nothing is read twice and less than
one sample is skipped. If a sample continues in the next chunk, that position counts as the
beginning of a document and is not a target. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bigtrain.data.samples.rows import Indices, TokenRows
from bigtrain.data.samples.shuffle import permute
from bigtrain.data.samples.token_stream import PackedWindows, count_windows


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
    ) -> Pieces:
        """Return the pieces from which `samples`, counted from 0, are joined.

        `seed`, `source`: of the order of the epoch (`bigtrain.data.samples.shuffle`).
        """
        chunk_length, num_chunks = self.chunk_length, count_windows(num_tokens, self.chunk_length)
        begins = self.tokens_read + samples * sequence_length
        first = begins // chunk_length
        counts = (begins + sequence_length - 1) // chunk_length - first + 1
        last = np.cumsum(counts) - 1
        number = np.repeat(np.arange(len(samples)), counts)
        chunks = np.arange(len(number)) + np.repeat(first - (last - counts + 1), counts)
        low = np.maximum(begins[number], chunks * chunk_length)
        high = np.minimum(begins[number] + sequence_length, (chunks + 1) * chunk_length)
        lengths = high - low
        lengths[last] += 1
        permuted = permute(chunks, num_chunks, seed, self.epoch, source)
        starts = (permuted - chunks) * chunk_length + low
        return Pieces(number, low - begins[number], starts, lengths)


@dataclass(frozen=True)
class Pieces:
    """Ranges of a source's tokens, int64 [pieces]: index of the requested sample,
    positions in it, first tokens and lengths. A sample's last piece includes the label after it."""

    samples: Indices
    places: Indices
    starts: Indices
    lengths: Indices


class JoinedWindows:
    """Samples of `windows`, then those joined from `rest`.

    `seed`, `source`: see `EpochRemainder.pieces`.
    """

    masks_loss = True

    def __init__(
        self, windows: PackedWindows, rest: EpochRemainder, seed: int, source: int
    ) -> None:
        self.windows = windows
        self.rest = rest
        self.seed = seed
        self.source = source
        self.stream = windows.stream
        self.sequence_length = windows.sequence_length
        self.token_dtype = windows.token_dtype
        self.vocab_size = windows.vocab_size
        self.num_samples = windows.num_samples + rest.num_samples(
            self.stream.num_tokens, self.sequence_length
        )

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        joined = samples >= self.windows.num_samples
        self.windows.fill(samples[~joined], rows[~joined], out)
        if not joined.any():
            return
        pieces = self._pieces(samples[joined])
        starts, lengths = pieces.starts, pieces.lengths
        places = rows[joined][pieces.samples] * (self.sequence_length + 1) + pieces.places
        joints = places[pieces.places > 0]
        self.stream.read(starts, lengths, out.tokens.reshape(-1), places)
        assert out.loss_mask is not None
        loss_mask = out.loss_mask.reshape(-1)
        if self.stream.is_masked:
            self.stream.read_mask(starts, lengths, loss_mask, places)
        loss_mask[joints] = False
        if out.begins is not None:
            out.begins += [self.stream.begins(starts, lengths, places), joints]

    def describe(self, sample: int) -> str:
        if sample < self.windows.num_samples:
            return self.windows.describe(sample)
        pieces = self._pieces(np.array([sample]))
        ranges = zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
        return " and ".join(self.stream.describe(start, length) for start, length in ranges)

    def _pieces(self, samples: Indices) -> Pieces:
        assert samples.max() < self.num_samples
        return self.rest.pieces(
            samples - self.windows.num_samples,
            self.stream.num_tokens,
            self.sequence_length,
            self.seed,
            self.source,
        )
