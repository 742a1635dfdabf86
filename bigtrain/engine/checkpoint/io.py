"""Fragments to and from the tensor files of a checkpoint
(`bigtrain.engine.checkpoint.tensor_files`).

Each rank writes the parts that fall to it to a file of its own, and reads what it owns from the
files of all. Keys are ``KIND/PARAMETER`` (`master/...`, `exp_avg/...`) and ``buffer/NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import Fragment
from bigtrain.engine.checkpoint.lazy import BUFFER, DTYPES, memory_of, open_tensors, open_weights
from bigtrain.engine.checkpoint.tensor_files import Identity, NewPart, file_name, write_parts
from bigtrain.errors import CheckpointError, CorruptCheckpointError

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_Index = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Chunk:
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    view: torch.Tensor

    @property
    def index(self) -> _Index:
        return self.key, self.offsets

    def part(self) -> NewPart:
        if self.view.dtype not in _NAMES:
            raise CheckpointError(f"{self.key}: {self.view.dtype} cannot be saved")
        name = _NAMES[self.view.dtype]
        sizes = tuple(self.view.shape)
        return NewPart(self.key, self.shape, self.offsets, sizes, name, self._memory)

    def _memory(self) -> memoryview:
        return memory_of(self.view.detach().cpu().contiguous())


def _chunks(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]
) -> dict[_Index, _Chunk]:
    found = []
    for fragment in fragments:
        for kind in fragment.tensors:
            key, shape = f"{kind}/{fragment.name}", fragment.shard.shape
            found += [_Chunk(key, shape, offsets, view) for offsets, view in fragment.parts(kind)]
    for name, buffer in buffers.items():
        view = buffer if buffer.ndim else buffer.view(1)
        found.append(_Chunk(f"{BUFFER}/{name}", tuple(view.shape), (0,) * view.ndim, view))
    return {chunk.index: chunk for chunk in found}


class Staging:
    """Host memory that saves are copied to, page-locked beside a GPU, and used again by the next.

    group: of all processes, on the CPU; None: the default one. copies: False to divide the work
    alone, and write from the live tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, copies: bool = True) -> None:
        self._group = group
        self._copies = copies
        self._arenas: dict[torch.dtype, torch.Tensor] = {}
        self._written_here: frozenset[_Index] | None = None

    def take(self, chunks: dict[_Index, _Chunk]) -> dict[_Index, _Chunk]:
        """Those chunks that this process is to write; their copies are valid until the next call.

        Collective at the first call, which divides what several processes hold among them.
        """
        if self._written_here is None:
            self._written_here = _divide(chunks, self._group)
        own = [chunk for index, chunk in chunks.items() if index in self._written_here]
        return {chunk.index: chunk for chunk in (self._copy(own) if self._copies else own)}

    def _copy(self, own: list[_Chunk]) -> list[_Chunk]:
        num_elements: dict[torch.dtype, int] = {}
        for chunk in own:
            dtype = chunk.view.dtype
            num_elements[dtype] = num_elements.get(dtype, 0) + chunk.view.numel()
        on_gpu = any(chunk.view.is_cuda for chunk in own)
        for dtype, count in num_elements.items():
            if dtype not in self._arenas or self._arenas[dtype].numel() != count:
                self._arenas[dtype] = torch.empty(count, dtype=dtype, pin_memory=on_gpu)
        used = dict.fromkeys(num_elements, 0)
        copies = []
        for chunk in own:
            dtype, count = chunk.view.dtype, chunk.view.numel()
            place = self._arenas[dtype].narrow(0, used[dtype], count).view(chunk.view.shape)
            copies.append(replace(chunk, view=place.copy_(chunk.view.detach(), non_blocking=True)))
            used[dtype] += count
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def _divide(chunks: dict[_Index, _Chunk], group: dist.ProcessGroup | None) -> frozenset[_Index]:
    """What this process writes: each chunk is written once, by the holder with the least to do."""
    if dist.get_world_size(group) == 1:
        return frozenset(chunks)
    own = {index: chunk.view.numel() * chunk.view.itemsize for index, chunk in chunks.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    holders: dict[_Index, list[int]] = {}
    for rank, held in enumerate(everyone):
        for index in held:
            holders.setdefault(index, []).append(rank)
    load = [0] * len(everyone)
    mine = set()
    for index, ranks in holders.items():
        writer = min(ranks, key=lambda rank: load[rank])
        load[writer] += everyone[writer][index]
        if writer == dist.get_rank(group):
            mine.add(index)
    return frozenset(mine)


class TensorSnapshot:
    """What this process holds of a checkpoint, ready to be written."""

    def __init__(
        self,
        fragments: Iterable[Fragment],
        buffers: Mapping[str, torch.Tensor],
        staging: Staging | None = None,
    ) -> None:
        """Of the live tensors, or of what `staging` takes of them. Collective."""
        # Of a part that several processes hold, the one that answers for it writes.
        chunks = _chunks((f for f in fragments if f.shard.primary), buffers)
        self._chunks = (staging or Staging(copies=False)).take(chunks)

    def num_bytes(self, group: dist.ProcessGroup | None = None) -> int:
        """Of all processes' tensors together. Collective over the CPU group `group`."""
        own = sum(chunk.view.numel() * chunk.view.itemsize for chunk in self._chunks.values())
        total = torch.tensor(own, dtype=torch.int64)
        dist.all_reduce(total, group=group)
        return int(total)

    def write(
        self,
        directory: Path,
        group: dist.ProcessGroup | None = None,
        identity: Identity | None = None,
    ) -> dict[str, tuple[int, str]]:
        """Write and fsync the file of every rank; bytes and checksum of the header by file name.

        Collective over `group`, a CPU group of all processes, and in a thread of its own if that
        group is used by nothing else meanwhile. Raises CheckpointError on all processes where one
        of them cannot write.
        """
        written: dict[str, tuple[int, str]] = {}

        def write() -> None:
            rank = dist.get_rank()
            directory.mkdir(exist_ok=True)
            name, parts = file_name(rank), [chunk.part() for chunk in self._chunks.values()]
            written[name] = write_parts(directory / name, identity or Identity(), rank, parts)

        everyone = _together(write, lambda: written, group)
        return {name: entry for files in everyone for name, entry in files.items()}


def read_tensors(
    directory: Path,
    fragments: Iterable[Fragment],
    buffers: Mapping[str, torch.Tensor],
    headers: Mapping[str, str] | None = None,
) -> None:
    """Fill every process's fragments and buffers in place, whatever topology wrote them.

    Collective. `headers`: checksums by file name, as the manifest has them. Raises CheckpointError
    when a tensor is missing or has another shape, and CorruptCheckpointError when a file is not as
    it was written, on all processes.
    """

    def read() -> None:
        chunks = _chunks(fragments, buffers).values()
        stored = open_tensors(directory, headers)
        for chunk in chunks:
            tensor = stored.get(chunk.key)
            if tensor is None:
                raise CheckpointError(f"{directory}: holds no tensor {chunk.key}")
            if tuple(tensor.shape) != chunk.shape:
                raise CheckpointError(
                    f"{directory}: {chunk.key} has shape {list(tensor.shape)} there and "
                    f"{list(chunk.shape)} in this run's model"
                )
        for chunk in chunks:
            stored[chunk.key].fill(chunk.offsets, chunk.view.detach())

    _together(read, lambda: None, None)


def _together(
    action: Callable[[], None], result: Callable[[], Any], group: dist.ProcessGroup | None
) -> list[Any]:
    """Let every rank do `action`; the `result` of each. Collective over `group`.

    Raises on all of them if one has failed: CorruptCheckpointError if that is all that is wrong,
    or else CheckpointError, since another model's checkpoint is no damage.
    """
    failure: tuple[bool, str] | None = None
    try:
        action()
    except Exception as error:
        is_damage = isinstance(error, CorruptCheckpointError)
        failure = (is_damage, str(error) or type(error).__name__)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (failure, result()), group=group)
    failures = {found for found, _ in everyone if found is not None}
    if failures:
        kind = CorruptCheckpointError if all(d for d, _ in failures) else CheckpointError
        raise kind("; ".join(sorted({text for _, text in failures})))
    return [value for _, value in everyone]


def read_full_masters(directory: Path) -> dict[str, torch.Tensor]:
    """All fp32 masters and buffers as full CPU tensors by Hugging Face name; see `read_full`."""
    return {name: tensor.read() for name, tensor in open_weights(directory).items()}


def read_full(directory: Path, kinds: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Full CPU tensors by key, of some or all kinds, in one process, without a process group.

    Takes as much memory as they do. Raises CorruptCheckpointError.
    """
    return {key: tensor.read() for key, tensor in open_tensors(directory, kinds=kinds).items()}
