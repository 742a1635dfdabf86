"""Directories of checkpoints in memory: who may use them, what is removed, what is still the run's;
and what `check` says of their file system."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigtrain.errors import CheckpointError
from bigtrain.run import shared_memory
from bigtrain.run.checkpointing import memory_directory
from bigtrain.run.checkpointing.host_files import Partners
from bigtrain.run.checkpointing.memory_directory import (
    MemoryDirectory,
    keeper_of,
    remove_stale,
    steps_of_attempts,
    write_documents,
)
from bigtrain.run.shared_memory import SPARE_BYTES, check_memory_directory, size_line
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import MemoryCheckpointSection, RunConfig
from bigtrain.system.units import GIB

RUN, OTHER = "0123456789abcdef", "fedcba9876543210"


def config_with(directory: Path) -> RunConfig:
    memory = [f"checkpoint.memory.directory={directory}", "checkpoint.memory.every_steps=1"]
    return load_run_config("quickstart", memory)


def test_a_directory_is_of_one_user_and_run(tmp_path: Path) -> None:
    first = MemoryDirectory.of(str(tmp_path), tmp_path / "run", RUN)
    first.open()
    assert first.path.parent.name == f"bigtrain-{os.getuid()}"
    assert all(path.stat().st_mode & 0o777 == 0o700 for path in (first.path, first.path.parent))
    others = [
        MemoryDirectory.of(str(tmp_path), tmp_path / "run", OTHER),
        MemoryDirectory.of(str(tmp_path), tmp_path / "copied", RUN),
    ]
    assert len({one.path for one in (first, *others)}) == 3
    first.remove()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    root = tmp_path / f"bigtrain-{os.getuid()}"
    root.mkdir(mode=0o750)
    with pytest.raises(CheckpointError, match="is not a directory of this user only"):
        MemoryDirectory.of(str(tmp_path), tmp_path / "run", RUN).open()
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory of this user only"):
        MemoryDirectory.of(str(tmp_path), tmp_path / "run", RUN).open()


def test_one_process_of_a_host_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_directory, "_LOCK_SECONDS", 0.0)
    first = MemoryDirectory.of(str(tmp_path), tmp_path / "run", RUN)
    second = MemoryDirectory.of(str(tmp_path), tmp_path / "run", RUN)
    first.open()
    with pytest.raises(CheckpointError, match="in use by another process"):
        second.open()
    first.close()
    second.close()
    second.open()
    assert second._lock is not None
    os.close(second._lock)  # as the kernel does where its process is killed
    first.open()
    first.close()


def test_left_over_directories_are_removed_unless_they_are_used(tmp_path: Path) -> None:
    run = tmp_path / "run"
    own = MemoryDirectory.of(str(tmp_path), run, RUN)
    earlier = MemoryDirectory.of(str(tmp_path), run, OTHER)
    used = MemoryDirectory.of(str(tmp_path), tmp_path / "b", RUN)
    young = MemoryDirectory.of(str(tmp_path), tmp_path / "c", RUN)
    old = MemoryDirectory.of(str(tmp_path), tmp_path / "d", RUN)
    for one in (own, earlier, used, young, old):
        one.open()
    for one in (own, earlier, young, old):
        one.close()
    for one in (used, old):
        for path in (one.path / "checkpoints", one.path):
            os.utime(path, (0, 0))
    assert remove_stale(str(tmp_path), own.path, run) == 2
    assert {path.name for path in own.path.parent.iterdir()} == {
        one.path.name for one in (own, used, young)
    }
    used.close()
    assert remove_stale(str(tmp_path / "missing"), None, run) == 0


def test_steps_after_those_that_later_launches_began_at_are_not_the_runs(tmp_path: Path) -> None:
    (tmp_path / "generations").mkdir()
    names = {1: "superseded.json", 2: "superseded.json", 3: "superseded.json", 4: "json"}
    for generation, suffix in names.items():
        holder = {"generation": generation, "attempt": "abcd"[generation - 1]}
        path = tmp_path / "generations" / f"{generation:08d}.{suffix}"
        path.write_text(json.dumps(holder))
    starts = [(1, 0), (2, 10), (3, 6), (4, 8)]
    lines = [json.dumps({"generation": number, "step": step}) for number, step in starts]
    (tmp_path / "starts.jsonl").write_text("\n".join([*lines, '{"torn']))
    assert steps_of_attempts(tmp_path) == {"a": 6, "b": 6, "c": 8, "d": math.inf}


def test_a_checkpoint_exists_from_its_rename_on(tmp_path: Path) -> None:
    directory = MemoryDirectory.of(str(tmp_path), tmp_path, RUN)
    directory.open()
    for number in range(2):  # the second replaces the first
        partial = directory.path / "checkpoints" / "step-00000007.partial-abc"
        (partial / "tensors").mkdir(parents=True)
        documents = {"manifest.json": b"m%d" % number, "state.json": b"s"}
        final = write_documents(partial, documents)
        assert final.name == "step-00000007"
        assert (final / "manifest.json").read_bytes() == b"m%d" % number
    (directory.path / "checkpoints" / "step-00000008.partial-abc").mkdir()
    directory.keep_only(7)
    assert [path.name for path in (directory.path / "checkpoints").iterdir()] == ["step-00000007"]
    directory.keep_only(None)
    assert not list((directory.path / "checkpoints").iterdir())
    directory.close()


def test_partners_are_on_the_next_host() -> None:
    partners = Partners.of(["a", "a", "b", "b", "c", "c"])
    assert partners is not None
    assert partners.partner_of == (2, 3, 4, 5, 0, 1)
    assert [partners.source_of(rank) for rank in range(6)] == [4, 5, 0, 1, 2, 3]
    assert Partners.of(["a", "a"]) is None
    assert Partners.of(["a", "a", "b"]) is None
    assert [keeper_of(["b", "a", "b", "a"], rank) for rank in range(4)] == [0, 1, 0, 1]


def test_check_refuses_what_is_not_in_memory(tmp_path: Path) -> None:
    assert check_memory_directory(load_run_config("quickstart", [])) == []
    place = tmp_path / "missing"
    assert [str(one) for one in check_memory_directory(config_with(place))] == [
        f"checkpoint.memory.directory = {str(place)!r}: is not a directory of this host -> "
        "a file system in memory, as /dev/shm, or checkpoint.memory=null"
    ]


@pytest.mark.parametrize(("kind", "refused"), [("ext4", True), ("tmpfs", False), (None, False)])
def test_check_refuses_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None, refused: bool
) -> None:
    monkeypatch.setattr(shared_memory, "_file_system", lambda path: kind)
    problems = check_memory_directory(config_with(tmp_path))
    assert bool(problems) is refused
    assert all("is on a disk (ext4), not in memory" in str(one) for one in problems)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")
def test_the_file_system_of_dev_shm_is_in_memory() -> None:
    assert shared_memory._file_system(Path("/dev/shm")) in ("tmpfs", "ramfs")
    assert shared_memory._file_system(Path("/proc")) == "proc"


def test_the_size_is_compared_with_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=4 * GIB, used=0, free=2 * GIB)
    monkeypatch.setattr(
        shared_memory.shutil, "disk_usage", lambda path: (usage.total, usage.used, usage.free)
    )
    section = MemoryCheckpointSection(every_steps=1, directory=str(tmp_path))
    text = size_line(section, GIB, 1)
    assert text == (
        f"checkpoints in memory: 1 GiB for one rank of a host in {tmp_path}, which has 2 of 4 GiB "
        "free here"
    )
    assert size_line(section, GIB - SPARE_BYTES / 2, 2).endswith("free here")
    assert size_line(section, GIB, 2).endswith(": too small, so only those on disk will be written")
