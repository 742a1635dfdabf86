"""Checksums of what passes to and from the files of torch.distributed.checkpoint (DCP).

Every tensor part carries its own XXH3-64, which is compared when the part is read: so a resume
notices any damage to what it uses, at no other cost than hashing it. Every file is hashed while it
is written, so that the manifest says what was meant to be on the disk, and nobody reads it again.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import xxhash
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter

from bigtrain.errors import DamagedCheckpointError

DIGEST_BYTES = 8


class _Checked(StreamTransformExtension):
    """A part, followed by the XXH3-64 of its bytes (big-endian)."""

    @staticmethod
    def registry_name() -> str:
        return "stream.xxh3"

    @staticmethod
    def from_descriptor(version: str) -> _Checked:
        if version != "1":
            raise DamagedCheckpointError(f"tensor parts with checksums of unknown kind {version}")
        return _Checked()

    def get_descriptor(self) -> str:
        return f"{self.registry_name()}/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return cast(IO[bytes], _Hashing(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        data = memoryview(input.read())
        part, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if xxhash.xxh3_64_digest(part) != bytes(digest):
            file = getattr(getattr(input, "base_stream", None), "name", "a tensor file")
            raise DamagedCheckpointError(f"{file}: contents do not match their checksum")
        return io.BytesIO(part)


class _Hashing(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._digest = xxhash.xxh3_64()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._output.write(data)
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._output.write(self._digest.digest())
            self._output.close()
        super().close()


class _CountedFile:
    """A file open for writing, hashed on the way: what DCP uses of one."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = xxhash.xxh3_64()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _CountingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.written: dict[str, tuple[int, str]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with Path(path).open(mode) as file:
            if mode != "wb":
                yield cast(io.IOBase, file)
                return
            counted = _CountedFile(cast(IO[bytes], file))
            yield cast(io.IOBase, counted)
            # DCP has closed it by now, or the caller of this block has.
        self.written[Path(path).name] = (Path(path).stat().st_size, counted.digest.hexdigest())


class CheckedWriter(FileSystemWriter):
    """Writes parts with their checksums; fsyncs every file."""

    def __init__(self, directory: Path) -> None:
        # No copying ahead: DCP would do it on a stream of GPU 0, in a thread that has chosen none.
        super().__init__(directory, per_thread_copy_ahead=0, _extensions=[_Checked()])
        self.fs = _CountingFileSystem()

    @property
    def written(self) -> dict[str, tuple[int, str]]:
        """Bytes and XXH3-64 of every tensor file that this process wrote, by name."""
        counted = cast(_CountingFileSystem, self.fs).written
        return {name: entry for name, entry in counted.items() if name.endswith(".distcp")}


class CheckedReader(FileSystemReader):
    """Reads what `CheckedWriter` wrote; a damaged part is a DamagedCheckpointError of its file."""

    def __init__(self, directory: Path) -> None:
        registry = ExtensionRegistry()
        registry.register(_Checked)
        super().__init__(directory, _extension_registry=registry)
