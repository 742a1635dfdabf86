"""docs/troubleshooting.md quotes errors as the code words them."""

from __future__ import annotations

import re

import pytest

from tests.support.error_texts import error_texts
from tests.support.worlds import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def texts() -> str:
    """Texts of all errors of the code; seconds, which collecting the tests need not take."""
    return error_texts()


def quotes() -> list[str]:
    """The first cells of the tables of texts."""
    tables = re.findall(r"^\| Error text .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, flags=re.M)
    rows = [row for table in tables for row in table.splitlines()]
    return [row.split("|")[1].strip() for row in rows]


def test_there_are_quotes() -> None:
    assert len(quotes()) > 20


@pytest.mark.parametrize("quote", quotes())
def test_every_quote_is_an_error_of_the_code(quote: str, texts: str) -> None:
    assert quote[0] == quote[-1] == "`"
    assert quote.strip("`") in texts, "correct the quote: the error has another text now"


@pytest.mark.parametrize(
    "text",
    [
        "exactly one of data.path (one dataset) and data.sources (a mixture) must be set",
        "… is a link to …, outside of the dataset",
        "a sequence between … and … has negative length",
    ],
)
def test_texts_of_errors_are_collected(text: str, texts: str) -> None:
    """Also those that helpers add through a function, a name or a loop over problems."""
    assert text in texts
