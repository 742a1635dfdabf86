"""Token shards in Megatron's `.bin/.idx` format. numpy only.

The `.bin` contains the documents' tokens, one after another, little-endian. The `.idx`
(Megatron-LM, ``megatron/core/datasets/indexed_dataset.py``) is::

    9 bytes  b"MMIDIDX\\x00\\x00"
    uint64   version, 1
    uint8    token type (`DTYPE_CODES`)
    uint64   number of sequences S
    uint64   number of document-index entries D + 1
    int32    [S]      tokens of every sequence
    int64    [S]      byte offset of every sequence in the .bin
    int64    [D + 1]  first sequence of every document, then S

In DeepSpeed 0.19.8 the codes from 6 on have a different meaning (uint16 is 6 there), so it reads
int32 shards, but not uint16 shards.

As with ``preprocess_data.py --append-eod``, a document is one sequence that ends with the
end-of-document token; a document without any text is one without sequences.

If not every token is a target (chat), there is also a `.mask`: one bit per token, 1
if it has a loss as a target. Token ``i`` is bit ``i % 8``, counted from the lowest, of byte
``i // 8`` (``np.packbits`` with ``bitorder="little"``); the bits after the last token are 0.
If some losses have weights other than 0 and 1, there is also a `.weights`: a float32 per token,
little-endian, the factor of its loss as a target; 1 for tokens that the `.mask` excludes.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.block_checksums import SUFFIX, BlockSums, read_blocks
from bigtrain.data.shards.manifest import RESTORE, corrupt, reading
from bigtrain.errors import DataError
from bigtrain.system.files import file_checksum, require_regular

IGNORED_LABEL = -100
"""Label without loss: `ignore_index` of torch's cross-entropy and of transformers, which data/ and
models/ do not import from each other (`bigtrain.models.layers.token_loss`)."""
MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
NEAR_SEQUENCES = 16
"""Sequences that are read before a second search: few documents begin in one sample."""
CHUNK_ITEMS = 1 << 20
"""Items of an index or a shard checked at once; this bounds the memory of a check."""

Tokens = npt.NDArray[np.integer[Any]]
Mask = npt.NDArray[np.bool_]
Weights = npt.NDArray[np.float32]


def token_dtype(vocab_size: int) -> Literal["uint16", "int32"]:
    """Return the type by Megatron's rule (``DType.optimal_dtype``): uint16 below 65,500 ids."""
    return "uint16" if vocab_size < 65_500 else "int32"


