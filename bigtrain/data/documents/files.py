"""Sources and the bytes in source files: decompressed, hashed as stored, checked to be unchanged.

Files whose format needs random access (parquet, arrow) are decompressed first, into an unnamed
temporary file.

A file can be split at any byte: the lines of a range [begin, end) start in the range, so
every line belongs to exactly one range, and ranges can be read independently. Memory is bounded by
the longest line allowed.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from bigtrain.data.documents.compression import COMPRESSION_SUFFIXES, COMPRESSIONS
from bigtrain.data.shards.manifest import SourceRecord
from bigtrain.errors import DataError
from bigtrain.system.storage.remote_file import RemoteFile, store_of
from bigtrain.system.storage.stores import RemoteStat, name_of, with_retries

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """Existing input: how to read it, and its manifest entry.

    `format`: its reader, a subclass of `bigtrain.data.documents.reader.PartReader`. `read_once`: a
    named pipe or standard input, which has no size and can be read only once. `address`: of a
    remote file, including credentials that must not be recorded; None for a local file. `read_as`:
    suffix that determines how it is read, instead of the suffix of the file.
    """

    format: type[Any]
    record: SourceRecord
    read_once: bool = False
    address: str | None = None
    read_as: str = ""

    @property
    def format_name(self) -> str:
        return str(self.format.format_name)

    @property
    def path(self) -> str:
        """Display name: the URL without credentials."""
        return self.record.path

    @property
    def file_name(self) -> str:
        """Name whose suffix determines how it is read."""
        return self.read_as or (self.path if self.address is None else name_of(self.path))

    @property
    def is_standard_input(self) -> bool:
        return self.read_once and self.path == STANDARD_INPUT

    @property
    def stat(self) -> RemoteStat:
        """Return the status of a remote file as it was listed."""
        return RemoteStat(self.record.bytes, self.record.revision, self.record.modified_ns)

    @property
    def compressed(self) -> bool:
        return self.file_name.lower().endswith(COMPRESSION_SUFFIXES)

    @property
    def needs_decompression(self) -> bool:
        """True if it is decompressed to a file before reading (`unpacked`)."""
        only_sequential = self.compressed or self.record.bytes is None
        return only_sequential and bool(self.format.random_access)

    @property
    def is_hashed_by_documents(self) -> bool:
        """True if its checksum covers documents; for other sources it covers bytes of the file."""
        return bool(self.format.hashes_documents) and not self.needs_decompression


@dataclass(frozen=True)
class Selection:
    """Selection of inputs: `suffixes` (default: `DEFAULT_SUFFIXES`) and `exclude` select files of
    folders. `read_as`: read every file as if it had this suffix. `follow_links`: also follow links
    out of a folder (`bigtrain.data.documents.links`)."""

    inputs: Sequence[str]
    suffixes: Sequence[str] = ()
    exclude: Sequence[str] = ()
    dataset_config: str | None = None
    dataset_split: str = "train"
    read_as: str = ""
    follow_links: bool = False


@contextmanager
def open_file(source: Source, end: int | None = None) -> Iterator[IO[bytes]]:
    """Yield the source's file, checked before and after the block to be unchanged since it was
    listed. `end`: end of sequential reading, for read-ahead over a network; default: the end of the
    file. Raises as `require_unchanged`, and StorageError for a file at an address; opening and
    reading raise `READ_ERRORS`."""
    if source.address is not None:
        # Every response contains its version, and one other than the listed version is refused.
        size = source.record.bytes
        with RemoteFile(source.address, source.stat, size if end is None else end) as remote:
            yield cast(IO[bytes], remote)
        return
    file_or_descriptor = 0 if source.is_standard_input else source.path
    with open(file_or_descriptor, "rb", buffering=0, closefd=not source.is_standard_input) as file:
        require_unchanged(source, file.fileno())
        yield file
        require_unchanged(source, file.fileno())


def open_table(source: Source) -> Any:
    """Return pyarrow's input for a table that is not decompressed: a path, or a remote file."""
    if source.address is None:
        return source.path
    return RemoteFile(source.address, source.stat)


@contextmanager
def open_stream(source: Source, digest: Digest, *, to_end: bool = True) -> Iterator[IO[bytes]]:
    """Yield the decompressed content of the file; `digest` is updated with the bytes as stored.
    to_end: update it with the remaining bytes after the block. Raises as `open_file`."""
    with open_file(source) as file:
        raw = HashingReader(file, digest)
        suffix = source.file_name[source.file_name.rfind(".") :].lower()
        open_compressed = COMPRESSIONS.get(suffix)
        if open_compressed is None:
            yield raw  # type: ignore[misc]
        else:
            with open_compressed(raw) as stream:
                yield stream
        if to_end:
            raw.drain()


