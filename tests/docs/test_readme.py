"""What README.md tells people to type is typed here."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import COMMANDS, build_parser
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import RunConfig
from bigtrain.train import build_parser as train_parser
from tests.support.worlds import ROOT, default_port
from tools.quickstart import train_command

README = (ROOT / "README.md").read_text()
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python")


def blocks(language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands() -> list[list[str]]:
    """Command lines of the page's job, in order."""
    job = next(block for block in blocks() if "bigtrain tokenize" in block)
    return [shlex.split(line, comments=True) for line in job.splitlines() if line[:1] not in "# "]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150


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


def overrides(words: list[str]) -> dict[str, str]:
    """Settings that a training command changes."""
    arguments = words[words.index("bigtrain/train.py") + 1 :]
    parsed = train_parser().parse_intermixed_args(arguments).overrides
    return dict(override.split("=", 1) for override in parsed)


def test_runs_of_the_job_are_nobody_elses() -> None:
    """A line would be refused where the quickstart, or the line before it, has run."""
    used = [load_run_config("quickstart").output.directory]
    used += [overrides(w)["output.directory"] for w in commands() if "bigtrain/train.py" in w]
    assert len(used) == 4
    assert len(set(used)) == 4, used
    for words in commands():
        if "--run" in words:
            assert words[words.index("--run") + 1] in used[1:]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reader's own: files of the standard library."""
    directory = tmp_path_factory.mktemp("reader") / "texts"
    directory.mkdir()
    stdlib = Path(sysconfig.get_path("stdlib"))
    for number, source in enumerate(sorted(stdlib.glob("*.py"))):
        (directory / f"{number}.txt").write_bytes(source.read_bytes())
    return directory


def type_in(folder: Path, words: list[str]) -> str:
    """Run a command as a reader of the page does; returns what it said."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with default_port() if "deepspeed" in words else nullcontext():
        result = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout}\n{result.stderr}"
    return result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_from_the_top(tmp_path: Path, texts: Path) -> None:
    """In the reader's order: the quickstart's run stands when the lines of the job are typed.

    The quickstart is run with its own command, in its own directories, for 40 steps instead of
    500 and on the reader's texts instead of the whole standard library.
    """
    for name in ("bigtrain", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "texts").symlink_to(texts)
    lines = list(filter(None, commands()))
    tokenizer, tokenize, *rest = lines
    home = Path("runs/quickstart")
    type_in(tmp_path, [*tokenizer[:-1], str(home / "tokenizer")])
    of_quickstart = {"tokenizer/": f"{home}/tokenizer", "shards/": f"{home}/shards"}
    type_in(tmp_path, [of_quickstart.get(word, word) for word in tokenize])
    few = ["train.steps=40", "checkpoint.every_steps=20", "evaluation.every_steps=20"]
    type_in(tmp_path, train_command(home / "shards", home / "run", few))
    # check compares the recipe with the quickstart's run, which has 40 steps here.
    fewer = [[*words, few[0]] if words[:2] == ["bigtrain", "check"] else words for words in rest]
    said = [type_in(tmp_path, words) for words in (tokenizer, tokenize, *fewer)]
    assert sum("resumed at step" in text for text in said) == 0
    assert sum("exported to" in text for text in said) == 3
    for run in ("one", "two", "three", "quickstart/run"):
        assert (tmp_path / "runs" / run / "hf/config.json").is_file()
    assert (tmp_path / "exported/model.safetensors").is_file()
