"""Conversations as documents. No transformers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson


class ConversationError(Exception):
    """A conversation that cannot be used: the text is the reason, for the list of bad documents."""


def conversation_bytes(messages: object, tools: object = None, *, last_only: bool = False) -> bytes:
    """A conversation as the document that is tokenized: JSON, always the same for the same.

    last_only: of what the assistant said only the last message is learned.
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
        _check_learning(number, message)
        _check_content(number, message.get("content"))
    tools = _listed_tools(tools)
    # As transformers does: a key without a value is no key.
    given = [{key: value for key, value in m.items() if value is not None} for m in messages]
    if last_only:
        answers = [number for number, message in enumerate(given) if is_learned(message)]
        for number in answers[:-1]:
            given[number] = {**given[number], "weight": 0}
    try:
        return orjson.dumps({"messages": given, **({"tools": tools} if tools else {})})
    except TypeError as error:
        raise ConversationError(f"it cannot be written as JSON: {error}") from error


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message is learned: the assistant's, but for ``weight: 0`` (OpenAI's format) and
    ``train: false`` (Axolotl's)."""
    wanted = message.get("weight", 1) and message.get("train", True)
    return bool(message["role"] == "assistant" and wanted)


def _check_learning(number: int, message: Mapping[str, Any]) -> None:
    weight, train, role = message.get("weight"), message.get("train"), message["role"]
    if weight not in (None, 0, 1):
        raise ConversationError(
            f"message {number} has weight {weight!r}: a message is learned or not -> 0, 1, or no "
            "weight"
        )
    if train is not None and not isinstance(train, bool):
        raise ConversationError(f"message {number} has train {train!r} -> true, false, or no train")
    for key, value in (("weight", weight), ("train", train)):
        if value and role != "assistant":
            raise ConversationError(
                f"message {number} has {key} {value!r} and role {role}: only messages of the "
                f"assistant are learned -> {'0' if key == 'weight' else 'false'}, or no {key}"
            )
    if weight is not None and train is not None and bool(weight) != train:
        raise ConversationError(
            f"message {number} has weight {weight!r} and train {train!r}, which contradict each "
            "other -> one of them"
        )


def _check_content(number: int, content: object) -> None:
    """Refuse parts of a message that no text tokenizer has tokens for, by name."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ConversationError(
                f"message {number} holds a part of type {kind!r}: models of text alone are trained "
                "-> leave such conversations out (--skip-bad)"
            )


def _listed_tools(tools: object) -> object:
    """The tools of a conversation, which some data sets write as a JSON string each or together."""
    if isinstance(tools, str):
        tools = _from_json(tools)
    if isinstance(tools, list):
        tools = [_from_json(tool) if isinstance(tool, str) else tool for tool in tools]
    if tools is None or (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        return tools
    raise ConversationError("its tools are not a list of objects, nor JSON of one")


def _from_json(text: str) -> object:
    try:
        return orjson.loads(text) if text.strip() else None
    except ValueError as error:
        raise ConversationError(f"its tools are text that is not JSON ({error})") from error
