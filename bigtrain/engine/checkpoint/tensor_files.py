"""Tensor files of a checkpoint: plain data, every block of which proves what it is.

A file is in the safetensors layout (huggingface.co/docs/safetensors): 8 bytes with the length of
the header (little-endian), the header in JSON, then the data of one part after another, without
holes. A part is a rectangle of a tensor. Its entry is named ``KEY@OFFSETS``, and ``__metadata__``
has under the same name the full tensor's shape and the XXH3-64 of each `BLOCK_BYTES` of the part::

    "exp_avg/model.norm.weight@0": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}
    "__metadata__": {"format", "run", "step", "attempt", "rank",
                     "exp_avg/model.norm.weight@0": "64 0011223344556677"}

The checksum of the header stands for the whole file, so a manifest with that of every file vouches
for every byte, and a reader compares only the blocks that it reads. Headers are not trusted: what
does not hold together is a CorruptCheckpointError. Nothing here is collective. Imports no torch.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigtrain.errors import CorruptCheckpointError

FORMAT = "bigtrain.checkpoint/2"
SUFFIX = ".safetensors"
BLOCK_BYTES = 1 << 20
"""What one checksum is of: the least that is read to verify a byte."""

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
class Identity:
    """The save that a file belongs to.

    run: drawn when the run began, and kept by all of its starts. attempt: names this start.
    """

    run: str = ""
    step: int = 0
    attempt: str = ""


@dataclass(frozen=True)
class NewPart:
    """A part to write. data: its bytes, row-major and little-endian; called once."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    data: Callable[[], memoryview]

    @property
    def name(self) -> str:
        return f"{self.key}@{','.join(map(str, self.offsets))}"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Part:
    """A rectangle of the tensor `key`, whose bytes begin at `begin` of the file `path`.

    shape: of the full tensor. digests: hexadecimal XXH3-64 of the blocks, one after the other.
    """

    path: Path
    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    begin: int
    digests: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.sizes) * DTYPE_BYTES[self.dtype]

    def read(self, fd: int, begin: int, out: memoryview) -> None:
        """Read bytes [begin, begin + len(out)) of the part from its open file.

        Raises CorruptCheckpointError where a block that holds some of them is not as written.
        """
        at, end = begin, begin + len(out)
        while at < end:
            block = at // BLOCK_BYTES
            low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.num_bytes)
            stop = min(high, end)
            there = out[at - begin : stop - begin]
            held = there if len(there) == high - low else memoryview(bytearray(high - low))
            _read_exactly(fd, self.begin + low, held)
            digest = self.digests[block * _DIGEST_DIGITS : (block + 1) * _DIGEST_DIGITS]
            if xxhash.xxh3_64_hexdigest(held) != digest:
                raise CorruptCheckpointError(f"{self.path}: {_MISMATCH}")
            if held is not there:
                there[:] = held[at - low : stop - low]
            at = stop


def file_name(rank: int) -> str:
    """Of the file that `rank` writes."""
    return f"rank-{rank:05d}{SUFFIX}"


def write_parts(
    path: Path, identity: Identity, rank: int, parts: Sequence[NewPart]
) -> tuple[int, str]:
    """Write and fsync a new file; returns its bytes and the XXH3-64 of its header.

    Each byte is hashed as it is written; the header, whose length is known before, comes last.
    """
    # Elements of every part begin at a multiple of their size, as safetensors' own writer has it.
    ordered = sorted(parts, key=lambda part: (-DTYPE_BYTES[part.dtype], part.name))
    blank = {p.name: "0" * _DIGEST_DIGITS * _num_blocks(p.num_bytes) for p in ordered}
    length = len(_header(ordered, identity, rank, blank))
    digests = {}
    with path.open("wb") as file:
        file.seek(length)
        for part in ordered:
            found, data = [], part.data()
            for begin in range(0, part.num_bytes, BLOCK_BYTES):
                block = data[begin : begin + BLOCK_BYTES]
                found.append(xxhash.xxh3_64_hexdigest(block))
                file.write(block)
            digests[part.name] = "".join(found)
        header = _header(ordered, identity, rank, digests)
        assert len(header) == length <= _MAX_HEADER_BYTES, (len(header), length)
        file.seek(0)
        file.write(header)
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size, xxhash.xxh3_64_hexdigest(header)


