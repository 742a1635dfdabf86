"""Every file of a checkpoint cut, changed or gone: refused by name, or proven not to matter."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.errors import CorruptCheckpointError
from bigtrain.run.checkpointing import checkpoints
from tests.chaos.conftest import STEPS, arguments, assert_same_run
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


@pytest.mark.slow
def test_the_files_are_all_there_are(uninterrupted: Path) -> None:
    directory = checkpoints.checkpoint_path(uninterrupted, NEWEST)
    files = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert files == set(FILES)


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_named(run: Path, name: str, kind: str) -> None:
    directory = checkpoints.checkpoint_path(run, NEWEST)
    DAMAGES[kind](directory / name)
    reason = checkpoints.find_corruption(directory)
    if name.startswith("tensors/") and kind == "flip":
        assert reason is None  # found when a resume reads it, and by `bigtrain verify`
        with pytest.raises(CorruptCheckpointError, match=rf"{name}: contents do not match"):
            read_full(directory / checkpoints.TENSORS)
        reason = checkpoints.find_corruption(directory, "all")
    assert reason is not None
    assert reason.startswith(str(directory / name)) or name == "manifest.json"
    assert str(directory) in reason


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_byte_changes_what_is_read(run: Path, name: str) -> None:
    directory = checkpoints.checkpoint_path(run, NEWEST)
    state = checkpoints.read_state(directory)
    tensors = read_full(directory / checkpoints.TENSORS)
    path = directory / name
    contents = path.read_bytes()
    chooser = random.Random(name)
    num_refused = 0
    for _ in range(60):
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
    assert num_refused == 60


def fall_back(server: Server, run_yaml: Path, run: Path, uninterrupted: Path, name: str) -> None:
    codes, text = server.live(arguments(run_yaml, run))
    assert codes == [0, 0], text
    corrupt = checkpoints.checkpoint_path(run, NEWEST)
    line = f"skipping corrupt checkpoint at step {NEWEST}: {corrupt}/{name}"
    assert text.count(line) == 1
    assert f"resumed at step {BEFORE} " in text
    assert_same_run(run, uninterrupted)
    assert checkpoints.list_steps(run) == [8, 16, 22, 24]


def test_damage_found_while_reading_falls_back(
    server: Server, run_yaml: Path, run: Path, uninterrupted: Path
) -> None:
    name = "tensors/rank-00001.safetensors"
    DAMAGES["flip"](checkpoints.checkpoint_path(run, NEWEST) / name)
    fall_back(server, run_yaml, run, uninterrupted, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_falls_back(
    server: Server, run_yaml: Path, run: Path, uninterrupted: Path, name: str, kind: str
) -> None:
    DAMAGES[kind](checkpoints.checkpoint_path(run, NEWEST) / name)
    fall_back(server, run_yaml, run, uninterrupted, name)


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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["tensor file", "directory"])
def test_another_steps_content_falls_back(
    server: Server, run_yaml: Path, run: Path, uninterrupted: Path, what: str
) -> None:
    name = put_another_steps_content(run, what)
    fall_back(server, run_yaml, run, uninterrupted, name)


@pytest.mark.slow
def test_another_runs_checkpoint_falls_back(
    server: Server, run_yaml: Path, run: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    codes, text = server.live(arguments(run_yaml, other, f"train.steps={NEWEST}"))
    assert codes == [0, 0], text
    newest = checkpoints.checkpoint_path(run, NEWEST)
    shutil.rmtree(newest)
    shutil.copytree(checkpoints.checkpoint_path(other, NEWEST), newest)
    fall_back(server, run_yaml, run, uninterrupted, "manifest.json")


def test_a_run_with_nothing_whole_is_refused(server: Server, run_yaml: Path, run: Path) -> None:
    for step in (8, 16):
        (checkpoints.checkpoint_path(run, step) / "state.json").unlink()
    DAMAGES["flip"](checkpoints.checkpoint_path(run, NEWEST) / "tensors/rank-00000.safetensors")
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    codes, text = server.live(arguments(run_yaml, run))
    assert 2 in codes, text
    assert "Traceback" not in text
    assert f"{run}: every checkpoint is corrupt, so the run cannot resume" in text
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    assert (
        "step-00000022/tensors/rank-00000.safetensors: contents do not match their checksum" in text
    )


@pytest.mark.slow
def test_contents_are_verified_on_request(
    server: Server, run_yaml: Path, run: Path, uninterrupted: Path
) -> None:
    """What no resume reads, the whole file's checksum covers."""
    path = checkpoints.checkpoint_path(run, NEWEST) / "tensors/rank-00000.safetensors"
    contents = path.read_bytes()
    path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))
    codes, text = server.live(arguments(run_yaml, run, "checkpoint.verify=contents"))
    assert codes == [0, 0], text
    assert f"{path}: contents do not match their checksum" in text
    assert f"resumed at step {BEFORE} " in text