def stream_bytes(source: Source) -> int | None:
    """Return the number of bytes of `open_stream`, if known."""
    return None if source.compressed or source.read_once else source.record.bytes


def require_unchanged(source: Source, descriptor: int | None = None) -> None:
    """Raise DataError if size or time of the file, or the version of a remote one, have changed
    since it was listed. `descriptor`: of the file, if it is open."""
    if source.read_once:
        return
    if source.address is not None:
        store, address = store_of(source.address), source.address
        current_stat = with_retries(address, "cannot be read", lambda: store.stat(address))
        is_unchanged = source.stat.is_same(current_stat)
    elif source.record.modified_ns is None or os.path.isdir(source.path):
        return  # a dataset
    else:
        status = os.stat(source.path if descriptor is None else descriptor)
        listed_status = (source.record.bytes, source.record.modified_ns)
        is_unchanged = (status.st_size, status.st_mtime_ns) == listed_status
    if not is_unchanged:
        raise DataError(
            f"{source.path} was changed while it was read -> start again when it is complete"
        )


@contextmanager
def unpacked(source: Source, digest: Digest, scratch: Path) -> Iterator[IO[bytes]]:
    """Yield the decompressed file of `source`, in a temporary file in the folder `scratch`.
    `digest` is updated with the bytes of the compressed file. Raises `READ_ERRORS` if that cannot
    be read or is corrupt, and DataError if the disk is full, or it was changed since it was listed.
    """
    with ExitStack() as stack:
        with _writing(source, scratch):
            # Linux creates it without a name; elsewhere the name is removed right after creation.
            file = stack.enter_context(tempfile.TemporaryFile(dir=scratch, buffering=0))
        with open_stream(source, digest) as stream:
            for chunk in stream_chunks(stream):
                with _writing(source, scratch):
                    unwritten = memoryview(chunk)
                    while unwritten:  # an unbuffered file may accept less at once
                        unwritten = unwritten[file.write(unwritten) :]
        with _writing(source, scratch):
            os.fsync(file.fileno())  # a network file system reports only here that it is full
            file.seek(0)
        yield file


@contextmanager
def _writing(source: Source, scratch: Path) -> Iterator[None]:
    """Raise DataError for an error of writing the decompressed file of `source`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{source.path} cannot be decompressed into {scratch}, which {source.format_name} "
            f"requires before it is read: {error.strerror or error} -> make room there for the "
            "largest such file, once for each of --workers, or decompress it yourself"
        ) from error


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
OTHER_MARKS = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Byte order marks of encodings that are not read, the longer ones first."""


def not_utf8(content: bytes, reason: str) -> str:
    """Return why `content`, the beginning of a file or later text, is not read, and the fix if it
    has the mark of another encoding."""
    name = next((name for mark, name in OTHER_MARKS.items() if content.startswith(mark)), "")
    if name:
        return f"not UTF-8 but {name} -> convert it: iconv -f {name} -t UTF-8"
    return f"not UTF-8 ({reason})"


def without_mark(head: bytes, path: str) -> bytes:
    """Return the first bytes of a file without its byte order mark, which is not text. Raise
    DataError for the mark of another encoding than UTF-8."""
    if head.startswith(tuple(OTHER_MARKS)):
        raise DataError(f"{path} is {not_utf8(head, '')}")
    return head.removeprefix(BYTE_ORDER_MARK)


BLOCK_BYTES = 1 << 20
READ_AHEAD_BYTES = 1 << 25
"""Bytes that are requested from the disk or file server in advance: 0.2 s of tokenizing."""


class Digest(Protocol):
    """Incremental hash."""

    def update(self, data: bytes | memoryview, /) -> None: ...


class ReadAhead:
    """Read-ahead requests for `file` from `begin` to `end` or the end of the file (posix_fadvise).
    Does nothing for pipes."""

    def __init__(self, file: IO[bytes], begin: int = 0, end: int | None = None) -> None:
        self._file = file
        self._position = self._requested_end = begin
        self._end = end

    def follow(self, num_bytes: int) -> None:
        """Request read-ahead; call it before each read of `num_bytes`."""
        self._position += num_bytes
        wanted_end = self._position + READ_AHEAD_BYTES
        if self._end is not None:
            wanted_end = min(wanted_end, self._end)
        # Every request costs as much as a small read.
        if wanted_end - self._requested_end >= BLOCK_BYTES or wanted_end == self._end:
            size = wanted_end - self._requested_end
            with suppress(OSError, AttributeError):  # a pipe; an unsupported system
                if size > 0:
                    advice = os.POSIX_FADV_WILLNEED
                    os.posix_fadvise(self._file.fileno(), self._requested_end, size, advice)
            self._requested_end = wanted_end


