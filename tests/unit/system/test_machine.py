"""What of a machine a process may use, by its affinity and its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bigtrain.data.tokenize_job.request import divide
from bigtrain.system.machine import Machine, this_machine

GIB = 1 << 30


def linux(root: Path, group: str, files: dict[str, str]) -> Path:
    """The files of a machine with 64 GiB free and a process in the control group `group`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"1:name=systemd:/x\n0::{group}\n")
    (root / "proc/meminfo").write_text(
        f"MemTotal: {100 << 20} kB\nMemAvailable: {64 << 20} kB\nSwapTotal: 0 kB\n"
    )
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("/", {}, Machine(16, 64 * GIB)),
        ("/", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, Machine(16, 64 * GIB)),
        # A container with a share of the cores and of the memory.
        (
            "/",
            {"cpu.max": "350000 100000\n", "memory.max": f"{8 * GIB}\n"},
            Machine(3, 8 * GIB),
        ),
        # A limit above the own group counts as well.
        (
            "/job/step",
            {
                "cpu.max": "1200000 100000\n",
                "job/cpu.max": "400000 100000\n",
                "job/step/cpu.max": "max 100000\n",
                "job/memory.max": f"{4 * GIB}\n",
            },
            Machine(4, 4 * GIB),
        ),
        ("/", {"cpu.max": "50000 100000\n"}, Machine(1, 64 * GIB)),
    ],
)
def test_limits_of_control_groups(
    group: str, files: dict[str, str], expected: Machine, tmp_path: Path
) -> None:
    assert this_machine({}, linux(tmp_path, group, files)) == expected


@pytest.mark.usefixtures("sixteen_cores")
def test_processes_of_torchrun_share_a_machine(tmp_path: Path) -> None:
    root = linux(tmp_path, "/", {})
    assert this_machine({"LOCAL_WORLD_SIZE": "4"}, root) == Machine(4, 16 * GIB)
    assert this_machine({"LOCAL_WORLD_SIZE": "what"}, root) == Machine(16, 64 * GIB)


def test_a_system_without_these_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    machine = this_machine({}, tmp_path)
    assert machine.num_cores == os.cpu_count()
    assert divide(None, 1000, 1000 * GIB, machine).num_processes == machine.num_cores
