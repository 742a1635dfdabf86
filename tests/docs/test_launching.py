"""Command lines in the pages parse, and name what exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bigtrain.cli import build_parser, main
from bigtrain.train import build_parser as train_parser
from tests.support.worlds import ROOT

PAGES = ["README.md", "hostfiles/README.md", "slurm/README.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))


def command_lines(page: str) -> list[list[str]]:
    """Every line of the page's code blocks that starts bigtrain or train.py."""
    commands = []
    text = (ROOT / page).read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if "bigtrain/train.py" in words or words[:1] == ["bigtrain"]:
                    commands.append(words)
    return commands


WITH_COMMANDS = [page for page in PAGES if command_lines(page)]


def test_pages_with_commands_are_found() -> None:
    assert {"README.md", "docs/launching.md", "docs/tutorial.md"} < set(WITH_COMMANDS)
    assert {"hostfiles/README.md", "slurm/README.md"} < set(WITH_COMMANDS)


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_command_lines_parse(page: str) -> None:
    for words in command_lines(page):
        if words[0] == "bigtrain":
            build_parser(words[1]).parse_args(words[1:])
        else:
            arguments = words[words.index("bigtrain/train.py") + 1 :]
            train_parser().parse_intermixed_args(arguments)


def test_what_the_tutorial_types_is_typed_by_a_test() -> None:
    """Training, saving and exporting on one machine: lines of README.md's job, which is run."""
    typed = command_lines("README.md")
    for words in command_lines("docs/tutorial.md"):
        if "RUN.yaml" not in words and words[1] not in ("doctor", "launch"):
            assert words in typed, words


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_scripts_of_the_named_recipes_are_written(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [words for words in command_lines(page) if words[:2] == ["bigtrain", "launch"]]
    assert {words[2] for words in lines} == {"slurm", "torchrun", "kubernetes"}
    for words in lines:
        assert main(words[1:]) == 0, words
