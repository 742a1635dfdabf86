"""What the loader asks of any kind of samples: to fill rows of tokens, many at a time. numpy only.

Shapes: R = rows of a buffer, T = sequence length. A row is T + 1 tokens: T inputs, and the last
label.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass
class TokenRows:
    """The buffer that samples are written into, used again for the next ones.

    tokens: [R, T + 1], contiguous, of the samples' `token_dtype`; holds anything before it is
        filled.
    begins: where documents begin, as places ``row * (T + 1) + t``, in arrays of any length and
        order; None where nobody asks. The first token of a row need not be named.
    loss_mask: bool [R, T + 1], true where the token is to be predicted, and true everywhere before
        it is filled; None where the samples mask nothing (`Samples.masks_loss`).
    """

    tokens: npt.NDArray[np.unsignedinteger[Any] | np.signedinteger[Any]]
    begins: list[Indices] | None = None
    loss_mask: npt.NDArray[np.bool_] | None = field(default=None)


class Samples(Protocol):
    """Samples of one length that the loader reads by number,
    `bigtrain.data.samples.windows.PackedWindows` for one.

    num_samples: they are numbered from 0.
    sequence_length: tokens of each.
    token_dtype: uint16 or int32, whichever holds all tokens as they are stored.
    vocab_size: tokens are below it; the loader checks that, once for all rows.
    masks_loss: whether `fill` writes `TokenRows.loss_mask`.
    """

    @property
    def num_samples(self) -> int: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def token_dtype(self) -> np.dtype[Any]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def masks_loss(self) -> bool: ...

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        """Write sample ``samples[i]`` into row ``rows[i]`` of `out`: all of its tokens, and what
        else `out` has room for.

        Several threads may call it at once, with buffers of their own. Raises DataError where a
        file cannot be read or contradicts itself.
        """

    def describe(self, sample: int) -> str:
        """Where the tokens of `sample` come from, for an error: files and ranges."""
