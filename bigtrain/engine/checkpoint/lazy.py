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
    """Return lazy tensors by key, with some or all prefixes; only headers are read. Not collective.
    `listing`: as for `find_parts`. Opening and reading raise CorruptCheckpointError."""
    return _opened(find_parts(directory, listing, prefixes))


def open_boxes(
    directory: Path,
    requests: Mapping[str, Wanted],
    listing: Listing | None = None,
) -> dict[str, LazyTensor]:
    """Return lazy tensors by key, of which only the rectangles `requests` can be read. Not
    collective. Opens the files that the layout of `listing` names; without a layout, or if the
    named files lack parts, all files. Raises as `find_boxes`."""
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
    # Later prefixes replace earlier ones: the average of a master replaces the master.
    prefixes = [BUFFER, MASTER]
    if average:
        prefixes.append(AVERAGE)
    tensors_by_prefix: dict[str, dict[str, LazyTensor]] = {prefix: {} for prefix in prefixes}
    for key, tensor in open_tensors(directory, listing, prefixes).items():
        prefix, _, name = key.partition("/")
        tensors_by_prefix[prefix][name] = tensor
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
    """Source of a tensor that is stored in `parts`, which cover it."""

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
    """Read the rectangle `box` of `part` into `out`, in blocks of limited size."""
    dtype = DTYPES[part.dtype]
    strides = [math.prod(part.box.sizes[dim + 1 :]) for dim in range(out.ndim)]
    # Complete rows are read: bytes in the file for each element of the rectangle.
    read_bytes = dtype.itemsize * math.ceil(strides[0] / math.prod(box.sizes[1:]))
    try:
        with part.path.open("rb", buffering=0) as file:
            for corner, sizes in blocks(box.sizes, read_bytes):
                offsets = Box(corner, sizes).moved(box.offsets).offsets
                # A read is contiguous: rows of the first dimension in which the block has several.
                dim = next((d for d, size in enumerate(sizes) if size > 1), len(sizes) - 1)
                first_element = sum(
                    offset * stride
                    for offset, stride in zip(offsets[: dim + 1], strides, strict=False)
                )
                rows_shape = (sizes[dim], *part.box.sizes[dim + 1 :])
                target = narrowed(out, corner, sizes)
                is_direct = (
                    rows_shape == sizes[dim:]
                    and target.dtype == dtype
                    and target.device.type == "cpu"
                    and target.is_contiguous()
                )
                buffer = target if is_direct else allocate(rows_shape, dtype)
                part.read(file.fileno(), first_element * dtype.itemsize, memory_of(buffer))
                if not is_direct:
                    block = narrowed(buffer, (0, *offsets[dim + 1 :]), sizes[dim:])
                    target.copy_(block.reshape(sizes))
    except OSError as error:
        raise CorruptCheckpointError(f"{part.path}: cannot be read: {error}") from error
