"""Learned characters of a rendering: their messages, and proof that the messages wrote them.

Templates with ``{% generation %}`` blocks: a block belongs to the message whose strings it has
(`rendered_parts`). A block without a string, for example the end of the text after the last answer
(Phi 3), belongs to the message of the block that it continues, or else to the only answer between
the strings before and after it.

Templates without blocks: a turn begins at the end of the prompt that a model would get for it,
the earlier messages rendered with the generation prompt. It ends with the rendering of the messages
up to and including it, if the template renders a turn alike in a longer conversation.
Templates that remove the reasoning of earlier turns, or that end the last turn otherwise, do not:
then the end is determined by rendering again with a placeholder as the turn's content. Every step
is compared with the rendering of the full conversation. White space after the control token that
ends a turn does not belong to the turn.

In both cases learned characters contain no string of another message, and more of a
learned message than its end; otherwise the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.chat.marked_strings import CALLS, CONTENT, UNMARKED, ChatPart
from bigtrain.data.chat.rendered_parts import RenderedString
from bigtrain.data.documents.conversations import is_learned, weight_of
from bigtrain.data.tokenizers.chat_template import (
    ChatTemplate,
    ConversationError,
    Messages,
    TemplateRefusal,
    Tools,
)

Span = tuple[int, int]

PLACEHOLDER = "\U0010fffb"
REMEDY = (
    "the chat template does not mark the assistant's text, and its renderings do not determine it "
    "({}) -> use one with {{% generation %}} marks: --chat-template FILE"
)

WEIGHT_REMEDY = (
    "messages have different weights, and it is ambiguous which {{% generation %}} blocks of the "
    "chat template belong to message {} -> write one block for each message of the assistant"
)


@dataclass(frozen=True)
class Answer:
    """Learned message: its number from 1, and its character ranges in the rendering."""

    number: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Rendering:
    """Conversation as text. strings: of the messages in `text`, by `begin`."""

    messages: Messages
    tools: Tools
    text: str
    strings: Sequence[RenderedString]

    def answer_numbers(self) -> list[int]:
        """Return the numbers of the assistant's messages, from 1."""
        return [n for n, message in enumerate(self.messages, 1) if message["role"] == "assistant"]

    def spoken_by(self, number: int) -> list[RenderedString]:
        """Return the strings in content and calls of message `number`."""
        strings = [string for string in self.strings if string.message == number]
        return [string for string in strings if string.part_kind in (CONTENT, CALLS)]


def learned_blocks(rendering: Rendering, blocks: Sequence[Span]) -> list[Answer]:
    """Return the learned messages of a template with ``{% generation %}`` blocks, without messages
    of weight 0. Raise ConversationError for a block with text of another role, for an answer of
    which only the end is in a block, and for a block of unknown message if messages have different
    weights."""
    messages, answer_numbers = rendering.messages, rendering.answer_numbers()
    # Weights of the answers, False for an answer that is not learned.
    weights = {is_learned(messages[n - 1]) and weight_of(messages[n - 1]) for n in answer_numbers}
    blocks = [(begin, end) for begin, end in blocks if begin < end]
    spans_by_number: dict[int, list[Span]] = {}
    ambiguous_answers: list[Answer] = []
    # A block of ambiguous owner is learned if all answers have the same weight.
    for block, owners in zip(blocks, _owners_of_blocks(rendering, blocks), strict=True):
        # Without an owner, any message is named in the error.
        last_owner = (owners or answer_numbers or [1])[-1]
        if len(owners) == 1:
            spans_by_number.setdefault(last_owner, []).append(block)
        elif len(weights) > 1:
            raise ConversationError(WEIGHT_REMEDY.format(last_owner))
        elif weights != {False}:  # all answers are learned
            ambiguous_answers.append(Answer(last_owner, (block,)))
    answers = [
        Answer(number, tuple(spans))
        for number, spans in spans_by_number.items()
        if is_learned(messages[number - 1])
    ]
    for answer in answers:
        strings = rendering.spoken_by(answer.number)
        if strings and not any(_overlap(s, span) for s in strings for span in answer.spans):
            raise ConversationError(
                f"the chat template closes the {{% generation %}} block of message {answer.number} "
                "without the message's text: only its end would be learned -> write the content "
                "inside the block: --chat-template FILE"
            )
    return sorted([*answers, *ambiguous_answers], key=lambda answer: answer.spans)


