"""A run with checkpoints in memory that is killed: it resumes from them, to the same bits."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.engine.checkpoint.tensor_file import read_header
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.run.checkpointing import checkpoints
from bigtrain.settings.run_config import ModelSection
from tests.chaos.conftest import arguments, assert_same_run, complete, run_until_killed
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

TOPOLOGIES = {
    "zero3": ["engine.deepspeed_config=zero3"],
    "pipeline2": ["engine.deepspeed_config=zero1", "parallel.pipeline=2"],
}


def words(run_yaml: Path, run: Path, memory: Path, *more: str) -> list[str]:
    """Arguments of a run that saves in memory after every step, and on disk only at its end."""
    own = [
        "checkpoint.memory.every_steps=1",
        f"checkpoint.memory.directory={memory}",
        "checkpoint.every_steps=null",
        "checkpoint.keep_every_steps=null",
    ]
    return arguments(run_yaml, run, *own, *more)


def hugging_face_model(tree: dict[str, Any], directory: Path) -> Path:
    """Write the model of a run with random weights as Hugging Face files."""
    section = ModelSection.model_validate(tree["model"])
    build_model(section, load_hf_config(section), seed=5).save_pretrained(directory)
    return directory


def steps_in_memory(memory: Path) -> list[int]:
    """Steps of the complete checkpoints in `memory`."""
    directories = memory.glob("bigtrain-*/*/checkpoints/step-????????")
    return sorted(int(path.name.removeprefix("step-")) for path in directories)


def resumed(text: str) -> list[tuple[int, str]]:
    """Step and directory of each resume that the output tells of."""
    return [(int(step), at) for step, at in re.findall(r"resumed at step (\d+) from (\S+)", text)]


def left_in(memory: Path) -> list[str]:
    return sorted(str(path.relative_to(memory)) for path in memory.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_killed_rank_resumes_from_memory_to_the_same_bits(
    server: Server, run_yaml: Path, memory: Path, tmp_path: Path, topology: str
) -> None:
    own = TOPOLOGIES[topology]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    codes, text = server.live(arguments(run_yaml, undisturbed, "checkpoint.every_steps=null",
                                        "checkpoint.keep_every_steps=null", *own))  # fmt: skip
    assert codes == [0, 0], text
    command = words(run_yaml, run, memory, *own)
    codes, text = server.live(command, die=(1, 12))  # while it writes one of them
    assert -signal.SIGKILL in codes, text
    assert checkpoints.list_steps(run) == []
    newest = steps_in_memory(memory)[-1]
    assert newest >= 1
    text = complete(server, command)
    [(step, directory)] = resumed(text)
    assert step == newest
    assert directory.startswith(str(memory))
    assert left_in(memory) == []
    assert_same_run(run, undisturbed)


@pytest.fixture
def killed(server: Server, run_yaml: Path, memory: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A run that was killed with checkpoints in memory and older ones on disk; its arguments."""
    run = tmp_path / "run"
    command = words(run_yaml, run, memory, "checkpoint.every_steps=3", "checkpoint.keep_last=9")
    run_until_killed(server, command, die=(1, 26))
    assert checkpoints.list_steps(run)
    return run, command


def newest_in_memory(run: Path, memory: Path) -> int:
    """Return the newest step in memory, without checkpoints on disk from then on: on a slow machine
    memory skips steps."""
    newest = steps_in_memory(memory)[-1]
    for step in checkpoints.list_steps(run):
        if step >= newest:
            shutil.rmtree(checkpoints.checkpoint_path(run, step))
    return newest


def continue_run(server: Server, command: list[str], memory: Path, reference: Path) -> str:
    """Start the run again, to its end; returns what it printed."""
    text = complete(server, command)
    assert left_in(memory) == []
    run = Path(next(w for w in command if w.startswith("output.directory=")).partition("=")[2])
    assert_same_run(run, reference)
    return text


