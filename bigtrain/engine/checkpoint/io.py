"""Writing and reading of fragments in the tensor files of a checkpoint.

Each rank writes its share to one file and reads what it owns from every rank's file; every element
is written once. The shares are a function of the topology, so that computing them needs no
communication. Keys are ``KIND/PARAMETER`` (`master/...`, `exp_avg/...`) and ``buffer/NAME``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.fragments import MASTER, Fragment
from bigtrain.engine.checkpoint.layout import CheckpointLayout, LayoutRow, merge
from bigtrain.engine.checkpoint.lazy import (
    BUFFER,
    DTYPES,
    memory_of,
    open_boxes,
    open_tensors,
    open_weights,
)
from bigtrain.engine.checkpoint.tensor_file import (
    NewPart,
    SaveIdentity,
    file_name,
    in_file_order,
    write_parts,
)
from bigtrain.engine.checkpoint.tensor_files import Listing, Wanted
from bigtrain.engine.startup.cpu_collectives import gather_on_main
from bigtrain.engine.startup.long_work import on_all_ranks
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.system.boxes import Box, Numbers, ShardRanges
from bigtrain.system.storage.direct_file import ALIGNMENT

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Chunk:
    """Rectangle `box` of the tensor `key` with the full `shape`, in the memory of this rank."""

    key: str
    shape: Numbers
    box: Box
    view: torch.Tensor

    def part(self) -> NewPart:
        if self.view.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{self.key}: {self.view.dtype} cannot be saved")
        name = _DTYPE_NAMES[self.view.dtype]
        content = self.view.detach()
        return NewPart(
            self.key, self.shape, self.box, name, lambda: memory_of(content.cpu().contiguous())
        )


def _chunks(fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]) -> list[_Chunk]:
    chunks = []
    for fragment in fragments:
        for state_name in fragment.tensors:
            key, shape = f"{state_name}/{fragment.name}", fragment.shard.shape
            chunks += [_Chunk(key, shape, box, view) for box, view in fragment.parts(state_name)]
    for name, buffer in buffers.items():
        view = buffer if buffer.ndim else buffer.view(1)
        full = Box.full(view.shape)
        chunks.append(_Chunk(f"{BUFFER}/{name}", full.sizes, full, view))
    return chunks


class Staging:
    """Host memory to which saves are copied (pinned for GPUs), reused by the next save. copies:
    False to write from the live tensors. pinned_limit_bytes: largest pinned copy of this rank; a
    larger copy goes to pageable memory, several times slower."""

    def __init__(self, *, copies: bool = True, pinned_limit_bytes: int | None = None) -> None:
        self._copies = copies
        self._pinned_limit_bytes = pinned_limit_bytes
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._division: WriterShare | None = None

    def division(
        self, fragments: Sequence[Fragment], buffers: Mapping[str, torch.Tensor], mesh: Mesh
    ) -> WriterShare:
        """Return the parts that this rank writes. The first call, which is collective, computes
        them."""
        if self._division is None:
            self._division = divide(fragments, buffers, mesh)
        return self._division

    def take(self, chunks: list[_Chunk]) -> tuple[list[_Chunk], memoryview | None]:
        """Return copies of the chunks that this rank writes, valid until the next call, and the
        bytes of the file; None if nothing was copied."""
        if not self._copies:
            return chunks, None
        chunk_of_part = {chunk.part().name: chunk for chunk in chunks}
        parts = in_file_order(chunk.part() for chunk in chunks)
        ordered = [chunk_of_part[part.name] for part in parts]
        num_bytes = sum(chunk.view.numel() * chunk.view.itemsize for chunk in chunks)
        on_gpu = any(chunk.view.is_cuda for chunk in chunks)
        # A buffer with room to align its content; reused while the size stays.
        arena_bytes = num_bytes + ALIGNMENT
        if self._arena.numel() != arena_bytes:
            self._arena = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            limit = self._pinned_limit_bytes
            is_pinned = on_gpu and (limit is None or pinned_bytes(arena_bytes) <= limit)
            self._arena = torch.empty(arena_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        content = self._arena.narrow(0, -self._arena.data_ptr() % ALIGNMENT, num_bytes)
        copies, begin = [], 0
        for chunk in ordered:
            end = begin + chunk.view.numel() * chunk.view.itemsize
            target = content[begin:end].view(chunk.view.dtype).view(chunk.view.shape)
            copies.append(replace(chunk, view=target.copy_(chunk.view.detach(), non_blocking=True)))
            begin = end
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies, memory_of(content)


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch allocates for `num_bytes` pinned bytes: the next power of two, in
    versions (2.11) without a setting for it."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@dataclass(frozen=True)
class Written:
    """Files written by all ranks, on the main rank; empty on other ranks. files: bytes and checksum
    of the header by name."""

    files: Mapping[str, tuple[int, str]]
    layout: CheckpointLayout


class TensorSnapshot:
    """This rank's parts of a checkpoint, ready to be written."""

    def __init__(
        self,
        fragments: Sequence[Fragment],
        buffers: Mapping[str, torch.Tensor],
        mesh: Mesh,
        staging: Staging | None = None,
    ) -> None:
        """Hold the live tensors, or the copies that `staging` makes. Collective."""
        staging = staging or Staging(copies=False)
        division = staging.division(fragments, buffers, mesh)
        chunks = [chunk for chunk in _chunks(fragments, buffers) if chunk.key in division.keys]
        self._chunks, self._content = staging.take(chunks)
        self._rows = division.rows

    @property
    def own_bytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        return sum(chunk.view.numel() * chunk.view.itemsize for chunk in self._chunks)

    def num_bytes(self, group: dist.ProcessGroup | None = None) -> int:
        """Return the bytes of all ranks' tensors. Collective over the CPU group `group`."""
        total = torch.tensor(self.own_bytes, dtype=torch.int64)
        dist.all_reduce(total, group=group)
        return int(total)

    def write(
        self,
        directory: Path,
        group: dist.ProcessGroup | None = None,
        identity: SaveIdentity | None = None,
    ) -> Written:
        """Write and fsync the file of every rank. Collective over `group`, a CPU group of the
        world; may run in a thread if nothing else uses `group` meanwhile. Raises CheckpointError on
        all ranks if a rank cannot write."""
        rank, entry = dist.get_rank(), (0, "")

        def write() -> None:
            nonlocal entry
            directory.mkdir(exist_ok=True)
            parts = [chunk.part() for chunk in self._chunks]
            path = directory / file_name(rank)
            entry = write_parts(path, identity or SaveIdentity(), rank, parts, self._content)

        _on_all_ranks(write, group)
        entries = gather_on_main((entry, self._rows), group)
        files = {file_name(number): file_entry for number, (file_entry, _) in enumerate(entries)}
        return Written(files, merge(row for _, rows in entries for row in rows))


