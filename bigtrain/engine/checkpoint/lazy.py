"""Tensors of a checkpoint, read and verified a rectangle at a time, for resume and export."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bigtrain.engine.checkpoint.fragments import MASTER
from bigtrain.engine.checkpoint.tensor_file import Part
from bigtrain.engine.checkpoint.tensor_files import (
    Listing,
    MissingPartsError,
    Wanted,
    find_boxes,
    find_parts,
    no_tensor,
    refuse_other_shape,
)
from bigtrain.engine.optimizers.update_rule import AVERAGE
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.models.weights.lazy_tensors import LazyTensor, Offsets, allocate, blocks, narrowed
from bigtrain.system.boxes import Box

BUFFER = "buffer"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def open_tensors(
    directory: Path,
    listing: Listing | None = None,
    prefixes: Collection[str] | None = None,
) -> dict[str, LazyTensor]:
    """Lazy tensors by key, with some or all prefixes; only headers are read. Not collective.
    `listing`: as for `find_parts`. Opening and reading raise CorruptCheckpointError."""
    return _opened(find_parts(directory, listing, prefixes))


def open_boxes(
    directory: Path,
    requests: Mapping[str, Wanted],
    listing: Listing | None = None,
) -> dict[str, LazyTensor]:
    """Lazy tensors by key, of which only the rectangles `requests` can be read. Not collective.
    Opens the files that the layout of `listing` names; all files without a layout, or if the named
    files do not hold what they should. Raises as `find_boxes`."""
    layout = None if listing is None else listing.layout
    if layout is None:
        return _opened(find_boxes(directory, requests, listing))
    ranks: set[int] = set()
    for key, tensor in requests.items():
        rows = layout.rows.get(key)
        if rows is None:
            raise CheckpointError(no_tensor(directory, key))
        refuse_other_shape(directory, key, rows[0].shard.shape, tensor)
        for box in tensor.boxes:
            ranks |= layout.writers(key, box)
    try:
        return _opened(find_boxes(directory, requests, listing, ranks))
    except MissingPartsError:
        return _opened(find_boxes(directory, requests, listing))


def _opened(parts_by_key: Mapping[str, Sequence[Part]]) -> dict[str, LazyTensor]:
    return {
        key: LazyTensor(parts[0].shape, DTYPES[parts[0].dtype], _Stored(parts))
        for key, parts in parts_by_key.items()
    }


def open_weights(
    directory: Path, listing: Listing | None = None, *, average: bool = False
) -> dict[str, LazyTensor]:
    """Open masters and buffers by Hugging Face name, like `open_tensors`; with `average`, with the
    average instead of a master that has one."""
    prefixes = (BUFFER, MASTER, AVERAGE)[: 3 if average else 2]
    tensors_by_prefix: dict[str, dict[str, LazyTensor]] = {prefix: {} for prefix in prefixes}
    for key, tensor in open_tensors(directory, listing, prefixes).items():
        prefix, _, name = key.partition("/")
        tensors_by_prefix[prefix][name] = tensor
    # Later prefixes replace earlier ones: the average of a master replaces the master.
    weights: dict[str, LazyTensor] = {}
    for tensors in tensors_by_prefix.values():
        weights |= tensors
    return weights


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


@dataclass(frozen=True)
class _Stored:
    """A tensor stored in parts that cover it."""

    parts: Sequence[Part]

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        box = Box(offsets, tuple(out.shape))
        for part in self.parts:
            common = box.intersect(part.box)
            if common is not None:
                _fill(part, common.relative_to(part.box), out[common.relative_to(box).slices])

    def sources(self) -> Iterator[object]:
        yield from self.parts


def _fill(part: Part, box: Box, out: torch.Tensor) -> None:
    """Read the rectangle `box` of `part` into `out`."""
    dtype = DTYPES[part.dtype]
    strides = [math.prod(part.box.sizes[dim + 1 :]) for dim in range(out.ndim)]
    itemsize = dtype.itemsize * math.ceil(strides[0] / math.prod(box.sizes[1:]))
    try:
        with part.path.open("rb", buffering=0) as file:
            for corner, block in blocks(box.sizes, itemsize):
                offsets = Box(corner, block).moved(box.offsets).offsets
                # Whole rows, beginning with the dimension in which the block has several.
                dim = next((d for d, n in enumerate(block) if n > 1), len(block) - 1)
                first = sum(o * s for o, s in zip(offsets[: dim + 1], strides, strict=False))
                rows = (block[dim], *part.box.sizes[dim + 1 :])
                target = narrowed(out, corner, block)
                is_direct = (
                    rows == block[dim:]
                    and target.dtype == dtype
                    and target.device.type == "cpu"
                    and target.is_contiguous()
                )
                buffer = target if is_direct else allocate(rows, dtype)
                part.read(file.fileno(), first * dtype.itemsize, memory_of(buffer))
                if not is_direct:
                    inner = narrowed(buffer, (0, *offsets[dim + 1 :]), block[dim:])
                    target.copy_(inner.reshape(block))
    except OSError as error:
        raise CorruptCheckpointError(f"{part.path}: cannot be read: {error}") from error
