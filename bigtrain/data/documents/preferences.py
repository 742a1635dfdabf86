"""Rows of preferences: pairs of a chosen and a rejected answer; answers with a label (KTO). Samples
with a label (classification). Pure.

Prompt and answers are all text, or all messages. A pair without a prompt has it as the common
beginning of both answers, as in TRL's ``extract_prompt``. No message of a prompt is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.data.documents.conversations import (
    FLAGS,
    WORDLESS,
    ConversationError,
    has_fraction,
)
from bigtrain.data.documents.exact_json import dumps, joined_documents
from bigtrain.data.documents.row_format import Chat, Completion, RowDocument, Values
from bigtrain.data.documents.turns import Messages, Roles, is_turn, messages_in, with_roles

PAIR_KEYS = ("chosen", "rejected", "prompt", "tools")
LABELED_KEYS = ("prompt", "completion", "label", "tools")
CLASSIFIED_KEYS = ("label", "text", "messages", "tools")
SIDES = ("chosen", "rejected")
"""Order of the two documents of a pair."""
LABELS = {"true": True, "false": False, "1": True, "0": False}
"""Text of labels of answers in lower case, as csv files hold them."""


@dataclass(frozen=True)
class Pair:
    """Chosen and rejected answer to one prompt, each with the prompt."""

    chosen: RowDocument
    rejected: RowDocument

    def document(self, *, last_only: bool) -> bytes:
        """Return the pair as JSON of both documents."""
        chosen, rejected = (s.document(last_only=last_only) for s in (self.chosen, self.rejected))
        return joined_documents(chosen=chosen, rejected=rejected)


@dataclass(frozen=True)
class Labeled:
    """Answer to a prompt; `is_desirable` is its label."""

    answer: RowDocument
    is_desirable: bool

    def document(self, *, last_only: bool) -> bytes:
        """Return the answer and its label as JSON."""
        answer = self.answer.document(last_only=last_only)
        return joined_documents(answer=answer, label=dumps(self.is_desirable))


@dataclass(frozen=True)
class Classified:
    """Text, or conversation, with its label: a number, or a name."""

    sample: str | RowDocument
    label: int | str

    def document(self, *, last_only: bool) -> bytes:
        """Return the sample and its label as JSON."""
        if isinstance(self.sample, str):
            sample = dumps({"text": self.sample})
        else:
            sample = self.sample.document(last_only=last_only)
        return joined_documents(sample=sample, label=dumps(self.label))


def pair(values: Values, roles: Roles) -> Pair:
    """Return the pair in the values of `PAIR_KEYS`. Raise ConversationError for one without two
    different answers to one prompt."""
    chosen, rejected, prompt, tools = *map(messages_in, values[:3]), values[3]
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if side is None:
            raise ConversationError(f"it has no {name}")
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        given, (one, other) = _text_prompt(chosen, rejected, prompt)
        _refuse_same(one, other)
        for name, side in zip(SIDES, (one, other), strict=True):
            _require_text(name, side)
        return Pair(Completion(given, one), Completion(given, other))
    if prompt is None and isinstance(rejected, str):
        rejected = _with_last_answer(chosen, rejected)
    both = [_messages(name, s, roles) for name, s in zip(SIDES, (chosen, rejected), strict=True)]
    before = _messages_prompt(both[0], both[1], prompt, roles)
    if prompt is None or isinstance(prompt, str):
        both = [side[len(before) :] for side in both]
    _refuse_same(*both)
    for name, messages in zip(SIDES, both, strict=True):
        _require_answer(name, messages)
    begin = [_unlearned(message) for message in before]
    return Pair(Chat([*begin, *both[0]], tools), Chat([*begin, *both[1]], tools))


def _with_last_answer(chosen: object, rejected: str) -> object:
    """Return the messages of `chosen` with the text `rejected` as the last answer, as ms-swift has
    it under ``rejected_response``; `rejected` if that cannot be."""
    if not isinstance(chosen, list) or len(chosen) < 2 or not isinstance(chosen[-1], dict):
        return rejected
    last = chosen[-1]
    if any(last.get(key) for key in WORDLESS):
        return rejected
    return [*chosen[:-1], {**last, ("value" if is_turn(last) else "content"): rejected}]


def _desirable(label: object) -> bool:
    """Return whether an answer is desirable by its label: a boolean, or 0 or 1, also as text. Raise
    ConversationError for any other label."""
    is_desirable = label
    if isinstance(label, str):
        is_desirable = LABELS.get(label.strip().lower())
    elif isinstance(label, int | float) and label in (0, 1):
        is_desirable = bool(label)
    if not isinstance(is_desirable, bool):
        raise ConversationError(
            f"its label is {label!r}, which is neither true nor false -> a boolean, 0 or 1; or "
            "--format prompt-completion, which reads no label"
        )
    return is_desirable


def labeled(values: Values, roles: Roles) -> Labeled:
    """Return the answer in the values of `LABELED_KEYS`. Raise ConversationError for one without an
    answer or a label."""
    prompt, completion = map(messages_in, values[:2])
    label, tools = values[2:]
    is_desirable = _desirable(label)
    if isinstance(prompt, str) and isinstance(completion, str):
        _require_text("completion", completion)
        return Labeled(Completion(prompt, completion), is_desirable)
    if completion is None and not isinstance(prompt, list):
        raise ConversationError("it has no completion")
    before = _messages("prompt", prompt, roles)
    if completion is not None:
        after = _messages("completion", completion, roles)
    elif before and before[-1].get("role") == "assistant":
        before, after = before[:-1], before[-1:]  # a complete conversation, as in LLaMA-Factory
    else:
        raise ConversationError("it has no completion, and its prompt does not end in an answer")
    _require_answer("completion", after)
    return Labeled(Chat([*map(_unlearned, before), *after], tools), is_desirable)


def classified(values: Values, roles: Roles) -> Classified:
    """Return the sample in the values of `CLASSIFIED_KEYS`. Raise ConversationError for one without
    a label, or without either text or messages."""
    label, text, messages, tools = values
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise ConversationError(f"its label is {label!r}, which is neither an integer nor a name")
    if (text is None) == (messages is None):
        has = "both" if text is not None else "neither"
        raise ConversationError(f"it has {has} of text and messages -> one of them")
    if messages is not None:
        given = with_roles(messages, roles)
        if isinstance(given, list):
            _refuse_fractions("messages", [one for one in given if isinstance(one, dict)])
        return Classified(Chat(given, tools), label)
    if not isinstance(text, str):
        raise ConversationError(f"its text is {type(text).__name__}")
    _require_text("text", text)
    return Classified(text, label)


def _text_prompt(chosen: str, rejected: str, prompt: str | None) -> tuple[str, tuple[str, str]]:
    """Return the prompt and both answers without it."""
    if prompt is not None:
        return prompt, (chosen, rejected)
    _refuse_same(chosen, rejected)
    begin = _common(chosen, rejected)
    if chosen[begin] != rejected[begin] and chosen[max(0, begin - 1)] == " ":
        begin = max(0, begin - 1)  # the space belongs to the answers
    if not begin:
        raise _without_prompt()
    return chosen[:begin], (chosen[begin:], rejected[begin:])


def _messages_prompt(
    chosen: Messages, rejected: Messages, prompt: object, roles: Roles
) -> Messages:
    """Return the messages of the prompt: those given, or else the common beginning."""
    if isinstance(prompt, list | dict):
        given = _messages("prompt", prompt, roles)
        if given and chosen[: len(given)] == given == rejected[: len(given)]:
            raise ConversationError(
                "chosen and rejected begin with the messages of prompt, which would be there twice "
                "-> remove them, or omit the prompt: --key prompt=none"
            )
        return given
    if prompt is not None and not isinstance(prompt, str):
        raise _of_two_kinds("prompt", prompt)
    _refuse_same(chosen, rejected)
    before = chosen[: _common(chosen, rejected)]
    if not before:
        raise _without_prompt()
    if isinstance(prompt, str) and before[-1].get("content") != prompt:
        raise ConversationError(
            "its prompt is text, and not the last message with which chosen and rejected both "
            "begin -> messages, or omit the prompt: --key prompt=none"
        )
    return before


def _common(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the length of the common beginning; one less if that is all of one of them."""
    shorter = min(len(chosen), len(rejected))
    return next((n for n in range(shorter) if chosen[n] != rejected[n]), max(0, shorter - 1))


