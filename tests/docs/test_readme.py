"""README.md is short and complete; tests/docs/test_clean_clone.py types its lines."""

from __future__ import annotations

import re
import shlex

import yaml

from bigtrain.cli import COMMANDS
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import RunConfig
from bigtrain.train import build_parser as train_parser
from tests.support.pages import page_text
from tests.support.worlds import ROOT

README = page_text("README.md")


def blocks(language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def commands() -> list[list[str]]:
    """Command lines of the page's job, in order."""
    job = next(block for block in blocks() if "bigtrain tokenize" in block)
    return [shlex.split(line, comments=True) for line in job.splitlines() if line[:1] not in "# "]


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 150  # with each command on one line


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