def _owners_of_blocks(rendering: Rendering, blocks: Sequence[Span]) -> list[list[int]]:
    """Return, for each block, the numbers of the assistant's messages that may own it; a single
    number if the owner is proven."""
    owners: list[list[int]] = []
    for block in blocks:
        numbers = sorted({s.message for s in rendering.strings if _overlap(s, block)})
        for number in numbers:
            role = rendering.messages[number - 1]["role"]
            if role != "assistant":
                raise ConversationError(
                    f"the chat template writes text of message {number} (role {role}) inside a "
                    "{% generation %} block: it would be learned -> close the block before it: "
                    "--chat-template FILE"
                )
        owners.append(numbers)
    # Only the first occurrence of a string locates its message: a template may repeat the name of a
    # call in its result.
    first_by_piece: dict[int, RenderedString] = {}
    for string in rendering.strings:
        first_by_piece.setdefault(string.piece, string)
    first_strings = list(first_by_piece.values())
    for index, block in enumerate(blocks):
        if owners[index]:
            continue
        # A block without a string continues the block before it, or begins the block after it.
        for neighbour in (index - 1, index + 1):
            if 0 <= neighbour < len(blocks) and len(owners[neighbour]) == 1:
                left, right = sorted((blocks[neighbour], block))
                if not rendering.text[left[1] : right[0]].strip():
                    owners[index] = owners[neighbour]
                    break
        if owners[index]:
            continue
        # Or the only answer between the strings before and after it owns the block.
        before = [string.message for string in first_strings if string.end <= block[0]]
        after = [string.message for string in first_strings if string.begin >= block[1]]
        first_number = before[-1] if before else 1
        last_number = after[0] if after else len(rendering.messages)
        owners[index] = [n for n in rendering.answer_numbers() if first_number <= n <= last_number]
    return owners


def _overlap(string: RenderedString, span: Span) -> bool:
    return string.begin < span[1] and span[0] < string.end


def unmarked_parts(rendering: Rendering, answers: Sequence[Answer]) -> list[ChatPart]:
    """Return the parts of learned messages that are in a rendering, and outside of the ``{%
    generation %}`` blocks of `answers`."""
    spans = [span for answer in answers for span in answer.spans]
    strings = rendering.strings
    learned_pieces = {
        s.piece for s in strings if any(begin <= s.begin and s.end <= end for begin, end in spans)
    }
    unlearned_parts = {
        (s.message, s.part_kind)
        for s in strings
        if s.piece not in learned_pieces and is_learned(rendering.messages[s.message - 1])
    }
    return [
        ChatPart(UNMARKED, number, f"the {part_kind} of message {number}")
        for number, part_kind in sorted(unlearned_parts)
    ]


def assistant_spans(
    template: ChatTemplate, control: ControlTokens, rendering: Rendering
) -> list[Answer]:
    """Return the character range of every answer, without answers of weight 0, for a template that
    has no {% generation %} blocks. Raise ConversationError if they cannot be determined."""
    answers = []
    for number in rendering.answer_numbers():
        if not is_learned(rendering.messages[number - 1]):
            continue
        try:
            begin, end = _span(template, control, rendering, number)
        except TemplateRefusal as refusal:
            rendered_messages = "no message"
            if number > 1:
                rendered_messages = f"only the messages before or up to message {number}"
            raise ConversationError(
                f"the chat template cannot write the prompt of message {number}, an answer, so it "
                f"is unknown which text is learned: with {rendered_messages} it raises "
                f"{refusal.reason} -> put a message of the user before message {number}; or do not "
                f'learn message {number}: "train": false; or use a template with {{% generation %}}'
                " marks: --chat-template FILE; or skip such documents: --skip-bad"
            ) from refusal
        # White space after the control token that ends the turn does not belong to it.
        token_ends = [match.end() for match in control.find(rendering.text[begin:end])]
        if token_ends and rendering.text[begin + token_ends[-1] : end].isspace():
            end = begin + token_ends[-1]
        # Nothing of another message may be learned.
        for string in rendering.strings:
            if string.message != number and _overlap(string, (begin, end)):
                reason = f"text of message {string.message} is inside message {number}"
                raise ConversationError(REMEDY.format(reason))
        # All content and calls of this message must be learned. If the template writes a piece more
        # than once, one occurrence inside the turn is enough.
        strings = rendering.spoken_by(number)
        pieces_in_turn = {s.piece for s in strings if begin <= s.begin and s.end <= end}
        if any(s.piece not in pieces_in_turn for s in strings):
            reason = f"text of message {number} is outside of its turn"
            raise ConversationError(REMEDY.format(reason))
        answers.append(Answer(number, ((begin, end),)))
    return answers


