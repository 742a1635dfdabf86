"""Search of the tensor files of a checkpoint for the parts that a reader needs, which must cover
each element exactly once. Nothing here is collective. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bigtrain.engine.checkpoint.layout import CheckpointLayout
from bigtrain.engine.checkpoint.tensor_file import (
    SUFFIX,
    Part,
    SaveIdentity,
    file_name,
    read_header,
    verify_parts,
)
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.system.boxes import Box, Numbers


class MissingPartsError(CorruptCheckpointError):
    """The files that were read lack requested parts."""


@dataclass
class Wanted:
    """Rectangles of a tensor that a reader requests, and the expected shape of the tensor."""

    shape: Numbers
    boxes: list[Box]


@dataclass(frozen=True)
class Listing:
    """Facts about tensor files that are known before the files are opened. headers: checksums of
    headers by file name, from the manifest. identity: the save that wrote all files; layout: the
    writers of parts; None if unknown."""

    headers: Mapping[str, str]
    identity: SaveIdentity | None = None
    layout: CheckpointLayout | None = None


def list_files(directory: Path) -> Listing:
    """Return a listing of the files in `directory`, without checksums or identity."""
    names = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    return Listing(dict.fromkeys(names, ""))


def find_parts(
    directory: Path,
    listing: Listing | None = None,
    prefixes: Collection[str] | None = None,
) -> dict[str, list[Part]]:
    """Return the parts of every tensor by key; they cover the tensor exactly. Reads all headers.
    listing: None: the files that exist. prefixes: of keys, up to the first slash; None: all. Raises
    CorruptCheckpointError for a file that is unreadable, was changed, or contradicts another
    file."""
    parts_by_key: dict[str, list[Part]] = {}
    covers: dict[str, Cover] = {}
    for part in itertools.chain.from_iterable(_read_headers(directory, listing)):
        if prefixes is None or part.key.partition("/")[0] in prefixes:
            parts_by_key.setdefault(part.key, []).append(part)
            covers.setdefault(part.key, Cover(part.shape)).add(part.shape, part.box, part.dtype)
    if not covers:
        raise CorruptCheckpointError(f"{directory}: holds no tensors")
    _require_covered(directory, covers)
    return parts_by_key


def find_boxes(
    directory: Path,
    requests: Mapping[str, Wanted],
    listing: Listing | None = None,
    ranks: Collection[int] | None = None,
) -> dict[str, list[Part]]:
    """Return the parts that contain the `requests`, each element once, by key. listing: as for
    `find_parts`. ranks: ranks whose headers are read; None: all. Raises CheckpointError for a
    tensor that is missing (MissingPartsError with `ranks`: the files of other ranks may have it) or
    has another shape, and CorruptCheckpointError as `find_parts`."""
    listing = listing or list_files(directory)
    if ranks is not None:
        names = set(map(file_name, ranks))
        headers = {name: digest for name, digest in listing.headers.items() if name in names}
        listing = replace(listing, headers=headers)
    # Parts that overlap a requested rectangle. The list is empty if only other parts of the tensor
    # were found.
    parts_by_key: dict[str, list[Part]] = {}
    for part in itertools.chain.from_iterable(_read_headers(directory, listing)):
        tensor = requests.get(part.key)
        if tensor is None:
            continue
        refuse_other_shape(directory, part.key, part.shape, tensor)
        parts = parts_by_key.setdefault(part.key, [])
        if any(box.intersect(part.box) for box in tensor.boxes):
            parts.append(part)
    # The parts must cover every requested rectangle, each element once.
    for key, tensor in requests.items():
        if key not in parts_by_key:
            error_type = CheckpointError if ranks is None else MissingPartsError
            raise error_type(no_tensor(directory, key))
        for box in tensor.boxes:
            cover = Cover(box.sizes)
            for part in parts_by_key[key]:
                common = box.intersect(part.box)
                if common is not None:
                    cover.add(box.sizes, common.relative_to(box), part.dtype)
            _require_covered(directory, {key: cover})
    return parts_by_key


def no_tensor(directory: Path, key: str) -> str:
    """Return the error text for a tensor that a run trains and its checkpoint lacks."""
    return (
        f"{directory}: holds no tensor {key}, which a run with these settings trains -> restore "
        "the settings of the run that wrote it, or train as a run of its own in another "
        "output.directory"
    )


def refuse_other_shape(directory: Path, key: str, shape: Numbers, request: Wanted) -> None:
    """Raise CheckpointError if the tensor `key` does not have the shape of `request`."""
    if shape != request.shape:
        raise CheckpointError(
            f"{directory}: {key} has shape {list(shape)} there and {list(request.shape)} in this "
            "run's model -> give the model the shapes it has there, or train this one as a run of "
            "its own in another output.directory"
        )


def verify_files(directory: Path, listing: Listing) -> None:
    """Read every byte of every file of `listing`, and check that the files hold each element of
    each tensor exactly once. Holds one header in memory. Raises CorruptCheckpointError if a file
    was changed after it was written, belongs to a save that is not the save of `listing`, or does
    not fit the other files."""
    covers: dict[str, Cover] = {}
    for parts in _read_headers(directory, listing):
        for part in parts:
            covers.setdefault(part.key, Cover(part.shape)).add(part.shape, part.box, part.dtype)
        verify_parts(parts)
    _require_covered(directory, covers)


def _read_headers(directory: Path, listing: Listing | None) -> Iterator[list[Part]]:
    """Yield the parts of every file; all files belong to one save."""
    listing = listing or list_files(directory)
    identity = listing.identity
    for name, digest in sorted(listing.headers.items()):
        path = directory / name
        file_identity, parts = read_header(path, digest)
        if identity is not None and file_identity != identity:
            raise CorruptCheckpointError(
                f"{path}: is of {_save_text(file_identity)}, and not of {_save_text(identity)}"
            )
        identity = file_identity
        yield parts


def _save_text(identity: SaveIdentity) -> str:
    return f"run {identity.run or '?'}, step {identity.step}"


def _require_covered(directory: Path, covers: Mapping[str, Cover]) -> None:
    for key, cover in covers.items():
        problem = cover.problem()
        if problem:
            raise MissingPartsError(f"{directory}: {problem} of {key}")


_WORD_MASK = (1 << 64) - 1


class Cover:
    """Check in constant memory that rectangles cover a tensor of this shape, each element once.

    Where rectangles meet, corners cancel in pairs. The corners that remain are the corners of the
    set of elements that are covered an odd number of times. If they equal the corners of the
    tensor, every element is covered an odd number of times, and, if the number of elements in all
    rectangles is right, exactly once. The remaining corners are compared by the exclusive or of
    64-bit hashes.
    """

    def __init__(self, shape: Numbers) -> None:
        self._full = Box.full(shape)
        self._num_elements = 0
        self._corners_hash = 0
        self._dtypes: set[str] = set()
        self._has_other_shape = False

    def add(self, shape: Numbers, box: Box, dtype: str) -> None:
        """Add the rectangle `box` of a tensor of `shape`, which must equal the shape of the covered
        tensor."""
        self._has_other_shape |= shape != self._full.sizes
        self._dtypes.add(dtype)
        self._num_elements += box.num_elements
        if not self._has_other_shape:
            self._corners_hash ^= self._hash_corners(box)

    def problem(self) -> str | None:
        """Return the error in the parts; None if there is none."""
        if self._has_other_shape or len(self._dtypes) > 1:
            return "different shapes or dtypes"
        if self._num_elements != self._full.num_elements:
            return "parts are missing, or there are too many,"
        if self._corners_hash != self._hash_corners(self._full):
            return "parts overlap, and others are missing,"
        return None

    def _hash_corners(self, box: Box) -> int:
        """Return the exclusive or of the hashes of the corners of `box`."""
        if 0 in box.sizes:
            return 0
        corners = [0]  # as row-major positions
        for length, low, size in zip(self._full.sizes, box.offsets, box.sizes, strict=True):
            corners = [c * (length + 1) + end for c in corners for end in (low, low + size)]
        combined = 0
        for corner in corners:
            # Hash the corner by SplitMix64 (Steele, Lea, Flood 2014); 2**64 and more are folded.
            number = (corner ^ (corner >> 64)) + 0x9E3779B97F4A7C15 & _WORD_MASK
            number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _WORD_MASK
            number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _WORD_MASK
            combined ^= number ^ (number >> 31)
        return combined
