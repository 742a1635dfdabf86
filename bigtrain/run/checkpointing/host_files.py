"""Files of a checkpoint in memory among the hosts of a launch: who keeps the directory of a host,
who is whose partner, and the sending of files between them by a CPU group.

A file that cannot be read or written does not break off a transfer, so that the peer never waits:
the reader of a checkpoint compares all checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from bigtrain.engine.checkpoint.lazy import memory_of

CHUNK_BYTES = 8 << 20
"""Bytes sent at a time: two buffers of it are all the memory that a transfer takes."""


@dataclass(frozen=True)
class Partners:
    """Partner of each rank on the next host: it gets a copy of the rank's file."""

    partner_of: tuple[int, ...]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Partners | None:
        """Return the partners of the ranks on `hosts` (by rank): the host after theirs in the order
        of the first ranks, the last one's the first. None for one host, and for hosts with
        different numbers of ranks."""
        ranks: dict[str, list[int]] = {}
        for rank, name in enumerate(hosts):
            ranks.setdefault(name, []).append(rank)
        names = list(ranks)
        if len(names) == 1 or len({len(host_ranks) for host_ranks in ranks.values()}) > 1:
            return None
        partner_of = [0] * len(hosts)
        for index, name in enumerate(names):
            following = ranks[names[(index + 1) % len(names)]]
            for rank, partner in zip(ranks[name], following, strict=True):
                partner_of[rank] = partner
        return cls(tuple(partner_of))

    def source_of(self, rank: int) -> int:
        """Return the rank whose copy `rank` keeps."""
        return self.partner_of.index(rank)


def send_file(path: Path, num_bytes: int, rank: int, group: dist.ProcessGroup) -> OSError | None:
    """Send a file of `num_bytes` to `rank`, which calls `receive_file`; return the error of
    reading it, after which zeros are sent."""
    source, unsent_bytes = _Source(path), num_bytes
    while unsent_bytes:
        count = min(CHUNK_BYTES, unsent_bytes)
        dist.send(source.read(count), dst=rank, group=group)
        unsent_bytes -= count
    return source.close()


def receive_file(path: Path, num_bytes: int, rank: int, group: dist.ProcessGroup) -> OSError | None:
    """Receive a file of `num_bytes` from `rank`, which calls `send_file`; return the error of
    writing it, after which further data is dropped."""
    target, missing_bytes = _Target(path), num_bytes
    while missing_bytes:
        chunk = torch.empty(min(CHUNK_BYTES, missing_bytes), dtype=torch.uint8)
        dist.recv(chunk, src=rank, group=group)
        target.write(chunk)
        missing_bytes -= chunk.numel()
    return target.close()


def exchange_files(
    sent_file: Path, partner: int, copy: Path, source: int, group: dist.ProcessGroup
) -> OSError | None:
    """Send the file `sent_file` to the rank `partner`, and write the file that the rank `source`
    sends to `copy` at the same time. Collective over `group`. Returns the first error of reading or
    writing."""
    sizes = torch.zeros(2, dtype=torch.int64)
    with suppress(OSError):
        sizes[0] = sent_file.stat().st_size
    _exchange(sizes[:1], partner, sizes[1:], source, group)
    unsent_bytes, missing_bytes = map(int, sizes)
    reader, writer = _Source(sent_file), _Target(copy)
    while unsent_bytes or missing_bytes:
        outgoing = reader.read(min(CHUNK_BYTES, unsent_bytes)) if unsent_bytes else None
        incoming = torch.empty(min(CHUNK_BYTES, missing_bytes), dtype=torch.uint8)
        _exchange(outgoing, partner, incoming if missing_bytes else None, source, group)
        if missing_bytes:
            writer.write(incoming)
        missing_bytes -= incoming.numel()
        unsent_bytes -= 0 if outgoing is None else outgoing.numel()
    errors = [reader.close(), writer.close()]
    return next((error for error in errors if error is not None), None)


def _exchange(
    outgoing: torch.Tensor | None,
    partner: int,
    incoming: torch.Tensor | None,
    source: int,
    group: dist.ProcessGroup,
) -> None:
    works = []
    if outgoing is not None:
        works.append(dist.isend(outgoing, dst=partner, group=group))
    if incoming is not None:
        works.append(dist.irecv(incoming, src=source, group=group))
    for work in works:
        assert work is not None  # this rank is in the group
        work.wait()


class _Source:
    """A file that is read in order; zeros after an error."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            self._error = error

    def read(self, count: int) -> torch.Tensor:
        data = bytearray(count)
        view = memoryview(data)
        try:
            while view and self._file is not None and self._error is None:
                size = self._file.readinto(view)  # type: ignore[attr-defined]
                if not size:
                    raise OSError("ends too soon")
                view = view[size:]
        except OSError as error:
            self._error = error
        return torch.frombuffer(data, dtype=torch.uint8)

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self._error


class _Target:
    """A new file that is written in order, until an error."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            self._error = error

    def write(self, chunk: torch.Tensor) -> None:
        view = memory_of(chunk)
        try:
            while view and self._file is not None and self._error is None:
                view = view[self._file.write(view) :]
        except OSError as error:
            self._error = error

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self._error
