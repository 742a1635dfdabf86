"""Suggestions for unknown keys of a DeepSpeed JSON. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Collection

FORMER_NAMES = {"aio.thread_count": "aio.intra_op_parallelism"}
"""Keys that DeepSpeed has renamed to something different, without marking them as deprecated."""

_SIMILAR = 0.6
_LISTED_KEYS = 16  # a longer list would bury the message


def suggestion(path: str, accepted: Collection[str]) -> str:
    """Return how to correct the key `path` of a DeepSpeed JSON, which DeepSpeed does not know.

    accepted: dotted keys that a run may have; no other one is suggested.
    """
    block, _, name = path.rpartition(".")
    siblings = _below(block, accepted)
    close = _containing(name, siblings) or next(
        iter(difflib.get_close_matches(name, siblings, n=1, cutoff=_SIMILAR)), None
    )
    homes = [key for key in accepted if key.rpartition(".")[2] == name]
    if path in FORMER_NAMES:
        return f"write {FORMER_NAMES[path]}"
    if close is not None:
        return f"did you mean {_joined(block, close)}?"
    if len(homes) == 1:
        return f"it belongs to {homes[0].rpartition('.')[0]}: write {homes[0]}"
    if not block or not siblings:
        return "remove it; docs/reference/deepspeed_keys.md lists the accepted keys"
    if len(siblings) <= _LISTED_KEYS:
        return f"known in {block}: {', '.join(siblings)}"
    nearest = difflib.get_close_matches(name, siblings, n=1, cutoff=0.0)[0]
    return f"the nearest known key is {_joined(block, nearest)}, or remove it"


def _below(block: str, accepted: Collection[str]) -> list[str]:
    """Return names of keys and blocks directly below `block`, sorted."""
    start = f"{block}." if block else ""
    names = {key.removeprefix(start).partition(".")[0] for key in accepted if key.startswith(start)}
    return sorted(names)


def _containing(name: str, siblings: Collection[str]) -> str | None:
    """Return the shortest of `siblings` that contains `name` as complete words."""
    matches = [sibling for sibling in siblings if f"_{name}_" in f"_{sibling}_"]
    return min(matches, key=len, default=None)


def _joined(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name