def _messages(name: str, value: object, roles: Roles) -> Messages:
    messages = with_roles([value] if isinstance(value, dict) else value, roles)
    if not isinstance(messages, list) or isinstance(value, str):
        raise _of_two_kinds(name, value)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            kind = type(message).__name__
            raise ConversationError(f"message {number} of its {name} is not an object but {kind}")
    return messages


def _of_two_kinds(name: str, value: object) -> ConversationError:
    return ConversationError(
        f"its {name} is {type(value).__name__}: prompt and answers must be all text or all messages"
    )


def _without_prompt() -> ConversationError:
    return ConversationError(
        "chosen and rejected have no common beginning, and there is no prompt -> a key prompt, "
        "which may be an empty text"
    )


def _refuse_same(chosen: object, rejected: object) -> None:
    if chosen == rejected:
        raise ConversationError("chosen and rejected are equal")


def _require_text(name: str, text: str) -> None:
    if not text:
        raise ConversationError(f"its {name} is empty")


def _require_answer(name: str, messages: Messages) -> None:
    """Raise ConversationError unless each answer in `messages` has content, a call or reasoning."""
    if not messages:
        raise ConversationError(f"its {name} is empty")
    _refuse_fractions(name, messages)
    for number, message in enumerate(messages, 1):
        is_empty = message.get("content") in (None, "", [])
        if message.get("role") == "assistant" and is_empty:
            if any(message.get(key) for key in (*WORDLESS, "function_call")):
                continue
            raise ConversationError(f"message {number} of its {name} is empty")


def _refuse_fractions(name: str, messages: Messages) -> None:
    """Raise ConversationError for a message whose weight would be ignored."""
    for number, message in enumerate(messages, 1):
        if has_fraction(message):
            raise ConversationError(
                f"message {number} of its {name} has weight {message['weight']!r}: only "
                "conversations that are learned token by token have factors of losses -> 0, 1, or "
                "no weight"
            )


def _unlearned(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a prompt, which has no loss."""
    if message.get("role") != "assistant":
        return message
    rest = {key: value for key, value in message.items() if key not in ("weight", *FLAGS)}
    return {**rest, "train": False}
