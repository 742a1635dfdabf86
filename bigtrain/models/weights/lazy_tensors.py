"""Tensors whose values are read on demand, a rectangle at a time.

transformers renames, merges and splits the tensors of a file while it loads or saves a model
(transformers/core_model_loading.py). Lazy tensors record these operations. A read of a rectangle
follows operations that only move elements back to the file; the result of any other operation is
computed in full.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bigtrain.models.torch_patches import ATEN_TO_COPY, map_instances, wrapper_tensor
from bigtrain.system.boxes import Box

Offsets = tuple[int, ...]
aten = torch.ops.aten

BLOCK_BYTES = 16 << 20
"""The most that is read, compared or converted at once, unless a single row is longer."""


_SEPARATE_MAPPING_BYTES = 1 << 20


class Values(Protocol):
    """Source of the values of a lazy tensor."""

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        """Write the rectangle at `offsets` with the shape of `out` into `out`, in the dtype of
        `out`."""

    def sources(self) -> Iterator[object]:
        """Yield the leaves that a read needs, for example tensors of files."""


class LazyTensor(torch.Tensor):
    """A tensor with a shape and a dtype whose values are read on demand. Always contiguous.
    Read-only: writing into it is an error."""

    origin: Values

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, origin: Values) -> LazyTensor:
        tensor = wrapper_tensor(cls, shape, dtype)
        assert isinstance(tensor, LazyTensor)
        tensor.origin = origin
        return tensor

    def __repr__(self, *_: object) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"

    @torch.no_grad()
    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        """Read the rectangle at `offsets`, of the shape of `out`, into `out`."""
        assert len(offsets) == self.ndim == out.ndim, (offsets, self.shape, out.shape)
        self.origin.fill(offsets, out)

    def read(self) -> torch.Tensor:
        """Return the full tensor."""
        tensor = allocate(tuple(self.shape), self.dtype)
        self.fill((0,) * self.ndim, tensor)
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the class argument
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.equal.default:
            return _equal(*args)
        # On the meta device, the operation gives the shape and dtype of the result, or of each of
        # several results.
        meta_kwargs = dict(kwargs)
        if kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        meta_result = func(*_as_meta(args), **_as_meta(meta_kwargs))
        is_single = torch.is_tensor(meta_result)
        follow = _FOLLOWED.get(func.overloadpacket)
        if follow is not None:
            origin = follow(*args, **kwargs)
        elif is_single:
            origin = _ComputedResult(func, args, kwargs, None)
        else:
            indices = range(len(meta_result))
            origin = [_ComputedResult(func, args, kwargs, index) for index in indices]
        if is_single:
            return LazyTensor(meta_result.shape, meta_result.dtype, origin)
        results = zip(meta_result, origin, strict=True)
        return [LazyTensor(meta.shape, meta.dtype, values) for meta, values in results]


def _as_meta(tree: Any) -> Any:
    """Return `tree` with tensors on the meta device for lazy tensors."""
    return map_instances(
        LazyTensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree
    )


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal, of which either may be lazy; reads a block at a
    time."""
    if first.shape != second.shape:
        return False
    bytes_per_pair = 2 * first.itemsize
    for offsets, sizes in blocks(tuple(first.shape), bytes_per_pair):
        first_block, second_block = (torch.empty(sizes, dtype=x.dtype) for x in (first, second))
        _fill(first, offsets, first_block)
        _fill(second, offsets, second_block)
        if not torch.equal(first_block, second_block):
            return False
    return True


