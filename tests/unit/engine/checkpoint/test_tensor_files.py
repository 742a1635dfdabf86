"""Tensor files of a checkpoint: any tool reads them, and nothing wrong in them is taken."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.engine.checkpoint.lazy import DTYPES, memory_of, open_tensors
from bigtrain.engine.checkpoint.tensor_file import (
    BLOCK_BYTES,
    DTYPE_BYTES,
    NewPart,
    SaveIdentity,
    file_name,
    verify_parts,
    write_parts,
)
from bigtrain.engine.checkpoint.tensor_files import Listing, find_parts
from bigtrain.errors import CorruptCheckpointError
from bigtrain.system.boxes import Box
from tests.support.tiers import examples
from tests.support.worlds import ROOT

NAMES = {dtype: name for name, dtype in DTYPES.items()}
IDENTITY = SaveIdentity("0123456789abcdef", 7, "89abcdef")


def part_of(key: str, tensor: torch.Tensor, box: Box) -> NewPart:
    held = tensor[box.slices].contiguous()
    shape = tuple(tensor.shape)
    return NewPart(key, shape, box, NAMES[tensor.dtype], lambda: memory_of(held))


def whole(tensor: torch.Tensor) -> Box:
    return Box.full(tensor.shape)


def write(directory: Path, *ranks: Sequence[NewPart], identity: SaveIdentity = IDENTITY) -> None:
    for rank, parts in enumerate(ranks):
        write_parts(directory / file_name(rank), identity, rank, parts)


def test_what_they_are_of_needs_no_torch() -> None:
    program = (
        "import sys, bigtrain.engine.checkpoint.tensor_files as t; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
    assert DTYPES.keys() == DTYPE_BYTES.keys()
    assert all(dtype.itemsize == DTYPE_BYTES[name] for name, dtype in DTYPES.items())


def test_safetensors_opens_them(tmp_path: Path) -> None:
    made = {
        f"master/{name}": (torch.arange(12).view(3, 4) % 2).to(dtype)
        for name, dtype in DTYPES.items()
    }
    path = tmp_path / "file.safetensors"
    parts = [part_of(key, tensor, Box((1, 0), (2, 4))) for key, tensor in made.items()]
    num_bytes, checksum = write_parts(path, IDENTITY, 3, [*parts, *empty()])
    assert num_bytes == path.stat().st_size
    contents = path.read_bytes()
    length = 8 + int.from_bytes(contents[:8], "little")
    assert length % 8 == 0
    assert xxhash.xxh3_64_hexdigest(contents[:length]) == checksum
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors_by_name = {name: file.get_tensor(name) for name in file.keys()}
    assert [metadata[name] for name in ("run", "step", "attempt", "rank")] == [
        "0123456789abcdef",
        "7",
        "89abcdef",
        "3",
    ]
    for key, tensor in made.items():
        assert torch.equal(
            tensors_by_name[f"{key}@1,0"].view(torch.uint8), tensor[1:].view(torch.uint8)
        ), key
        assert metadata[f"{key}@1,0"].startswith("3,4 ")


def empty() -> list[NewPart]:
    return [part_of("buffer/none", torch.zeros(0), Box((0,), (0,)))]


@st.composite
def cuts(draw: st.DrawFn, box: Box) -> list[Box]:
    """A box cut in two, again and again, anywhere."""
    cuttable = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not cuttable or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(cuttable))
    size, begin = draw(st.integers(1, box.sizes[dim] - 1)), box.offsets[dim]
    low = box.replace(dim, begin, size)
    high = box.replace(dim, begin + size, box.sizes[dim] - size)
    return [*draw(cuts(low)), *draw(cuts(high))]


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_every_rectangle_of_every_cut_is_read(data: st.DataObject, tmp_path_factory: Any) -> None:
    directory = tmp_path_factory.mktemp("tensors")
    shape = data.draw(SHAPES)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
    tensor = torch.arange(math.prod(shape)).view(shape).to(dtype)
    boxes = data.draw(cuts(Box.full(shape)))
    ranks: list[list[NewPart]] = [[], [], []]
    for box in boxes:
        ranks[data.draw(st.integers(0, 2))].append(part_of("m/a", tensor, box))
    write(directory, *ranks)
    [lazy] = open_tensors(directory).values()
    assert torch.equal(lazy.read(), tensor)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    ends = [data.draw(st.integers(o + 1, n)) for o, n in zip(offsets, shape, strict=True)]
    sizes = tuple(end - o for end, o in zip(ends, offsets, strict=True))
    out = torch.full((*sizes[:-1], sizes[-1] + 1), -1, dtype=torch.float64)[..., :-1]
    lazy.fill(offsets, out)
    where = tuple(slice(o, end) for o, end in zip(offsets, ends, strict=True))
    assert torch.equal(out, tensor[where].to(torch.float64))
    # Without one of its parts, or with one twice, it is no tensor.
    left_out = data.draw(st.sampled_from(boxes))
    for wrong in ([box for box in boxes if box != left_out], [*boxes, left_out]):
        for path in directory.iterdir():
            path.unlink()
        write(directory, *([part_of("m/a", tensor, box)] for box in wrong))
        with pytest.raises(CorruptCheckpointError):
            find_parts(directory)


@settings(max_examples=examples(200))
@given(data=st.data())
def test_boxes_that_do_not_tile_are_refused(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Any boxes of the right volume: taken just where they cover each element once."""
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    tensor = torch.zeros(shape, dtype=torch.int8)
    counts, boxes = torch.zeros(shape, dtype=torch.int64), list[Box]()
    while sum(box.num_elements for box in boxes) < math.prod(shape):
        offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
        sizes = tuple(
            data.draw(st.integers(1, size - o)) for o, size in zip(offsets, shape, strict=True)
        )
        boxes.append(Box(offsets, sizes))
        counts[boxes[-1].slices] += 1
    directory = tmp_path_factory.mktemp("tensors")
    write(directory, *([part_of("m/a", tensor, box)] for box in boxes))
    if (counts == 1).all():
        assert len(find_parts(directory)["m/a"]) == len(boxes)
    else:
        with pytest.raises(CorruptCheckpointError, match="missing"):
            find_parts(directory)


