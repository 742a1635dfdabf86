"""Every file of a checkpoint cut, changed or gone: refused by name, or proven not to matter."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.errors import CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import STEPS, arguments, assert_same_run, complete, refused
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

FILES = [
    "layout.json",
    "manifest.json",
    "state.json",
    "probe.safetensors",
    "tensors/rank-00000.safetensors",
    "tensors/rank-00001.safetensors",
]
NEWEST, BEFORE = 22, 16


def flip(path: Path, position: int, mask: int = 0x10) -> None:
    contents = bytearray(path.read_bytes())
    contents[position] ^= mask
    path.write_bytes(contents)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flip": lambda path: flip(path, path.stat().st_size // 2),
    "cut": cut,
    "delete": Path.unlink,
}


@pytest.fixture
def run(uninterrupted: Path, tmp_path: Path) -> Path:
    """The run as it was before its last two steps; its checkpoints are of steps 8, 16 and 22."""
    copy = tmp_path / "run"
    shutil.copytree(uninterrupted, copy)
    checkpoints.remove(checkpoints.checkpoint_path(copy, STEPS))
    return copy


def test_damage_is_named(run: Path) -> None:
    directory = checkpoints.checkpoint_path(run, NEWEST)
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert files == set(FILES)
    for name, (kind, damage) in itertools.product(FILES, DAMAGES.items()):
        contents = (directory / name).read_bytes()
        damage(directory / name)
        reason = checkpoints.find_corruption(directory)
        if name.startswith("tensors/") and kind == "flip":
            assert reason is None  # found when a resume reads it, and by `bigtrain verify`
            with pytest.raises(CorruptCheckpointError, match=rf"{name}: contents do not match"):
                read_full(directory / checkpoints.TENSORS)
            reason = checkpoints.find_corruption(directory, "all")
        assert reason is not None
        assert reason.startswith(str(directory / name)) or name == "manifest.json"
        assert str(directory) in reason
        (directory / name).write_bytes(contents)


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_byte_changes_what_is_read(run: Path, name: str) -> None:
    directory = checkpoints.checkpoint_path(run, NEWEST)
    state = checkpoints.read_state(directory)
    tensors = read_full(directory / checkpoints.TENSORS)
    path = directory / name
    contents = path.read_bytes()
    chooser = random.Random(name)
    num_refused = 0
    for _ in range(20):
        flip(path, chooser.randrange(len(contents)), 1 << chooser.randrange(8))
        if checkpoints.find_corruption(directory) is not None:
            num_refused += 1
        else:
            try:
                again = read_full(directory / checkpoints.TENSORS)
            except CorruptCheckpointError:
                num_refused += 1
            else:
                assert checkpoints.read_state(directory) == state
                assert all(torch.equal(again[key], tensors[key]) for key in tensors)
        path.write_bytes(contents)
    assert num_refused == 20


def put_another_steps_content(run: Path, what: str) -> str:
    """Replace a file or all of the newest checkpoint; return the name of the file at fault. By
    itself each is right: the size is the same, and so are its checksums."""
    newest, before = (checkpoints.checkpoint_path(run, step) for step in (NEWEST, BEFORE))
    name = "tensors/rank-00001.safetensors" if what == "tensor file" else "manifest.json"
    if what == "tensor file":
        assert (newest / name).stat().st_size == (before / name).stat().st_size
        shutil.copyfile(before / name, newest / name)
    else:
        shutil.rmtree(newest)
        shutil.copytree(before, newest)
    return name


@pytest.mark.parametrize("what", ["tensor file", "directory"])
def test_another_steps_content_is_named(run: Path, what: str) -> None:
    directory = checkpoints.checkpoint_path(run, NEWEST)
    name = put_another_steps_content(run, what)
    if what == "tensor file":
        with pytest.raises(CorruptCheckpointError, match=name):
            read_full(directory / checkpoints.TENSORS)
    else:
        reason = checkpoints.find_corruption(directory)
        assert reason is not None
        assert reason.startswith(str(directory / name))


def flip_a_tensor(run: Path) -> str:
    """Found when it is read."""
    DAMAGES["flip"](checkpoints.checkpoint_path(run, NEWEST) / FILES[-1])
    return FILES[-1]


def delete_the_state(run: Path) -> str:
    (checkpoints.checkpoint_path(run, NEWEST) / "state.json").unlink()
    return "state.json"


# tests/chaos/test_memory_checkpoints.py has one that is found when it is read.
@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        flip_a_tensor,
        delete_the_state,
        pytest.param(
            partial(put_another_steps_content, what="tensor file"), id="another step's tensors"
        ),
    ],
)
def test_falls_back(
    server: Server,
    run_yaml: Path,
    run: Path,
    uninterrupted: Path,
    damage: Callable[[Path], str],
) -> None:
    name = damage(run)
    text = complete(server, arguments(run_yaml, run))
    corrupt = checkpoints.checkpoint_path(run, NEWEST)
    line = f"skipping corrupt checkpoint at step {NEWEST}: {corrupt}/{name}"
    assert text.count(line) == 1
    assert f"resumed at step {BEFORE} " in text
    assert_same_run(run, uninterrupted)
    assert checkpoints.list_steps(run) == [8, 16, 22, 24]


@pytest.mark.slow
def test_another_runs_checkpoint_falls_back(
    server: Server, run_yaml: Path, run: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    complete(server, arguments(run_yaml, other, f"train.steps={NEWEST}"))
    newest = checkpoints.checkpoint_path(run, NEWEST)
    shutil.rmtree(newest)
    shutil.copytree(checkpoints.checkpoint_path(other, NEWEST), newest)
    text = complete(server, arguments(run_yaml, run))
    assert f"skipping corrupt checkpoint at step {NEWEST}: {newest}/manifest.json" in text
    assert_same_run(run, uninterrupted)


def test_a_run_with_nothing_whole_is_refused(server: Server, run_yaml: Path, run: Path) -> None:
    for step in (8, 16):
        (checkpoints.checkpoint_path(run, step) / "state.json").unlink()
    DAMAGES["flip"](checkpoints.checkpoint_path(run, NEWEST) / "tensors/rank-00000.safetensors")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    text = refused(server, arguments(run_yaml, run))
    assert f"{run}: every checkpoint is corrupt, so the run cannot resume" in text
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert (
        "step-00000022/tensors/rank-00000.safetensors: contents do not match their checksum" in text
    )


@pytest.mark.slow
def test_contents_are_verified_on_request(server: Server, run_yaml: Path, run: Path) -> None:
    """What no resume reads, the whole file's checksum covers."""
    path = checkpoints.checkpoint_path(run, NEWEST) / "tensors/rank-00000.safetensors"
    flip(path, -1, 1)
    text = complete(server, arguments(run_yaml, run, "checkpoint.verify=contents"))
    assert f"{path}: contents do not match their checksum" in text
    assert f"resumed at step {BEFORE} " in text
