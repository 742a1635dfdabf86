"""Files that launch commands write: whole or not at all, one text for what hinders them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain

COMMANDS = {
    "slurm": ["launch", "slurm", "--config", "quickstart", "--gpus-per-node", "1"],
    "torchrun": [
        *("launch", "torchrun", "--config", "quickstart", "--gpus-per-node", "1"),
        *("--rendezvous", "login:29400"),
    ],
    "kubernetes": [
        *("launch", "kubernetes", "--config", "quickstart", "--gpus-per-node", "1"),
        *("--image", "registry/bigtrain:1", "--claim", "disk"),
        *("output.directory=/data/run", "data.path=/data/shards"),
    ],
    "environment": ["hostfile", "--environment"],
    "hosts": ["hostfile", "--slurm"],
}


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a Slurm job knows of its hosts, and no file of this machine's user."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-9]")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "8")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def refused(
    command: str, output: Path, said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One text, exit code 2, nothing left behind."""
    before = sorted(folder.rglob("*"))
    words = [*COMMANDS[command][:2], "--output", str(output), *COMMANDS[command][2:]]
    assert bigtrain(words) == 2
    error = capfd.readouterr().err
    assert f"cannot write {output}: {said} -> choose another --output" in error
    assert "Traceback" not in error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    refused(command, tmp_path / "not" / "there", "No such file or directory", tmp_path, capfd)
    refused(command, tmp_path / "file" / "below", "Not a directory", tmp_path, capfd)
    refused(command, tmp_path, "Is a directory", tmp_path, capfd)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """In a process of its own, none of whose files may grow beyond some bytes (EFBIG)."""
    output = tmp_path / "out" / "file"
    output.parent.mkdir()
    script = "import resource as r, sys; from bigtrain.cli import main; "
    script += "r.setrlimit(r.RLIMIT_FSIZE, (20, r.RLIM_INFINITY)); sys.exit(main(sys.argv[1:]))"
    words = [*COMMANDS["hosts"], "--output", str(output)]
    ended = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    assert f"cannot write {output}: File too large -> choose another --output" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(output.parent.iterdir()) == []
