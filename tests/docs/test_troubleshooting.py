"""Texts of errors on the page for troubleshooting are those of the code."""

from __future__ import annotations

import re

from tests.support.error_texts import error_texts
from tests.support.worlds import ROOT

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def test_every_quote_is_an_error_of_the_code() -> None:
    texts = error_texts()
    # Errors that helpers add through a function, a name or a loop over problems are collected.
    for text in (
        "exactly one of data.path (one dataset) and data.sources (a mixture) must be set",
        "… is a link to …, outside of the dataset",
        "a sequence between … and … has negative length",
    ):
        assert text in texts
    tables = re.findall(r"^\| Error text .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, flags=re.M)
    quotes = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    assert len(quotes) > 20
    for quote in quotes:
        assert quote[0] == quote[-1] == "`"
        assert quote.strip("`") in texts, f"{quote}: the error has another text now"
