"""Mixture of several datasets: the source of sample n, and its window in that source.

Sample n is in block ``n // BLOCK_SAMPLES``. The number of samples of every source before a
block is the Webster (Sainte-Lague) apportionment of that many seats by weight; inside the block a
keyed permutation mixes the sources, and each source is read in the order of a `SampleOrder`. The
mixture is a pure function of (seed, n) and the weights, and any sample is computed in the time of
one block.

Webster's method is monotone in the number of seats (no source ever loses a sample; Balinski
and Young 1982, "Fair representation"), which largest remainders are not. numpy only.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.shuffle import SampleOrder, shuffle_block
from bigtrain.data.samples.token_stream import Indices, Samples, TokenRows
from bigtrain.settings.run_config import SourceSection

BLOCK_SAMPLES = 1024
"""Proportions are exact at its multiples; a resumed run computes at most one block again."""

BLOCKS_AT_ONCE = 16
"""Blocks whose order is computed together, in some milliseconds: walking the few samples that a
permutation sends outside of a small source takes numpy as long as thousands."""


class MixedSamples:
    """Samples of several sources, numbered one source after another."""

    def __init__(self, sources: Sequence[Samples]) -> None:
        assert len({source.sequence_length for source in sources}) == 1
        assert len({source.vocab_size for source in sources}) == 1
        self.sources = tuple(sources)
        self.sequence_length = self.sources[0].sequence_length
        self.vocab_size = self.sources[0].vocab_size
        self.token_dtype = np.result_type(*(source.token_dtype for source in self.sources))
        self.masks_loss = any(source.masks_loss for source in self.sources)
        self.weighs_loss = any(source.weighs_loss for source in self.sources)
        self._ends = np.cumsum([source.num_samples for source in self.sources])
        self.num_samples = int(self._ends[-1])

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        if len(self.sources) == 1:
            self.sources[0].fill(samples, rows, out)
            return
        assert not len(samples) or 0 <= samples.min() <= samples.max() < self.num_samples
        for number, indices, source_samples in self.by_source(samples):
            self.sources[number].fill(source_samples, rows[indices], out)

    def by_source(self, samples: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """Yield for each source its number, the indices in `samples` of the samples that belong to
        it, and the numbers that these samples have within the source."""
        numbers = np.searchsorted(self._ends, samples, side="right")
        for number in np.unique(numbers).tolist():
            indices = np.flatnonzero(numbers == number)
            begin = self._ends[number] - self.sources[number].num_samples
            yield number, indices, samples[indices] - begin

    def describe(self, sample: int) -> str:
        number = int(np.searchsorted(self._ends, sample, side="right"))
        source = self.sources[number]
        return source.describe(sample - (int(self._ends[number]) - source.num_samples))


class MixtureOrder:
    """Order in which a run reads sources, source i in the order ``orders[i]``, in the proportions
    of `weights`, positive integers. Windows are numbered like the samples of `MixedSamples`, one
    source after another. `first_sample` is the sample of the run at which this order begins."""

    def __init__(
        self,
        orders: Sequence[SampleOrder],
        weights: Sequence[int],
        seed: int,
        first_sample: int = 0,
    ) -> None:
        assert min(weights) >= 1
        self.weights = tuple(weights)
        self.seed = seed
        self.first_sample = first_sample
        self._orders = orders
        sizes = (order.num_windows + order.num_joined for order in orders)
        self._offsets = [0, *accumulate(sizes)][:-1]
        # Consecutive steps read from one block, and numpy does more in one call.
        self._blocks = lru_cache(maxsize=2)(self._windows_of_blocks)
        # Samples of every source before a block; a block's end is the next one's start.
        self._counts_before = lru_cache(maxsize=2)(
            lambda block: apportion(self.weights, block * BLOCK_SAMPLES)
        )

    def windows(self, first_sample: int, count: int) -> Indices:
        """Return the windows of samples `first_sample` to `first_sample + count`, int64 [count]."""
        assert first_sample >= self.first_sample
        parts = [np.empty(0, np.int64)]
        position = first_sample - self.first_sample
        end = position + count
        while position < end:
            number, offset = divmod(position, BLOCKS_AT_ONCE * BLOCK_SAMPLES)
            length = min(end - position, BLOCKS_AT_ONCE * BLOCK_SAMPLES - offset)
            parts.append(self._blocks(number)[offset : offset + length])
            position += length
        return np.concatenate(parts)

    def counts(self, sample: int) -> list[int]:
        """Return the samples of every source before `sample`, counted from `first_sample` of this
        order. Takes the time of one block for any `sample`."""
        block, offset = divmod(sample - self.first_sample, BLOCK_SAMPLES)
        if len(self._orders) == 1:
            return [sample - self.first_sample]
        counts = list(self._counts_before(block))
        for number, positions in enumerate(self._positions(block)):
            counts[number] += int((positions < offset).sum())
        return counts

    def _windows_of_blocks(self, number: int) -> Indices:
        """Return the windows of `BLOCKS_AT_ONCE` blocks from ``number * BLOCKS_AT_ONCE`` on."""
        first_block, size = number * BLOCKS_AT_ONCE, BLOCKS_AT_ONCE * BLOCK_SAMPLES
        if len(self._orders) == 1:
            return self._orders[0].windows(first_block * BLOCK_SAMPLES, size)
        counts_before = self._counts_before(first_block)
        blocks = [self._positions(first_block + offset) for offset in range(BLOCKS_AT_ONCE)]
        windows = np.empty(size, np.int64)
        for source, order in enumerate(self._orders):
            begins = range(0, size, BLOCK_SAMPLES)
            parts = [begin + block[source] for begin, block in zip(begins, blocks, strict=True)]
            positions = np.concatenate(parts)
            source_windows = order.windows(counts_before[source], len(positions))
            windows[positions] = source_windows + self._offsets[source]
        return windows

    def _positions(self, block: int) -> list[Indices]:
        """Return, for every source, the ascending positions in a block that read it."""
        counts_before, counts_after = self._counts_before(block), self._counts_before(block + 1)
        positions = shuffle_block(BLOCK_SAMPLES, self.seed, block, self.first_sample)
        ends = np.cumsum(np.subtract(counts_after, counts_before))
        return [np.sort(source_positions) for source_positions in np.split(positions, ends[:-1])]


def apportion(weights: Sequence[int], seats: int) -> list[int]:
    """Return Webster's apportionment of `seats` among positive integer `weights`; ties to the
    first. Sums to `seats`, grows in no entry when `seats` shrinks, and is within ``(1 +
    len(weights)) / 2`` of the exact share in every entry. Exact at any size: integer arithmetic
    throughout."""
    total = sum(weights)
    # Rounded exact shares are a Webster apportionment of the sum of the rounded shares. Missing or
    # excess seats are added or removed by this rule, one at a time: a seat goes to the largest
    # weight / (2 * count + 1).
    counts = [(2 * seats * weight + total) // (2 * total) for weight in weights]
    missing = seats - sum(counts)
    if missing > 0:
        # A heap has its smallest entry first: the largest quotient negated, then the first number.
        heap = [
            (-Fraction(weight, 2 * count + 1), number)
            for number, (weight, count) in enumerate(zip(weights, counts, strict=True))
        ]
        heapq.heapify(heap)
        for _ in range(missing):
            _, number = heap[0]
            counts[number] += 1
            heapq.heapreplace(heap, (-Fraction(weights[number], 2 * counts[number] + 1), number))
    elif missing < 0:
        # The smallest quotient, then the last number.
        heap = [
            (Fraction(weight, 2 * count - 1), -number)
            for number, (weight, count) in enumerate(zip(weights, counts, strict=True))
            if count
        ]
        heapq.heapify(heap)
        for _ in range(-missing):
            number = -heapq.heappop(heap)[1]
            counts[number] -= 1
            if counts[number]:
                heapq.heappush(heap, (Fraction(weights[number], 2 * counts[number] - 1), -number))
    return counts


def integer_weights(sources: Sequence[SourceSection], sizes: Sequence[int]) -> list[int]:
    """Return the proportions of `sources` of `sizes` windows, as integers without a common divisor.
    Weights are exact decimal numbers, not the nearest binary fraction, so that 0.1 and 0.3 are 1 to
    3 on every machine."""
    shares = [
        Fraction(repr(source.weight))
        if source.weight is not None
        else Fraction(repr(source.epochs)) * size
        for source, size in zip(sources, sizes, strict=True)
    ]
    common_denominator = math.lcm(*(share.denominator for share in shares))
    integer_shares = [int(share * common_denominator) for share in shares]
    divisor = math.gcd(*integer_shares)
    return [weight // divisor for weight in integer_shares]


def labels_of(samples: Samples) -> npt.NDArray[np.uint8] | None:
    """Return the labels of samples, or of every sample of a mixture; None without labels, which
    only rated and classified samples have."""
    sources = samples.sources if isinstance(samples, MixedSamples) else (samples,)
    labels = [getattr(source, "labels", None) for source in sources]
    present_labels = [source_labels for source_labels in labels if source_labels is not None]
    return np.concatenate(present_labels) if len(present_labels) == len(labels) else None
