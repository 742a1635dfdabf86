"""slurm/*.sbatch and what `bigtrain launch slurm` makes of them; tests/cluster runs them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from bigtrain.cli import main as bigtrain
from bigtrain.launch.slurm import time_seconds
from tests.support.worlds import ROOT

SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def sbatch_lines(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if "#SBATCH " in line]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("bash reads it; shellcheck is not installed")
    subprocess.run(["shellcheck", "--severity=warning", script], check=True)


def test_what_requeue_and_resume_rest_on() -> None:
    lines = sbatch_lines((ROOT / "slurm" / "train.sbatch").read_text())
    assert {"--requeue", "--open-mode=append"} <= set(lines)
    # With it Slurm takes the lowest number of a range of nodes.
    assert not any("ntasks" in line for line in lines)
    assert any(line.startswith("--signal=B:USR1@") for line in lines)


def test_script_for_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["launch", "slurm", "--config", "quickstart", "--nodes", "1-2", "--gpus-per-node", "1"]
    options = ["--time", "2:00:00", "--sbatch", "partition=gpu", "--sbatch", "mem=64G"]
    rest = ["--setup", "module load cuda", "--deepspeed_config", "zero3", "seed=1"]
    assert bigtrain([*run, *options, *rest, "--dry-run"]) == 0
    text = capsys.readouterr().out
    lines = sbatch_lines(text)
    assert {"--nodes=1-2", "--gpus-per-node=1", "--time=2:00:00", "--partition=gpu"} <= set(lines)
    assert "--mem=64G" in lines
    assert "--mem=0" not in lines
    assert text.index("#SBATCH --partition") < text.index("set -u")  # sbatch reads no further
    assert "module load cuda\narguments=(quickstart --deepspeed_config zero3 seed=1 " in text
    assert f"checkout={ROOT}\n" in text
    assert f"--chdir={Path.cwd()}" in lines

    output = ["--output", str(tmp_path / "job.sbatch")]
    assert bigtrain([*run, *options, *rest, *output]) == 0
    assert (tmp_path / "job.sbatch").read_text() == text
    capsys.readouterr()
    assert bigtrain([*run, *output]) == 2
    assert "exists and differs" in capsys.readouterr().err
    assert (tmp_path / "job.sbatch").read_text() == text


def test_script_without_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch", "slurm", "--config", "quickstart", "--dry-run", "--gpus-per-node", "0"]
    assert bigtrain([*command, "--processes-per-node", "2"]) == 0
    text = capsys.readouterr().out
    assert not any("gpus" in line for line in sbatch_lines(text))
    assert "BIGTRAIN_PROCESSES_PER_NODE=2\n" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nodes", "2-1"], "--nodes = '2-1': is no number of nodes"),
        (["--time", "soon"], "--time = 'soon': is no time limit of Slurm"),
        (["--time", "5"], "--save-seconds = 600: leaves nothing of the time limit 5 = 300 s"),
        (["--sbatch", "nodes=3"], "--sbatch nodes = '3': is set by bigtrain"),
        (["--sbatch", "Bad Name"], "is no option of sbatch"),
        (["--nodes", "1-3"], "on 3 nodes x 1 processes"),
        (["--setup", "if ["], "bash cannot read the script"),
        (["--processes-per-node", "2"], "contradicts --gpus-per-node = 1"),
        (["optimizer.lrr=1"], "optimizer.lrr"),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "job.sbatch"
    run = ["launch", "slurm", "--config", "quickstart", "--gpus-per-node", "1"]
    assert bigtrain([*run, "--output", str(output), *words]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:00", 7200),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("x", None),
        ("", None),
    ],
)
def test_time_limits(text: str, seconds: int | None) -> None:
    assert time_seconds(text) == seconds
