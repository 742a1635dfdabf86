"""Block checksums of a shard, which verify data as it is read. numpy only.

The manifest's checksums cover full files, and comparing one reads the full file. A `.blocks` file
next to a shard has a checksum for every 16 KiB of its `.bin`, `.mask` and `.weights`, and the
manifest has the checksum of the `.blocks` file: so a file of equal size from another dataset is
detected too. The `.idx` needs no blocks: it is verified completely when it is first used.

A `.blocks` file is, little-endian::

    8 bytes  b"BTBLCKS1"
    uint64   bytes of a block
    uint64   blocks of the .bin, B (the last one may be shorter)
    uint64   blocks of the .mask, M
    uint64   [B]  XXH3-64 of every block of the .bin
    uint64   [M]  XXH3-64 of every block of the .mask
    uint64   [W]  XXH3-64 of every block of the .weights, if there is one

A rank verifies each block once, and must read the full block for that: with larger blocks a
data-parallel rank, which reads a few samples of every block, would read several times its data, and
smaller blocks would cost a call for every few samples.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.shards.manifest import REBUILD, RESTORE, corrupt, reading
from bigtrain.errors import DataError
from bigtrain.system.files import require_regular

SUFFIX = "blocks"
MAGIC = b"BTBLCKS1"
HEADER = struct.Struct("<8sQQQ")
BLOCK_BYTES = 1 << 14
NOT_VERIFIED = (
    "it has no block checksums, so its data is not verified on reading -> "
    f"{REBUILD}, or set data.verify=contents"
)
"""Note about a dataset made before block checksums existed."""

Indices = npt.NDArray[np.int64]
Bytes = TypeVar("Bytes", int, Indices)
Read = Callable[[int, int, int], "memoryview | bytes"]
"""Function (file, first byte, end) that returns bytes of one of several files."""


class BlockHasher:
    """Hasher of the blocks of a file that is being written."""

    def __init__(self) -> None:
        self._sums = array("Q")
        self._hash = xxhash.xxh3_64()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        position = 0
        while position < len(data):
            block_part = data[position : position + BLOCK_BYTES - self._filled]
            self._hash.update(block_part)
            position += len(block_part)
            self._filled += len(block_part)
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> npt.NDArray[np.uint64]:
        """Return the checksums of the blocks, uint64 [blocks]. Call it once, at the end."""
        if self._filled:
            self._end_block()
        return np.frombuffer(self._sums, np.uint64)

    def _end_block(self) -> None:
        self._sums.append(self._hash.intdigest())
        self._hash.reset()
        self._filled = 0


def blocks_content(
    bin_sums: npt.NDArray[np.uint64],
    mask_sums: npt.NDArray[np.uint64] | None,
    weights_sums: npt.NDArray[np.uint64] | None = None,
) -> bytes:
    """Return the content of a `.blocks` file."""
    sums = [part for part in (bin_sums, mask_sums, weights_sums) if part is not None]
    header = HEADER.pack(
        MAGIC, BLOCK_BYTES, len(bin_sums), 0 if mask_sums is None else len(mask_sums)
    )
    return b"".join([header, *(part.astype("<u8").tobytes() for part in sums)])


def num_blocks(num_bytes: Bytes) -> Bytes:
    """Return the number of blocks of a file of `num_bytes`, or of every file of several."""
    return -(-num_bytes // BLOCK_BYTES)


@dataclass(frozen=True)
class BlockSums:
    """Contents of a `.blocks` file: checksums of the blocks of a shard, memory maps."""

    path: Path
    bin_sums: npt.NDArray[np.uint64]
    mask_sums: npt.NDArray[np.uint64]
    weights_sums: npt.NDArray[np.uint64]


def read_blocks(
    path: Path, xxh3: str, bin_bytes: int, mask_bytes: int, weights_bytes: int = 0
) -> BlockSums:
    """Read the `.blocks` file at `path`, whose checksum must be `xxh3`. Raises DataError if it is
    another file, or belongs to a shard of other sizes."""
    with reading(path):
        require_regular(path)
        content = path.read_bytes()
    checksum = xxhash.xxh3_64_hexdigest(content)
    if checksum != xxh3:
        problem = f"its checksum is {checksum}, the manifest lists {xxh3}"
        raise corrupt(path, problem, RESTORE)
    magic, block_bytes, num_bin_blocks, num_mask_blocks = HEADER.unpack(content[: HEADER.size])
    if (magic, block_bytes) != (MAGIC, BLOCK_BYTES):
        raise DataError(f"{path} has another version -> use the bigtrain that wrote it")
    num_weights_blocks = num_blocks(weights_bytes)
    expected_bytes = HEADER.size + 8 * (num_bin_blocks + num_mask_blocks + num_weights_blocks)
    if (num_bin_blocks, num_mask_blocks, len(content)) != (
        num_blocks(bin_bytes),
        num_blocks(mask_bytes),
        expected_bytes,
    ):
        raise DataError(f"{path} belongs to another shard -> {RESTORE}")
    # Memory-mapped, so that all ranks of a host share one copy; an empty range cannot be mapped.
    sums: npt.NDArray[np.uint64] = np.empty(0, "<u8")
    if num_bin_blocks + num_mask_blocks:
        sums = np.memmap(path, "<u8", "r", HEADER.size)
    sums_of_files = np.split(sums, [num_bin_blocks, num_bin_blocks + num_mask_blocks])
    return BlockSums(path, *map(np.asarray, sums_of_files))


class BlockVerifier:
    """Verifier of ranges of several files by the checksums of their blocks, each block once.
    `path` and `sizes` (bytes) of the files; `sums`: returns the checksums of a file, and is called
    when the file is first read. Thread-safe: blocks that several threads need at once are verified
    several times. Uses a byte of memory per verified block."""

    def __init__(
        self,
        path: Callable[[int], Path],
        sizes: Sequence[int] | Indices,
        sums: Callable[[int], tuple[Path, npt.NDArray[np.uint64]]],
    ) -> None:
        self._path = path
        self._sizes = np.array(sizes, np.int64)
        self._sums = sums
        counts = num_blocks(self._sizes)
        ends = np.cumsum(counts, dtype=np.int64)
        self._first_blocks = ends - counts  # of every file, numbered through all files
        # Untouched zero pages take no memory.
        self._verified = np.zeros(int(ends[-1]) if len(ends) else 0, np.bool_)

    def verify(self, numbers: Any, low: Indices, high: Indices, read: Read) -> None:
        """Verify bytes ``low[i]`` to ``high[i]`` of file ``numbers[i]``, or of file `numbers` if
        that is a number. `read` returns the bytes to verify. Raises DataError with file and
        bytes."""
        file_begins = self._first_blocks[numbers]
        assert not len(low) or (low < high).all()
        first, last = file_begins + low // BLOCK_BYTES, file_begins + (high - 1) // BLOCK_BYTES
        while len(first):
            # The first block of every range, then the next block of the ranges that have more.
            unverified = first[~self._verified[first]]
            if len(unverified):
                self._verify_blocks(np.unique(unverified), read)
            has_more = first < last
            first, last = first[has_more] + 1, last[has_more]

    def _verify_blocks(self, blocks: Indices, read: Read) -> None:
        """Compare ascending `blocks`, numbered through all files, with the checksums. Raise as
        `verify`."""
        numbers = np.searchsorted(self._first_blocks, blocks, side="right") - 1
        low = (blocks - self._first_blocks[numbers]) * BLOCK_BYTES
        high = np.minimum(low + BLOCK_BYTES, self._sizes[numbers])
        current_number = -1
        for number, begin, end in zip(numbers.tolist(), low.tolist(), high.tolist(), strict=True):
            if number != current_number:
                current_number, (path, sums) = number, self._sums(number)
            listed = sums[begin // BLOCK_BYTES]
            if xxhash.xxh3_64_intdigest(read(number, begin, end)) != listed:
                problem = f"bytes {begin} to {end} do not have the checksum that {path.name} lists"
                fix = f"{RESTORE} (`bigtrain verify` names every corrupt file)"
                raise corrupt(self._path(number), problem, fix)
        self._verified[blocks] = True
