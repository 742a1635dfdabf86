"""Fragments to and from disk through torch.distributed.checkpoint (DCP).

DCP stores each tensor as chunks of its full shape, drops copies that several processes hold, and
reads any other chunking back. Its planners are the documented place to say which chunks a process
has (pytorch.org/docs/stable/distributed.checkpoint.html): the two below turn fragments into chunks.
Keys are ``KIND/PARAMETER`` (`master/...`, `exp_avg/...`) and ``buffer/NAME``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from bigtrain.engine.checkpoint_streams import CheckedReader, CheckedWriter
from bigtrain.engine.fragments import MASTER, Fragment
from bigtrain.errors import CheckpointError, DamagedCheckpointError

BUFFER = "buffer"


@dataclass(frozen=True)
class _Chunk:
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    view: torch.Tensor

    @property
    def index(self) -> MetadataIndex:
        return MetadataIndex(self.key, torch.Size(self.offsets))

    @property
    def storage(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.view.shape)


def _chunks(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]
) -> dict[MetadataIndex, _Chunk]:
    found = []
    for fragment in fragments:
        for kind in fragment.tensors:
            key, shape = f"{kind}/{fragment.name}", fragment.shard.shape
            found += [_Chunk(key, shape, offsets, view) for offsets, view in fragment.parts(kind)]
    for name, buffer in buffers.items():
        view = buffer if buffer.ndim else buffer.view(1)
        found.append(_Chunk(f"{BUFFER}/{name}", tuple(view.shape), (0,) * view.ndim, view))
    return {chunk.index: chunk for chunk in found}


class _SavePlanner(DefaultSavePlanner):
    def __init__(self, chunks: dict[MetadataIndex, _Chunk]) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = chunks

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=index,
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk.storage,
                    properties=TensorProperties(dtype=chunk.view.dtype),
                    size=torch.Size(chunk.shape),
                ),
            )
            for index, chunk in self._chunks.items()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._chunks[write_item.index].view.detach().contiguous()


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, chunks: dict[MetadataIndex, _Chunk], directory: Path) -> None:
        super().__init__(flatten_state_dict=False)
        self._chunks = chunks
        self._directory = directory

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        by_key: dict[str, list[_Chunk]] = {}
        for chunk in self._chunks.values():
            by_key.setdefault(chunk.key, []).append(chunk)
        items: list[ReadItem] = []
        for key, chunks in by_key.items():
            stored = self.metadata.state_dict_metadata.get(key)
            if stored is None or isinstance(stored, BytesStorageMetadata):
                raise CheckpointError(f"{self._directory}: holds no tensor {key}")
            if tuple(stored.size) != chunks[0].shape:
                raise CheckpointError(
                    f"{self._directory}: {key} has shape {list(stored.size)} there and "
                    f"{list(chunks[0].shape)} in this run's model"
                )
            items += create_read_items_for_chunk_list(key, stored, [c.storage for c in chunks])
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)
        view = self._chunks[index].view.detach()
        for axis, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(axis, offset, length)
        return view


class Staging:
    """Host memory that saves are copied to, page-locked beside a GPU, and used again by the next.

    group: of all processes, on the CPU; None: the default one. copies: False to divide the work
    alone, and write from the live tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, copies: bool = True) -> None:
        self._group = group
        self._copies = copies
        self._arenas: dict[torch.dtype, torch.Tensor] = {}
        self._written_here: frozenset[MetadataIndex] | None = None

    def take(self, chunks: dict[MetadataIndex, _Chunk]) -> dict[MetadataIndex, _Chunk]:
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


def _divide(
    chunks: dict[MetadataIndex, _Chunk], group: dist.ProcessGroup | None
) -> frozenset[MetadataIndex]:
    """What this process writes: each chunk is written once, by the holder with the least to do."""
    if dist.get_world_size(group) == 1:
        return frozenset(chunks)
    own = {index: chunk.view.numel() * chunk.view.itemsize for index, chunk in chunks.items()}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    holders: dict[MetadataIndex, list[int]] = {}
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
        self._chunks = chunks if staging is None else staging.take(chunks)

    def num_bytes(self, group: dist.ProcessGroup | None = None) -> int:
        """Of all processes' tensors together. Collective over the CPU group `group`."""
        own = sum(chunk.view.numel() * chunk.view.itemsize for chunk in self._chunks.values())
        total = torch.tensor(own, dtype=torch.int64)
        dist.all_reduce(total, group=group)
        return int(total)

    def write(
        self, directory: Path, group: dist.ProcessGroup | None = None
    ) -> dict[str, tuple[int, str]]:
        """Write and fsync every process's part; bytes and XXH3-64 of all tensor files by name.

        Collective over `group`, a CPU group of all processes, and in a thread of its own if that
        group is used by nothing else meanwhile. Raises CheckpointError on all processes where one
        of them cannot write.
        """
        writer = CheckedWriter(directory)
        try:
            dcp_save(
                {},
                storage_writer=writer,
                planner=_SavePlanner(self._chunks),
                process_group=group,
            )
        except CheckpointException as error:
            raise CheckpointError(_causes(error)) from error
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, writer.written, group=group)
        return {name: entry for written in everyone for name, entry in written.items()}


def read_tensors(
    directory: Path, fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Fill every process's fragments and buffers in place, whatever topology wrote them.

    Collective. Raises CheckpointError when a tensor is missing or has another shape, and
    DamagedCheckpointError when a file is not as it was written, on all processes.
    """
    chunks = _chunks(fragments, buffers)
    try:
        dcp_load(
            {},
            storage_reader=CheckedReader(directory),
            planner=_LoadPlanner(chunks, directory),
        )
    except CheckpointException as error:
        raise _kind(error)(_causes(error)) from error


def _causes(error: CheckpointException) -> str:
    causes = {str(cause[0]) or type(cause[0]).__name__ for cause in error.failures.values()}
    return "; ".join(sorted(causes))


def _kind(error: CheckpointException) -> type[CheckpointError]:
    """Another model's checkpoint is no damage; whatever else stops reading is."""
    fits = all(type(cause[0]) is not CheckpointError for cause in error.failures.values())
    return DamagedCheckpointError if fits else CheckpointError


def read_full_masters(directory: Path) -> dict[str, torch.Tensor]:
    """All fp32 masters and buffers as full CPU tensors by Hugging Face name; see `read_full`."""
    found = read_full(directory, kinds=(MASTER, BUFFER))
    return {key.split("/", 1)[1]: tensor for key, tensor in found.items()}


def read_full(directory: Path, kinds: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Full CPU tensors by key, of some or all kinds, in one process, without a process group.

    Takes as much memory as they do. Raises DamagedCheckpointError.
    """
    reader = CheckedReader(directory)
    stored: dict[str, Any] = {
        key: value
        for key, value in reader.read_metadata().state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
        and (kinds is None or key.split("/", 1)[0] in kinds)
    }
    tensors = {key: torch.empty(v.size, dtype=v.properties.dtype) for key, v in stored.items()}
    with warnings.catch_warnings():
        # That it runs without a process group is what is wanted here.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp_load(tensors, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise DamagedCheckpointError(_causes(error)) from error
    return tensors
