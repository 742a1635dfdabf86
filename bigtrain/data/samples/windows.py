"""Windows: the token stream of a dataset, split into samples of equal length."""

from __future__ import annotations

import numpy as np

from bigtrain.data.samples.rows import Indices, TokenRows
from bigtrain.data.samples.token_stream import TokenStream
from bigtrain.errors import DataError


class PackedWindows:
    """Windows of `sequence_length` + 1 tokens, `sequence_length` apart, of one stream, in complete
    chunks of `chunk_length` tokens, a multiple of it (default: the same).

    Raises DataError if the stream is too short for a single one.
    """

    def __init__(
        self, stream: TokenStream, sequence_length: int, chunk_length: int | None = None
    ) -> None:
        chunk_length = chunk_length or sequence_length
        assert chunk_length % sequence_length == 0
        self.stream = stream
        self.sequence_length = sequence_length
        self.token_dtype = stream.token_dtype
        self.vocab_size = stream.vocab_size
        self.masks_loss = stream.is_masked
        num_chunks = count_windows(stream.num_tokens, chunk_length)
        self.num_samples = num_chunks * (chunk_length // sequence_length)
        if not self.num_samples:
            key = (
                "batch.sequence_length" if chunk_length == sequence_length else "data.chunk_length"
            )
            raise DataError(
                f"{stream.num_tokens} tokens are too few for one sample: {key} = {chunk_length} "
                f"needs {chunk_length + 1} -> tokenize more text or set a smaller {key}"
            )

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert not len(samples) or 0 <= samples.min() <= samples.max() < self.num_samples
        starts, width = samples * self.sequence_length, self.sequence_length + 1
        self.stream.read_rows(starts, out.tokens, rows)
        lengths = np.full(len(samples), width)
        if self.masks_loss:
            assert out.loss_mask is not None
            self.stream.read_mask(starts, lengths, out.loss_mask.reshape(-1), rows * width)
        if out.begins is not None:
            out.begins.append(self.stream.begins(starts, lengths, rows * width))

    def describe(self, sample: int) -> str:
        return self.stream.describe(sample * self.sequence_length, self.sequence_length + 1)


def count_windows(num_tokens: int, sequence_length: int) -> int:
    """Return the windows of `sequence_length` inputs and as many labels in a stream of
    `num_tokens`."""
    return max(0, num_tokens - 1) // sequence_length