def test_a_part_of_several_blocks_is_verified_where_it_is_read(tmp_path: Path) -> None:
    rows, columns = 40, BLOCK_BYTES // 40  # a row of 4 bytes is a tenth of a block
    tensor = torch.randn(rows, columns)
    write(tmp_path, [part_of("m/a", tensor, whole(tensor))])
    [lazy] = open_tensors(tmp_path).values()
    path = tmp_path / file_name(0)
    data_begin = path.stat().st_size - tensor.numel() * 4
    with path.open("r+b") as file:
        file.seek(data_begin + 2 * BLOCK_BYTES + 5)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for begin, end in ((0, 19), (31, 40), (3, 7)):
        out = torch.empty(end - begin, columns - 2)
        lazy.fill((begin, 1), out)
        assert torch.equal(out, tensor[begin:end, 1:-1])
    for begin, end in ((0, 40), (19, 21), (29, 31)):
        with pytest.raises(CorruptCheckpointError, match="contents do not match their checksum"):
            lazy.fill((begin, 0), torch.empty(end - begin, columns))
    [parts] = find_parts(tmp_path).values()
    with pytest.raises(CorruptCheckpointError, match="contents do not match their checksum"):
        verify_parts(parts)


def small_checkpoint(directory: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Two files; checksums of their headers, and the tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{k}/a": torch.randn(4, 6, generator=generator) for k in ("master", "exp_avg")}
    tensors["buffer/b"] = torch.arange(5, dtype=torch.int16)
    headers = {}
    for rank, columns in ((0, 2), (1, 4)):
        box = Box((0, 2 * rank), (4, columns))
        parts = [part_of(key, tensors[key], box) for key in ("master/a", "exp_avg/a")]
        if rank == 0:
            parts.append(part_of("buffer/b", tensors["buffer/b"], Box((0,), (5,))))
        name = file_name(rank)
        headers[name] = write_parts(directory / name, IDENTITY, rank, parts)[1]
    return headers, tensors


def assert_refused_or_same(directory: Path, headers: dict[str, str], tensors: Any) -> bool:
    try:
        tensors_by_name = {
            key: lazy.read() for key, lazy in open_tensors(directory, Listing(headers)).items()
        }
    except CorruptCheckpointError:
        return True
    assert tensors_by_name.keys() == tensors.keys()
    assert all(torch.equal(tensors_by_name[key], tensor) for key, tensor in tensors.items())
    return False


@settings(max_examples=examples(300))
@given(
    rank=st.integers(0, 1),
    kind=st.sampled_from(["flip", "cut", "grow", "zero", "swap", "insert"]),
    at=st.floats(0, 1, exclude_max=True),
    mask=st.integers(1, 255),
)
def test_no_damage_is_taken(
    rank: int, kind: str, at: float, mask: int, tmp_path_factory: Any
) -> None:
    directory = tmp_path_factory.mktemp("tensors")
    headers, tensors = small_checkpoint(directory)
    path, other = directory / file_name(rank), directory / file_name(1 - rank)
    before = path.read_bytes()
    contents, position = bytearray(before), int(at * len(before))
    if kind == "flip":
        contents[position] ^= mask
    elif kind == "cut":
        del contents[position:]
    elif kind == "grow":
        contents += bytes(mask)
    elif kind == "zero":
        contents[position : position + mask] = bytes(len(contents[position : position + mask]))
    elif kind == "swap":
        contents = bytearray(other.read_bytes())
    else:
        contents[position:position] = bytes([mask])
    path.write_bytes(contents)
    assert assert_refused_or_same(directory, headers, tensors) == (contents != before)


HEADER = {
    "__metadata__": {
        "format": "bigtrain.checkpoint/2",
        "run": "0123456789abcdef",
        "step": "7",
        "attempt": "89abcdef",
        "rank": "0",
        "m/a@0": "4 " + xxhash.xxh3_64_hexdigest(bytes(16)),
        "m/b@0,0": "1,2 " + xxhash.xxh3_64_hexdigest(bytes(8)),
    },
    "m/a@0": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "m/b@0,0": {"dtype": "F32", "shape": [1, 2], "data_offsets": [16, 24]},
}


def write_raw(directory: Path, header: bytes, data: bytes = bytes(24)) -> Path:
    path = directory / file_name(0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def changed(where: str, value: object) -> bytes:
    tree: Any = json.loads(json.dumps(HEADER))
    *names, last = where.split(">")
    inner = tree
    for name in names:
        inner = inner[name]
    inner[last] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("m/a@0>dtype", "F64"),
        ("m/a@0>dtype", ["F32"]),
        ("m/a@0>shape", [5]),
        ("m/a@0>shape", [-4]),
        ("m/a@0>shape", []),
        ("m/a@0>shape", [10**30]),
        ("m/a@0>shape", "4"),
        ("m/a@0>data_offsets", [8, 24]),
        ("m/a@0>data_offsets", [-8, 8]),
        ("m/a@0>data_offsets", [0, 16, 24]),
        ("m/a@0>data_offsets", [2**70, 2**70 + 16]),
        ("m/a@0>data_offsets", None),
        ("m/a@0", 7),
        ("m/c@0", {"dtype": "F32", "shape": [1], "data_offsets": [24, 28]}),
        ("m/b@0,0>data_offsets", [8, 16]),
        ("__metadata__", {}),
        ("__metadata__", 7),
        ("__metadata__>format", "pt"),
        ("__metadata__>step", "seven"),
        ("__metadata__>step", "-7"),
        ("__metadata__>m/a@0", "4"),
        ("__metadata__>m/a@0", 7),
        ("__metadata__>m/a@0", "5 " + "0" * 16),
        ("__metadata__>m/a@0", "4 " + "0" * 32),
        ("__metadata__>m/b@0,0", "1,2,1 " + "0" * 16),
    ],
)
def test_a_header_that_does_not_hold_together(where: str, value: object, tmp_path: Path) -> None:
    write_raw(tmp_path, json.dumps(HEADER).encode())
    assert {k: t.tolist() for k, t in read_full(tmp_path).items()} == {
        "m/a": [0.0] * 4,
        "m/b": [[0.0] * 2],
    }
    path = write_raw(tmp_path, changed(where, value))
    with pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        find_parts(tmp_path)
    assert path.stat().st_size < 4096


