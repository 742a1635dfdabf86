"""Arrow columns as UTF-8 without a Python string per row, which costs as much as encoding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TextColumn:
    """Rows of a text column: `joined` is their concatenation."""

    contents: list[bytes]
    joined: bytes

    def rows(self) -> list[list[str]]:
        return [[content.decode("utf-8")] for content in self.contents]


def require_sound(column: Any) -> None:
    """Raise ArrowInvalid if the arrow array `column` has offsets outside of its buffers.

    A corrupt file can produce one, and reading its rows would crash the process. Text that is not
    UTF-8 is accepted: it is checked per row.
    """
    import pyarrow

    if pyarrow.types.is_string(column.type):
        column.view(pyarrow.binary()).validate(full=True)
    elif pyarrow.types.is_large_string(column.type):
        column.view(pyarrow.large_binary()).validate(full=True)
    else:
        try:
            column.validate(full=True)
        except pyarrow.ArrowInvalid as error:
            if "UTF8" not in str(error):
                raise


def text_column(column: Any) -> TextColumn | None:
    """Return the arrow array `column`; None unless every row is text and valid UTF-8."""
    import pyarrow

    kind = column.type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        return None
    offset_type = np.dtype("<i8" if pyarrow.types.is_large_string(kind) else "<i4")
    if column.null_count or not len(column):
        return None
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid:
        return None
    _, offset_buffer, data = column.buffers()
    offsets = np.frombuffer(
        offset_buffer, offset_type, len(column) + 1, column.offset * offset_type.itemsize
    )
    first, last = int(offsets[0]), int(offsets[-1])
    joined = data.slice(first, last - first).to_pybytes() if last > first else b""
    ends = (offsets - first).tolist()
    return TextColumn([joined[begin:end] for begin, end in pairwise(ends)], joined)