def _header(
    parts: Sequence[NewPart], identity: Identity, rank: int, digests: Mapping[str, str]
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
            "shape": part.sizes,
            "data_offsets": (begin, end),
        }
        metadata[part.name] = f"{','.join(map(str, part.shape))} {digests[part.name]}"
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def find_parts(
    directory: Path,
    headers: Mapping[str, str] | None = None,
    identity: Identity | None = None,
) -> dict[str, list[Part]]:
    """The parts of every tensor by its key, which cover it exactly. Reads headers alone.

    headers: checksum of the header of each file by its name, as the manifest has them; None takes
    the files that are there. identity: theirs, if known; it is the same for all in any case. Which
    file holds what is told by nothing else, so a reader opens all of them: if that ever costs too
    much, this is the place to compute it from the topology.

    Raises CorruptCheckpointError for a file that cannot be read, is not as it was written, or does
    not fit the others.
    """
    if headers is None:
        names = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
        headers = dict.fromkeys(names, "")
    found: dict[str, list[Part]] = {}
    for name, digest in sorted(headers.items()):
        path = directory / name
        theirs, parts = _read_header(path, digest)
        if identity is not None and theirs != identity:
            raise CorruptCheckpointError(
                f"{path}: is of {_words(theirs)}, and not of {_words(identity)}"
            )
        identity = theirs
        for part in parts:
            found.setdefault(part.key, []).append(part)
    if not found:
        raise CorruptCheckpointError(f"{directory}: holds no tensors")
    for key, parts in found.items():
        problem = _misfit(parts)
        if problem:
            raise CorruptCheckpointError(f"{directory}: {problem} of {key}")
    return found


def verify_parts(parts: Sequence[Part]) -> None:
    """Read all bytes of `parts` of one file. Raises CorruptCheckpointError where one is wrong."""
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


def _read_header(path: Path, digest: str) -> tuple[Identity, list[Part]]:
    """What the header says of the file; `digest`: of the header, or empty where that is unknown."""
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, num_bytes - _LENGTH_BYTES):
                raise ValueError(f"a header of {length} bytes in a file of {num_bytes}")
            header = bytearray(length)
            _read_exactly(file.fileno(), _LENGTH_BYTES, memoryview(header))
        if digest and xxhash.xxh3_64_hexdigest(start + header) != digest:
            raise CorruptCheckpointError(f"{path}: {_MISMATCH}")
        return _parse(path, bytes(header), _LENGTH_BYTES + length, num_bytes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: cannot be read: {error}") from error


def _parse(
    path: Path, header: bytes, data_begin: int, num_bytes: int
) -> tuple[Identity, list[Part]]:
    """Raises ValueError and what wrong types raise, unless all entries hold together."""
    document = json.loads(header, object_pairs_hook=_without_duplicates)
    metadata = document.pop(_METADATA)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"format {metadata.get('format')!r}, this is {FORMAT!r}")
    identity = Identity(metadata["run"], _numbers(metadata["step"])[0], metadata["attempt"])
    parts = []
    for name, entry in document.items():
        key, _, corner = name.rpartition("@")
        shape_text, _, digests = metadata[name].partition(" ")
        shape, offsets, sizes = _numbers(shape_text), _numbers(corner), tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*sizes, begin, end)):
            raise ValueError(f"{name}: sizes and offsets that are no counts")
        part = Part(path, key, shape, offsets, sizes, entry["dtype"], data_begin + begin, digests)
        if not len(shape) == len(offsets) == len(sizes) or any(
            o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError(f"{name}: a rectangle {sizes} outside of its tensor {shape}")
        if part.num_bytes != end - begin:
            raise ValueError(f"{name}: {end - begin} bytes for {sizes} of {part.dtype}")
        if len(digests) != _DIGEST_DIGITS * _num_blocks(part.num_bytes):
            raise ValueError(f"{name}: checksums of another number of blocks")
        parts.append(part)
    reached = data_begin
    for part in sorted(parts, key=lambda part: (part.begin, part.num_bytes)):
        if part.begin != reached:
            raise ValueError(f"{part.key}: bytes that belong to no part or to several")
        reached += part.num_bytes
    if reached != num_bytes:
        raise ValueError(f"{num_bytes} bytes, should be {reached}")
    return identity, parts


def _misfit(parts: Sequence[Part]) -> str | None:
    """What is wrong with parts that are to cover a tensor, each element once; None if nothing."""
    shape = parts[0].shape
    if any(part.shape != shape or part.dtype != parts[0].dtype for part in parts):
        return "different shapes or dtypes"
    # Corners of boxes cancel in pairs, but those of the sum of all boxes modulo 2: if they are the
    # full tensor's, every element is covered an odd number of times, and by the volume just once.
    if sum(math.prod(part.sizes) for part in parts) != math.prod(shape):
        return "parts are missing, or there are too many,"
    corners: set[tuple[int, ...]] = set()
    for part in parts:
        if 0 not in part.sizes:
            ends = zip(part.offsets, part.sizes, strict=True)
            corners ^= set(itertools.product(*((low, low + size) for low, size in ends)))
    full = set(itertools.product(*((0, size) for size in shape))) if 0 not in shape else set()
    return None if corners == full else "parts overlap, and others are missing,"


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _numbers(text: str) -> tuple[int, ...]:
    if _NUMBERS.fullmatch(text) is None:
        raise ValueError(f"no numbers: {text[:80]!r}")
    return tuple(map(int, text.split(",")))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that stands there twice")
    return found


def _read_exactly(fd: int, where: int, out: memoryview) -> None:
    while out:
        count = os.preadv(fd, [out], where)
        if count == 0:
            raise OSError("ends too soon")
        out, where = out[count:], where + count


def _words(identity: Identity) -> str:
    return f"run {identity.run or '?'}, step {identity.step}"
