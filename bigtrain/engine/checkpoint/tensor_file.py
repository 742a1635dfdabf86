"""Tensor file of a checkpoint: safetensors with a checksum for every block.

A file is in the safetensors layout (huggingface.co/docs/safetensors): 8 bytes with the length of
the header (little-endian), the header in JSON, filled up with spaces so that the data begins at a
multiple of 4,096, then the data of the parts in order, without holes. A part is a rectangle of a
tensor. Its entry is named ``KEY@OFFSETS``, and ``__metadata__`` has under that name the full
tensor's shape and the XXH3-64 of every `BLOCK_BYTES` of the part::

    "exp_avg/model.norm.weight@0": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
    "__metadata__": {"format", "run", "step", "attempt", "rank",
                     "exp_avg/model.norm.weight@0": "64 0011223344556677"}

The checksum of the header covers the complete file, so a manifest that lists it for every file
covers every byte, and a reader verifies only the blocks that it reads. Headers are validated:
inconsistent ones raise CorruptCheckpointError. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigtrain.errors import CorruptCheckpointError
from bigtrain.system.boxes import Box, Numbers
from bigtrain.system.storage.direct_file import ALIGNMENT, DirectFile

FORMAT = "bigtrain.checkpoint/2"
SUFFIX = ".safetensors"
BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers. To verify a single byte, its block is read."""

DTYPE_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_DIGEST_DIGITS = 16
_NUMBERS = re.compile(r"\d{1,18}(,\d{1,18}){0,7}")
_MISMATCH = "contents do not match their checksum"


@dataclass(frozen=True)
class SaveIdentity:
    """Identity of the save that wrote a file. run: random id of the run, equal for all launches.
    attempt: random id of the launch."""

    run: str = ""
    step: int = 0
    attempt: str = ""


@dataclass(frozen=True)
class NewPart:
    """Rectangle `box` to write of the tensor `key` with the full `shape`. data: returns the bytes,
    row-major and little-endian; called once."""

    key: str
    shape: Numbers
    box: Box
    dtype: str
    data: Callable[[], memoryview]

    @property
    def name(self) -> str:
        return f"{self.key}@{','.join(map(str, self.box.offsets))}"

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """Stored rectangle `box` of the tensor `key` with the full `shape`, whose bytes begin at
    `begin` of the file `path`. digests: hexadecimal XXH3-64 of the blocks, concatenated."""

    path: Path
    key: str
    shape: Numbers
    box: Box
    dtype: str
    begin: int
    digests: str

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * DTYPE_BYTES[self.dtype]

    def read(self, fd: int, begin: int, out: memoryview) -> None:
        """Read bytes [begin, begin + len(out)) of the part from its open file. Raises
        CorruptCheckpointError if a block that contains some of the bytes is not as written."""
        position, end = begin, begin + len(out)
        while position < end:
            # The block with the byte at `position`, and the range of `out` that it fills.
            block = position // BLOCK_BYTES
            block_begin = block * BLOCK_BYTES
            block_end = min(block_begin + BLOCK_BYTES, self.num_bytes)
            stop = min(block_end, end)
            target = out[position - begin : stop - begin]
            # Blocks are verified as a whole: a block that is needed partly is read into a buffer.
            content = target
            if len(target) < block_end - block_begin:
                content = memoryview(bytearray(block_end - block_begin))
            _read_exactly(fd, self.begin + block_begin, content)
            digest = self.digests[block * _DIGEST_DIGITS : (block + 1) * _DIGEST_DIGITS]
            if xxhash.xxh3_64_hexdigest(content) != digest:
                raise CorruptCheckpointError(f"{self.path}: {_MISMATCH}")
            if content is not target:
                target[:] = content[position - block_begin : stop - block_begin]
            position = stop


def file_name(rank: int) -> str:
    """Return the name of the file that `rank` writes."""
    return f"rank-{rank:05d}{SUFFIX}"


def write_parts(
    path: Path,
    identity: SaveIdentity,
    rank: int,
    parts: Sequence[NewPart],
    content: memoryview | None = None,
) -> tuple[int, str]:
    """Write and fsync a new file; return the file's number of bytes and the XXH3-64 of the header,
    which is written last. content: the data of `parts` in `in_file_order`, if they are contiguous
    and aligned in memory (`DirectFile.append`)."""
    ordered = in_file_order(parts)
    # The header's length does not depend on the digits of the digests.
    zeros = {part.name: "0" * _num_digits(part.num_bytes) for part in ordered}
    header_bytes = len(_header(ordered, identity, rank, zeros))
    digests = {}
    with DirectFile(path, header_bytes) as file:
        if content is not None:
            file.append(content)
        for part in ordered:
            block_digests, data = [], part.data()
            for begin in range(0, part.num_bytes, BLOCK_BYTES):
                block = data[begin : begin + BLOCK_BYTES]
                block_digests.append(xxhash.xxh3_64_hexdigest(block))
                if content is None:
                    file.write(block)
            digests[part.name] = "".join(block_digests)
        header = _header(ordered, identity, rank, digests)
        assert len(header) == header_bytes <= _MAX_HEADER_BYTES, (len(header), header_bytes)
        return file.finish(header), xxhash.xxh3_64_hexdigest(header)


