"""Transfer of the files of a checkpoint in memory between hosts: partners of the ranks, and sending
and receiving of files by a CPU group.

A file that cannot be read or written does not end a transfer, so that the peer never waits: who
reads the checkpoint later compares all checksums.
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
        """Return the partners of the ranks on `hosts` (by rank). Each host's partner is the next
        host in the order of first ranks; the last host's partner is the first host. None for a
        single host, and for hosts with different numbers of ranks."""
        ranks_by_host: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_by_host.setdefault(host, []).append(rank)
        host_ranks = list(ranks_by_host.values())
        if len(host_ranks) == 1 or len(set(map(len, host_ranks))) > 1:
            return None
        partner_of = [0] * len(hosts)
        for ranks, next_ranks in zip(host_ranks, [*host_ranks[1:], host_ranks[0]], strict=True):
            for rank, partner in zip(ranks, next_ranks, strict=True):
                partner_of[rank] = partner
        return cls(tuple(partner_of))

    def source_of(self, rank: int) -> int:
        """Return the rank whose copy `rank` keeps."""
        return self.partner_of.index(rank)


def send_file(path: Path, num_bytes: int, rank: int, group: dist.ProcessGroup) -> OSError | None:
    """Send a file of `num_bytes` to `rank`, which calls `receive_file`; return the error of
    reading it, after which zeros are sent."""
    reader, unsent_bytes = _FileReader(path), num_bytes
    while unsent_bytes:
        chunk_bytes = min(CHUNK_BYTES, unsent_bytes)
        dist.send(reader.read(chunk_bytes), dst=rank, group=group)
        unsent_bytes -= chunk_bytes
    return reader.close()


def receive_file(path: Path, num_bytes: int, rank: int, group: dist.ProcessGroup) -> OSError | None:
    """Receive a file of `num_bytes` from `rank`, which calls `send_file`; return the error of
    writing it, after which further data is dropped."""
    writer, missing_bytes = _FileWriter(path), num_bytes
    while missing_bytes:
        chunk = torch.empty(min(CHUNK_BYTES, missing_bytes), dtype=torch.uint8)
        dist.recv(chunk, src=rank, group=group)
        writer.write(chunk)
        missing_bytes -= chunk.numel()
    return writer.close()


def exchange_files(
    sent_file: Path, partner: int, copy: Path, source: int, group: dist.ProcessGroup
) -> OSError | None:
    """Send the file `sent_file` to the rank `partner`, and write the file that the rank `source`
    sends to `copy` at the same time. Collective over `group`. Returns the first error of reading or
    writing."""
    sizes = torch.zeros(2, dtype=torch.int64)  # bytes of the sent and of the received file
    with suppress(OSError):
        sizes[0] = sent_file.stat().st_size
    _exchange(sizes[:1], partner, sizes[1:], source, group)
    unsent_bytes, missing_bytes = map(int, sizes)
    reader, writer = _FileReader(sent_file), _FileWriter(copy)
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


class _FileReader:
    """A file that is read in order; zeros after an error."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            self._error = error

    def read(self, num_bytes: int) -> torch.Tensor:
        data = bytearray(num_bytes)
        unread = memoryview(data)
        try:
            while unread and self._file is not None and self._error is None:
                num_read = self._file.readinto(unread)  # type: ignore[attr-defined]
                if not num_read:
                    raise OSError("ends too soon")
                unread = unread[num_read:]
        except OSError as error:
            self._error = error
        return torch.frombuffer(data, dtype=torch.uint8)

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self._error


class _FileWriter:
    """A new file that is written in order, until an error."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None = None
        self._error: OSError | None = None
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            self._error = error

    def write(self, chunk: torch.Tensor) -> None:
        unwritten = memory_of(chunk)
        try:
            while unwritten and self._file is not None and self._error is None:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            self._error = error

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self._error