class TokenShard:
    """`.bin/.idx` pair, whose arrays are memory maps: a file must not be truncated while it is
    open. Opening reads only the header and the file sizes.

    `mask_path` is None if every token is a target. `checksums`: XXH3-64 of files by suffix, as in a
    manifest; `.idx` and `.mask` are compared on first access, `.blocks` by `block_sums`. Raises
    DataError if a file is missing or its size differs from the index's header.
    """

    def __init__(
        self, prefix: Path, *, masked: bool = False, checksums: Mapping[str, str] | None = None
    ) -> None:
        # The header of the index determines its size and the token type.
        self.bin_path = prefix.with_name(prefix.name + ".bin")
        self.index_path = prefix.with_name(prefix.name + ".idx")
        index_size, self.num_bytes = _file_size(self.index_path), _file_size(self.bin_path)
        if index_size < HEADER.size:
            raise self.corrupt(f"{index_size} bytes are less than a header of {HEADER.size}")
        with self.index_path.open("rb") as file:
            magic, version, code, num_sequences, num_starts = HEADER.unpack(file.read(HEADER.size))
        if magic != MAGIC:
            raise self.corrupt("it does not start like a Megatron index")
        if version != INDEX_VERSION:
            raise self.corrupt(f"index version {version}, expected {INDEX_VERSION}")
        dtype = DTYPE_CODES.get(code)
        if dtype is None or dtype.kind not in "iu":
            raise self.corrupt(f"token type code {code} is not an integer type")
        # A sequence has a length and an offset, a document its first sequence.
        expected = HEADER.size + (4 + 8) * num_sequences + 8 * num_starts
        if index_size != expected:
            raise self.corrupt(
                f"it has {index_size} bytes; its header ({num_sequences} sequences, {num_starts} "
                f"document entries) requires {expected}"
            )
        if num_starts < 1 or self.num_bytes % dtype.itemsize:
            raise self.corrupt(
                f"{num_starts} document entries, {self.num_bytes} bytes of tokens of "
                f"{dtype.itemsize} bytes"
            )
        self.dtype = dtype
        self.num_documents = int(num_starts) - 1
        self.num_sequences = int(num_sequences)
        self._index_bytes = index_size
        self._checksums = checksums or {}
        # Optional files: their sizes follow from the number of tokens or documents.
        self._blocks_path = prefix.with_name(f"{prefix.name}.{SUFFIX}")
        if self.has_blocks:
            _file_size(self._blocks_path)

        def checked(suffix: str, num_bytes: int, expected: str) -> Path:
            path = prefix.with_name(prefix.name + suffix)
            if (size := _file_size(path)) != num_bytes:
                raise corrupt(path, f"{size} bytes, {expected}")
            return path

        self.mask_path: Path | None = None
        self.weights_path: Path | None = None
        self.labels_path: Path | None = None
        rule, mask_bytes = f"{self.num_tokens} tokens have", -(-self.num_tokens // 8)
        if masked:
            self.mask_path = checked(".mask", mask_bytes, f"{rule} {mask_bytes}")
        if "weights" in self._checksums:
            num_bytes = self.weights_bytes
            self.weights_path = checked(".weights", num_bytes, f"{rule} {num_bytes}")
        if "labels" in self._checksums:
            count = self.num_documents
            self.labels_path = checked(".labels", count, f"there are {count} documents")

    # Mapped on first access: a training run reads tokens by positioned reads, and
    # most positioned reads do not need the index.

    @cached_property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every sequence, int32 [num_sequences]."""
        return self._index_array(np.dtype("<i4"), HEADER.size, self.num_sequences)

    @cached_property
    def sequence_pointers(self) -> npt.NDArray[np.int64]:
        """Byte offset of every sequence in the `.bin`, int64 [num_sequences]."""
        offset = HEADER.size + 4 * self.num_sequences
        return self._index_array(np.dtype("<i8"), offset, self.num_sequences)

    @cached_property
    def document_starts(self) -> npt.NDArray[np.int64]:
        """First sequence of every document, then their number, int64 [num_documents + 1]."""
        offset = HEADER.size + (4 + 8) * self.num_sequences
        return self._index_array(np.dtype("<i8"), offset, self.num_documents + 1)

    @cached_property
    def _index_map(self) -> npt.NDArray[np.uint8]:
        """Complete `.idx`, compared with its checksum: a process that looks up documents reads most
        of the index, which has about a hundredth of the tokens' size."""
        return self._mapped(self.index_path, "u1", self._index_bytes)

    def _index_array(self, dtype: np.dtype[Any], offset: int, count: int) -> npt.NDArray[Any]:
        return self._index_map[offset : offset + count * dtype.itemsize].view(dtype)

    def _mapped(self, path: Path | None, dtype: str, count: int) -> npt.NDArray[Any]:
        """Return the values of a file, which must exist, after comparing all of it with its
        checksum. Raise DataError if it does not match."""
        assert path is not None
        if (listed := self._checksums.get(path.suffix[1:])) is not None:
            with reading(path):
                checksum = file_checksum(path)
            if checksum != listed:
                num_bytes = count * np.dtype(dtype).itemsize
                problem = f"the checksum of bytes 0 to {num_bytes} is {checksum}, "
                raise corrupt(path, f"{problem}the manifest lists {listed}", RESTORE)
        return _map(path, dtype, count)

    @cached_property
    def block_sums(self) -> BlockSums | None:
        """Checksums of the blocks of `.bin`, `.mask` and `.weights`; None without a `.blocks`.
        Raises DataError if that file differs from the manifest."""
        if not self.has_blocks:
            return None
        mask_bytes = 0 if self.mask_path is None else -(-self.num_tokens // 8)
        listed = self._checksums[SUFFIX]
        sizes = self.num_bytes, mask_bytes, self.weights_bytes
        return read_blocks(self._blocks_path, listed, *sizes)

    @property
    def has_blocks(self) -> bool:
        return SUFFIX in self._checksums

    @cached_property
    def tokens(self) -> Tokens:
        return _map(self.bin_path, self.dtype.str, self.num_tokens)

    @cached_property
    def token_bytes(self) -> memoryview:
        return self.tokens.view(np.uint8).data

    @cached_property
    def mask_bytes(self) -> npt.NDArray[np.uint8]:
        """Complete `.mask`; only if it exists."""
        return self._mapped(self.mask_path, "u1", -(-self.num_tokens // 8))

    @cached_property
    def labels(self) -> npt.NDArray[np.uint8]:
        """Label of every document, uint8 [num_documents]: 1 for a desirable answer, or the number
        of a class; only if the rows are labeled."""
        return self._mapped(self.labels_path, "u1", self.num_documents)

    @cached_property
    def weights(self) -> npt.NDArray[np.float32]:
        """Weights of the losses of the tokens, float32 [num_tokens]; only if they have some."""
        return self._mapped(self.weights_path, "<f4", self.num_tokens)

    @property
    def weights_bytes(self) -> int:
        """Size of the `.weights`; 0 without one."""
        return 4 * self.num_tokens if "weights" in self._checksums else 0

    @property
    def num_tokens(self) -> int:
        return self.num_bytes // self.dtype.itemsize

    def document(self, index: int) -> Tokens:
        """Return the tokens of document `index`, with its end-of-document token; a view of the map.
        Raises DataError if the index points outside of the `.bin`."""
        low, high = self._document_range(index)
        return self.tokens[low:high]

    def document_mask(self, index: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of document `index` are targets; without a `.mask` every token is."""
        low, high = self._document_range(index)
        if self.mask_path is None:
            return np.ones(high - low, np.bool_)
        bits = np.unpackbits(self.mask_bytes[low // 8 : -(-high // 8)], bitorder="little")
        return bits[low % 8 : low % 8 + high - low].astype(np.bool_)

    def document_weights(self, index: int) -> npt.NDArray[np.float32]:
        """Return the weights of the losses of document `index`; 1 without a `.weights`."""
        low, high = self._document_range(index)
        if self.weights_path is None:
            return np.ones(high - low, np.float32)
        return self.weights[low:high]

    def _document_range(self, index: int) -> tuple[int, int]:
        """Return the token range of document `index`."""
        if not 0 <= index < self.num_documents:
            raise DataError(
                f"{self.bin_path} has documents 0 to {self.num_documents - 1}, not {index}"
            )
        first_sequence, end_sequence = map(int, self.document_starts[index : index + 2])
        if first_sequence == end_sequence:
            return 0, 0
        if not 0 <= first_sequence < end_sequence <= len(self.sequence_lengths):
            raise self.corrupt(f"document {index} has sequences {first_sequence} to {end_sequence}")
        begin = int(self.sequence_pointers[first_sequence])
        end = int(self.sequence_pointers[end_sequence - 1]) + (
            int(self.sequence_lengths[end_sequence - 1]) * self.dtype.itemsize
        )
        if not 0 <= begin <= end <= self.num_bytes or begin % self.dtype.itemsize:
            raise self.corrupt(f"document {index} is at bytes {begin} to {end}")
        return begin // self.dtype.itemsize, end // self.dtype.itemsize

    def document_begins(self, low: int, high: int) -> list[int]:
        """Return the byte offsets at which documents begin in tokens `low` to `high` (exclusive).
        Searches the index by bisection, so it reads a few pages at any size. For an index that is
        inconsistent, any numbers may be returned. Raises DataError if the search leaves the
        index."""
        # Sequences that begin in the range: usually few, so the nearest are read before a search
        # for the end, which is needed only if all of them begin in the range.
        token_bytes = self.dtype.itemsize
        pointers = self._pointers
        first, end_byte = bisect_left(pointers, low * token_bytes), high * token_bytes
        begins: list[int] = pointers[first : first + NEAR_SEQUENCES].tolist()
        if begins and begins[-1] < end_byte:
            end = bisect_left(pointers, end_byte, lo=first + len(begins))
            begins = pointers[first:end].tolist()
        else:
            del begins[bisect_left(begins, end_byte) :]
        if self.num_documents == self.num_sequences:
            return begins
        # Documents may have several sequences, or none: keep the sequences that begin a document.
        # `documents`: for each sequence, the first document that begins at it or after it.
        sequences = range(first, first + len(begins))
        documents = [bisect_left(self._starts, sequence) for sequence in sequences]
        if documents and documents[-1] > self.num_documents:
            raise self.corrupt(f"its documents end before sequence {sequences.stop}")
        return [
            begin
            for begin, sequence, document in zip(begins, sequences, documents, strict=True)
            if self._starts[document] == sequence
        ]

    # The arrays of an .idx are not aligned: numpy's searchsorted would copy a complete array first.
    # A memory view returns Python integers, several times faster to compare than numpy's.

    @cached_property
    def _pointers(self) -> memoryview:
        return self.sequence_pointers.view(np.uint8).data.cast("q")

    @cached_property
    def _starts(self) -> memoryview:
        return self.document_starts.view(np.uint8).data.cast("q")

    def check_index(self) -> None:
        """Raise DataError unless sequences and documents cover the `.bin` without gap or overlap.
        Reads the full index, in chunks."""
        # Sequences are adjacent in the .bin and cover it.
        position = 0
        for low, high in _chunks(len(self.sequence_lengths)):
            lengths = self.sequence_lengths[low:high].astype(np.int64)
            if lengths.min() < 0:
                raise self.corrupt(f"a sequence between {low} and {high} has negative length")
            ends = position + np.cumsum(lengths) * self.dtype.itemsize
            if not np.array_equal(
                self.sequence_pointers[low:high], ends - lengths * self.dtype.itemsize
            ):
                raise self.corrupt(
                    f"a sequence between {low} and {high} does not begin at the previous end"
                )
            position = int(ends[-1])
        if position != self.num_bytes:
            raise self.corrupt(
                f"its sequences have {position} bytes, {self.bin_path.name} has {self.num_bytes}"
            )
        # Documents are adjacent in the sequences and cover them: the last entry is where the last
        # document ends.
        previous = 0
        for low, high in _chunks(len(self.document_starts)):
            starts = self.document_starts[low:high]
            if (low == 0 and starts[0] != 0) or starts[0] < previous or (np.diff(starts) < 0).any():
                raise self.corrupt(f"document entries between {low} and {high} are out of order")
            previous = int(starts[-1])
        if previous != len(self.sequence_lengths):
            raise self.corrupt(
                f"its documents end at sequence {previous} of {len(self.sequence_lengths)}"
            )

    def corrupt(self, problem: str) -> DataError:
        return corrupt(self.index_path, problem)


def _file_size(path: Path) -> int:
    with reading(path):
        return require_regular(path).st_size


def _map(path: Path, dtype: str, count: int) -> npt.NDArray[Any]:
    """Return the first `count` values of a file as a memory map. Raise DataError if it fails."""
    if count == 0:  # an empty range cannot be mapped
        return np.empty(0, dtype)
    try:
        mapped = np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be mapped: {error}") from error
    # A plain array of this memory: slices of a memmap cost several microseconds each.
    return np.asarray(mapped)


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    for low in range(0, count, CHUNK_ITEMS):
        yield low, min(low + CHUNK_ITEMS, count)