def _num_digits(num_bytes: int) -> int:
    """Return the digits of the digests of a part."""
    num_blocks = -(-num_bytes // BLOCK_BYTES)
    return _DIGEST_DIGITS * num_blocks


def in_file_order(parts: Iterable[NewPart]) -> list[NewPart]:
    """Return the parts in safetensors' order, which aligns every part to its element size."""
    return sorted(parts, key=lambda part: (-DTYPE_BYTES[part.dtype], part.name))


def _header(
    parts: Sequence[NewPart], identity: SaveIdentity, rank: int, digests: Mapping[str, str]
) -> bytes:
    metadata = {
        "format": FORMAT,
        "run": identity.run,
        "step": str(identity.step),
        "attempt": identity.attempt,
        "rank": str(rank),
    }
    entries: dict[str, Any] = {_METADATA: metadata}
    begin = 0
    for part in parts:
        end = begin + part.num_bytes
        assert part.name not in entries, part.name
        entries[part.name] = {
            "dtype": part.dtype,
            "shape": part.box.sizes,
            "data_offsets": (begin, end),
        }
        metadata[part.name] = f"{','.join(map(str, part.shape))} {digests[part.name]}"
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % ALIGNMENT)  # aligns the data after it
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def verify_parts(parts: Sequence[Part]) -> None:
    """Read all bytes of `parts` of one file. Raises CorruptCheckpointError for a wrong byte."""
    if not parts:
        return
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with parts[0].path.open("rb") as file:
            for part in sorted(parts, key=lambda part: part.begin):
                for begin in range(0, part.num_bytes, BLOCK_BYTES):
                    count = min(BLOCK_BYTES, part.num_bytes - begin)
                    part.read(file.fileno(), begin, buffer[:count])
    except OSError as error:
        raise CorruptCheckpointError(f"{parts[0].path}: cannot be read: {error}") from error


def read_header(path: Path, digest: str) -> tuple[SaveIdentity, list[Part]]:
    """Return the identity and parts in the header of a file; `digest`: of the header, empty if
    unknown. Raises CorruptCheckpointError."""
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = file.read(_LENGTH_BYTES)
            text_bytes = int.from_bytes(length, "little")
            if not 0 < text_bytes <= min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
                raise ValueError(f"a header of {text_bytes} bytes in a file of {num_bytes}")
            text = bytearray(text_bytes)
            _read_exactly(file.fileno(), _LENGTH_BYTES, memoryview(text))
        if digest and xxhash.xxh3_64_hexdigest(length + text) != digest:
            raise CorruptCheckpointError(f"{path}: {_MISMATCH}")
        return _parse(path, bytes(text), _LENGTH_BYTES + text_bytes, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error}") from error


def _parse(
    path: Path, header: bytes, data_begin: int, num_bytes: int
) -> tuple[SaveIdentity, list[Part]]:
    """Return the identity and parts in `header`. Raises ValueError if entries contradict each
    other, and KeyError, TypeError or AttributeError if a key is missing or a value has another
    type."""
    document = json.loads(header, object_pairs_hook=_without_duplicates)
    metadata = document.pop(_METADATA)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"format {metadata.get('format')!r}, this is {FORMAT!r}")
    identity = SaveIdentity(metadata["run"], _numbers(metadata["step"])[0], metadata["attempt"])
    # A part must be a rectangle inside its tensor, with the rectangle's bytes and checksums.
    parts = []
    for name, entry in document.items():
        key, _, offsets_text = name.rpartition("@")
        shape_text, _, digests = metadata[name].partition(" ")
        shape, offsets, sizes = _numbers(shape_text), _numbers(offsets_text), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*sizes, begin, end)):
            raise ValueError(f"{name}: sizes and offsets must be counts")
        box = Box(offsets, sizes)
        part = Part(path, key, shape, box, entry["dtype"], data_begin + begin, digests)
        is_inside = len(shape) == len(offsets) == len(sizes) and all(
            offset + size <= length
            for offset, size, length in zip(offsets, sizes, shape, strict=True)
        )
        if not is_inside:
            raise ValueError(f"{name}: a rectangle {sizes} outside of its tensor {shape}")
        if part.num_bytes != end - begin:
            raise ValueError(f"{name}: {end - begin} bytes for {sizes} of {part.dtype}")
        if len(digests) != _num_digits(part.num_bytes):
            raise ValueError(f"{name}: checksums of another number of blocks")
        parts.append(part)
    # Every byte of the file belongs to exactly one part.
    end = data_begin
    for part in sorted(parts, key=lambda part: (part.begin, part.num_bytes)):
        if part.begin != end:
            raise ValueError(f"{part.key}: bytes that belong to no part or to several")
        end += part.num_bytes
    if end != num_bytes:
        raise ValueError(f"{num_bytes} bytes, should be {end}")
    return identity, parts


def _numbers(text: str) -> Numbers:
    if _NUMBERS.fullmatch(text) is None:
        raise ValueError(f"not numbers: {text[:80]!r}")
    return tuple(map(int, text.split(",")))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("duplicate name")
    return entries


def _read_exactly(fd: int, offset: int, out: memoryview) -> None:
    while out:
        num_read = os.preadv(fd, [out], offset)
        if num_read == 0:
            raise OSError("ends too soon")
        out, offset = out[num_read:], offset + num_read
