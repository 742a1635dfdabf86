"""Command lines in the pages parse, and name what exists."""

from __future__ import annotations

import re
import shlex
from functools import cache

from bigtrain.cli import build_parser
from bigtrain.train import build_parser as train_parser
from tests.support.pages import page_text
from tests.support.worlds import ROOT

PAGES = ["README.md", "hostfiles/README.md", "slurm/README.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))


def command_lines(page: str) -> list[list[str]]:
    """Every line of the page's code blocks that starts bigtrain or train.py."""
    commands = []
    text = page_text(page)
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        for line in [] if language else block.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if "bigtrain/train.py" in words or words[:1] == ["bigtrain"]:
                    commands.append(words)
    return commands


def test_command_lines_parse() -> None:
    with_commands = [page for page in PAGES if command_lines(page)]
    assert {"README.md", "docs/launching.md", "docs/tutorial.md"} < set(with_commands)
    assert {"hostfiles/README.md", "slurm/README.md"} < set(with_commands)
    parser_of, train_parser_of = cache(build_parser), cache(train_parser)
    for words in (words for page in with_commands for words in command_lines(page)):
        if words[0] == "bigtrain":
            parser_of(words[1]).parse_args(words[1:])
        else:
            arguments = words[words.index("bigtrain/train.py") + 1 :]
            train_parser_of().parse_intermixed_args(arguments)


def test_what_the_tutorial_types_is_typed_by_a_test() -> None:
    """Training, saving and exporting on one machine: lines of README.md's job, which is run."""
    typed = command_lines("README.md")
    for words in command_lines("docs/tutorial.md"):
        if "RUN.yaml" not in words and words[1] not in ("doctor", "launch"):
            assert words in typed, words
