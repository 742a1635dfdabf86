"""Fragments to and from disk through torch.distributed.checkpoint (DCP).

DCP stores each tensor as chunks of its full shape, drops copies that several processes hold, and
reads any other chunking back. Its planners are the documented place to say which chunks a process
has (pytorch.org/docs/stable/distributed.checkpoint.html): the two below turn fragments into chunks.
Keys are ``KIND/PARAMETER`` (`master/...`, `exp_avg/...`) and ``buffer/NAME``.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
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

from bigtrain.engine.fragments import MASTER, Fragment
from bigtrain.errors import CheckpointError

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


def write_tensors(
    directory: Path, fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Write every process's fragments and the replicated buffers. Collective.

    Of a part that several processes hold, the one that answers for it writes, and DCP drops what
    its replicas hold as well. Files are fsynced before this returns. Raises OSError (inside DCP's
    own error) if writing fails.
    """
    dcp_save(
        {},
        storage_writer=FileSystemWriter(directory),
        planner=_SavePlanner(_chunks((f for f in fragments if f.shard.primary), buffers)),
    )


def read_tensors(
    directory: Path, fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Fill every process's fragments and buffers in place, whatever topology wrote them.

    Collective. Raises CheckpointError when a tensor is missing or has another shape.
    """
    chunks = _chunks(fragments, buffers)
    try:
        dcp_load(
            {},
            storage_reader=FileSystemReader(directory),
            planner=_LoadPlanner(chunks, directory),
        )
    except CheckpointException as error:
        causes = {str(cause[0]) for cause in error.failures.values()}
        raise CheckpointError("; ".join(sorted(causes))) from error


def read_full_masters(directory: Path) -> dict[str, torch.Tensor]:
    """All fp32 masters and buffers as full CPU tensors by Hugging Face name; see `read_full`."""
    found = read_full(directory, kinds=(MASTER, BUFFER))
    return {key.split("/", 1)[1]: tensor for key, tensor in found.items()}


def read_full(directory: Path, kinds: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Full CPU tensors by key, of some or all kinds, in one process, without a process group.

    Takes as much memory as they do.
    """
    reader = FileSystemReader(directory)
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
        dcp_load(tensors, storage_reader=reader, no_dist=True)
    return tensors
