"""Tokens that end the learned answers of a rendering.

A model that never learned a token that ends generation does not stop. Most templates write one
after an answer (``<|im_end|>``), inside the learned range. Some end an answer by the token of the
next role (GLM-4.5: ``<|user|>``): that token is then learned, and appended to the last answer of a
conversation, like in TRL's training templates. All other answers are refused. A control token that
the template also writes inside answers (gpt-oss: ``<|end|>`` between reasoning and answer) does not
end one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from bigtrain.data.chat.answer_spans import Answer, Rendering, Span
from bigtrain.data.chat.control_tokens import ControlTokens
from bigtrain.data.chat.document_forms import RenderedChat
from bigtrain.data.tokenizers.chat_template import ChatTemplate, ConversationError, Messages

_ANSWER, _THOUGHT = "\U0010fffb", "\U0010fffa"
"""Placeholders for the content of an answer and for its reasoning in probes of the template."""
_ASKED = {"role": "user", "content": "a"}
_ANSWERED = {"role": "assistant", "content": _ANSWER}


class _EndAfter(NamedTuple):
    """Range of the token that ends an answer and follows its range, and the text of the rendering,
    to which the token may be appended."""

    token: Span
    text: str


class AnswerEnds:
    """Tokens that end answers under a chat template. Can be pickled. usual: text of the first token
    after an answer, None if unknown. by_next_role: `usual` is the token of the next role.
    inner_controls: control tokens that the template writes between reasoning and answer."""

    def __init__(
        self, template: ChatTemplate, control: ControlTokens, eos: Collection[str]
    ) -> None:
        """`eos`: texts of the tokens that end generation by the tokenizer's own settings."""
        self.eos = frozenset(eos)
        self._template, self._control = template, control
        after_last = self._after_answer([_ASKED, _ANSWERED])
        self.usual = None if after_last is None else self._first_token(after_last)
        self.by_next_role = False
        # Nothing is written after the last answer: the token of the next role may end answers.
        if after_last is not None and not after_last.strip():
            before_question = self._after_answer([_ASKED, _ANSWERED, _ASKED])
            self.usual = None if before_question is None else self._first_token(before_question)
            self.by_next_role = self.usual is not None
        self.inner_controls = self._between_thought_and_answer()

    def finish(
        self,
        conversation: RenderedChat,
        rendering: Rendering,
        answers: Sequence[Answer],
        *,
        has_blocks: bool,
    ) -> RenderedChat:
        """Return `conversation` with `answers` as spans, whose ends are learned: each answer ends
        in a token that ends generation. `has_blocks`: the template has ``{% generation %}`` blocks,
        so its author decided which text is learned. Raises ConversationError for an answer without
        an end."""
        text, control = conversation.text, conversation.control
        controls = control
        if controls is None:
            controls = [match.span() for match in self._control.find(text)]
        spans: list[Span] = []
        ends, inner_names = set(), set(self.inner_controls)
        full_text = text
        for answer in answers:
            begin, end = answer.spans[-1]
            tokens_in_answer = [
                token for low, high in answer.spans for token in controls if low <= token[0] < high
            ]
            # The end is a token in the answer, or after it, which is then learned as well.
            end_token = self._last_token(text, tokens_in_answer, end)
            if end_token is None:
                end_token, full_text = self._end_after(
                    rendering, full_text, answer, controls, has_blocks=has_blocks
                )
                end = end_token[1]
            ends.add(full_text[slice(*end_token)])
            inner_tokens = [token for token in tokens_in_answer if token[0] < end_token[0]]
            inner_names |= {text[slice(*token)] for token in inner_tokens}
            spans += [*answer.spans[:-1], (begin, end)]

        # A model that generates an end inside an answer would stop there.
        for name in sorted(ends - self.eos):
            if name in inner_names:
                raise ConversationError(
                    f"the chat template ends an answer in {name}, which it also writes inside "
                    "answers, so generation cannot stop there -> learn only the last answer: "
                    "--learn last; or use a template that ends every answer in "
                    f"{' or '.join(sorted(self.eos)) or 'eos_token'}: --chat-template FILE"
                )
        if full_text != text and control is not None:
            control = [*control, (len(text), len(full_text))]
        return replace(
            conversation,
            text=full_text,
            spans=spans,
            control=control,
            ends=frozenset(ends),
            inner_controls=frozenset(inner_names) - self.inner_controls,
        )

    def _last_token(self, text: str, tokens_in_answer: Sequence[Span], end: int) -> Span | None:
        """Return the control token that ends the answer `text[:end]`; None if there is none.
        Several control tokens may end an answer: Phi 3 writes the end of the text after the end of
        the last answer, Cohere the end of a turn after the end of a response."""
        final_tokens: list[Span] = []  # with white space between them, the last one first
        for token in reversed(tokens_in_answer):
            next_begin = final_tokens[-1][0] if final_tokens else end
            if text[token[1] : next_begin].strip():
                break
            final_tokens.append(token)
        for token in reversed(final_tokens):
            if text[slice(*token)] in self.eos or text[slice(*token)] == self.usual:
                return token
        if final_tokens and not self.by_next_role:
            return final_tokens[0]
        stripped = text[:end].rstrip()
        for name in self.eos:  # an end that is not a control token
            if stripped.endswith(name):
                return len(stripped) - len(name), len(stripped)
        return None

    def _end_after(
        self,
        rendering: Rendering,
        text: str,
        answer: Answer,
        controls: Sequence[Span],
        *,
        has_blocks: bool,
    ) -> _EndAfter:
        """Return the token that ends an answer and follows it, or is appended to the text.
        controls: ranges of the control tokens in `text`."""
        messages, end = rendering.messages, answer.spans[-1][1]
        following = next((token for token in controls if token[0] >= end), None)
        if following is not None and not text[end : following[0]].strip():
            following_name = text[slice(*following)]
            if has_blocks:
                raise _closed_early_error(answer.number, following_name)
            if self.by_next_role or following_name == self.usual or following_name in self.eos:
                return _EndAfter(following, text)
        if text[end:].strip() or not self.by_next_role or answer.number != len(messages):
            raise _without_end_error(answer.number, has_blocks)

        # The token of the next role: of a tool's response, or of the user.
        end_name = self.usual
        if messages[-1].get("tool_calls"):
            reply = {"role": "tool", "name": "a", "tool_call_id": "a", "content": "a"}
            longer = ""
            with suppress(ConversationError):
                longer, _ = self._template.render([*messages, reply], rendering.tools)
            end_name = None
            if longer.startswith(text):
                end_name = self._first_token(longer[len(text) :])
        if end_name is None:
            raise _without_end_error(answer.number, has_blocks)
        if has_blocks:
            raise _closed_early_error(answer.number, end_name)
        return _EndAfter((len(text), len(text) + len(end_name)), text + end_name)

    def _after_answer(self, messages: Messages) -> str | None:
        """Return the text after the answer in a probe; None unless it is rendered exactly once."""
        try:
            text, _ = self._template.render(messages)
        except ConversationError:
            return None
        return text.partition(_ANSWER)[2] if text.count(_ANSWER) == 1 else None

    def _first_token(self, text: str) -> str | None:
        """Return the control token or end of generation at the start of the stripped `text`."""
        text = text.lstrip()
        match = next(self._control.find(text), None)
        if match is not None and match.start() == 0:
            return match.group()
        return next((name for name in self.eos if text.startswith(name)), None)

    def _between_thought_and_answer(self) -> frozenset[str]:
        """Return the control tokens that the template writes between reasoning and answer."""
        reasoning_keys = ("reasoning_content", "reasoning", "thinking")
        thinking = {**_ANSWERED, **dict.fromkeys(reasoning_keys, _THOUGHT)}
        try:
            text, _ = self._template.render([_ASKED, thinking])
        except ConversationError:
            return frozenset()
        before, answered, _ = text.partition(_ANSWER)
        _, thought, between = before.partition(_THOUGHT)
        if not answered or not thought:
            return frozenset()
        return frozenset(match.group() for match in self._control.find(between))


def _closed_early_error(number: int, name: str) -> ConversationError:
    return ConversationError(
        f"the chat template closes the {{% generation %}} block of message {number} before {name}, "
        "the token that ends the answer: it would not be learned, and generation would not stop "
        f"-> write {{% endgeneration %}} after {name} in the template: --chat-template FILE"
    )


def _without_end_error(number: int, has_blocks: bool) -> ConversationError:
    position = "inside the {% generation %} block" if has_blocks else "after the answer"
    return ConversationError(
        f"the chat template ends message {number}, an answer, in no token that ends generation: "
        f"the model would not learn to stop -> write {{{{ eos_token }}}} {position} in the "
        "template: --chat-template FILE"
    )
