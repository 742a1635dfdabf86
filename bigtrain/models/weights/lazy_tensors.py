"""Tensors whose values are read on demand, a rectangle at a time.

transformers renames, merges and splits the tensors of a file while it loads or saves a model
(transformers/core_model_loading.py). Lazy tensors record these operations: operations that only
move elements are traced back to the file, the result of any other operation is computed when it is
read.
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


_OWN_BYTES = 1 << 20


class Values(Protocol):
    """Source of the values of a lazy tensor."""

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        """Write the rectangle at `offsets`, of the shape of `out`, into `out`, in its dtype."""

    def sources(self) -> Iterator[object]:
        """The leaves that are read, for example tensors of files."""


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
        # On the meta device the operation gives the shapes and dtypes of its result, or results.
        meta_kwargs = dict(kwargs)
        if kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        meta = func(*_as_meta(args), **_as_meta(meta_kwargs))
        follow = _FOLLOWED.get(func.overloadpacket)
        if follow is not None:
            values = follow(*args, **kwargs)
        elif torch.is_tensor(meta):
            values = _Computed(func, args, kwargs, None)
        else:
            values = [_Computed(func, args, kwargs, index) for index in range(len(meta))]
        if torch.is_tensor(meta):
            return LazyTensor(meta.shape, meta.dtype, values)
        return [LazyTensor(m.shape, m.dtype, v) for m, v in zip(meta, values, strict=True)]


def _as_meta(tree: Any) -> Any:
    return map_instances(
        LazyTensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"), tree
    )


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape:
        return False
    for offsets, sizes in blocks(tuple(first.shape), 2 * first.itemsize):
        pair = [torch.empty(sizes, dtype=tensor.dtype) for tensor in (first, second)]
        for tensor, block in zip((first, second), pair, strict=True):
            _fill(tensor, offsets, block)
        if not torch.equal(*pair):
            return False
    return True


def blocks(sizes: Offsets, itemsize: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Yield (offsets, sizes) of blocks of at most `BLOCK_BYTES`, in row-major order."""
    num_bytes = math.prod(sizes) * itemsize
    if num_bytes <= BLOCK_BYTES or not sizes:
        yield (0,) * len(sizes), sizes
        return
    row = num_bytes // sizes[0]
    if row > BLOCK_BYTES:
        for index in range(sizes[0]):
            for offsets, inner in blocks(sizes[1:], itemsize):
                yield (index, *offsets), (1, *inner)
        return
    step = BLOCK_BYTES // row
    for start in range(0, sizes[0], step):
        yield (start, *(0,) * (len(sizes) - 1)), (min(step, sizes[0] - start), *sizes[1:])


def allocate(shape: Offsets, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor whose memory returns to the system as soon as it is freed.
    malloc would keep blocks of up to 32 MiB."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _OWN_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def narrowed(tensor: torch.Tensor, offsets: Offsets, sizes: Offsets) -> torch.Tensor:
    """Return the view of a rectangle of `tensor`."""
    return tensor[Box(offsets, sizes).slices]


def _fill(tensor: torch.Tensor, offsets: Offsets, out: torch.Tensor) -> None:
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
class _Moved:
    """Elements of `tensor`: `locate` maps a rectangle of the result, its offsets and the tensor
    that it is read into, to offsets in `tensor` and a view of the tensor that is read into."""

    tensor: torch.Tensor
    locate: Callable[[Offsets, torch.Tensor], tuple[Offsets, torch.Tensor]]

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        _fill(self.tensor, *self.locate(offsets, out))

    def sources(self) -> Iterator[object]:
        return _sources([self.tensor])


@dataclass(frozen=True)
class _Joined:
    """Tensors one after another along `dim`."""

    tensors: Sequence[torch.Tensor]
    dim: int

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        begin, dim = 0, self.dim
        low, high = offsets[dim], offsets[dim] + out.shape[dim]
        for tensor in self.tensors:
            end = begin + tensor.shape[dim]
            first, last = max(low, begin), min(high, end)
            if first < last:
                tensor_offsets = (*offsets[:dim], first - begin, *offsets[dim + 1 :])
                _fill(tensor, tensor_offsets, out.narrow(dim, first - low, last - first))
            begin = end

    def sources(self) -> Iterator[object]:
        return _sources(self.tensors)


def rows_joined(first: LazyTensor, second: torch.Tensor) -> LazyTensor:
    """Return `second` below the rows of `first`, in the dtype of `first`."""
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return LazyTensor(shape, first.dtype, _Joined((first, second), 0))


def _same(tensor: torch.Tensor, *_: Any, **__: Any) -> Values:
    return _Moved(tensor, lambda offsets, out: (offsets, out))


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
        return _Computed(aten.slice.Tensor, (tensor, dim, first, last, step), {}, None)
    return _Moved(
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
    return _Moved(
        tensor, lambda offsets, out: ((*offsets[:dim], index, *offsets[dim:]), out.unsqueeze(dim))
    )


def _unsqueeze(tensor: torch.Tensor, dim: int) -> Values:
    dim %= tensor.ndim + 1
    return _Moved(
        tensor, lambda offsets, out: ((*offsets[:dim], *offsets[dim + 1 :]), out.select(dim, 0))
    )


def _squeeze(tensor: torch.Tensor, dims: int | Sequence[int] | None = None) -> Values:
    if dims is None:
        dims = range(tensor.ndim)
    elif isinstance(dims, int):
        dims = [dims]
    squeezed = {dim % tensor.ndim for dim in dims}
    source_dims = [
        dim for dim in range(tensor.ndim) if dim not in squeezed or tensor.shape[dim] != 1
    ]

    def locate(offsets: Offsets, out: torch.Tensor) -> tuple[Offsets, torch.Tensor]:
        full = [0] * tensor.ndim
        for dim, offset in zip(source_dims, offsets, strict=True):
            full[dim] = offset
        for dim in range(tensor.ndim):
            if dim not in source_dims:
                out = out.unsqueeze(dim)
        return tuple(full), out

    return _Moved(tensor, locate)


def _permute(tensor: torch.Tensor, order: Sequence[int]) -> Values:
    order = [dim % tensor.ndim for dim in order]
    inverse = [order.index(dim) for dim in range(tensor.ndim)]
    return _Moved(
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
    ATEN_TO_COPY: _same,  # reading converts to the dtype of the tensor that is read into
    aten.cat: lambda tensors, dim=0: _Joined(tensors, dim % tensors[0].ndim),
    aten.stack: lambda tensors, dim=0: _Joined(
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


class _Computed:
    """A result that is computed in full when a part is read, and cached until another result is
    computed."""

    _latest: tuple[_Computed | None, torch.Tensor | None] = (None, None)

    def __init__(self, func: Any, args: Any, kwargs: Any, index: int | None) -> None:
        self._call = (func, args, kwargs, index)

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        if _Computed._latest[0] is not self:
            _Computed._latest = (None, None)
            func, args, kwargs, index = self._call
            inputs = map_instances(LazyTensor, LazyTensor.read, (args, kwargs))
            computed = func(*inputs[0], **inputs[1])
            result: torch.Tensor = computed if index is None else computed[index]
            _Computed._latest = (self, result)
        value = _Computed._latest[1]
        assert value is not None
        out.copy_(narrowed(value, offsets, tuple(out.shape)))

    def sources(self) -> Iterator[object]:
        inputs: list[LazyTensor] = []
        map_instances(LazyTensor, inputs.append, self._call[1:3])
        return _sources(inputs)


def forget_computed() -> None:
    """Free the last computed result."""
    _Computed._latest = (None, None)
