"""Pages as a reader sees them: what they begin with, their numbers, their sentences."""

from __future__ import annotations

import re

import pytest

from tests.support.prose import num_words, sentences
from tests.support.worlds import ROOT
from tools.architectures import RECORD, statuses, tables

DOCS = ROOT / "docs"
GENERATED = sorted(
    page for page in DOCS.rglob("*.md") if "Written by `python tools/" in page.read_text("utf-8")
)


def test_a_generated_page_begins_with_its_subject() -> None:
    assert len(GENERATED) >= 10
    for page in GENERATED:
        first_half, _, _ = page.read_text(encoding="utf-8").rpartition("\n\n")
        assert "Written by" not in first_half, f"{page.name}: name the tool in the last paragraph"


def test_status_counts_the_architectures_of_their_table() -> None:
    text = (DOCS / "architectures.md").read_text(encoding="utf-8")
    # Neither without a plan, nor of models that see later tokens.
    undivided = "transformers has no tensor-parallel plan|sees later tokens.*"
    notes = re.findall(rf"^(\d+)\. .*(?:{undivided})$", text, re.MULTILINE)
    cells = [line.split("|")[5].strip() for line in text.splitlines() if line.startswith("| `")]
    cells = cells[: len(statuses(text))]
    num_exact = cells.count("exact")
    num_planned = len(cells) - sum(cells.count(f"refused ({note})") for note in notes)
    status = (DOCS / "status.md").read_text(encoding="utf-8")
    expected = (
        f"{num_planned} architectures can be divided, by transformers' plan or by bigtrain's for "
        f"recurrent layers. {num_exact} of them are exact; a run refuses the other "
        f"{num_planned - num_exact}"
    )
    assert expected in status


def test_the_table_of_architectures_follows_from_the_recorded_outcomes() -> None:
    text = (DOCS / "architectures.md").read_text(encoding="utf-8")
    table, _, _ = text.partition("## Weight decay and Muon")
    assert table.splitlines() == tables(RECORD)


MOST_WORDS = 40
MOST_WORDS_IN_THE_MEAN = 18
DEVELOPERS = ("Reference", "Development")
INCLUDED = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)


def users_pages() -> dict[str, str]:
    """Texts of the pages for users by their paths, with the files that a page includes."""
    lines = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2].splitlines()
    paths, part = ["README.md"], ""
    for line in lines:
        if heading := re.match(r"  - ([A-Z][\w ]*):$", line):
            part = heading[1]
        elif (page := re.search(r"[\w/]+\.md$", line)) and part not in DEVELOPERS:
            paths.append(f"docs/{page[0]}")
    texts = {}
    for path in paths:
        text = (ROOT / path).read_text(encoding="utf-8")
        for included in INCLUDED.findall(text):
            text += (ROOT / included).read_text(encoding="utf-8")
        texts[path] = text
    return texts


USERS_PAGES = users_pages()


def test_most_pages_are_for_users() -> None:
    assert len(USERS_PAGES) > 40
    assert all(sentences(text) for text in USERS_PAGES.values())


@pytest.mark.parametrize("path", USERS_PAGES)
def test_sentences_are_short(path: str) -> None:
    lengths = {sentence: num_words(sentence) for sentence in sentences(USERS_PAGES[path])}
    too_long = [f"{n} words: {sentence}" for sentence, n in lengths.items() if n > MOST_WORDS]
    assert too_long == [], f"{path}: divide them"
    mean = sum(lengths.values()) / len(lengths)
    assert mean <= MOST_WORDS_IN_THE_MEAN, f"{path}: {mean:.1f} words in the mean"


def test_sentences_are_those_that_a_reader_sees() -> None:
    page = """
# A title that is not a sentence at all

First sentence has `code.with dots.` and a [link](x.md#y.z). `code` begins the second one.

- an item that is
  continued below
- short

| a heading of cells | b |
|---|---|
| cell of four words | two words. And some more words |

peft begins one in lower case.
```
not a sentence, but code. Of course
```
"""
    assert sentences(page) == [
        "First sentence has Code and a link.",
        "Code begins the second one.",
        "an item that is continued below",
        "a heading of cells",
        "cell of four words",
        "And some more words",
        "peft begins one in lower case.",
    ]
