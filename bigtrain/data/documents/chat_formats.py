"""Common formats of conversations (ShareGPT, Alpaca, ...), converted to messages with roles. Pure.

A `ChatFormat` defines the keys of a row, and converts their values to messages for transformers'
``apply_chat_template``. `nearest` detects the format from a row's keys.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.data.documents.conversations import ConversationError

Messages = list[dict[str, Any]]
Values = Sequence[Any]
"""A row's values under the keys of its format, None for missing ones."""

TOOLS_KEY = "tools"
"""The key of a conversation's tools, beside its messages."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""ShareGPT's names, and those of LLaMA-Factory and Axolotl, as templates know them."""


@dataclass(frozen=True)
class ChatFormat:
    """name: of ``--format``. keys: the first is required in every row; told: keys that identify the
    format; make: converts their values to messages and tools."""

    name: str
    keys: tuple[str, ...]
    told: frozenset[str]
    make: Callable[[Values], tuple[object, object]]


def _messages(values: Values) -> tuple[object, object]:
    return values[0], values[1]


def _sharegpt(values: Values) -> tuple[object, object]:
    turns, system, tools = values
    if not isinstance(turns, list):
        return turns, tools
    messages: Messages = []
    if _text(system, "system"):
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or "from" not in turn:
            shown = type(turn).__name__
            if isinstance(turn, dict):
                shown = f"an object with the keys {', '.join(sorted(turn)) or 'none'}"
            raise ConversationError(
                f"turn {number} is not an object with from and value but {shown}"
                + (" -> --format messages" if isinstance(turn, dict) and "role" in turn else "")
            )
        role = ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise ConversationError(
                f"turn {number} is from {turn['from']!r}, which is none of {', '.join(ROLES)}"
            )
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        messages.append({"role": role, "content": turn.get("value"), **rest})
    return messages, tools


def _alpaca(values: Values) -> tuple[object, object]:
    instruction, given, output, system, history = values
    messages: Messages = []
    if _text(system, "system"):
        messages.append({"role": "system", "content": system})
    for number, pair in enumerate(history or (), 1):
        if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_text, pair))):
            raise ConversationError(f"history {number} is not a pair of instruction and output")
        messages += [
            {"role": "user", "content": pair[0]},
            {"role": "assistant", "content": pair[1]},
        ]
    if not _is_text(instruction) or not _is_text(output):
        wrong = "instruction" if not _is_text(instruction) else "output"
        raise ConversationError(f"its {wrong} is not text")
    # As LLaMA-Factory and Alpaca itself join them.
    asked = f"{instruction}\n{given}" if _text(given, "input") else instruction
    return [*messages, *_exchange(asked, output)], None


def _prompt_completion(values: Values) -> tuple[object, object]:
    prompt, completion, tools = values
    if isinstance(prompt, list) and isinstance(completion, list):
        # Of the prompt nothing is learned, as in TRL.
        before = [{**m, "train": False} if _is_answer(m) else m for m in prompt]
        return [*before, *completion], tools
    if not _is_text(prompt) or not _is_text(completion):
        kinds = f"{type(prompt).__name__} and {type(completion).__name__}"
        raise ConversationError(f"its prompt and completion are not both text or messages: {kinds}")
    return _exchange(prompt, completion), tools


def _exchange(asked: str, answer: str) -> Messages:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _text(value: object, name: str) -> bool:
    """Whether `value` is a non-empty text. Raises ConversationError unless it is text or None."""
    if value is not None and not isinstance(value, str):
        raise ConversationError(f"its {name} is not text but {type(value).__name__}")
    return bool(value)


FORMATS: Mapping[str, ChatFormat] = {
    entry.name: entry
    for entry in (
        ChatFormat("messages", ("messages", TOOLS_KEY), frozenset({"messages"}), _messages),
        ChatFormat(
            "sharegpt",
            ("conversations", "system", TOOLS_KEY),
            frozenset({"conversations"}),
            _sharegpt,
        ),
        ChatFormat(
            "alpaca",
            ("instruction", "input", "output", "system", "history"),
            frozenset({"instruction", "output"}),
            _alpaca,
        ),
        ChatFormat(
            "prompt-completion",
            ("prompt", "completion", TOOLS_KEY),
            frozenset({"prompt", "completion"}),
            _prompt_completion,
        ),
    )
}


def nearest(keys: Collection[str]) -> ChatFormat | None:
    """The format that a row with these keys has; None if it is none of them."""
    return next((entry for entry in FORMATS.values() if entry.told <= set(keys)), None)
