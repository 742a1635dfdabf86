"""Display of learned tokens: on a terminal, and as a page. Without torch."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.inspection import Decoder

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Marks around learned text without colors."""
CONTROL_OPEN, CONTROL_CLOSE = "\u2039", "\u203a"
"""Marks around a control token: letters that spell it have none."""
_LEARNED, _CONTROL, _PLAIN = "\x1b[30;42m", "\x1b[1;4m", "\x1b[0m"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;background:#f6f6f6;padding:1rem}"
    "mark{background:#9be29b;color:#000}b{outline:1px solid #888;font-weight:600}"
)


@dataclass(frozen=True)
class LearnedRange:
    """Consecutive tokens of a document that are all learned, or all not. weight: factor of the
    losses, 0 if the tokens are not learned. control: ranges of characters of `text` that are
    control tokens."""

    text: str
    num_tokens: int
    is_learned: bool
    weight: float
    control: tuple[tuple[int, int], ...]

    def render(self, format_part: Callable[[str, bool], str]) -> str:
        """Return the text, with each part formatted by `format_part`, which gets the part and
        whether it is a control token."""
        edges = [0, *(edge for begin_end in self.control for edge in begin_end), len(self.text)]
        parts = [self.text[low:high] for low, high in pairwise(edges)]
        # Every second part is a control token.
        return "".join(format_part(part, bool(n % 2)) for n, part in enumerate(parts) if part)


def runs_of(
    tokens: Sequence[int],
    mask: npt.NDArray[np.bool_],
    weights: npt.NDArray[np.float32],
    decoder: Decoder,
) -> list[LearnedRange]:
    """Return the runs of a document: consecutive tokens with losses of equal weight, 0 without a
    loss. mask: bool, weights: of the losses, both of the length of `tokens`."""
    factors = np.where(mask, weights, np.float32(0))
    edges = [0, *(np.flatnonzero(np.diff(factors)) + 1).tolist(), len(tokens)]
    return [
        _run_of(tokens[low:high], bool(mask[low]), float(factors[low]), decoder)
        for low, high in pairwise(edges)
        if low < high
    ]


def _run_of(
    tokens: Sequence[int], is_learned: bool, weight: float, decoder: Decoder
) -> LearnedRange:
    """Return a range with its text, and the control tokens in the text."""
    text = decoder.decode(tokens)
    control: list[tuple[int, int]] = []
    first_token = text_end = 0  # token and character after the last control token
    for number, token in enumerate(tokens):
        name = decoder.control_tokens.get(token)
        if name is None:
            continue
        # Letters may spell a control token, so its position is determined by the previous tokens.
        # Some tokenizers decode a part of a text differently, for example without a leading blank.
        text_before = decoder.decode(tokens[first_token:number])
        begin = text_end + len(text_before)
        if not text.startswith(text_before + name, text_end):
            begin = len(decoder.decode(tokens[:number]))
        if text.startswith(name, begin):
            control.append((begin, begin + len(name)))
            first_token, text_end = number + 1, begin + len(name)
    return LearnedRange(text, len(tokens), is_learned, weight, tuple(control))


def legend(runs: Sequence[LearnedRange], *, colors: bool) -> str:
    """Return a line that counts the learned tokens of `runs` and explains their marks."""
    learned = sum(run.num_tokens for run in runs if run.is_learned)
    parts = [f"{learned:,} tokens of these are learned"]
    if any(run.control for run in runs):
        marks = "underlined" if colors else f"between {CONTROL_OPEN} and {CONTROL_CLOSE}"
        parts.append(f"control tokens are {marks}")
    if any(run.is_learned and run.weight != 1 for run in runs):
        parts.append("a number with \u00d7 is the weight of the losses after it")
    return f"({'; '.join(parts)})"


def for_terminal(runs: Sequence[LearnedRange], *, colors: bool) -> str:
    """Return the text of `runs`: learned ones colored, or between `OPEN` and `CLOSE`, with a weight
    other than 1; control tokens underlined, or between `CONTROL_OPEN` and `CONTROL_CLOSE`."""
    texts = []
    for run in runs:
        before, after = "", ""
        if run.is_learned:
            before, after = (_LEARNED, _PLAIN) if colors else (OPEN, CLOSE)

        def format_part(part: str, is_control: bool, before: str = before) -> str:
            if not is_control:
                return part
            if colors:
                return f"{_CONTROL}{part}{_PLAIN}{before}"  # the color of the run continues
            return f"{CONTROL_OPEN}{part}{CONTROL_CLOSE}"

        texts.append(f"{before}{_weight(run)}{run.render(format_part)}{after}")
    return "".join(texts)


def _weight(run: LearnedRange) -> str:
    """Return the text of a weight other than 1; empty for others."""
    return f"{run.weight:g}\u00d7 " if run.is_learned and run.weight != 1 else ""


def as_html(title: str, documents: Sequence[dict[str, Any]]) -> str:
    """Return a page with the `runs` of documents of `bigtrain.python_api.shards.documents_of`."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1><p>Learned text is <mark>marked</mark>: only these tokens "
        "have a loss, with a factor where one is shown. Control tokens have a <b>frame</b>, and "
        "letters that spell one have none.</p>",
    ]
    # A heading for each document, then its text with marks around learned runs.
    for document in documents:
        runs: Sequence[LearnedRange] = document["runs"]
        learned = sum(run.num_tokens for run in runs if run.is_learned)
        num_tokens = sum(run.num_tokens for run in runs)
        parts.append(
            f"<h2>Document {document['index']} of {html.escape(document['split'])}</h2>"
            f"<p>{learned:,} of {num_tokens:,} tokens are learned"
            + (f"; the document has {document['num_tokens']:,}" if document["cut"] else "")
            + "</p><pre>"
        )
        for run in runs:
            text = run.render(
                lambda part, is_control: (
                    f"<b>{html.escape(part)}</b>" if is_control else html.escape(part)
                )
            )
            weight = f"<small>{_weight(run)}</small>" if _weight(run) else ""
            parts.append(f"<mark>{weight}{text}</mark>" if run.is_learned else text)
        parts.append("</pre>")
    return "".join(parts) + "</body></html>\n"
