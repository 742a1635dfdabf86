"""Unreadable documents: an immediate error, or skipped and listed. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from bigtrain.errors import DataError

ONE_FORMAT = (
    "rows of several formats must be tokenized one format at a time, each into its own --output, "
    "and mixed in the run: data.sources"
)
OTHER_KEYS = re.compile(r"^no key .*; keys here: (.* -> |(?:.*, )?text\b)")
"""Pattern of reasons for rows with the keys of another format."""
TEMPLATE_FAULT = "the chat template"
"""Start of reasons caused by the chat template, not by a document."""


@dataclass(frozen=True)
class BadDocument:
    """Location of an unusable document, and the reason.

    `line` counts from 1, `row` from 0; neither for a file that is one document. Lines count from
    the start of the file, or of the part of it that one unit reads
    (`bigtrain.data.sources.files`).
    """

    path: str
    reason: str
    line: int | None = None
    row: int | None = None

    def __str__(self) -> str:
        where = self.path
        if self.line is not None:
            where += f":{self.line}"
        elif self.row is not None:
            where += f" row {self.row}"
        return f"{where}: {self.reason}"


@dataclass
class RejectedDocuments:
    """Collector of unreadable documents.

    Unless `allowed`, the first is an error. Otherwise each is counted and passed to `keep`.
    """

    allowed: bool
    keep: Callable[[BadDocument], None] | None = None
    count: int = 0

    def add(self, bad: BadDocument) -> None:
        """Record `bad`. Raise DataError with location and reason unless bad documents are
        allowed."""
        if not self.allowed:
            if bad.reason.startswith(TEMPLATE_FAULT) and " -> " in bad.reason:
                raise DataError(str(bad))  # without such documents few would remain
            remedy = "skip such documents: --skip-bad"
            if OTHER_KEYS.search(bad.reason):
                first = " if all rows are like this one" if " -> " in str(bad) else " -> fix it"
                raise DataError(f"{bad}{first}; {ONE_FORMAT}; or {remedy}")
            joint = ", or" if " -> " in str(bad) else " -> fix it, or"
            raise DataError(f"{bad}{joint} {remedy}")
        self.count += 1
        if self.keep is not None:
            self.keep(bad)


def require_few(bad: int, good: int, max_fraction: float, first: str) -> None:
    """Raise DataError if `bad` of `bad + good` documents are more than `max_fraction`."""
    if bad > max_fraction * (bad + good):
        raise DataError(
            f"{bad:,} of {bad + good:,} documents cannot be read, more than --max-bad-fraction "
            f"{max_fraction:g} allows; the first is {first} -> fix them, or allow more"
        )