def read_tensors(
    directory: Path,
    fragments: Iterable[Fragment],
    buffers: Mapping[str, torch.Tensor],
    listing: Listing | None = None,
) -> None:
    """Fill every rank's fragments and buffers in place, from a checkpoint of any topology.
    Collective. Raises on all ranks CheckpointError for a missing tensor or another shape, and
    CorruptCheckpointError for a changed file."""

    def read() -> None:
        chunks = _chunks(fragments, buffers)
        stored = open_boxes(directory, _wanted(chunks), listing)
        for chunk in chunks:
            stored[chunk.key].fill(chunk.box.offsets, chunk.view.detach())

    _on_all_ranks(read, None)


def _wanted(chunks: Iterable[_Chunk]) -> dict[str, Wanted]:
    requests: dict[str, Wanted] = {}
    for chunk in chunks:
        tensor = requests.setdefault(chunk.key, Wanted(chunk.shape, []))
        tensor.boxes.append(chunk.box)
    return requests


def writers(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor], layout: CheckpointLayout
) -> set[int]:
    """Return the ranks that wrote what `read_tensors` reads on this rank, and perhaps a few
    more."""
    ranks: set[int] = set()
    for key, tensor in _wanted(_chunks(fragments, buffers)).items():
        for box in tensor.boxes:
            ranks.update(layout.writers(key, box))
    return ranks


def stored_dtypes(
    directory: Path, fragments: Iterable[Fragment], listing: Listing | None = None
) -> dict[str, torch.dtype]:
    """Return the dtypes of the masters of `fragments` in a checkpoint, by name; reads headers.
    Collective. Raises as `read_tensors`."""
    dtypes: dict[str, torch.dtype] = {}

    def read() -> None:
        masters = [
            replace(fragment, tensors={MASTER: fragment.tensors[MASTER]}) for fragment in fragments
        ]
        if not masters:
            return
        stored = open_boxes(directory, _wanted(_chunks(masters, {})), listing)
        dtypes.update({key.partition("/")[2]: tensor.dtype for key, tensor in stored.items()})

    _on_all_ranks(read, None)
    return dtypes


