"""Formats of rows that are not plain text: keys and kinds of documents. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from bigtrain.data.documents.conversations import conversation_bytes
from bigtrain.data.documents.exact_json import dumps
from bigtrain.data.documents.turns import Roles

Values = Sequence[Any]
"""Values of a row under the keys of its format, None for missing ones."""


class RowDocument(Protocol):
    """Document of a row."""

    def document(self, *, last_only: bool) -> bytes:
        """Return it as the document that is tokenized. last_only: only the last answer has loss.
        Raise ConversationError for an invalid one."""


class Extracted(NamedTuple):
    """Document of a row as UTF-8; None if the row has no usable document, and the reason."""

    content: bytes | None
    reason: str = ""


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
        return dumps({"prompt": self.prompt, "completion": self.completion})


TOKEN_KEYS = (
    "input_ids",
    "labels",
    "attention_mask",
    "loss_mask",
    "completion_mask",
    "assistant_masks",
    "token_weights",
    "loss_weights",
    "weight",
)
"""Keys of rows that are already tokenized (`bigtrain.data.documents.token_rows`)."""
MESSAGE_KEYS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")
"""Keys of formats that may hold messages."""


@dataclass(frozen=True)
class ChatFormat:
    """Format of rows. name: of ``--format``. keys: the first is required in every row; identifying:
    keys that identify the format; make: converts the values of `keys` and `extra_keys` to a
    document; turn_keys: keys of speaker and text in each turn. extra_keys: keys that always have
    these names. noun: what a row is, for errors. is_detected: whether rows with the identifying
    keys have this format if the user names none. has_roles: whether rows name speakers.
    needs_template: whether every row is rendered by the chat template; rows of other formats may
    hold plain text."""

    name: str
    keys: tuple[str, ...]
    identifying: frozenset[str]
    make: Callable[[Values, Roles], RowDocument]
    turn_keys: tuple[str, ...] = ("role", "content")
    extra_keys: tuple[str, ...] = ()
    noun: str = "a conversation"
    is_detected: bool = True
    has_roles: bool = True
    needs_template: bool = False
