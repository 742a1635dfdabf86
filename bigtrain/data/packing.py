"""From documents to samples of fixed length: concatenate, then cut. numpy only.

The documents of a split form one stream of tokens, and sample ``w`` is its window
``[w * L, w * L + L + 1)`` for sequence length ``L``, as in Megatron's GPTDataset: consecutive
windows share one token, which is the last label of the first and the first input of the second, so
every token but the first of the stream is predicted exactly once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bigtrain.data.manifest import Split
from bigtrain.data.reading import TokenReader
from bigtrain.data.shards import Shard, TokenDataset
from bigtrain.errors import DataError

Window = npt.NDArray[np.int64]


class TokenStream:
    """The tokens of `shards`, one after another. `vocab_size` bounds what may be read.

    For one thread at a time.
    """

    def __init__(self, shards: Sequence[Shard], vocab_size: int) -> None:
        self.shards = tuple(shards)
        self._reader = TokenReader(vocab_size)
        self._ends: list[int] = []
        self.num_tokens = 0
        for shard in self.shards:
            self.num_tokens += shard.num_tokens
            self._ends.append(self.num_tokens)

    def read_into(self, start: int, out: Window) -> None:
        """Fill `out` with the tokens from `start` on, across shards.

        Raises DataError where a shard cannot be read or holds a token beyond the vocabulary.
        """
        assert 0 <= start <= self.num_tokens - len(out)
        number = bisect_right(self._ends, start)
        filled = 0
        while filled < len(out):
            shard = self.shards[number]
            offset = start + filled - (self._ends[number] - shard.num_tokens)
            part = out[filled : filled + shard.num_tokens - offset]
            self._reader.read_into(shard, offset, part)
            filled += len(part)
            number += 1

    def positions_into(self, start: int, out: Window) -> None:
        """Fill `out` with every token's distance from the beginning of its document.

        `out[0]` is token `start` of the stream and counts as a beginning. Raises DataError where an
        index is damaged.
        """
        assert 0 <= start <= self.num_tokens - len(out)
        number = bisect_right(self._ends, start)
        out[:] = 1
        out[:1] = 0
        filled = 0
        last_begin = 0
        while filled < len(out):
            shard = self.shards[number]
            shard_begin = self._ends[number] - shard.num_tokens
            low = start + filled - shard_begin
            high = min(shard.num_tokens, low + len(out) - filled)
            for begin in shard.document_begins(low, high).tolist():
                place = begin + shard_begin - start
                if place > last_begin:
                    # Where the running sum below starts anew.
                    out[place] = 1 - (place - last_begin)
                    last_begin = place
            filled += high - low
            number += 1
        np.cumsum(out, out=out)


class PackedWindows:
    """Windows of `sequence_length` + 1 tokens, `sequence_length` apart, of one stream.

    Raises DataError where the stream is too short for a single one. At most `sequence_length` - 1
    tokens at the end of the stream belong to no window.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        self.num_windows = count_windows(stream.num_tokens, sequence_length)
        if not self.num_windows:
            raise DataError(
                f"{stream.num_tokens} tokens are too few for one sample: batch.sequence_length = "
                f"{sequence_length} needs {sequence_length + 1} -> tokenize more text or set a "
                "smaller batch.sequence_length"
            )

    def read_into(self, window_index: int, out: Window) -> None:
        """Fill `out`, int64 [sequence_length + 1], with window `window_index`."""
        assert 0 <= window_index < self.num_windows
        assert len(out) == self.sequence_length + 1
        self.stream.read_into(window_index * self.sequence_length, out)

    def positions_into(self, window_index: int, out: Window) -> None:
        """Fill `out`, int64 [sequence_length + 1], with positions counted from each document's
        beginning; 0 is the first token of a document, or of the window."""
        assert 0 <= window_index < self.num_windows
        assert len(out) == self.sequence_length + 1
        self.stream.positions_into(window_index * self.sequence_length, out)


def count_windows(num_tokens: int, sequence_length: int) -> int:
    """Windows of `sequence_length` inputs and as many labels in a stream of `num_tokens`."""
    return max(0, num_tokens - 1) // sequence_length


def split_stream(dataset: TokenDataset, split: Split) -> TokenStream:
    """The stream of one split of `dataset`; of no tokens where there is no such split."""
    return TokenStream(dataset.shards(split), dataset.manifest.tokenizer.vocab_size)
