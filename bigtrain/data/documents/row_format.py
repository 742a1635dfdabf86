"""Formats of rows that are not plain text: keys, kinds of documents, role names. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bigtrain.data.documents.conversations import completion_bytes, conversation_bytes, from_text

Messages = list[dict[str, Any]]
Values = Sequence[Any]
"""Values of a row under the keys of its format, None for missing ones."""
Roles = Mapping[str, str]
"""User-defined meanings of role names in the data (``--role``)."""


class RowDocument(Protocol):
    """Document of a row."""

    def document(self, *, last_only: bool) -> bytes:
        """Return it as the document that is tokenized. last_only: only the last answer has loss.
        Raise ConversationError for an invalid one."""


@dataclass(frozen=True)
class Chat:
    """Messages and their tools; not checked yet."""

    messages: object
    tools: object = None

    def document(self, *, last_only: bool) -> bytes:
        return conversation_bytes(self.messages, self.tools, last_only=last_only)


@dataclass(frozen=True)
class Completion:
    """Prompt and completion as plain text, without a chat template."""

    prompt: str
    completion: str

    def document(self, *, last_only: bool) -> bytes:
        return completion_bytes(self.prompt, self.completion)


TOKEN_KEYS = (
    "input_ids",
    "labels",
    "attention_mask",
    "loss_mask",
    "token_weights",
    "loss_weights",
    "weight",
)
"""Keys of rows that are already tokenized (`bigtrain.data.documents.token_rows`)."""
FUNCTION_CALL = "function_call"
"""LLaMA-Factory's ShareGPT role of a turn whose value is the JSON of one or more calls."""
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "bot": "assistant",
    FUNCTION_CALL: "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
}
"""Names of ShareGPT, LLaMA-Factory and Axolotl, mapped to the names that templates use."""
PEOPLE = {name: ROLES[name] for name in ("human", "gpt", "chatgpt", "bard", "bing")}
"""Names that no template uses, so that their meaning does not depend on the format."""


@dataclass(frozen=True)
class ChatFormat:
    """Format of rows. name: of ``--format``. keys: the first is required in every row; identifying:
    keys that identify the format; make: converts their values, and those of `extra_keys`, to a
    document; turn_keys: keys of speaker and text in each turn. extra_keys: keys that always have
    these names. noun: what a row is, for errors. is_detected: whether rows with the identifying
    keys are of it without being named."""

    name: str
    keys: tuple[str, ...]
    identifying: frozenset[str]
    make: Callable[[Values, Roles], RowDocument]
    turn_keys: tuple[str, ...] = ("role", "content")
    extra_keys: tuple[str, ...] = ()
    noun: str = "a conversation"
    is_detected: bool = True


def with_roles(given: object, roles: Roles) -> object:
    """Return messages with role names mapped by `roles` and `PEOPLE`."""
    messages = from_text(given)
    if not isinstance(messages, list):
        return messages
    return [with_role(m, roles) if isinstance(m, dict) and "role" in m else m for m in messages]


def with_role(message: Mapping[str, Any], roles: Roles) -> dict[str, Any]:
    """Return `message` with its role mapped by `roles` and `PEOPLE`."""
    name = message["role"]
    return {**message, "role": {**PEOPLE, **roles}.get(str(name), name)}
