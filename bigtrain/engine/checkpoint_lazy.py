"""The full weights of a checkpoint as tensors that are read a rectangle at a time.

Parts are read past DCP, which would hold three copies of each: a part is a `torch.save` archive,
in which the elements lie as they are, uncompressed and row-major (docs/checkpoints.md). Its
checksum is not compared here: whoever opens a checkpoint verifies its files first.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from bigtrain.engine.checkpoint_io import BUFFER
from bigtrain.engine.checkpoint_streams import DIGEST_BYTES, CheckedReader
from bigtrain.engine.fragments import MASTER
from bigtrain.errors import DamagedCheckpointError
from bigtrain.models.lazy_tensors import LazyTensor, Offsets, blocks, narrowed, room

_ZIP_HEADER_BYTES = 30


def open_weights(directory: Path) -> dict[str, LazyTensor]:
    """Masters and buffers by Hugging Face name, of which nothing is read yet.

    One process, no process group; `directory` is the checkpoint's, and whole. Reading raises
    DamagedCheckpointError for a file that is not what it was.
    """
    metadata = CheckedReader(directory).read_metadata()
    found = {}
    for key, stored in metadata.state_dict_metadata.items():
        kind, _, name = key.partition("/")
        if kind not in (MASTER, BUFFER) or not isinstance(stored, TensorStorageMetadata):
            continue
        parts = []
        for chunk in stored.chunks:
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            parts.append(
                _Part(
                    directory / place.relative_path,
                    place.offset,
                    place.length - (DIGEST_BYTES if place.transform_descriptors else 0),
                    tuple(chunk.offsets) or (0,),
                    tuple(chunk.sizes) or (1,),
                    stored.properties.dtype,
                )
            )
        found[name] = LazyTensor(tuple(stored.size), stored.properties.dtype, _Stored(parts))
    return found


@dataclass(frozen=True)
class _Part:
    """A rectangle of a tensor, and the range of a file that holds its archive."""

    path: Path
    start: int
    length: int
    offsets: Offsets
    sizes: Offsets
    dtype: torch.dtype

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        """As `LazyTensor.fill`, with offsets in this part."""
        sizes = tuple(out.shape)
        strides = [math.prod(self.sizes[dim + 1 :]) for dim in range(len(sizes))]
        inner = math.prod(sizes[1:])
        itemsize = self.dtype.itemsize * math.ceil(strides[0] / inner) if inner else 1
        try:
            with self.path.open("rb") as file:
                begin = self._elements_at(file.fileno())
                for corner, block in blocks(sizes, itemsize):
                    there = tuple(a + b for a, b in zip(offsets, corner, strict=True))
                    # Whole rows, beginning with the dimension in which the block has several.
                    dim = next((d for d, n in enumerate(block) if n > 1), len(block) - 1)
                    first = sum(o * s for o, s in zip(there[: dim + 1], strides, strict=False))
                    rows = (block[dim], *self.sizes[dim + 1 :])
                    buffer = room(rows, self.dtype)
                    where = begin + first * self.dtype.itemsize
                    _read(file.fileno(), where, buffer)
                    part = narrowed(buffer, (0, *there[dim + 1 :]), block[dim:])
                    narrowed(out, corner, block).copy_(part.reshape(block))
        except (OSError, EOFError, zipfile.BadZipFile, KeyError, AssertionError) as error:
            raise DamagedCheckpointError(f"{self.path}: cannot be read: {error}") from error

    def _elements_at(self, fd: int) -> int:
        """Where in the file the elements begin."""
        window = _Window(fd, self.start, self.length)
        with zipfile.ZipFile(window) as archive:
            [record] = [i for i in archive.infolist() if i.filename.endswith("/data/0")]
        assert record.compress_type == zipfile.ZIP_STORED
        assert record.file_size == math.prod(self.sizes) * self.dtype.itemsize, record.file_size
        # Lengths of name and extra field, which may differ from those of the directory's entry.
        header = os.pread(fd, _ZIP_HEADER_BYTES, self.start + record.header_offset)
        name, extra = (int.from_bytes(header[n : n + 2], "little") for n in (26, 28))
        return self.start + record.header_offset + _ZIP_HEADER_BYTES + name + extra


def _read(fd: int, where: int, buffer: torch.Tensor) -> None:
    view = buffer.view(-1).view(torch.uint8).numpy().data
    while view:
        count = os.preadv(fd, [view], where)
        if count == 0:
            raise EOFError("ends too soon")
        view, where = view[count:], where + count


class _Window:
    """A range of an open file as a file: what zipfile uses of one."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length = fd, start, length
        self._at = 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        data = os.pread(self._fd, left if count < 0 else min(count, left), self._start + self._at)
        self._at += len(data)
        return data


@dataclass(frozen=True)
class _Stored:
    """A tensor in parts; those of a scalar have one element in one dimension."""

    parts: Sequence[_Part]

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        if not offsets:
            offsets, out = (0,), out.view(1)
        for part in self.parts:
            low = tuple(map(max, offsets, part.offsets))
            high = tuple(
                min(o + n, p + m)
                for o, n, p, m in zip(offsets, out.shape, part.offsets, part.sizes, strict=True)
            )
            sizes = tuple(h - i for h, i in zip(high, low, strict=True))
            if min(sizes) <= 0:
                continue
            there = tuple(a - b for a, b in zip(low, part.offsets, strict=True))
            here = tuple(a - b for a, b in zip(low, offsets, strict=True))
            part.fill(there, narrowed(out, here, sizes))

    def sources(self) -> Iterator[object]:
        yield from self.parts
