"""Command lines in the pages on launching parse, and name what exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from bigtrain.cli import build_parser
from bigtrain.train import build_parser as train_parser
from tests.support.worlds import ROOT

PAGES = ["README.md", "docs/launching.md", "hostfiles/README.md", "slurm/README.md"]


def command_lines(page: str) -> list[list[str]]:
    """Every line of the page's code blocks that starts bigtrain or train.py."""
    found = []
    text = (ROOT / page).read_text()
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if "bigtrain/train.py" in words or words[:1] == ["bigtrain"]:
                    found.append(words)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_command_lines_parse(page: str) -> None:
    lines = command_lines(page)
    assert lines
    for words in lines:
        if words[0] == "bigtrain":
            build_parser(words[1]).parse_args(words[1:])
        else:
            arguments = words[words.index("bigtrain/train.py") + 1 :]
            train_parser().parse_intermixed_args(arguments)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^):]+)\)", (ROOT / page).read_text()):
        assert (Path(ROOT / page).parent / target).exists(), target