TWICE = json.dumps(HEADER).replace('"m/b@0,0": {', '"m/a@0": {', 1).encode()


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 200_000, b"{}", TWICE],
    ids=range(9),
)
def test_a_header_of_garbage(header: bytes, tmp_path: Path) -> None:
    write_raw(tmp_path, header)
    with pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        find_parts(tmp_path)


@pytest.mark.parametrize("length", [0, 25, 1 << 20, (1 << 64) - 1])
def test_a_length_that_cannot_be(length: int, tmp_path: Path) -> None:
    path = write_raw(tmp_path, b"", b"{" + bytes(30))
    contents = path.read_bytes()
    path.write_bytes(length.to_bytes(8, "little") + contents[8:])
    with pytest.raises(CorruptCheckpointError, match=str(tmp_path)):
        find_parts(tmp_path)


def test_files_of_two_saves_do_not_mix(tmp_path: Path) -> None:
    tensor = torch.zeros(2, 2)
    halves = [[part_of("m/a", tensor, Box((row, 0), (1, 2)))] for row in (0, 1)]
    for other in (
        SaveIdentity("f" * 16, 7),
        SaveIdentity(IDENTITY.run, 8),
        SaveIdentity(IDENTITY.run, 7, "x"),
    ):
        write(tmp_path, *halves)
        write_parts(tmp_path / file_name(1), other, 1, halves[1])
        with pytest.raises(CorruptCheckpointError, match=r"rank-00001.*is of run .*, and not of"):
            find_parts(tmp_path)


def test_nothing_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="holds no tensors"):
        find_parts(tmp_path)
    with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors: cannot be read"):
        find_parts(tmp_path, Listing({file_name(0): "0" * 16}))
