"""Samples that contain their own number."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigtrain.data.samples.token_stream import Indices, TokenRows
from bigtrain.errors import DataError


class Numbered:
    """Sample s holds the tokens 10 s, 10 s + 1, ... (`first` added); `failing` cannot be read."""

    vocab_size = 1 << 31
    token_dtype: np.dtype[Any] = np.dtype("<i4")
    masks_loss = False
    weighs_loss = False

    def __init__(
        self, num_samples: int, sequence_length: int, first: int = 0, failing: int | None = None
    ) -> None:
        self.num_samples = num_samples
        self.sequence_length = sequence_length
        self.first = first
        self.failing = failing

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        if self.failing in samples.tolist():
            raise DataError(f"sample {self.failing}")
        assert not len(samples) or samples.max() < self.num_samples
        tokens = self.first + 10 * samples[:, None] + np.arange(self.sequence_length + 1)
        out.tokens[rows] = tokens

    def describe(self, sample: int) -> str:
        return f"sample {sample}"
