"""What of a row or a JSON object is the document: some of its values as UTF-8. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigtrain.data.documents.conversations import ConversationError, conversation_bytes

JOINED_WITH = "\n"
TOOLS_KEY = "tools"
"""Where data sets of conversations keep the tools of one, beside its messages."""


def text_of(values: Sequence[Any], keys: Sequence[str]) -> tuple[bytes | None, str]:
    """The document of the `values` of `keys`, or None and why there is none."""
    given = [value for value in values if value is not None]
    wrong = next((value for value in given if not isinstance(value, str)), None)
    if wrong is not None or not given:
        found = "nothing" if wrong is None else type(wrong).__name__
        return None, f"{' or '.join(map(repr, keys))} is not text but {found}"
    text = given[0] if len(given) == 1 else JOINED_WITH.join(filter(None, given))
    try:
        return text.encode("utf-8"), ""
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # csv's, of a byte that is not UTF-8
            return None, "not UTF-8, or half of a surrogate pair"
        return None, "the text holds half of a surrogate pair"


def conversation_of(values: Sequence[Any], key: str) -> tuple[bytes | None, str]:
    """The document of messages and tools, or None and why there is none."""
    try:
        return conversation_bytes(*values), ""
    except ConversationError as error:
        return None, f"{key!r} is no conversation: {error}"


def text_in(document: Any, keys: Sequence[str]) -> bytes:
    """The document of a JSON object that is right. Raises LookupError, TypeError or ValueError
    where something is wrong."""
    content, why = text_of([document[key] for key in keys if key in document], keys)
    if content is None:
        raise LookupError(why)
    return content


def document_in(tree: Any, keys: Sequence[str], chat: bool) -> tuple[bytes | None, str]:
    """The document of any JSON value, or None and why there is none.

    `chat`: the only key holds a conversation.
    """
    if not isinstance(tree, dict):
        return None, f"not a JSON object but {type(tree).__name__}"
    found = [key for key in keys if key in tree]
    if not found:
        there = ", ".join(sorted(tree)[:20]) or "none"
        return None, f"no key {' or '.join(map(repr, keys))}; keys here: {there}"
    if chat:
        return conversation_of([tree[found[0]], tree.get(TOOLS_KEY)], keys[0])
    return text_of([tree[key] for key in found], found)