def blocks(sizes: Offsets, itemsize: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Yield (offsets, sizes) of blocks of at most `BLOCK_BYTES` that divide a tensor of `sizes`, in
    row-major order."""
    num_bytes = math.prod(sizes) * itemsize
    if num_bytes <= BLOCK_BYTES or not sizes:
        yield (0,) * len(sizes), sizes
        return
    num_rows, row_sizes = sizes[0], sizes[1:]
    row_bytes = num_bytes // num_rows
    if row_bytes > BLOCK_BYTES:
        for row in range(num_rows):
            for block_offsets, block_sizes in blocks(row_sizes, itemsize):
                yield (row, *block_offsets), (1, *block_sizes)
        return
    rows_per_block = BLOCK_BYTES // row_bytes
    for start in range(0, num_rows, rows_per_block):
        offsets = (start, *(0,) * len(row_sizes))
        yield offsets, (min(rows_per_block, num_rows - start), *row_sizes)


def allocate(shape: Offsets, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor whose memory returns to the system as soon as it is freed.
    malloc would keep blocks of up to 32 MiB."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SEPARATE_MAPPING_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def narrowed(tensor: torch.Tensor, offsets: Offsets, sizes: Offsets) -> torch.Tensor:
    """Return the view of the rectangle of `tensor` at `offsets`, of shape `sizes`."""
    return tensor[Box(offsets, sizes).slices]


def _fill(tensor: torch.Tensor, offsets: Offsets, out: torch.Tensor) -> None:
    """Write the rectangle of `tensor`, lazy or not, at `offsets` into `out`."""
    if isinstance(tensor, LazyTensor):
        tensor.fill(offsets, out)
    else:
        out.copy_(narrowed(tensor, offsets, tuple(out.shape)))


def _sources(tensors: Sequence[torch.Tensor]) -> Iterator[object]:
    for tensor in tensors:
        if isinstance(tensor, LazyTensor):
            yield from tensor.origin.sources()


# --- operations that only move elements ---


@dataclass(frozen=True)
class _MovedElements:
    """Elements of `tensor` in another place. `locate` maps a rectangle of the result, given by its
    offsets and the tensor that gets the values, to the offsets in `tensor` and a view, in the shape
    of the rectangle in `tensor`, of the tensor that gets the values."""

    tensor: torch.Tensor
    locate: Callable[[Offsets, torch.Tensor], tuple[Offsets, torch.Tensor]]

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        _fill(self.tensor, *self.locate(offsets, out))

    def sources(self) -> Iterator[object]:
        return _sources([self.tensor])


@dataclass(frozen=True)
class _JoinedTensors:
    """Tensors concatenated along `dim`."""

    tensors: Sequence[torch.Tensor]
    dim: int

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        dim, tensor_start = self.dim, 0
        out_start, out_stop = offsets[dim], offsets[dim] + out.shape[dim]
        for tensor in self.tensors:
            tensor_stop = tensor_start + tensor.shape[dim]
            start, stop = max(out_start, tensor_start), min(out_stop, tensor_stop)
            if start < stop:  # the rectangle contains a part of this tensor
                tensor_offsets = (*offsets[:dim], start - tensor_start, *offsets[dim + 1 :])
                _fill(tensor, tensor_offsets, out.narrow(dim, start - out_start, stop - start))
            tensor_start = tensor_stop

    def sources(self) -> Iterator[object]:
        return _sources(self.tensors)


def rows_joined(first: LazyTensor, second: torch.Tensor) -> LazyTensor:
    """Return the rows of `first` followed by the rows of `second`, in the dtype of `first`."""
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return LazyTensor(shape, first.dtype, _JoinedTensors((first, second), 0))


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> Values:
    return _MovedElements(tensor, lambda offsets, out: (offsets, out))


def _slice(
    tensor: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Values:
    dim %= tensor.ndim
    first, last, _ = slice(start, end).indices(tensor.shape[dim])
    if step != 1:
        return _ComputedResult(aten.slice.Tensor, (tensor, dim, first, last, step), {}, None)
    return _MovedElements(
        tensor,
        lambda offsets, out: ((*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]), out),
    )


def _split_with_sizes(tensor: torch.Tensor, sizes: Sequence[int], dim: int = 0) -> list[Values]:
    begins = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_slice(tensor, dim, begin, begin + n) for begin, n in zip(begins, sizes, strict=True)]


def _split(tensor: torch.Tensor, size: int, dim: int = 0) -> list[Values]:
    length = tensor.shape[dim]
    sizes = [min(size, length - start) for start in range(0, length, size)]
    return _split_with_sizes(tensor, sizes, dim)


def _select(tensor: torch.Tensor, dim: int, index: int) -> Values:
    dim, index = dim % tensor.ndim, index % tensor.shape[dim]
    return _MovedElements(
        tensor, lambda offsets, out: ((*offsets[:dim], index, *offsets[dim:]), out.unsqueeze(dim))
    )


def _unsqueeze(tensor: torch.Tensor, dim: int) -> Values:
    dim %= tensor.ndim + 1
    return _MovedElements(
        tensor, lambda offsets, out: ((*offsets[:dim], *offsets[dim + 1 :]), out.select(dim, 0))
    )


def _squeeze(tensor: torch.Tensor, dims: int | Sequence[int] | None = None) -> Values:
    if dims is None:
        dims = range(tensor.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    named_dims = {dim % tensor.ndim for dim in dims}
    kept_dims = [  # a dimension of another size than 1 stays
        dim for dim in range(tensor.ndim) if dim not in named_dims or tensor.shape[dim] != 1
    ]

    def locate(offsets: Offsets, out: torch.Tensor) -> tuple[Offsets, torch.Tensor]:
        tensor_offsets = [0] * tensor.ndim
        for dim, offset in zip(kept_dims, offsets, strict=True):
            tensor_offsets[dim] = offset
        for dim in range(tensor.ndim):
            if dim not in kept_dims:
                out = out.unsqueeze(dim)
        return tuple(tensor_offsets), out

    return _MovedElements(tensor, locate)


def _permute(tensor: torch.Tensor, order: Sequence[int]) -> Values:
    order = [dim % tensor.ndim for dim in order]
    inverse = [order.index(dim) for dim in range(tensor.ndim)]
    return _MovedElements(
        tensor, lambda offsets, out: (tuple(offsets[dim] for dim in inverse), out.permute(inverse))
    )


def _transpose(tensor: torch.Tensor, dim0: int, dim1: int) -> Values:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


_FOLLOWED: dict[Any, Callable[..., Any]] = {
    aten.detach: _same,
    aten.alias: _same,
    aten.clone: _same,
    ATEN_TO_COPY: _same,  # a read converts to the dtype of the tensor that gets the values
    aten.cat: lambda tensors, dim=0: _JoinedTensors(tensors, dim % tensors[0].ndim),
    aten.stack: lambda tensors, dim=0: _JoinedTensors(
        [tensor.unsqueeze(dim) for tensor in tensors], dim % (tensors[0].ndim + 1)
    ),
    aten.slice: _slice,
    aten.split: _split,
    aten.split_with_sizes: _split_with_sizes,
    aten.select: _select,
    aten.unbind: lambda tensor, dim=0: [
        _select(tensor, dim, index) for index in range(tensor.shape[dim])
    ],
    aten.unsqueeze: _unsqueeze,
    aten.squeeze: _squeeze,
    aten.permute: _permute,
    aten.transpose: _transpose,
    aten.t: lambda tensor: _transpose(tensor, 0, 1),
}


# --- any other operation ---


class _ComputedResult:
    """The result of a call of `func`, or result number `index` of several. A read of any part
    computes the full result, which is cached until another result is computed."""

    _cached: tuple[_ComputedResult, torch.Tensor] | None = None

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        self._func, self._index = func, index
        self._arguments = (args, kwargs)

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        if _ComputedResult._cached is None or _ComputedResult._cached[0] is not self:
            _ComputedResult._cached = None  # frees memory before the computation
            args, kwargs = map_instances(LazyTensor, LazyTensor.read, self._arguments)
            results = self._func(*args, **kwargs)
            computed: torch.Tensor = results if self._index is None else results[self._index]
            _ComputedResult._cached = (self, computed)
        _, result = _ComputedResult._cached
        out.copy_(narrowed(result, offsets, tuple(out.shape)))

    def sources(self) -> Iterator[object]:
        inputs: list[LazyTensor] = []
        map_instances(LazyTensor, inputs.append, self._arguments)
        return _sources(inputs)


def forget_computed() -> None:
    """Free the last computed result."""
    _ComputedResult._cached = None
