"""Conversations as documents. No transformers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson


class ConversationError(Exception):
    """A conversation that cannot be used: the text is the reason, for the list of bad documents."""


def conversation_bytes(messages: object, tools: object = None) -> bytes:
    """A conversation as the document that is tokenized: JSON, always the same for the same.

    Raises ConversationError for what is not one.
    """
    if isinstance(messages, str):  # as some columns of tables hold them
        with suppress(ValueError):
            messages = orjson.loads(messages)
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else type(messages).__name__
        raise ConversationError(f"not a list of messages but {found}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ConversationError(
                f"message {number} is not an object but {type(message).__name__}"
            )
        if not isinstance(message.get("role"), str):
            keys = ", ".join(sorted(map(str, message))) or "none"
            raise ConversationError(f"message {number} has no role that is text; keys here: {keys}")
        _check_weight(number, message)
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ConversationError("its tools are not a list of objects")
    # As transformers does: a key without a value is no key.
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    try:
        return orjson.dumps({"messages": given, **({"tools": tools} if tools else {})})
    except TypeError as error:
        raise ConversationError(f"it cannot be written as JSON: {error}") from error


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is learned: the assistant's, but for ``weight: 0`` (OpenAI's format)."""
    return bool(message["role"] == "assistant" and message.get("weight", 1))


def _check_weight(number: int, message: Mapping[str, Any]) -> None:
    weight, role = message.get("weight"), message["role"]
    if weight not in (None, 0, 1):
        raise ConversationError(
            f"message {number} has weight {weight!r}: a message is learned or not -> 0, 1, or no "
            "weight"
        )
    if weight and role != "assistant":
        raise ConversationError(
            f"message {number} has weight {weight!r} and role {role}: only messages of the "
            "assistant are learned -> 0, or no weight"
        )
