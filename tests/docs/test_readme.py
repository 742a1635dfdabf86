"""What README.md tells people to type is typed here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import COMMANDS, build_parser
from bigtrain.config import RunConfig
from bigtrain.train import build_parser as train_parser
from tests.support.worlds import ROOT

README = (ROOT / "README.md").read_text()
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python")


def blocks(language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands() -> list[list[str]]:
    """Command lines of the page's job, in order."""
    job = next(block for block in blocks() if "bigtrain tokenize" in block)
    return [shlex.split(line, comments=True) for line in job.splitlines() if line[:1] not in "# "]


def test_there_is_a_job() -> None:
    assert {words[0] for words in commands() if words} >= {"bigtrain", "deepspeed", "torchrun"}


@pytest.mark.parametrize("words", [w for w in commands() if w], ids=" ".join)
def test_arguments_exist(words: list[str]) -> None:
    if words[0] == "bigtrain":
        build_parser(words[1]).parse_args(words[1:])
        return
    assert words[0] in LAUNCHERS
    train_parser().parse_intermixed_args(words[words.index("bigtrain/train.py") + 1 :])


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\S+)", "\n".join(blocks()), flags=re.M):
        assert re.search(rf"^(\S+ )*{target}( \S+)*:", makefile, flags=re.M), target


def test_example_run_is_valid() -> None:
    (text,) = blocks("yaml")
    RunConfig.model_validate(yaml.safe_load(text.replace("4.0e-3", "0.004")))


def test_every_command_is_mentioned() -> None:
    for name in COMMANDS:
        assert f"bigtrain {name}" in README, name


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_job_as_it_stands(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    stdlib = Path(sysconfig.get_path("stdlib"))
    for number, source in enumerate(sorted(stdlib.glob("*.py"))):
        (texts / f"{number}.txt").write_bytes(source.read_bytes())
    for name in ("bigtrain", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs/quickstart").mkdir(parents=True)
    (tmp_path / "runs/quickstart/shards").symlink_to(tmp_path / "shards")
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for words in filter(None, commands()):
        result = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout}\n{result.stderr}"
    assert (tmp_path / "exported/model.safetensors").is_file()
    assert (tmp_path / "runs/quickstart/run/hf/config.json").is_file()
