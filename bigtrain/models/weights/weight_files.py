"""Weights in files of a Hugging Face model: which files, and their tensors, read by rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.modeling_utils import str_to_torch_dtype
from transformers.utils import cached_file

from bigtrain.errors import one_line
from bigtrain.models.weights.lazy_tensors import BLOCK_BYTES, LazyTensor, Offsets, blocks, narrowed
from bigtrain.models.weights.weight_paths import weight_paths
from bigtrain.system.boxes import Box


def stored_tensors(file: Path) -> dict[str, LazyTensor]:
    """Return all tensors of a safetensors file, unread. Raises ValueError if it cannot be
    opened."""
    return {name: LazyTensor(leaf.shape, leaf.dtype, leaf) for name, leaf in _leaves(file)}


class UnreadableError(Exception):
    """A file that can be opened but not read."""


def stored_tensors_of(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return all tensors of `files` by name. Raises ValueError for a name in two files, where
    transformers would take the last."""
    tensors: dict[str, StoredTensor] = {}
    for path in files:
        for name, leaf in _leaves(path):
            if name in tensors:
                raise ValueError(
                    f"two files hold the tensor {name}, {tensors[name].file.path} and {path} -> "
                    "remove the file, or the tensor, that is not meant"
                )
            tensors[name] = leaf
    return tensors


def _leaves(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a safetensors file by name. Raises ValueError."""
    try:
        file = _Safetensors(path)
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():
                part = opened.get_slice(name)
                dtype_name = part.get_dtype()
                if dtype_name not in str_to_torch_dtype:
                    raise ValueError(
                        f"holds numbers of the kind {dtype_name}, which torch does not have"
                    )
                shape, dtype = tuple(part.get_shape()), str_to_torch_dtype[dtype_name]
                yield name, StoredTensor(file, name, shape, dtype)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read: {one_line(error, None)}") from error


class _Safetensors:
    """A safetensors file, mapped again after every `BLOCK_BYTES` so that few pages stay
    resident."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: Any = None
        self._num_bytes = 0

    def read(self, name: str, offsets: Offsets, out: torch.Tensor, num_bytes: int) -> None:
        try:
            if self._open is None:
                self._open = safe_open(self.path, framework="pt")
            part = self._open.get_slice(name)
            slices = Box(offsets, tuple(out.shape)).slices
            out.copy_(part[slices] if slices else self._open.get_tensor(name))
        except (OSError, SafetensorError) as error:
            raise UnreadableError(
                f"{self.path}: cannot be read: {one_line(error, None)}"
            ) from error
        self._num_bytes += num_bytes
        if self._num_bytes >= BLOCK_BYTES:
            self._open, self._num_bytes = None, 0


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file."""

    file: _Safetensors
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_plain(self) -> bool:
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    def __str__(self) -> str:
        return f"{self.file.path}: {self.name}"

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        sizes = tuple(out.shape)
        # If rows are read in part, the pages of full rows are mapped.
        share = max(1, math.prod(self.shape[1:])) / max(1, math.prod(sizes[1:]))
        itemsize = math.ceil(self.dtype.itemsize * share)
        for begin, block in blocks(sizes, itemsize):
            file_offsets = tuple(a + b for a, b in zip(offsets, begin, strict=True))
            num_bytes = math.prod(block) * itemsize
            self.file.read(self.name, file_offsets, narrowed(out, begin, block), num_bytes)

    def sources(self) -> Iterator[object]:
        yield self


def weight_files(source: str, hf_config: PreTrainedConfig) -> list[Path]:
    """Return the files with weights, in the order transformers looks for them. Raises
    ValueError."""
    listed = getattr(hf_config, "transformers_weights", None)
    return weight_paths(source, listed, partial(find_file, source))


def find_file(source: str, name: str) -> Path | None:
    """Return the file `name` of a directory, or of a model on the hub or in the hub's cache; None
    without the file."""
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    cached = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if cached is None else Path(cached)
