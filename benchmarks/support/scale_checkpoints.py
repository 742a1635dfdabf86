"""Cost of checkpoints for one of many ranks: parts of `benchmarks/scale.py`."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support.simulated import Cost, Meter, world
from bigtrain.engine.checkpoint.fragments import Fragment
from bigtrain.engine.checkpoint.io import Staging, TensorSnapshot, divide, read_tensors
from bigtrain.engine.checkpoint.layout import LayoutRow, merge
from bigtrain.engine.checkpoint.tensor_file import SaveIdentity, file_name, write_parts
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.models.parallel.sharding import Shard
from bigtrain.run.checkpointing import checkpoints
from bigtrain.settings.topology import Topology

IDENTITY = SaveIdentity("0" * 16, 1)
SIDE = 512
"""Of every parameter, a square matrix: at 4,096 ranks a part of ZeRO 3 has 64 elements of it."""
KINDS = ("master", "exp_avg", "exp_avg_sq")
SHARED_MEMORY = Path("/dev/shm")

Entry = tuple[int, str]


@dataclass(frozen=True)
class Zero3:
    """`num_parameters` square matrices with two states each, split into one part per rank."""

    num_ranks: int
    num_parameters: int

    @property
    def topology(self) -> Topology:
        return Topology(data_size=self.num_ranks)

    def fragments(self, rank: int) -> list[Fragment]:
        count = SIDE * SIDE
        capacity = -(-count // self.num_ranks)
        start = min(capacity * rank, count)
        tensors = _zeros(min(capacity, count - start))
        shard = Shard((SIDE, SIDE), primary=True)
        names = map(_name, range(self.num_parameters))
        return [Fragment(name, shard, start, tensors(), capacity) for name in names]

    def all_rows(self, directory: Path) -> list[tuple[LayoutRow, ...]]:
        """Return the rows of each rank: those of the first for all, since all parts are alike."""
        with world(0, self.num_ranks):
            mesh = open_mesh(self.topology, 0)
            rows = divide(self.fragments(0), {}, mesh).rows
        return [rows, *[()] * (self.num_ranks - 1)]


@dataclass(frozen=True)
class Zero1Cut:
    """The same matrices divided into stages, each sharded by rows for tensor parallelism, and the
    shard of a tensor-parallel rank flattened and split into one range per replica."""

    num_ranks: int
    num_parameters: int

    @property
    def topology(self) -> Topology:
        degree = max(number for number in (1, 2, 4, 8) if number**3 <= self.num_ranks)
        return Topology(
            data_size=self.num_ranks // degree**2, tensor_size=degree, pipeline_size=degree
        )

    def fragments(self, rank: int) -> list[Fragment]:
        topology = self.topology
        place = topology.coordinates(rank)
        rows = SIDE // topology.tensor_size
        first = rows * place.tensor_rank
        shard = Shard((SIDE, SIDE), 0, ((first, first + rows),), rows, primary=True)
        numbers = self._numbers(place.pipeline_rank)
        count = rows * SIDE
        capacity = -(-count * len(numbers) // topology.data_size)
        low, high = capacity * place.data_rank, capacity * (place.data_rank + 1)
        parts = []
        for index, number in enumerate(numbers):
            start, stop = max(low, index * count), min(high, (index + 1) * count)
            if start < stop:
                tensors = _zeros(stop - start)()
                parts.append(Fragment(_name(number), shard, start - index * count, tensors))
        return parts

    def _numbers(self, stage: int) -> range:
        each = -(-self.num_parameters // self.topology.pipeline_size)
        return range(stage * each, min((stage + 1) * each, self.num_parameters))

    def all_rows(self, directory: Path) -> list[tuple[LayoutRow, ...]]:
        """Return the rows of each rank: of one group of replicas from `divide`, of the others by
        their position, as theirs differ only in names and shard."""
        topology = self.topology
        tried = topology.tensor_size - 1  # of the first stage; rank 0 of tensors gathers buffers
        rows_by_rank: list[tuple[LayoutRow, ...]] = [()] * self.num_ranks
        with world(tried, self.num_ranks):
            mesh = open_mesh(topology, tried)
            own = [
                divide(self.fragments(rank), {}, replace(mesh, rank=rank)).rows
                for rank in dist.get_process_group_ranks(mesh.replicas)
            ]
        keys = {f"{kind}/{_name(n)}": (kind, n) for kind in KINDS for n in self._numbers(0)}
        rows = SIDE // topology.tensor_size
        for rank in range(self.num_ranks):
            place = topology.coordinates(rank)
            numbers = self._numbers(place.pipeline_rank)
            first = rows * place.tensor_rank
            moved = []
            for row in own[place.data_rank]:
                kind, number = keys[row.key]
                if number < len(numbers):
                    key = f"{kind}/{_name(numbers[number])}"
                    shard = replace(row.shard, ranges=((first, first + rows),))
                    moved.append(replace(row, key=key, shard=shard, ranks=(rank,)))
            rows_by_rank[rank] = tuple(moved)
        return rows_by_rank


Cutting = Zero3 | Zero1Cut


def _name(number: int) -> str:
    return f"model.layers.{number // 10}.part{number % 10}.weight"


def _zeros(size: int) -> Any:
    return lambda: {kind: torch.zeros(size) for kind in KINDS}


def _write(cutting: Cutting, rank: int, directory: Path) -> Entry:
    """Writes a rank's file; its entry in the manifest."""
    with world(rank, cutting.num_ranks):
        mesh = open_mesh(cutting.topology, rank)
        snapshot = TensorSnapshot(cutting.fragments(rank), {}, mesh)
    parts = [chunk.part() for chunk in snapshot._chunks]
    return write_parts(directory / file_name(rank), IDENTITY, rank, parts)


