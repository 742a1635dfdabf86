"""Samples with a label: a document each. numpy only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.documents import DocumentSamples, Longer
from bigtrain.data.samples.token_stream import TokenStream


class ClassifiedSamples(DocumentSamples):
    """Documents of `stream`, complete, padded at the end. labels: uint8 [samples]. `truncates`:
    longer documents, at the end. Raises DataError as `DocumentSamples`."""

    def __init__(
        self, stream: TokenStream, sequence_length: int, *, truncates: bool = False
    ) -> None:
        longer: Longer = "truncate" if truncates else "refuse"
        super().__init__(stream, sequence_length, longer, is_complete=True)
        parts: list[npt.NDArray[np.uint8]] = [shard.labels for shard in stream.shards]
        self.labels = np.concatenate(parts)
