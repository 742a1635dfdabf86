"""Text of documents with the trained tokens marked, for a terminal and as an HTML page. Pure."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Marks around learned text without colors."""
_GREEN, _PLAIN = "\x1b[30;42m", "\x1b[0m"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f6;padding:1rem}"
    "mark{background:#9be29b;color:#000}"
)


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of a document that are all learned, or all not."""

    text: str
    num_tokens: int
    is_learned: bool


def runs_of(
    tokens: Sequence[int], mask: npt.NDArray[np.bool_], decode: Callable[[Sequence[int]], str]
) -> list[Run]:
    """Return the runs of a document. mask: bool, same length as `tokens`."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(tokens)]
    return [
        Run(decode(tokens[low:high]), high - low, bool(mask[low]))
        for low, high in pairwise(edges)
        if low < high
    ]


def for_terminal(runs: Sequence[Run], *, colors: bool) -> str:
    """Return the text of `runs`, learned ones colored, or between `OPEN` and `CLOSE`."""
    before, after = (_GREEN, _PLAIN) if colors else (OPEN, CLOSE)
    return "".join(f"{before}{run.text}{after}" if run.is_learned else run.text for run in runs)


def as_html(title: str, documents: Sequence[dict[str, Any]]) -> str:
    """Return a page with the `runs` of documents, as returned by
    `bigtrain.python_api.results.documents_of`.
    """
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1><p>Learned text is <mark>marked</mark>: only these tokens "
        "have a loss.</p>",
    ]
    for document in documents:
        runs: Sequence[Run] = document["runs"]
        learned = sum(run.num_tokens for run in runs if run.is_learned)
        shown = sum(run.num_tokens for run in runs)
        parts.append(
            f"<h2>Document {document['index']} of {html.escape(document['split'])}</h2>"
            f"<p>{learned:,} of {shown:,} tokens are learned"
            + (f"; the document has {document['num_tokens']:,}" if document["cut"] else "")
            + "</p><pre>"
        )
        parts += [
            f"<mark>{html.escape(run.text)}</mark>" if run.is_learned else html.escape(run.text)
            for run in runs
        ]
        parts.append("</pre>")
    return "".join(parts) + "</body></html>\n"