def measure_save(num_ranks: int, size: int, directory: Path) -> Cost:
    cutting = Zero3(num_ranks, size)
    meter = Meter()
    num_bytes, _ = _write(cutting, num_ranks - 1, directory)
    return meter.read(bytes=num_bytes)


def _prepared(
    cutting: Cutting, written: Collection[int], directory: Path
) -> tuple[Path, list[tuple[Entry, tuple[LayoutRow, ...]]]]:
    """Return a checkpoint before it is committed, and what the main rank gets from each rank.

    written: ranks whose files are there; each other rank's is a link to the first of these, since
    of those that nobody reads only sizes are looked at.
    """
    partial = checkpoints.partial_path(directory, 1, "0" * 8)
    checkpoints.prepare(partial)
    (partial / checkpoints.STATE).write_text(json.dumps({"run": IDENTITY.run, "step": 1}))
    tensors = partial / checkpoints.TENSORS
    entries = {rank: _write(cutting, rank, tensors) for rank in sorted(written)}
    first = min(entries)
    for rank in range(cutting.num_ranks):
        if rank not in entries:
            (tensors / file_name(rank)).hardlink_to(tensors / file_name(first))
    rows = cutting.all_rows(directory)
    return partial, [(entries.get(rank, entries[first]), rows[rank]) for rank in range(len(rows))]


def _commit(partial: Path, told: bytes) -> Path:
    """Commit like the main rank, with the values gathered from all ranks."""
    everyone = pickle.loads(told)
    layout = merge(row for _, rows in everyone for row in rows).to_json()
    (partial / checkpoints.LAYOUT).write_text(json.dumps(layout, separators=(",", ":")))
    files = {file_name(rank): entry for rank, (entry, _) in enumerate(everyone)}
    return checkpoints.commit(partial, files, IDENTITY)


def _measure_commit(cutting: Cutting, directory: Path) -> Cost:
    partial, everyone = _prepared(cutting, [0], directory)
    told = pickle.dumps(everyone)
    del everyone
    meter = Meter()
    final = _commit(partial, told)
    reason = checkpoints.find_corruption(final)
    assert reason is None, reason
    small = sum(path.stat().st_size for path in final.iterdir() if path.is_file())
    return meter.read(bytes=small, gathered=len(told))


