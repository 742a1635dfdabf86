"""Values of a generated script stay values, or are refused: none becomes a line or a command."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from bigtrain.errors import ConfigError
from bigtrain.launchers.slurm import SlurmRequest, render_script
from bigtrain.launchers.torchrun import TorchrunRequest, render_torchrun

AWKWARD = ["/a b", "/it's", '/"q"', "/$(touch x)", "/`touch x`", "/a#b", "/a;b", "/[1-4]", "/%j"]
BREAKS = ["\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\x1b"]


def slurm(directory: str = "/work", **options: str) -> str:
    request = SlurmRequest(
        **{"config": "quickstart", "overrides": ("data.path=shards",), "nodes": "1"},
        **{"processes_per_node": 1, "directory": directory, "gpus": False},
        **{"time": "1:00:00", "save_seconds": 60, "options": options},
    )  # type: ignore[arg-type]
    return render_script(request)


def torchrun(directory: str = "/work", file: str = "run.sh") -> str:
    request = TorchrunRequest(
        **{"config": "quickstart", "overrides": ("data.path=shards",), "nodes": "1"},
        **{"processes_per_node": 1, "directory": directory, "gpus": False},
        **{"name": "run", "endpoint": "node:29400", "python": "/usr/bin/python3", "file": file},
    )  # type: ignore[arg-type]
    return render_torchrun(request)


@pytest.mark.parametrize("value", AWKWARD)
def test_values_are_quoted(value: str, tmp_path: Path) -> None:
    script = slurm(value, comment=value)
    header = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    words = [word for line in header for word in shlex.split(line.removeprefix("#SBATCH"))]
    assert f"--chdir={value}" in words
    assert f"--comment={value}" in words
    for text in (script, torchrun(value, file=value)):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    # Run up to the change of the directory, which fails with the file's name in the message.
    text = torchrun(str(tmp_path / "absent"), file=value)
    ran = subprocess.run(["bash"], input=text, text=True, capture_output=True, cwd=tmp_path)
    assert ran.stderr.splitlines()[-1].startswith(f"{value}: the folder of this run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("character", BREAKS)
def test_a_line_break_in_a_value_is_refused(character: str) -> None:
    value = f"/a{character}touch x"
    for render in (slurm, torchrun):
        with pytest.raises(ConfigError, match=r"the working directory = .* control character"):
            render(value)
    with pytest.raises(ConfigError, match=r"--sbatch comment = .* is not an option of sbatch"):
        slurm(comment=value)
    with pytest.raises(ConfigError, match=r"--output = .* control character"):
        torchrun(file=value)
