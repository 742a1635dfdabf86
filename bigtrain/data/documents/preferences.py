"""Rows of preferences: pairs of a chosen and a rejected answer; answers with a label (KTO). Samples
with a label (classification). Pure.

Prompt and answers are all text, or all messages. Without a key for the prompt, the prompt of a pair
is the common beginning of the two answers, as in TRL's ``extract_prompt``. No message of a prompt
is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.data.documents.conversations import FLAGS, WORDLESS, has_fraction
from bigtrain.data.documents.exact_json import dumps, joined_documents
from bigtrain.data.documents.row_format import Chat, Completion, RowDocument, Values
from bigtrain.data.documents.turns import Messages, Roles, is_turn, messages_in, with_roles
from bigtrain.data.tokenizers.chat_template import ConversationError
from bigtrain.objectives.preference import PAIRS

SIDES = PAIRS.documents
"""Order of the two documents of a pair."""
LABELS = {"true": True, "false": False, "1": True, "0": False}
"""Text of labels of answers in lower case, as csv files hold them."""


@dataclass(frozen=True)
class Pair:
    """Chosen and rejected answer to one prompt, each with the prompt."""

    chosen: RowDocument
    rejected: RowDocument

    def document(self, *, last_only: bool) -> bytes:
        """Return the pair as JSON of two documents."""
        chosen = self.chosen.document(last_only=last_only)
        rejected = self.rejected.document(last_only=last_only)
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
    """Return the pair in the values of the keys of `PAIRS`. Raise ConversationError unless it has
    two different answers to one prompt."""
    *answers_and_prompt, tools = values
    chosen, rejected, prompt = map(messages_in, answers_and_prompt)
    for name, side in zip(SIDES, (chosen, rejected), strict=True):
        if side is None:
            raise ConversationError(f"it has no {name}")
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        return _text_pair(chosen, rejected, prompt)

    # ms-swift's ``rejected_response``: a text instead of the last of the chosen messages.
    if prompt is None and isinstance(rejected, str) and isinstance(chosen, list) and chosen[1:]:
        last = chosen[-1]
        if isinstance(last, dict) and not any(last.get(key) for key in WORDLESS):
            rejected = [*chosen[:-1], {**last, "value" if is_turn(last) else "content": rejected}]

    # Answers without a key of messages for the prompt begin with the messages of the prompt.
    answers = [_messages(name, s, roles) for name, s in zip(SIDES, (chosen, rejected), strict=True)]
    prompt_messages = _messages_prompt(answers[0], answers[1], prompt, roles)
    if prompt is None or isinstance(prompt, str):
        answers = [side[len(prompt_messages) :] for side in answers]
    _refuse_same(*answers)
    for name, messages in zip(SIDES, answers, strict=True):
        _require_answer(name, messages)
    begin = [_unlearned(message) for message in prompt_messages]
    return Pair(Chat([*begin, *answers[0]], tools), Chat([*begin, *answers[1]], tools))


def labeled(values: Values, roles: Roles) -> Labeled:
    """Return the answer in the values of the keys of `RATED`. Raise ConversationError for one
    without an answer or a label."""
    row_prompt, row_completion, label, tools = values
    prompt, completion = messages_in(row_prompt), messages_in(row_completion)
    # A label may be a boolean, or 0 or 1, also as text.
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
    if isinstance(prompt, str) and isinstance(completion, str):
        _require_text("completion", completion)
        return Labeled(Completion(prompt, completion), is_desirable)
    if completion is None and not isinstance(prompt, list):
        raise ConversationError("it has no completion")

    # The answer is the completion, or the end of a complete conversation, as in LLaMA-Factory.
    prompt_messages = _messages("prompt", prompt, roles)
    if completion is not None:
        answer = _messages("completion", completion, roles)
    elif prompt_messages and prompt_messages[-1].get("role") == "assistant":
        prompt_messages, answer = prompt_messages[:-1], prompt_messages[-1:]
    else:
        raise ConversationError("it has no completion, and its prompt does not end in an answer")
    _require_answer("completion", answer)
    return Labeled(Chat([*map(_unlearned, prompt_messages), *answer], tools), is_desirable)


def classified(values: Values, roles: Roles) -> Classified:
    """Return the sample in the values of the keys of `CLASSIFIED`. Raise ConversationError for one
    without a label, or without either text or messages."""
    label, text, messages, tools = values
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise ConversationError(f"its label is {label!r}, which is neither an integer nor a name")
    if (text is None) == (messages is None):
        has = "both" if text is not None else "neither"
        raise ConversationError(f"it has {has} of text and messages -> one of them")
    if messages is not None:
        messages = with_roles(messages, roles)
        if isinstance(messages, list):
            _refuse_fractions("messages", [item for item in messages if isinstance(item, dict)])
        return Classified(Chat(messages, tools), label)
    if not isinstance(text, str):
        raise ConversationError(f"its text is {type(text).__name__}")
    _require_text("text", text)
    return Classified(text, label)


def _text_pair(chosen: str, rejected: str, prompt: str | None) -> Pair:
    """Return a pair of texts. Without a prompt it is the common beginning of the answers."""
    for name, text in zip(SIDES, (chosen, rejected), strict=True):
        _require_text(name, text)
    _refuse_same(chosen, rejected)
    if prompt is None:
        end = _common_length(chosen, rejected)
        if end and chosen[end] != rejected[end] and chosen[end - 1] == " ":
            end -= 1  # the space belongs to the answers
        if not end:
            raise _missing_prompt_error()
        prompt, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    return Pair(Completion(prompt, chosen), Completion(prompt, rejected))


def _messages_prompt(
    chosen: Messages, rejected: Messages, prompt: object, roles: Roles
) -> Messages:
    """Return the messages of the prompt: of `prompt`, or else the common beginning."""
    if isinstance(prompt, list | dict):
        prompt_messages = _messages("prompt", prompt, roles)
        count = len(prompt_messages)
        if count and chosen[:count] == prompt_messages == rejected[:count]:
            raise ConversationError(
                "chosen and rejected begin with the messages of prompt, which would be there twice "
                "-> remove them, or omit the prompt: --key prompt=none"
            )
        return prompt_messages
    if prompt is not None and not isinstance(prompt, str):
        raise _mixed_kinds_error("prompt", prompt)
    _refuse_same(chosen, rejected)
    prompt_messages = chosen[: _common_length(chosen, rejected)]
    if not prompt_messages:
        raise _missing_prompt_error()
    if isinstance(prompt, str) and prompt_messages[-1].get("content") != prompt:
        raise ConversationError(
            "its prompt is text, and not the last message with which chosen and rejected both "
            "begin -> messages, or omit the prompt: --key prompt=none"
        )
    return prompt_messages


def _common_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the length of the common beginning; one less if it is all of an answer."""
    min_length = min(len(chosen), len(rejected))
    return next((n for n in range(min_length) if chosen[n] != rejected[n]), max(0, min_length - 1))


def _messages(name: str, value: object, roles: Roles) -> Messages:
    """Return the messages under key `name`. Raise ConversationError for anything else."""
    messages = with_roles([value] if isinstance(value, dict) else value, roles)
    if not isinstance(messages, list) or isinstance(value, str):
        raise _mixed_kinds_error(name, value)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            type_name = type(message).__name__
            raise ConversationError(
                f"message {number} of its {name} is not an object but {type_name}"
            )
    return messages


def _mixed_kinds_error(name: str, value: object) -> ConversationError:
    return ConversationError(
        f"its {name} is {type(value).__name__}: prompt and answers must be all text or all messages"
    )


def _missing_prompt_error() -> ConversationError:
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
    fields = {key: value for key, value in message.items() if key not in ("weight", *FLAGS)}
    return {**fields, "train": False}