def measure_commit(num_ranks: int, size: int, directory: Path) -> Cost:
    return _measure_commit(Zero3(num_ranks, size), directory)


def measure_commit_3d(num_ranks: int, size: int, directory: Path) -> Cost:
    return _measure_commit(Zero1Cut(num_ranks, size), directory)


def _measure_resume(cutting: Cutting, reading: Cutting, directory: Path) -> Cost:
    """Return the cost of the last rank of `reading`; manifest and layout included, which every rank
    reads."""
    rank, num_ranks = reading.num_ranks - 1, cutting.num_ranks
    # The files that are opened, and that of rank 0, which describes even splits.
    written = {0, *range(rank * num_ranks // reading.num_ranks, num_ranks)}
    partial, everyone = _prepared(cutting, written, directory)
    final = _commit(partial, pickle.dumps(everyone))
    del everyone
    fragments = reading.fragments(rank)
    small = sum((final / n).stat().st_size for n in (checkpoints.MANIFEST, checkpoints.LAYOUT))
    with world(rank, reading.num_ranks):
        meter = Meter()
        listing = checkpoints.list_tensors(final)
        read_tensors(final / checkpoints.TENSORS, fragments, {}, listing)
        return meter.read(bytes=small)


def measure_resume(num_ranks: int, size: int, directory: Path) -> Cost:
    cutting = Zero3(num_ranks, size)
    return _measure_resume(cutting, cutting, directory)


def measure_half(num_ranks: int, size: int, directory: Path) -> Cost:
    return _measure_resume(Zero3(num_ranks, size), Zero3(num_ranks // 2, size), directory)


def measure_resume_3d(num_ranks: int, size: int, directory: Path) -> Cost:
    cutting = Zero1Cut(num_ranks, size)
    return _measure_resume(cutting, cutting, directory)


def measure_write(num_ranks: int, size: int, directory: Path) -> Cost:
    """Return a quarter of a MiB for each of `size`, copied and written as an asynchronous save
    does.

    gb_per_second: to the disk, fsync included. memory_gb_per_second, cpu_seconds_per_gb: the same
    where no disk is the limit, in /dev/shm where that is.
    """
    with tempfile.TemporaryDirectory(
        dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else directory
    ) as memory:
        on_disk, copied = _written(size, directory)
        in_memory, _ = _written(size, Path(memory))
    num_bytes = on_disk["bytes"]
    return {
        **in_memory,
        "gb_per_second": num_bytes / on_disk["wall"] / 1e9,
        "memory_gb_per_second": num_bytes / in_memory["wall"] / 1e9,
        "cpu_seconds_per_gb": in_memory["seconds"] / num_bytes * 1e9,
        "disk_cpu_seconds_per_gb": on_disk["seconds"] / num_bytes * 1e9,
        "copy_seconds_per_gb": copied["seconds"] / num_bytes * 1e9,
    }


def _written(size: int, directory: Path) -> tuple[Cost, Cost]:
    """Return the costs of the second save of `Staging`, whose memory is allocated: the copy, which
    stops training, and the write in the background."""
    with world(0, 1):
        mesh = open_mesh(Topology(), 0)
        tensors: Sequence[torch.Tensor] = [torch.rand(SIDE * SIDE // 4) for _ in range(size)]
        shard = Shard((SIDE // 2, SIDE // 2), primary=True)
        names = map(_name, range(size))
        fragments = [
            Fragment(name, shard, 0, {"master": tensor})
            for name, tensor in zip(names, tensors, strict=True)
        ]
        staging = Staging()
        TensorSnapshot(fragments, {}, mesh, staging)
        meter = Meter()
        snapshot = TensorSnapshot(fragments, {}, mesh, staging)
        copied = meter.read()
    meter = Meter()
    parts = [chunk.part() for chunk in snapshot._chunks]
    num_bytes, _ = write_parts(directory / file_name(0), IDENTITY, 0, parts, snapshot._content)
    return meter.read(bytes=num_bytes), copied
