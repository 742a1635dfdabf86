"""Statistics of a dataset: document lengths, token counts, unigram entropy. numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.format import CHUNK_ITEMS, Shard
from bigtrain.data.shards.manifest import Split
from bigtrain.errors import DataError

LONG_TOKENS = 1 << 20
"""Lengths below this are counted in an array, the few above it one by one."""
MANY_SEQUENCES_CHUNK = 1 << 17
"""Documents read at once if each may have many sequences."""


@dataclass(frozen=True)
class LengthHistogram:
    """Histogram of document lengths in tokens: ascending `lengths`, `counts`, int64 [K]."""

    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        return int((self.lengths * self.counts).sum())

    def quantile(self, fraction: float) -> int:
        """Return the least length that at least `fraction` of the documents do not exceed."""
        ends = np.cumsum(self.counts)
        rank = np.searchsorted(ends, max(1.0, fraction * ends[-1] - 1e-6))
        return int(self.lengths[rank])

    def buckets(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (least length, largest length, documents, tokens) between powers of two; 0
        separately."""
        exponents = np.frexp(self.lengths.astype(np.float64))[1]
        for exponent in range(int(exponents[0]), int(exponents[-1]) + 1):
            chosen = exponents == exponent
            counts = self.counts[chosen]
            low, high = (1 << exponent) >> 1, (1 << exponent) - 1
            yield low, high, int(counts.sum()), int((self.lengths[chosen] * counts).sum())


def length_histogram(shards: Iterable[Shard], one_sequence: bool) -> LengthHistogram:
    """Return the lengths of all documents of `shards`, which must have one. Reads the indexes, in
    chunks.

    `one_sequence`: every document is one sequence or none, as bigtrain writes them; then a third of
    the index is enough. Raises DataError if an index is corrupt.
    """
    counts = np.zeros(1, dtype=np.int64)
    longer: Counter[int] = Counter()
    for shard in shards:
        for lengths in _sequence_lengths(shard) if one_sequence else _document_lengths(shard):
            if lengths.min() < 0:
                raise DataError(f"{shard.index_path} is corrupt: a document has negative length")
            is_long = lengths >= LONG_TOKENS
            if is_long.any():
                longer.update(lengths[is_long].tolist())
                lengths = lengths[~is_long]
            total = np.bincount(lengths, minlength=len(counts))
            total[: len(counts)] += counts
            counts = total
        if one_sequence:
            counts[0] += max(0, shard.num_documents - shard.num_sequences)
    (short,) = np.nonzero(counts)
    long = sorted(longer.items())
    return LengthHistogram(
        np.concatenate([short, np.array([n for n, _ in long], dtype=np.int64)]),
        np.concatenate([counts[short], np.array([count for _, count in long], dtype=np.int64)]),
    )


def _sequence_lengths(shard: Shard) -> Iterator[npt.NDArray[np.int64]]:
    for low in range(0, shard.num_sequences, CHUNK_ITEMS):
        yield shard.sequence_lengths[low : low + CHUNK_ITEMS].astype(np.int64)


def _document_lengths(shard: Shard) -> Iterator[npt.NDArray[np.int64]]:
    for low in range(0, shard.num_documents, MANY_SEQUENCES_CHUNK):
        starts = shard.document_starts[low : low + MANY_SEQUENCES_CHUNK + 1].astype(np.int64)
        first, last = int(starts[0]), int(starts[-1])
        if not 0 <= first <= last <= shard.num_sequences or (np.diff(starts) < 0).any():
            raise DataError(
                f"{shard.index_path} is corrupt: documents after {low} are out of order"
            )
        ends = np.zeros(last - first + 1, dtype=np.int64)
        np.cumsum(shard.sequence_lengths[first:last], out=ends[1:])
        yield np.diff(ends[starts - first])


def token_counts(dataset: TokenDataset, split: Split) -> npt.NDArray[np.int64]:
    """Return the count of every token id in `split`, int64 [vocab_size]. Reads all tokens, in
    chunks.

    Raises DataError if a token is not in the vocabulary (a corrupt file).
    """
    vocab_size = dataset.table.tokenizer.vocab_size
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in dataset.shards(split):
        for low in range(0, shard.num_tokens, CHUNK_ITEMS):
            tokens = shard.tokens[low : low + CHUNK_ITEMS]
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise DataError(
                    f"{shard.bin_path} is corrupt: token {tokens.min()} or {tokens.max()} is not "
                    f"in the vocabulary of {vocab_size} -> remove the dataset and tokenize again"
                )
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def unigram_entropy(dataset: TokenDataset) -> float:
    """Return the loss of a model without context on the held-out split, in nats per token.

    The cross-entropy under the training split's token frequencies, with one added to every count
    (Laplace). Raises DataError if the dataset has no held-out tokens.
    """
    held_out = token_counts(dataset, "held_out")
    if not held_out.sum():
        raise DataError(
            f"{dataset.path} has no held-out tokens -> tokenize with --held-out FRACTION"
        )
    train = token_counts(dataset, "train") + 1
    log_probability = np.log(train) - np.log(train.sum())
    return float(-(held_out * log_probability).sum() / held_out.sum())
