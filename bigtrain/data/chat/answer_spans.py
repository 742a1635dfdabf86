"""Characters of a rendering that are learned: of which message, and proof that they are its own.

Templates with ``{% generation %}`` blocks: a block belongs to the message whose strings are in it
(`rendered_parts`). A block without a string, such as the end of the text after the last answer
(Phi 3), belongs to the message of the block that it continues, or else to the only answer between
the strings before and after it.

Templates without such blocks: a turn begins at the end of the prompt that a model would get for it,
the earlier messages rendered with the generation prompt. It ends with the rendering of the messages
up to and including it, if the template renders a turn the same inside a longer conversation.
Templates that remove the reasoning of earlier turns, or that end the last turn otherwise, do not:
then the end is determined by rendering again with a placeholder as the turn's content. Every step
is compared with the rendering of the full conversation. White space after the control token that
ends a turn does not belong to the turn.

In both cases learned characters contain no string of another message, and a learned message has
more than its end in them; otherwise the conversation is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.chat.rendered_parts import CALLS, CONTENT, UNMARKED, Lost, Place
from bigtrain.data.documents.conversations import ConversationError, is_learned, weight_of
from bigtrain.data.tokenizers.chat_template import (
    ChatTemplate,
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


def learned_blocks(
    messages: Messages, text: str, blocks: Sequence[Span], places: Sequence[Place]
) -> list[Answer]:
    """Return the learned messages of a template with ``{% generation %}`` blocks, without those of
    weight 0. Raise ConversationError for a block with text of another role, for an answer whose end
    only is in a block, and for a block of unknown message if messages have different weights."""
    turns = [n for n, message in enumerate(messages, 1) if message["role"] == "assistant"]
    weights = {is_learned(messages[n - 1]) and weight_of(messages[n - 1]) for n in turns}
    blocks = [block for block in blocks if block[0] < block[1]]
    owners = _owners_of_blocks(messages, text, blocks, places)
    answers: dict[int, list[Span]] = {}
    alone: list[Answer] = []
    for block, numbers in zip(blocks, owners, strict=True):
        if len(numbers) == 1:
            answers.setdefault(numbers[0], []).append(block)
        elif len(weights) > 1:
            raise ConversationError(WEIGHT_REMEDY.format((numbers or turns or [1])[-1]))
        else:  # all blocks are learned alike
            alone.append(Answer((numbers or turns or [1])[-1], (block,)))
    given = [Answer(number, tuple(spans)) for number, spans in answers.items()]
    learned = [answer for answer in given if is_learned(messages[answer.number - 1])]
    for answer in learned:
        own = [p for p in places if p.message == answer.number and p.kind in (CONTENT, CALLS)]
        if own and not any(_overlap(place, span) for place in own for span in answer.spans):
            raise ConversationError(
                f"the chat template closes the {{% generation %}} block of message {answer.number} "
                "without the message's text: only its end would be learned -> write the content "
                "inside the block: --chat-template FILE"
            )
    if weights != {False}:
        learned += alone
    return sorted(learned, key=lambda answer: answer.spans)


def _owners_of_blocks(
    messages: Messages, text: str, blocks: Sequence[Span], places: Sequence[Place]
) -> list[list[int]]:
    """Return the numbers of the assistant's messages that may own each block; one if it is
    proven."""
    owners: list[list[int]] = []
    for block in blocks:
        numbers = sorted({place.message for place in places if _overlap(place, block)})
        for number in numbers:
            if messages[number - 1]["role"] != "assistant":
                raise ConversationError(
                    f"the chat template writes text of message {number} (role "
                    f"{messages[number - 1]['role']}) inside a {{% generation %}} block: it would "
                    "be learned -> close the block before it: --chat-template FILE"
                )
        owners.append(numbers)
    # A name may be repeated later: that of a call in its result.
    firsts = list({place.piece: place for place in reversed(places)}.values())[::-1]
    for index, block in enumerate(blocks):
        if owners[index]:
            continue
        # A block without a string: continues the one before it, or begins the one after it.
        near = [n for n in (index - 1, index + 1) if 0 <= n < len(blocks) and len(owners[n]) == 1]
        touching = [n for n in near if not _between(blocks[n], block, text).strip()]
        if touching:
            owners[index] = owners[touching[0]]
            continue
        before = [place.message for place in firsts if place.end <= block[0]]
        after = [place.message for place in firsts if place.begin >= block[1]]
        first, last = before[-1] if before else 1, after[0] if after else len(messages)
        owners[index] = [
            n for n in range(first, last + 1) if messages[n - 1]["role"] == "assistant"
        ]
    return owners


def _between(one: Span, other: Span, text: str) -> str:
    first, second = sorted((one, other))
    return text[first[1] : second[0]]


def _overlap(place: Place, span: Span) -> bool:
    return place.begin < span[1] and span[0] < place.end


def unmarked_parts(
    messages: Messages, answers: Sequence[Answer], places: Sequence[Place]
) -> list[Lost]:
    """Return the parts of learned messages that are in a rendering, and outside of the ``{%
    generation %}`` blocks of `answers`."""
    spans = [span for answer in answers for span in answer.spans]
    inside = {p.piece for p in places if any(a <= p.begin and p.end <= b for a, b in spans)}
    outside = {
        (p.message, p.kind)
        for p in places
        if p.piece not in inside and is_learned(messages[p.message - 1])
    }
    return [
        Lost(UNMARKED, message, f"the {kind} of message {message}")
        for message, kind in sorted(outside)
    ]


def assistant_spans(
    template: ChatTemplate,
    control: ControlTokens,
    messages: Messages,
    tools: Tools,
    text: str,
    places: Sequence[Place],
) -> list[Answer]:
    """Return the assistant's messages in `text`, the rendering of `messages`, except those of
    weight 0. Raise ConversationError if their character ranges cannot be determined."""
    answers = []
    for number, message in enumerate(messages):
        if not is_learned(message):
            continue
        try:
            begin, end = _span(template, control, messages, tools, text, number)
        except TemplateRefusal as refusal:
            raise _without_prompt(number + 1, refusal) from refusal
        ending = [match.end() for match in control.find(text[begin:end])][-1:]
        if ending and text[begin + ending[0] : end].isspace():
            end = begin + ending[0]
        _require_own_text(number + 1, (begin, end), places)
        answers.append(Answer(number + 1, ((begin, end),)))
    return answers


def _without_prompt(number: int, refusal: TemplateRefusal) -> ConversationError:
    before = "no message" if number == 1 else f"only the messages before or up to message {number}"
    return ConversationError(
        f"the chat template cannot write the prompt of message {number}, an answer, so it is "
        f"unknown which text is learned: with {before} it raises {refusal.reason} -> put a message "
        f'of the user before message {number}; or do not learn message {number}: "train": false; '
        "or use a template with {% generation %} marks: --chat-template FILE; or skip such "
        "documents: --skip-bad"
    )


def _require_own_text(number: int, span: Span, places: Sequence[Place]) -> None:
    """Raise ConversationError if `span` has text of another message than `number`, or if content or
    calls of that message are not in it."""
    foreign = next((p for p in places if p.message != number and _overlap(p, span)), None)
    if foreign is not None:
        why = f"text of message {foreign.message} is inside message {number}"
        raise ConversationError(REMEDY.format(why))
    own = [p for p in places if p.message == number and p.kind in (CONTENT, CALLS)]
    inside = {p.piece for p in own if span[0] <= p.begin and p.end <= span[1]}
    if any(p.piece not in inside for p in own):
        why = f"text of message {number} is outside of its turn"
        raise ConversationError(REMEDY.format(why))


def _span(
    template: ChatTemplate,
    control: ControlTokens,
    messages: Messages,
    tools: Tools,
    text: str,
    number: int,
) -> Span:
    prompt, _ = template.render(messages[:number], tools, add_generation_prompt=True)
    if text.startswith(prompt):
        begin = len(prompt)
        up_to_turn = text
        if number + 1 < len(messages):
            up_to_turn, _ = template.render(messages[: number + 1], tools)
        if up_to_turn.startswith(prompt) and text.startswith(up_to_turn):
            return begin, len(up_to_turn)
        content, end = _around_content(template, control, messages, tools, text, number)
        if begin <= content:
            return begin, end
        raise ConversationError(REMEDY.format(f"message {number + 1} begins inside of its prompt"))
    # The prompt may contain more than the rendered turn: the opening of a reasoning block.
    before, _ = template.render(messages[:number], tools)
    begin, end = _around_content(template, control, messages, tools, text, number)
    if not text.startswith(before) or not prompt.startswith(text[:begin]) or begin < len(before):
        raise ConversationError(REMEDY.format(f"message {number + 1} does not follow its prompt"))
    return begin, end


def _around_content(
    template: ChatTemplate,
    control: ControlTokens,
    messages: Messages,
    tools: Tools,
    text: str,
    number: int,
) -> Span:
    """Return the start of a message's content in `text`, or of the name of its last tool call if it
    has no content, and the end of its turn."""
    other = [*messages]
    other[number] = _with_placeholder(messages[number])
    before, is_present, after = template.render(other, tools)[0].partition(PLACEHOLDER)
    ending = template.render(other[: number + 1], tools)[0].partition(PLACEHOLDER)[2]
    # The last turn of a conversation may have more at its end (Phi 3: the end of the text). Both
    # endings begin alike, at least up to a control token.
    pairs = enumerate(zip(after, ending, strict=False))
    size = next((n for n, (a, b) in pairs if a != b), min(len(after), len(ending)))
    if size < len(ending):
        size = max((m.end() for m in control.find(after) if m.end() <= size), default=-1)
    if (
        not is_present
        or size < 0
        or PLACEHOLDER in after + ending
        or not (text.startswith(before) and text.endswith(after))
        or len(before) + len(after) > len(text)
    ):
        raise ConversationError(
            REMEDY.format(f"message {number + 1} is rendered differently in a longer conversation")
        )
    return len(before), len(text) - len(after) + size


def _with_placeholder(message: dict[str, Any]) -> dict[str, Any]:
    """Return `message` with the placeholder as its content, or as the name of its last tool call if
    it has no content: templates render empty content differently."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and (content.strip() or not calls):
        return {**message, "content": PLACEHOLDER}
    if not isinstance(calls, list) or not calls:
        return message
    last = calls[-1]
    if isinstance(last.get("function"), dict):
        named = {**last, "function": {**last["function"], "name": PLACEHOLDER}}
    else:
        named = {**last, "name": PLACEHOLDER}
    return {**message, "tool_calls": [*calls[:-1], named]}
