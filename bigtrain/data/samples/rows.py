"""Interface of samples to the loader: filling rows of tokens, many at a time. numpy only.

Shapes: R = rows of a buffer, T = sequence length. A row is T + 1 tokens: T inputs, and the last
label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass
class TokenRows:
    """Buffer into which samples are written, reused for the next ones.

    tokens: [R, T + 1], contiguous, of the samples' `token_dtype`. begins: starts of documents, as
    positions ``row * (T + 1) + t``, in any order; None if not needed. The first token of a row
    may be omitted. loss_mask: bool [R, T + 1], true if the token is a target, and
    everywhere before filling; None if `Samples.masks_loss` is not set.
    """

    tokens: npt.NDArray[np.unsignedinteger[Any] | np.signedinteger[Any]]
    begins: list[Indices] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None


class Samples(Protocol):
    """Samples of one length that the loader reads by number, from 0.

    token_dtype: uint16 or int32, the smallest that stores all tokens. vocab_size: tokens
    are below it, which the loader checks. masks_loss: whether `fill` writes `TokenRows.loss_mask`.
    """

    num_samples: int
    sequence_length: int
    token_dtype: np.dtype[Any]
    vocab_size: int
    masks_loss: bool

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        """Write sample ``samples[i]`` into row ``rows[i]`` of `out`: all of its tokens, and the
        other fields of `out`.

        Thread-safe with one buffer per thread. Raises DataError if a file cannot be read
        or is inconsistent.
        """

    def describe(self, sample: int) -> str:
        """Return the files and ranges of the tokens of `sample`, for an error."""
