"""Extracts the document, as UTF-8, from the values of a row or a JSON object. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigtrain.data.documents.chat_formats import MEDIA_KEYS, ChatFormat, Completion, remedy_for
from bigtrain.data.documents.conversations import (
    ConversationError,
    completion_bytes,
    conversation_bytes,
    from_text,
)

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
    """How rows are conversations: their format, the keys of it in a row, whether only the last
    answer of each is learned, which roles names of the data mean, and the keys of a turn where they
    are others than the format's."""

    format: ChatFormat
    keys: tuple[str, ...]
    last_only: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    turn_keys: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The keys to read of a row: the format's, and those that say it is not text alone."""
        others = (*self.format.beside, *MEDIA_KEYS)
        return (*self.keys, *(key for key in others if key not in self.keys))

    def with_known_turns(self, value: object) -> object:
        """`value` of a row; turns in it with the format's keys."""
        if self.turn_keys in ((), self.format.turn_keys):
            return value
        turns = from_text(value)
        if not isinstance(turns, list):
            return value
        known = dict(zip(self.turn_keys, self.format.turn_keys, strict=True))
        return [
            {known.get(key, key): item for key, item in turn.items()}
            if isinstance(turn, dict)
            else turn
            for turn in turns
        ]


def conversation_of(values: Sequence[Any], how: Conversations) -> tuple[bytes | None, str]:
    """The document of the `values` of `how.columns`, or None and why there is none."""
    beside = dict(zip(how.columns[len(how.keys) :], values[len(how.keys) :], strict=False))
    for key, value in beside.items():
        if key in MEDIA_KEYS and value is not None and value not in ("", [], {}):
            return None, (f"it has a value under {key!r}: models of text alone are trained")
    try:
        given = [how.with_known_turns(value) for value in values[: len(how.keys)]]
        given += [beside.get(key) for key in how.format.beside]
        found = how.format.make(given, how.roles)
        if isinstance(found, Completion):
            return completion_bytes(found.prompt, found.completion), ""
        return conversation_bytes(found.messages, found.tools, last_only=how.last_only), ""
    except ConversationError as error:
        return None, f"{how.keys[0]!r} is no conversation: {error}"
    except TypeError as error:  # halves of surrogate pairs, in a prompt
        return None, f"{how.keys[0]!r} cannot be written as JSON: {error}"


def value_at(tree: Any, key: str) -> Any:
    """The value under `key`, or under the path that its points make of it; None where none is."""
    if isinstance(tree, dict) and (key in tree or "." not in key):
        return tree.get(key)
    found = tree
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
        missing = f"no key {' or '.join(map(repr, wanted))}; keys here: {there}"
        return None, missing + remedy_for(tree)
    if chat is not None:
        return conversation_of([value_at(tree, key) for key in chat.columns], chat)
    return text_of([value_at(tree, key) for key in found], found)
