"""Location of the assistant's text in renderings of templates without ``{% generation %}`` marks.

A turn begins at the end of the prompt that a model would get for it: the earlier messages, rendered
with the generation prompt. It ends with the rendering of the messages up to and including it, if
the template renders a turn the same inside a longer conversation. Templates that remove the
reasoning of earlier turns do not: then the end is determined by rendering again with a placeholder
as the turn's content. Every step is compared with the rendering of the full conversation. White
space after the control token that ends a turn does not belong to the turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigtrain.data.chat.answer_ends import Answer
from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.documents.conversations import ConversationError, is_learned
from bigtrain.data.tokenizers.chat_template import ChatTemplate

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None
Spans = Sequence[tuple[int, int]]

PLACEHOLDER = "\U0010fffb"
REMEDY = (
    "the chat template does not mark the assistant's text, and its renderings do not determine it "
    "({}) -> use one with {{% generation %}} marks: --chat-template FILE"
)

WEIGHT_REMEDY = (
    "a message has weight 0, and it is ambiguous which {{% generation %}} blocks of the chat "
    "template belong to message {} -> write one block for each message of the assistant"
)


def assistant_spans(
    template: ChatTemplate, control: ControlTokens, messages: Messages, tools: Tools, text: str
) -> list[Answer]:
    """Return the assistant's messages in `text`, the rendering of `messages`, except those of
    weight 0. Raise ConversationError if their character ranges cannot be determined."""
    answers = []
    for number, message in enumerate(messages):
        if not is_learned(message):
            continue
        begin, end = _span(template, messages, tools, text, number)
        ending = [match.end() for match in control.find(text[begin:end])][-1:]
        if ending and text[begin + ending[0] : end].isspace():
            end = begin + ending[0]
        answers.append(Answer(number + 1, ((begin, end),)))
    return answers


def learned_blocks(
    template: ChatTemplate, messages: Messages, tools: Tools, blocks: Spans
) -> list[Answer]:
    """Assign `blocks`, the ``{% generation %}`` blocks of a rendering, to messages; without weight
    0.

    A block is assigned to a message by counting the blocks in renderings of prefixes. If that is
    ambiguous, each block is a separate answer, and ConversationError is raised if a message has
    weight 0.
    """
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    all_learned = all(is_learned(messages[number]) for number in turns)
    if all_learned and len(blocks) == len(turns):
        return [Answer(n + 1, (block,)) for n, block in zip(turns, blocks, strict=True)]
    learned: list[Answer] = []
    end = 0
    for number in turns:
        begin = end
        try:
            end = len(template.render(messages[: number + 1], tools)[1])
        except ConversationError:
            if not all_learned:
                raise
            end = begin
        if end <= begin:
            if all_learned:
                return _singly(turns, blocks)
            raise ConversationError(WEIGHT_REMEDY.format(number + 1))
        if is_learned(messages[number]):
            learned.append(Answer(number + 1, tuple(blocks[begin:end])))
    if end != len(blocks):
        if all_learned:
            return _singly(turns, blocks)
        raise ConversationError(WEIGHT_REMEDY.format(turns[-1] + 1))
    return learned


def _singly(turns: Sequence[int], blocks: Spans) -> list[Answer]:
    """Return each block as an answer with the number of the assistant's last message."""
    return [Answer(turns[-1] + 1 if turns else 1, (block,)) for block in blocks]


def _span(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str, number: int
) -> tuple[int, int]:
    prompt, _ = template.render(messages[:number], tools, add_generation_prompt=True)
    if text.startswith(prompt):
        begin = len(prompt)
        whole = text
        if number + 1 < len(messages):
            whole, _ = template.render(messages[: number + 1], tools)
        if whole.startswith(prompt) and text.startswith(whole):
            return begin, len(whole)
        content, end = _around_content(template, messages, tools, text, number)
        if begin <= content:
            return begin, end
        raise ConversationError(REMEDY.format(f"message {number + 1} begins inside of its prompt"))
    # The prompt may contain more than the rendered turn: the opening of a reasoning block.
    before, _ = template.render(messages[:number], tools)
    begin, end = _around_content(template, messages, tools, text, number)
    if not text.startswith(before) or not prompt.startswith(text[:begin]) or begin < len(before):
        raise ConversationError(REMEDY.format(f"message {number + 1} does not follow its prompt"))
    return begin, end


def _around_content(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str, number: int
) -> tuple[int, int]:
    """Return the start of a message's content in `text`, or of the name of its last tool call if it
    has no content, and the end of its turn."""
    other = [*messages]
    other[number] = _with_placeholder(messages[number])
    before, found, after = template.render(other, tools)[0].partition(PLACEHOLDER)
    ending = template.render(other[: number + 1], tools)[0].partition(PLACEHOLDER)[2]
    if (
        not found
        or PLACEHOLDER in after + ending
        or not (text.startswith(before) and text.endswith(after) and after.startswith(ending))
        or len(before) + len(after) > len(text)
    ):
        raise ConversationError(
            REMEDY.format(f"message {number + 1} is rendered differently in a longer conversation")
        )
    return len(before), len(text) - len(after) + len(ending)


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
