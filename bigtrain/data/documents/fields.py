"""Extraction of the document, as UTF-8, from the values of a row or a JSON object. Pure."""

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
    """Return the document in the `values` of `keys`, or None and the reason."""
    given = [value for value in values if value is not None]
    wrong = next((value for value in given if not isinstance(value, str)), None)
    if wrong is not None or not given:
        kind = "nothing" if wrong is None else type(wrong).__name__
        return None, f"{' or '.join(map(repr, keys))} is not text but {kind}"
    text = given[0] if len(given) == 1 else JOINED_WITH.join(filter(None, given))
    try:
        return text.encode("utf-8"), ""
    except UnicodeEncodeError as error:
        if "\udc80" <= text[error.start] <= "\udcff":  # from csv: a byte that is not UTF-8
            return None, "not UTF-8, or half of a surrogate pair"
        return None, "the text contains half of a surrogate pair"


@dataclass(frozen=True)
class Conversations:
    """Rows as conversations: format, its keys in a row, whether only the last answer has loss,
    roles of names in the data, and keys of a turn if they differ from the format's."""

    format: ChatFormat
    keys: tuple[str, ...]
    last_only: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    turn_keys: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Keys to read from a row: the format's, and those that mark it as not text-only."""
        others = (*self.format.extra_keys, *MEDIA_KEYS)
        return (*self.keys, *(key for key in others if key not in self.keys))

    def with_known_turns(self, value: object) -> object:
        """Return the `value` of a row, with the format's keys in its turns."""
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
    """Return the document in the `values` of `how.columns`, or None and the reason."""
    extra = dict(zip(how.columns[len(how.keys) :], values[len(how.keys) :], strict=False))
    for key, value in extra.items():
        if key in MEDIA_KEYS and value is not None and value not in ("", [], {}):
            return None, (f"it has a value under {key!r}: only text is supported")
    try:
        given = [how.with_known_turns(value) for value in values[: len(how.keys)]]
        given += [extra.get(key) for key in how.format.extra_keys]
        conversation = how.format.make(given, how.roles)
        if isinstance(conversation, Completion):
            return completion_bytes(conversation.prompt, conversation.completion), ""
        messages, tools = conversation.messages, conversation.tools
        return conversation_bytes(messages, tools, last_only=how.last_only), ""
    except ConversationError as error:
        return None, f"{how.keys[0]!r} is not a conversation: {error}"
    except TypeError as error:  # halves of surrogate pairs, in a prompt
        return None, f"{how.keys[0]!r} cannot be written as JSON: {error}"


def value_at(tree: Any, key: str) -> Any:
    """Return the value under `key`, or under `key` as a dotted path; None if there is none."""
    if isinstance(tree, dict) and (key in tree or "." not in key):
        return tree.get(key)
    value = tree
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def text_in(document: Any, keys: Sequence[str]) -> bytes:
    """Return the document of a JSON object. Raise LookupError, TypeError or ValueError if
    invalid."""
    content, why = text_of([value_at(document, key) for key in keys], keys)
    if content is None:
        raise LookupError(why)
    return content


def document_in(
    tree: Any, keys: Sequence[str], chat: Conversations | None
) -> tuple[bytes | None, str]:
    """Return the document of any JSON value, or None and the reason. `chat`: for conversations."""
    if not isinstance(tree, dict):
        return None, f"not a JSON object but {type(tree).__name__}"
    wanted = keys if chat is None else chat.keys[:1]
    present = [key for key in wanted if key in tree or value_at(tree, key) is not None]
    if not present:
        there = ", ".join(sorted(tree)[:20]) or "none"
        missing = f"no key {' or '.join(map(repr, wanted))}; keys here: {there}"
        return None, missing + remedy_for(tree)
    if chat is not None:
        return conversation_of([value_at(tree, key) for key in chat.columns], chat)
    return text_of([value_at(tree, key) for key in present], present)
