"""Extracts the document, as UTF-8, from the values of a row or a JSON object. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.data.documents.chat_formats import ChatFormat, nearest
from bigtrain.data.documents.conversations import ConversationError, conversation_bytes

JOINED_WITH = "\n"


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


@dataclass(frozen=True)
class Conversations:
    """How rows are conversations: their format, the keys of it in a row, and whether only the last
    answer of each is learned."""

    format: ChatFormat
    keys: tuple[str, ...]
    last_only: bool = False


def conversation_of(values: Sequence[Any], how: Conversations) -> tuple[bytes | None, str]:
    """The document of the `values` of `how.keys`, or None and why there is none."""
    try:
        messages, tools = how.format.make(values)
        return conversation_bytes(messages, tools, last_only=how.last_only), ""
    except ConversationError as error:
        return None, f"{how.keys[0]!r} is no conversation: {error}"


def value_at(tree: dict[str, Any], key: str) -> Any:
    """The value under `key`, or under the path that its points make of it; None where none is."""
    if key in tree or "." not in key:
        return tree.get(key)
    found: Any = tree
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def text_in(document: Any, keys: Sequence[str]) -> bytes:
    """The document of a JSON object that is right. Raises LookupError, TypeError or ValueError
    where something is wrong."""
    content, why = text_of([value_at(document, key) for key in keys], keys)
    if content is None:
        raise LookupError(why)
    return content


def document_in(
    tree: Any, keys: Sequence[str], chat: Conversations | None
) -> tuple[bytes | None, str]:
    """The document of any JSON value, or None and why there is none. `chat`: of conversations."""
    if not isinstance(tree, dict):
        return None, f"not a JSON object but {type(tree).__name__}"
    wanted = keys if chat is None else chat.keys[:1]
    found = [key for key in wanted if key in tree or value_at(tree, key) is not None]
    if not found:
        there = ", ".join(sorted(tree)[:20]) or "none"
        near = nearest(tree)
        remedy = "" if near is None else f" -> --format {near.name}"
        return None, f"no key {' or '.join(map(repr, wanted))}; keys here: {there}{remedy}"
    if chat is not None:
        return conversation_of([value_at(tree, key) for key in chat.keys], chat)
    return text_of([value_at(tree, key) for key in found], found)