def _on_all_ranks(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run `action` on every rank. Collective over `group`. Raises on every rank if any rank fails:
    CorruptCheckpointError if every failure is corruption, otherwise CheckpointError, for example
    for a checkpoint of another model, which is not corrupt."""

    def attempt() -> None:
        try:
            action()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(str(error) or type(error).__name__) from error

    def joined(errors: Sequence[BaseException]) -> BaseException:
        is_corrupt = all(isinstance(error, CorruptCheckpointError) for error in errors)
        error_type = CorruptCheckpointError if is_corrupt else CheckpointError
        return error_type("; ".join(sorted({str(error) for error in errors})))

    on_all_ranks(attempt, group, joined)


def read_full_masters(directory: Path) -> dict[str, torch.Tensor]:
    """Return masters and buffers as full CPU tensors by Hugging Face name; see `read_full`."""
    return {name: tensor.read() for name, tensor in open_weights(directory).items()}


def read_full(directory: Path, prefixes: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Return full CPU tensors by key, with some or all prefixes, in one process, without a process
    group. Raises CorruptCheckpointError."""
    tensors = open_tensors(directory, prefixes=prefixes)
    return {key: tensor.read() for key, tensor in tensors.items()}


@dataclass(frozen=True)
class WriterShare:
    """Part of a checkpoint that this rank writes: its parts of the tensors `keys`. rows: this
    rank's rows of the layout."""

    keys: frozenset[str]
    rows: tuple[LayoutRow, ...]


def divide(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor], mesh: Mesh
) -> WriterShare:
    """Return this rank's share of fragments and buffers. Collective over `mesh.pipeline`.

    A tensor that all replicas hold (for experts: all ranks with equal experts) is assigned to the
    rank with the least to write so far. If tensor-parallel ranks or stages hold equal tensors, the
    rank with `Shard.primary` writes.
    """
    groups = {"tensor": mesh.replicas, "expert": mesh.expert_replicas}
    # Ranks by group; the rows of a group share one tuple.
    members = {over: tuple(dist.get_process_group_ranks(group)) for over, group in groups.items()}
    rows: list[LayoutRow] = []
    keys: set[str] = set()
    # Tensors that all ranks of a group hold, by the name of the group.
    replicated: dict[str, list[tuple[str, ShardRanges, torch.Tensor]]] = {
        over: [] for over in groups
    }
    for fragment in fragments:
        if not fragment.shard.primary:
            continue
        shard, capacity = fragment.shard, fragment.capacity
        replicas = members[shard.over]
        replica_index = replicas.index(mesh.rank)
        ranges = ShardRanges(shard.shape, shard.dim, shard.ranges, shard.local_size)
        for state_name, tensor in fragment.tensors.items():
            key = f"{state_name}/{fragment.name}"
            if fragment.is_replicated:
                replicated[shard.over].append((key, ranges, tensor))
                continue
            keys.add(key)
            # One row describes equal adjacent ranges of all replicas (ZeRO 3); other ranges have a
            # row each.
            is_regular = capacity is not None and fragment.start == capacity * replica_index
            if not is_regular:
                rows.append(LayoutRow(key, ranges, (mesh.rank,), fragment.start, tensor.numel()))
            elif replica_index == 0 and capacity is not None:
                rows.append(LayoutRow(key, ranges, replicas, 0, capacity))
    if mesh.coordinates.tensor_rank == 0:
        # Of several stages with a buffer, the first writes it.
        earlier_names: set[str] = set()
        if mesh.topology.pipeline_size > 1:
            names_by_stage: list[Any] = [None] * mesh.topology.pipeline_size
            dist.all_gather_object(names_by_stage, list(buffers), group=mesh.pipeline)
            earlier_names = set().union(*names_by_stage[: mesh.coordinates.pipeline_rank])
        for name, buffer in buffers.items():
            if name not in earlier_names:
                ranges = ShardRanges(tuple(buffer.shape) or (1,))
                replicated["tensor"].append((f"{BUFFER}/{name}", ranges, buffer))
    # Assign each replicated tensor to the rank with the least bytes so far: the top of a heap.
    for over, group in groups.items():
        loads = [(0, group_rank) for group_rank in range(dist.get_world_size(group))]
        for key, ranges, tensor in replicated[over]:
            num_bytes, writer = loads[0]
            heapq.heapreplace(loads, (num_bytes + tensor.numel() * tensor.itemsize, writer))
            if writer == dist.get_rank(group) and tensor.numel():
                keys.add(key)
                rows.append(LayoutRow(key, ranges, (mesh.rank,), 0, tensor.numel()))
    return WriterShare(frozenset(keys), tuple(rows))
