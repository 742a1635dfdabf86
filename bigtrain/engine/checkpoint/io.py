"""Writing and reading of fragments in the tensor files of a checkpoint.

Each rank writes its share to its own file and reads what it owns from the files of all ranks; every
element is written once. The shares are a function of the topology, so that computing them needs no
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

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Chunk:
    """A rectangle of the tensor `key`, of this shape, in the memory of this rank."""

    key: str
    shape: Numbers
    box: Box
    view: torch.Tensor

    def part(self) -> NewPart:
        if self.view.dtype not in _NAMES:
            raise CheckpointError(f"{self.key}: {self.view.dtype} cannot be saved")
        name = _NAMES[self.view.dtype]
        return NewPart(self.key, self.shape, self.box, name, self._memory)

    def _memory(self) -> memoryview:
        return memory_of(self.view.detach().cpu().contiguous())


def _chunks(fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor]) -> list[_Chunk]:
    chunks = []
    for fragment in fragments:
        for kind in fragment.tensors:
            key, shape = f"{kind}/{fragment.name}", fragment.shard.shape
            chunks += [_Chunk(key, shape, box, view) for box, view in fragment.parts(kind)]
    for name, buffer in buffers.items():
        view = buffer if buffer.ndim else buffer.view(1)
        full = Box.full(view.shape)
        chunks.append(_Chunk(f"{BUFFER}/{name}", full.sizes, full, view))
    return chunks


class Staging:
    """Host memory that saves are copied to (pinned for GPUs), reused by the next save. copies:
    False to write from the live tensors. pinned_limit_bytes: how much this rank may pin; a larger
    copy goes to pageable memory, several times slower."""

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

    def take(self, own: list[_Chunk]) -> tuple[list[_Chunk], memoryview | None]:
        """Return copies of the chunks that this rank writes, valid until the next call, and the
        bytes of the file; None if nothing was copied."""
        if not self._copies:
            return own, None
        by_name = {chunk.part().name: chunk for chunk in own}
        ordered = [by_name[part.name] for part in in_file_order(c.part() for c in own)]
        num_bytes = sum(chunk.view.numel() * chunk.view.itemsize for chunk in own)
        on_gpu = any(chunk.view.is_cuda for chunk in own)
        content = self._memory(num_bytes, on_gpu)
        copies, begin = [], 0
        for chunk in ordered:
            end = begin + chunk.view.numel() * chunk.view.itemsize
            target = content[begin:end].view(chunk.view.dtype).view(chunk.view.shape)
            copies.append(replace(chunk, view=target.copy_(chunk.view.detach(), non_blocking=True)))
            begin = end
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies, memory_of(content)

    def _memory(self, num_bytes: int, on_gpu: bool) -> torch.Tensor:
        """Return a buffer of `num_bytes`, aligned to `ALIGNMENT`; reused while the size stays."""
        if self._arena.numel() != num_bytes + ALIGNMENT:
            self._arena = torch.empty(0, dtype=torch.uint8)  # before there is another
            room, limit = num_bytes + ALIGNMENT, self._pinned_limit_bytes
            pin = on_gpu and (limit is None or pinned_bytes(room) <= limit)
            self._arena = torch.empty(room, dtype=torch.uint8, pin_memory=pin)
        return self._arena.narrow(0, -self._arena.data_ptr() % ALIGNMENT, num_bytes)


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes that torch allocates for `num_bytes` pinned bytes: the next power of two, in
    versions (2.11) without a setting for it."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


@dataclass(frozen=True)
class Written:
    """Files written by all ranks, on the main rank; empty on the others. files: bytes and checksum
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
        own = [chunk for chunk in _chunks(fragments, buffers) if chunk.key in division.keys]
        self._chunks, self._content = staging.take(own)
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
        """Write and fsync the file of every rank. Collective over `group`, a CPU group of all
        ranks, and in a thread of its own if that group is used by nothing else meanwhile. Raises
        CheckpointError on all ranks where one of them cannot write."""
        rank, entry = dist.get_rank(), (0, "")

        def write() -> None:
            nonlocal entry
            directory.mkdir(exist_ok=True)
            parts = [chunk.part() for chunk in self._chunks]
            path = directory / file_name(rank)
            entry = write_parts(path, identity or SaveIdentity(), rank, parts, self._content)

        _on_all_ranks(write, group)
        everyone = gather_on_main((entry, self._rows), group)
        files = {file_name(number): there for number, (there, _) in enumerate(everyone)}
        return Written(files, merge(row for _, rows in everyone for row in rows))


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
    wanted: dict[str, Wanted] = {}
    for chunk in chunks:
        tensor = wanted.setdefault(chunk.key, Wanted(chunk.shape, []))
        tensor.boxes.append(chunk.box)
    return wanted


def writers(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor], layout: CheckpointLayout
) -> set[int]:
    """Return the ranks that wrote what `read_tensors` reads here, and perhaps more."""
    wanted = _wanted(_chunks(fragments, buffers))
    return {
        rank for key, tensor in wanted.items() for box in tensor.boxes
        for rank in layout.writers(key, box)
    }  # fmt: skip