def _span(
    template: ChatTemplate, control: ControlTokens, rendering: Rendering, number: int
) -> Span:
    """Return the characters of the turn of message `number`, after its prompt. Raise
    ConversationError if the renderings do not determine them, TemplateRefusal for the prompt."""
    messages, tools, text = rendering.messages, rendering.tools, rendering.text
    prompt, _ = template.render(messages[: number - 1], tools, add_generation_prompt=True)
    if text.startswith(prompt):
        begin = len(prompt)
        up_to_turn = text
        if number < len(messages):
            up_to_turn, _ = template.render(messages[:number], tools)
        # The usual template: each longer conversation begins with the text of the shorter one.
        if up_to_turn.startswith(prompt) and text.startswith(up_to_turn):
            return begin, len(up_to_turn)
        content_begin, end = _around_content(template, control, rendering, number)
        if begin <= content_begin:
            return begin, end
        raise ConversationError(REMEDY.format(f"message {number} begins inside of its prompt"))
    # The prompt may contain more than the rendered turn: the opening of a reasoning block.
    earlier, _ = template.render(messages[: number - 1], tools)
    begin, end = _around_content(template, control, rendering, number)
    is_after_prompt = prompt.startswith(text[:begin]) and begin >= len(earlier)
    if not (text.startswith(earlier) and is_after_prompt):
        raise ConversationError(REMEDY.format(f"message {number} does not follow its prompt"))
    return begin, end


def _around_content(
    template: ChatTemplate, control: ControlTokens, rendering: Rendering, number: int
) -> Span:
    """Return the span in the rendering from the start of a message's content to the end of the
    turn; without content from the name of the last tool call."""
    text = rendering.text
    changed = [*rendering.messages]
    changed[number - 1] = _with_placeholder(changed[number - 1])
    full_text, _ = template.render(changed, rendering.tools)
    before, is_present, after = full_text.partition(PLACEHOLDER)
    text_to_turn, _ = template.render(changed[:number], rendering.tools)
    _, _, turn_ending = text_to_turn.partition(PLACEHOLDER)
    # The turn ends where `after` and `turn_ending` differ, or at the last control token before: the
    # last turn of a conversation may have more at its end (Phi 3: the end of the text).
    pairs = zip(after, turn_ending, strict=False)
    num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if num_shared < len(turn_ending):
        ends = [match.end() for match in control.find(after)]
        num_shared = max((end for end in ends if end <= num_shared), default=-1)  # -1: none
    if (
        not is_present
        or num_shared < 0
        or PLACEHOLDER in after + turn_ending
        or not (text.startswith(before) and text.endswith(after))
        or len(before) + len(after) > len(text)
    ):
        raise ConversationError(
            REMEDY.format(f"message {number} is rendered differently in a longer conversation")
        )
    return len(before), len(text) - len(after) + num_shared


def _with_placeholder(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with the placeholder as content, or as the name of the last tool call if it
    has no content: templates render empty content differently."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and (content.strip() or not calls):
        return {**message, "content": PLACEHOLDER}
    if not isinstance(calls, list) or not calls:
        return message
    last_call = calls[-1]
    if isinstance(last_call.get("function"), dict):
        renamed_call = {**last_call, "function": {**last_call["function"], "name": PLACEHOLDER}}
    else:
        renamed_call = {**last_call, "name": PLACEHOLDER}
    return {**message, "tool_calls": [*calls[:-1], renamed_call]}
