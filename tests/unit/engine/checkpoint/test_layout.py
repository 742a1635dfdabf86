"""A reader opens the few files that the layout names, and a wrong layout costs nothing but time."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigtrain.engine.checkpoint import tensor_files
from bigtrain.engine.checkpoint.fragments import MASTER, Fragment
from bigtrain.engine.checkpoint.layout import CheckpointLayout, LayoutRow, merge, parse_layout
from bigtrain.engine.checkpoint.lazy import memory_of, open_boxes
from bigtrain.engine.checkpoint.tensor_file import NewPart, SaveIdentity, file_name, write_parts
from bigtrain.engine.checkpoint.tensor_files import Listing, Wanted, list_files
from bigtrain.errors import CheckpointError, CorruptCheckpointError
from bigtrain.models.parallel.sharding import Shard, even_ranges, padded_range
from bigtrain.system.boxes import Box, ShardRanges
from tests.support.tiers import examples

KEY = f"{MASTER}/a"


def shards(shape: tuple[int, ...], tensor_size: int, dim: int | None, kind: str) -> list[Shard]:
    """How `tensor_size` ranks hold a parameter: alike, in even or padded rows, or of two packed
    matrices."""
    if dim is None:
        return [Shard(shape, primary=rank == 0) for rank in range(tensor_size)]
    shards_of_ranks = []
    for rank in range(tensor_size):
        if kind == "padded":
            piece, held = padded_range(shape[dim], tensor_size, rank)
            pieces = [piece]
        else:
            half = shape[dim] // 2 if kind == "packed" else 0
            low = even_ranges(half, tensor_size, rank)
            high = even_ranges(shape[dim] - half, tensor_size, rank)
            pieces = [low, (high[0] + half, high[1] + half)]
            held = sum(stop - start for start, stop in pieces)
        ranges = tuple((start, stop) for start, stop in pieces if start < stop)
        shards_of_ranks.append(Shard(shape, dim, ranges, held, primary=True))
    return shards_of_ranks


def fragments_of(
    shard: Shard, full: torch.Tensor, num_replicas: int, *, even: bool
) -> list[tuple[int, Fragment, int]]:
    """(replica, its fragment, capacity) as ZeRO-3 cuts a shard, or anywhere, as ZeRO-1 does."""
    local = shard.take(full).reshape(-1).clone()
    capacity = max(1, -(-local.numel() // num_replicas))
    edges = [min(capacity * number, local.numel()) for number in range(num_replicas + 1)]
    if not even:
        edges = sorted({0, local.numel(), *(min(edge + 1, local.numel()) for edge in edges[1:-1])})
    return [
        (number, Fragment("a", shard, low, {MASTER: local[low:high]}), capacity)
        for number, (low, high) in enumerate(itertools.pairwise(edges))
        if low < high
    ]


def write(
    directory: Path, full: torch.Tensor, held: list[Shard], replicas: int, *, even: bool
) -> CheckpointLayout:
    """A checkpoint of one tensor; rank = replica * tensor_size + tensor rank."""
    rows, size = [], len(held)
    files: dict[int, list[NewPart]] = {rank: [] for rank in range(replicas * size)}
    for tensor_rank, shard in enumerate(held):
        if not shard.primary:
            continue
        ranges = ShardRanges(shard.shape, shard.dim, shard.ranges, shard.local_size)
        group = tuple(range(tensor_rank, replicas * size, size))
        for number, fragment, capacity in fragments_of(shard, full, replicas, even=even):
            rank = group[number]
            count = fragment.tensors[MASTER].numel()
            if not even:
                rows.append(LayoutRow(KEY, ranges, (rank,), fragment.start, count))
            elif number == 0:
                rows.append(LayoutRow(KEY, ranges, group, 0, capacity))
            for box, view in fragment.parts(MASTER):
                memory = memory_of(view.contiguous())
                shape = tuple(full.shape)
                files[rank].append(NewPart(KEY, shape, box, "F32", lambda m=memory: m))
    for rank, parts in files.items():
        write_parts(directory / file_name(rank), SaveIdentity("0" * 16, 1), rank, parts)
    return merge(rows)


def listed(directory: Path, layout: CheckpointLayout | None) -> Listing:
    return replace(list_files(directory), layout=layout)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    dim = draw(st.sampled_from([None, *range(len(shape))]))
    low = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for o, n in zip(low, shape, strict=True))
    return {
        "shape": shape,
        "dim": dim,
        "kind": draw(st.sampled_from(["even", "padded", "packed"])),
        "tensor_size": draw(st.integers(1, 3)),
        "replicas": draw(st.integers(1, 5)),
        "even": draw(st.booleans()),
        "box": Box(low, sizes),
    }


@settings(max_examples=examples(200))
@given(case=cases())
def test_the_layout_names_every_file_that_holds_some_of_a_box(
    case: dict[str, Any], tmp_path_factory: Any
) -> None:
    directory = tmp_path_factory.mktemp("tensors")
    full = torch.arange(math.prod(case["shape"]), dtype=torch.float32).view(case["shape"])
    held = shards(case["shape"], case["tensor_size"], case["dim"], case["kind"])
    layout = write(directory, full, held, case["replicas"], even=case["even"])
    layout = parse_layout(json.dumps(layout.to_json()).encode())
    box = case["box"]
    wanted = {KEY: Wanted(case["shape"], [box])}
    named = layout.writers(KEY, box)
    parts = tensor_files.find_boxes(directory, wanted, ranks=named)  # raises if one was missing
    assert {part.path.name for part in parts[KEY]} <= {file_name(rank) for rank in named}
    out = torch.full(box.sizes, -1.0)
    open_boxes(directory, wanted, listed(directory, layout))[KEY].fill(box.offsets, out)
    assert torch.equal(out, full[box.slices])


def test_a_rank_that_reads_what_it_wrote_opens_its_own_file(tmp_path: Path) -> None:
    full = torch.randn(64, 6)
    layout = write(tmp_path, full, shards((64, 6), 2, 0, "even"), 8, even=True)
    assert sum(len(rows) for rows in layout.rows.values()) == 2  # one for each tensor-parallel rank
    # Rank 5 = replica 2, tensor rank 1: elements 48 to 71 of rows 32 to 63.
    assert layout.writers(KEY, Box((40, 0), (4, 6))) == {5}
    assert layout.writers(KEY, Box((31, 0), (2, 1))) == {14, 1}


def test_headers_of_other_files_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = torch.randn(40, 5)
    layout = write(tmp_path, full, shards((40, 5), 1, None, "even"), 20, even=True)
    opened: list[str] = []
    read_header = tensor_files.read_header

    def watched(path: Path, digest: str) -> Any:
        opened.append(path.name)
        return read_header(path, digest)

    monkeypatch.setattr(tensor_files, "read_header", watched)
    wanted = {KEY: Wanted((40, 5), [Box((6, 0), (4, 5))])}
    out = torch.empty(4, 5)
    open_boxes(tmp_path, wanted, listed(tmp_path, layout))[KEY].fill((6, 0), out)
    assert torch.equal(out, full[6:10])
    assert opened == [file_name(3), file_name(4)]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([((0,), 0, 1000)], id="all of it in the first file"),
        pytest.param([((7, 6, 5, 4, 3, 2, 1, 0), 0, 25)], id="the wrong way round"),
        pytest.param([((99,), 0, 1000)], id="a file that is not there"),
        pytest.param([((0,), 900, 10)], id="outside of the tensor"),
    ],
)
def test_a_wrong_layout_is_not_trusted(tmp_path: Path, rows: list[Any]) -> None:
    full = torch.randn(40, 5)
    write(tmp_path, full, shards((40, 5), 1, None, "even"), 8, even=True)
    wrong = merge(LayoutRow(KEY, ShardRanges((40, 5)), *row) for row in rows)
    wanted = {KEY: Wanted((40, 5), [Box((3, 0), (30, 5))])}
    out = torch.empty(30, 5)
    open_boxes(tmp_path, wanted, listed(tmp_path, wrong))[KEY].fill((3, 0), out)
    assert torch.equal(out, full[3:33])


def test_a_file_that_is_gone_is_damage(tmp_path: Path) -> None:
    layout = write(tmp_path, torch.randn(40, 5), shards((40, 5), 1, None, "even"), 8, even=True)
    (tmp_path / file_name(4)).unlink()
    wanted = {KEY: Wanted((40, 5), [Box((0, 0), (40, 5))])}
    with pytest.raises(CorruptCheckpointError, match="parts are missing"):
        open_boxes(tmp_path, wanted, listed(tmp_path, layout))
    untouched = {KEY: Wanted((40, 5), [Box((0, 0), (20, 5))])}
    assert open_boxes(tmp_path, untouched, listed(tmp_path, layout))


def test_another_models_checkpoint_is_no_damage(tmp_path: Path) -> None:
    layout = write(tmp_path, torch.randn(4, 5), shards((4, 5), 1, None, "even"), 2, even=True)
    for shape, key, text in (
        ((4, 6), KEY, r"\[4, 5\] there and \[4, 6\] in this run's model -> .* output\.directory"),
        ((5,), KEY, "has shape"),
        ((4, 5), "master/b", "holds no tensor master/b"),
    ):
        wanted = {key: Wanted(shape, [Box.full(shape)])}
        for where in (layout, None):
            with pytest.raises(CheckpointError, match=text) as raised:
                open_boxes(tmp_path, wanted, listed(tmp_path, where))
            assert not isinstance(raised.value, CorruptCheckpointError)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 2}',
        b'{"format": 1, "groups": 1, "cuts": [], "tensors": {}}',
        b'{"format": 1, "groups": [[0]], "cuts": [], "tensors": {"a": [[0, 0, 0, 1]]}}',
    ],
)
def test_what_is_no_layout_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_layout(text)