@pytest.mark.slow
def test_a_checkpoint_that_is_written_late_is_of_its_own_step(
    server: Server, run_yaml: Path, memory: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    """While two more steps are trained, which change every tensor."""
    run = tmp_path / "run"
    command = words(run_yaml, run, memory)
    run_until_killed(server, command, write_late=2, die=(1, 20))
    assert steps_in_memory(memory)
    continue_run(server, command, memory, uninterrupted)


@pytest.mark.slow
def test_the_newest_of_disk_and_memory_is_resumed(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    run, command = killed
    newest = newest_in_memory(run, memory)
    text = continue_run(server, command, memory, uninterrupted)
    assert [step for step, _ in resumed(text)] == [newest]


def test_a_corrupt_copy_is_named_and_an_older_checkpoint_is_used(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    run, command = killed
    newest = newest_in_memory(run, memory)
    for step in steps_in_memory(memory):
        [file] = memory.glob(f"*/*/checkpoints/step-{step:08d}/tensors/rank-00001.safetensors")
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    text = continue_run(server, command, memory, uninterrupted)
    [(step, directory)] = resumed(text)
    assert directory == str(checkpoints.checkpoint_path(run, step))
    [line] = [x for x in text.splitlines() if f"corrupt checkpoint at step {newest}" in x]
    assert "rank-00001.safetensors" in line


def flip_bit(file: Path, key: str) -> None:
    """Flip the last bit of the first part of a tensor whose key begins with `key`."""
    _, parts = read_header(file, "")
    part = next(part for part in parts if part.key.startswith(key) and part.num_bytes)
    content = bytearray(file.read_bytes())
    content[part.begin + part.num_bytes - 1] ^= 1
    file.write_bytes(content)


STARTED_AGAIN = {
    # topology, initial weights, rank of the damaged file, key of the damaged tensor
    "last states of a rank": ("zero2", "random", 1, "exp_avg_sq/model.norm.weight"),
    "first weights of the main rank": ("zero3", "random", 0, "master/"),
    "averages of a model's files": ("zero2", "hugging face", 1, "exp_avg/"),
    "adapters": ("zero2", "adapters", 0, "exp_avg/"),
    "weights of another run": ("zero2", "run", 1, "master/"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTED_AGAIN)
def test_a_run_without_a_usable_checkpoint_starts_with_a_new_engine(
    name: str,
    server: Server,
    run_yaml: Path,
    memory: Path,
    tmp_path: Path,
    uninterrupted: Path,
) -> None:
    """All checkpoints are in memory, and corrupt. The loss of each step, the weights and states at
    the end are those of a run that was never killed."""
    topology, weights, rank, key = STARTED_AGAIN[name]
    own = [f"engine.deepspeed_config={topology}", "checkpoint.every_steps=null"]
    own.append("checkpoint.keep_every_steps=null")
    if weights == "run":
        own.append(f"checkpoint.initialize_from={uninterrupted}")
    elif weights != "random":
        model = hugging_face_model(yaml.safe_load(run_yaml.read_text()), tmp_path / "model")
        own += [f"model.path={model}", "model.config=null"]
    own += ["optimizer.ema.decay=0.9"] if weights == "hugging face" else []
    own += ["adapters.rank=2"] if weights == "adapters" else []
    reference = tmp_path / "undisturbed"
    if name == "last states of a rank":
        reference = uninterrupted
    else:
        complete(server, arguments(run_yaml, reference, *own))
    command = words(run_yaml, tmp_path / "run", memory, *own)
    run_until_killed(server, command, die=(1, 25))
    steps = steps_in_memory(memory)
    assert steps
    for file in memory.glob(f"*/*/checkpoints/*/tensors/rank-{rank:05d}.safetensors"):
        flip_bit(file, key)
    text = continue_run(server, command, memory, reference)
    assert resumed(text) == []
    for step in steps:
        assert f"skipping corrupt checkpoint at step {step}: " in text
    assert text.count("building the engine again") == len(steps)


@pytest.mark.slow
def test_a_lost_part_is_named_and_the_disk_is_used(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    run, command = killed
    for file in memory.glob("*/*/checkpoints/step-*/tensors/rank-00001.safetensors"):
        file.unlink()
    text = continue_run(server, command, memory, uninterrupted)
    [(_, directory)] = resumed(text)
    assert directory.startswith(str(run))
    assert "no remaining host has rank-00001.safetensors" in text


@pytest.mark.slow
def test_memory_of_another_user_is_not_used(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    run, command = killed
    [root] = memory.iterdir()
    root.chmod(0o755)
    text = complete(server, command)
    [(_, directory)] = resumed(text)
    assert directory.startswith(str(run))
    lines = [x for x in text.splitlines() if "no checkpoints in memory, only on disk" in x]
    assert lines
    assert all("is not a directory of this user only" in line for line in lines)
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_memory_of_an_earlier_run_in_the_same_directory_is_removed(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    run, command = killed
    shutil.rmtree(run)
    text = continue_run(server, command, memory, uninterrupted)
    assert resumed(text) == []
    assert "removed 1 left-over" in text


@pytest.mark.slow
def test_memory_is_removed_by_a_start_without_it(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    """It holds steps that the run trains again, which no later start may take for the run's."""
    run, command = killed
    [own] = memory.glob("bigtrain-*/*")
    default = Path("/dev/shm", own.parent.name)
    default.mkdir(mode=0o700, exist_ok=True)
    moved = default / own.name
    shutil.move(own, moved)
    text = complete(server, [*command, "checkpoint.memory=null"])
    assert resumed(text)[0][1].startswith(str(run))
    assert not moved.exists()
    assert_same_run(run, uninterrupted)


@pytest.mark.slow
def test_steps_that_a_later_launch_trained_again_are_not_resumed(
    server: Server, memory: Path, killed: tuple[Path, list[str]], uninterrupted: Path
) -> None:
    """As when the run moved to another host, was killed there, and is back."""
    run, command = killed
    [own] = memory.glob("bigtrain-*/*")
    aside = memory / "aside"
    shutil.move(own, aside)
    run_until_killed(server, command, die=(0, 120))
    [left] = memory.glob("bigtrain-*/*")
    shutil.rmtree(left)
    shutil.move(aside, left)
    text = continue_run(server, command, memory, uninterrupted)
    assert "the run has continued from an earlier step since" in text
    assert resumed(text)[0][1].startswith(str(run))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_another_topology_resumes_from_memory(
    server: Server, memory: Path, killed: tuple[Path, list[str]], size: int
) -> None:
    run, command = killed
    newest = newest_in_memory(run, memory)
    own = [f"parallel.tensor={size}", f"engine.deepspeed_config=zero{3 - size}"]
    text = complete(server, [*command, *own], world_size=size)
    [(step, directory)] = resumed(text)
    assert (step, directory.startswith(str(memory))) == (newest, True)
    assert left_in(memory) == []


def test_too_small_a_memory_is_one_line(
    server: Server, run_yaml: Path, memory: Path, tmp_path: Path
) -> None:
    small = memory / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        run = tmp_path / "run"
        own = ["checkpoint.every_steps=2", "train.steps=6"]
        text = complete(server, words(run_yaml, run, small, *own))
        lines = [line for line in text.splitlines() if "could not be written" in line]
        assert len(lines) == 1
        assert "from here on only the disk is used" in lines[0]
        assert "GiB free -> a larger one" in lines[0]
        assert "too small, so only those on disk will be written" in text
        assert left_in(small) == []
        assert checkpoints.list_steps(run)[-1] == 6
    finally:
        subprocess.run(["umount", str(small)], check=True)


def survive(
    server: Server, command: list[str], memory: Path, num_kills: int, seed: int
) -> list[int]:
    """Kill the run at random operations on its checkpoints; the steps at which it resumed."""
    chooser = random.Random(seed)
    steps: list[int] = []
    for _ in range(num_kills):
        codes, text = server.live(command, die=(chooser.choice([0, 1]), chooser.randint(1, 90)))
        assert codes == [0, 0] or -signal.SIGKILL in codes, text
        assert "corrupt" not in text, text
        steps += [step for step, _ in resumed(text)]
        if codes == [0, 0]:
            break
    complete(server, command)
    assert left_in(memory) == []
    return steps


@pytest.mark.slow
def test_random_kills_leave_nothing_and_end_as_the_undisturbed_run(
    server: Server, run_yaml: Path, memory: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    own = ["checkpoint.every_steps=8", "checkpoint.keep_last=9"]
    survive(server, words(run_yaml, run, memory, *own), memory, num_kills=5, seed=1)
    assert_same_run(run, uninterrupted)