class HashingReader(io.RawIOBase):
    """Reader of `raw` that updates `digest` with the bytes it reads."""

    def __init__(self, raw: IO[bytes], digest: Digest) -> None:
        self._raw: Any = raw
        self._digest = digest
        self._ahead = ReadAhead(raw)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._ahead.follow(len(buffer))
        count = int(self._raw.readinto(buffer))
        self._digest.update(memoryview(buffer)[:count])
        return count

    def drain(self) -> None:
        """Read to the end, for the hash."""
        while self.read(BLOCK_BYTES):
            pass


def stream_chunks(stream: IO[bytes], expected_bytes: int | None = None) -> Iterator[bytes]:
    """Yield all of `stream` in blocks, which are not larger than the expected bytes: a read
    allocates its full size."""
    size = BLOCK_BYTES if expected_bytes is None else min(BLOCK_BYTES, expected_bytes + 1)
    while chunk := stream.read(size):
        yield chunk


def range_chunks(
    file: IO[bytes], begin: int, end: int, digest: Digest, layout_digest: Digest
) -> Iterator[bytes]:
    """Yield the bytes of the lines of `file` that start in [begin, end). `digest` is updated with
    the bytes of [begin, end), `layout_digest` with whether a line continues at `begin`, and with
    the bytes of the last line after `end`. Raises EOFError if the file ends before `end`."""
    # A line that continues at `begin` belongs to the previous range.
    file.seek(max(0, begin - 1))
    is_inside_line = begin > 0 and file.read(1) != b"\n"
    layout_digest.update(b"inside" if is_inside_line else b"begins")
    file.seek(begin)
    position, is_unfinished = begin, False
    ahead = ReadAhead(file, begin, end)
    while position < end:
        ahead.follow(BLOCK_BYTES)
        chunk = file.read(min(BLOCK_BYTES, end - position))
        if not chunk:
            raise EOFError(f"it ends at byte {position}, before byte {end}")
        digest.update(chunk)
        position += len(chunk)
        if is_inside_line:  # drop what belongs to the previous range
            _, newline, chunk = chunk.partition(b"\n")
            is_inside_line = not newline
        if chunk:
            is_unfinished = not chunk.endswith(b"\n")
            yield chunk
    # The last line continues after `end`.
    while is_unfinished and (chunk := file.read(BLOCK_BYTES)):
        head, newline, _ = chunk.partition(b"\n")
        is_unfinished = not newline
        layout_digest.update(head + newline)
        yield head + newline


def split_lines(chunks: Iterator[bytes], max_bytes: int) -> Iterator[list[bytes | None]]:
    """Yield the lines in `chunks` with their newlines, in a list per chunk. A line of more than
    `max_bytes` (without its newline) is None, and is never stored in memory."""
    # Parts of the line that has not ended yet, and its bytes, which count also if the parts of a
    # too long line are dropped.
    pending_parts: list[bytes] = []
    num_pending = 0
    for chunk in chunks:
        # Four times as fast as `bytes.split`, which checks the bytes one by one.
        complete = io.BytesIO(chunk).readlines()
        unfinished = complete.pop() if complete and not chunk.endswith(b"\n") else b""
        if complete:
            lines: list[bytes | None] = [*complete]
            num_pending += len(complete[0]) - 1
            lines[0] = b"".join([*pending_parts, complete[0]]) if num_pending <= max_bytes else None
            # Lines inside of the chunk cannot be longer than the chunk.
            if len(chunk) > max_bytes:
                lines = [None if line and len(line) > max_bytes + 1 else line for line in lines]
            yield lines
            pending_parts, num_pending = [], 0
        num_pending += len(unfinished)
        if num_pending > max_bytes:
            pending_parts = []
        elif unfinished:
            pending_parts.append(unfinished)
    if num_pending:
        yield [None if num_pending > max_bytes else b"".join(pending_parts)]


def count_lines_before(file: IO[bytes], begin: int) -> int:
    """Return how many lines of the file start before byte `begin`. Reads the file up to it."""
    count = 0
    bytes_remaining, last_byte = begin, b"\n"
    while bytes_remaining and (chunk := file.read(min(BLOCK_BYTES, bytes_remaining))):
        count += chunk.count(b"\n")
        bytes_remaining -= len(chunk)
        last_byte = chunk[-1:]
    return count + (last_byte != b"\n")  # the line of byte `begin` started before it
