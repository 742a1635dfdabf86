"""What the loader asks of any kind of samples: to fill rows of tokens, many at a time. numpy only.

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
    """The buffer that samples are written into, used again for the next ones.

    tokens: [R, T + 1], contiguous, of the samples' `token_dtype`. begins: where documents begin, as
    places ``row * (T + 1) + t``, in any order; None where nobody asks. The first token of a row
    need not be named. loss_mask: bool [R, T + 1], true where the token is to be predicted, and
    everywhere before it is filled; None where `Samples.masks_loss` is not set.
    """

    tokens: npt.NDArray[np.unsignedinteger[Any] | np.signedinteger[Any]]
    begins: list[Indices] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = None


class Samples(Protocol):
    """Samples of one length that the loader reads by number, from 0.

    token_dtype: uint16 or int32, whichever holds all tokens as they are stored. vocab_size: tokens
    are below it, which the loader checks. masks_loss: whether `fill` writes `TokenRows.loss_mask`.
    """

    num_samples: int
    sequence_length: int
    token_dtype: np.dtype[Any]
    vocab_size: int
    masks_loss: bool

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        """Write sample ``samples[i]`` into row ``rows[i]`` of `out`: all of its tokens, and what
        else `out` has room for.

        For several threads, each with its own buffer. Raises DataError where a file cannot be read
        or contradicts itself.
        """

    def describe(self, sample: int) -> str:
        """Where the tokens of `sample` come from, for an error: files and ranges."""