def stored_dtypes(
    directory: Path, fragments: Iterable[Fragment], listing: Listing | None = None
) -> dict[str, torch.dtype]:
    """Return the dtype of the master of each of `fragments` in a checkpoint, by name; reads
    headers. Collective. Raises as `read_tensors`."""
    dtypes: dict[str, torch.dtype] = {}

    def read() -> None:
        masters = [replace(f, tensors={MASTER: f.tensors[MASTER]}) for f in fragments]
        if not masters:
            return
        stored = open_boxes(directory, _wanted(_chunks(masters, {})), listing)
        dtypes.update({key.partition("/")[2]: tensor.dtype for key, tensor in stored.items()})

    _on_all_ranks(read, None)
    return dtypes


def _on_all_ranks(action: Callable[[], None], group: dist.ProcessGroup | None) -> None:
    """Run `action` on every rank. Collective over `group`. Raises on all of them if one has failed:
    CorruptCheckpointError if that is all that is wrong, or else CheckpointError, since another
    model's checkpoint is not corrupt."""

    def attempt() -> None:
        try:
            action()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(str(error) or type(error).__name__) from error

    on_all_ranks(attempt, group, _joined)


def _joined(errors: Sequence[BaseException]) -> BaseException:
    is_corrupt = all(isinstance(error, CorruptCheckpointError) for error in errors)
    kind = CorruptCheckpointError if is_corrupt else CheckpointError
    return kind("; ".join(sorted({str(error) for error in errors})))


def read_full_masters(directory: Path) -> dict[str, torch.Tensor]:
    """Return masters and buffers as full CPU tensors by Hugging Face name; see `read_full`."""
    return {name: tensor.read() for name, tensor in open_weights(directory).items()}


def read_full(directory: Path, kinds: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Full CPU tensors by key, of some or all kinds, in one process, without a process group. Takes
    as much memory as they do. Raises CorruptCheckpointError."""
    return {key: tensor.read() for key, tensor in open_tensors(directory, kinds=kinds).items()}


@dataclass(frozen=True)
class WriterShare:
    """keys: the tensors of which this rank writes its part. rows: its part of the layout."""

    keys: frozenset[str]
    rows: tuple[LayoutRow, ...]


def divide(
    fragments: Iterable[Fragment], buffers: Mapping[str, torch.Tensor], mesh: Mesh
) -> WriterShare:
    """Return this rank's share of fragments and buffers. Collective over `mesh.pipeline`.

    A tensor that all replicas hold (of experts: all ranks with the same ones) is assigned to the
    one with the least to write so far. Of tensor-parallel ranks or stages with the same one,
    `primary` writes.
    """
    groups = {"tensor": mesh.replicas, "expert": mesh.expert_replicas}
    # Once, not for each parameter: rows of one group share the same list of ranks.
    members = {over: tuple(dist.get_process_group_ranks(group)) for over, group in groups.items()}
    rows: list[LayoutRow] = []
    keys: set[str] = set()
    alike: dict[str, list[tuple[str, ShardRanges, torch.Tensor]]] = {over: [] for over in groups}
    for fragment in fragments:
        if not fragment.shard.primary:
            continue
        shard, capacity = fragment.shard, fragment.capacity
        replicas = members[shard.over]
        place = replicas.index(mesh.rank)
        ranges = ShardRanges(shard.shape, shard.dim, shard.ranges, shard.local_size)
        for kind, tensor in fragment.tensors.items():
            key = f"{kind}/{fragment.name}"
            if fragment.is_replicated:
                alike[shard.over].append((key, ranges, tensor))
                continue
            keys.add(key)
            if capacity is None or fragment.start != capacity * place:
                rows.append(LayoutRow(key, ranges, (mesh.rank,), fragment.start, tensor.numel()))
            elif place == 0:  # for all of them
                rows.append(LayoutRow(key, ranges, replicas, 0, capacity))
    if mesh.coordinates.tensor_rank == 0:
        held_before = _buffers_of_earlier_stages(buffers, mesh)
        alike["tensor"] += [
            (f"{BUFFER}/{name}", ShardRanges(tuple(buffer.shape) or (1,)), buffer)
            for name, buffer in buffers.items()
            if name not in held_before
        ]
    for over, group in groups.items():
        loads = [(0, number) for number in range(dist.get_world_size(group))]
        for key, ranges, tensor in alike[over]:
            num_bytes, writer = loads[0]
            heapq.heapreplace(loads, (num_bytes + tensor.numel() * tensor.itemsize, writer))
            if writer == dist.get_rank(group) and tensor.numel():
                keys.add(key)
                rows.append(LayoutRow(key, ranges, (mesh.rank,), 0, tensor.numel()))
    return WriterShare(frozenset(keys), tuple(rows))


def _buffers_of_earlier_stages(buffers: Mapping[str, torch.Tensor], mesh: Mesh) -> set[str]:
    if mesh.topology.pipeline_size == 1:
        return set()
    stages: list[Any] = [None] * mesh.topology.pipeline_size
    dist.all_gather_object(stages, list(buffers), group=mesh.pipeline)
    return {name for names in stages[: mesh.coordinates.pipeline_rank] for name in names}
