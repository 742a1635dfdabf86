"""Suggestions for misspelt names. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean X?`` for the nearest of `known`, or the first names of it."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"it has: {', '.join(names[:8]) or 'nothing'}"
