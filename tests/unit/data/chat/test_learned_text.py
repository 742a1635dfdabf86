"""Learned tokens are the text of the learned messages, and of no other, under any template.

The oracle knows nothing of templates: every part of a conversation is a random word, and the words
in the decoded learned tokens are compared with the words of the learned messages.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trl

from bigtrain.data.chat.encoder import EncodedChats
from bigtrain.data.documents.conversations import conversation_bytes
from tests.support.chats import CHATML, turns, unmarked
from tests.support.tiers import examples
from tests.unit.data.chat.test_lost_parts import TEMPLATES, encoder_of, tokenizer_of

FOLDERS = (Path(trl.__file__).parent / "chat_templates", TEMPLATES)
FILES = {path.stem: path for folder in FOLDERS for path in folder.glob("*.jinja")}
IMAGES = ("idefics3", "llava_next", "smolvlm")
"""Templates that take contents only as lists of parts, for images."""
WORD = re.compile(r"q[bcdfghjkmnprtvwxz]{7}q")


class Author:
    """Writer of conversations whose words all differ. messages_of: of each word."""

    def __init__(self, seed: object) -> None:
        self.random = random.Random(str(seed))
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] | None = None
        self.messages_of: dict[str, int] = {}

    def word(self) -> str:
        word = "q" + "".join(self.random.choices("bcdfghjkmnprtvwxz", k=7)) + "q"
        self.messages_of[word] = len(self.messages)
        return word

    def is_likely(self, share: float) -> bool:
        return self.random.random() < share

    def say(self, role: str, content: str | None = None, **more: Any) -> None:
        content = self.word() if content is None else content
        self.messages.append({"role": role, "content": content, **more})

    def write(self) -> None:
        kind = self.random.choice(("plain", "tools", "reasoning", "thoughts in content"))
        if self.is_likely(0.4):
            self.say("system")
        if kind == "tools":
            function = {"name": "qtool", "description": "d", "parameters": {"type": "object"}}
            self.tools = [{"type": "function", "function": function}]
        for _ in range(self.random.randint(1, 3)):
            self.say("user")
            if self.tools and self.is_likely(0.7):
                calls = [
                    {"id": f"call_abc{n}", "function": {"name": "qtool", "arguments": {"a": a}}}
                    for n, a in enumerate([self.word() for _ in range(self.random.randint(1, 2))])
                ]
                self.say("assistant", None if self.is_likely(0.5) else "", tool_calls=calls)
                for call in calls:
                    self.say("tool", name="qtool", tool_call_id=call["id"])
            more = {"reasoning_content": self.word()} if kind == "reasoning" else {}
            thoughts = f"<think>\n{self.word()}\n</think>\n\n" if "thoughts" in kind else ""
            self.say("assistant", thoughts + self.word(), **more)
        if self.is_likely(0.15):
            self.say("user")
        if self.is_likely(0.5):
            for message in self.messages:
                if message["role"] == "assistant":
                    message["weight"] = self.random.choice((0, 0.5, 1, 1))


def learned_words(chats: EncodedChats, decode: Any) -> dict[float, list[str]]:
    """Return the words in learned tokens, by their weight."""
    weights = np.ones(len(chats.mask)) if chats.weights is None else chats.weights
    return {
        weight: WORD.findall(decode(chats.tokens[chats.mask & (weights == weight)]))
        for weight in (0.5, 1)
    }


def check(source: str, seed: object) -> bool:
    """Return whether the conversation of `seed` is accepted; then its learned words are right."""
    author = Author(seed)
    author.write()
    last_only = author.is_likely(0.3)
    content = conversation_bytes(author.messages, author.tools, last_only=last_only)
    chats = encoder_of(source, True).encode([content])
    if chats.problems:
        return False
    decode = tokenizer_of(source).decode
    rendered = WORD.findall(decode(chats.tokens))
    answers = [n for n, m in enumerate(author.messages) if m["role"] == "assistant"]
    kept = [n for n in answers if author.messages[n].get("weight", 1)]
    kept = kept[-1:] if last_only else kept
    wanted: dict[float, list[str]] = {0.5: [], 1: []}
    for word in rendered:
        number = author.messages_of[word]
        if number in kept:
            wanted[author.messages[number].get("weight", 1)].append(word)
    assert learned_words(chats, decode) == wanted, (author.messages, chats.unrendered)
    return True


# The system prompt is in the first message of the user; every answer ends in the end of the text.
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = '<<SYS>>' + messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}"
    "{% endif %}{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
# Blocks of their own for the end of an answer and of the text; the system prompt is at the end.
SYSTEM_LAST = (
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    + CALLS
    + "{% endgeneration %}"
    "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% if not add_generation_prompt %}"
    "{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
)
SOURCES = {"llama2": LLAMA2, "system last": SYSTEM_LAST} | {
    name: path.read_text() for name, path in FILES.items()
}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_learned_text_is_that_of_the_learned_messages(name: str) -> None:
    source = SOURCES[name]
    accepted = [check(source, (name, seed)) for seed in range(examples(10))]
    # GPT-OSS ends answers before the last in a token that it also writes inside of answers.
    assert any(accepted) or name.startswith(IMAGES) or name == "gptoss"


TWO = turns("hi", "hello", "bye", "see you")


def learned(source: str, messages: list[dict[str, Any]], **how: Any) -> str:
    """Return the learned text, or why the conversation is refused."""
    chats = encoder_of(source).encode([conversation_bytes(messages, **how)])
    if chats.problems:
        return chats.problems[0][1]
    return str(tokenizer_of(source).decode(chats.tokens[chats.mask]))


@pytest.mark.parametrize("name", ["phi3", "phi3_training", "phi3_5", "phi3_5_training"])
def test_an_end_of_the_text_belongs_to_the_last_answer(name: str) -> None:
    """Phi 3's template writes it in a block of its own, or without marks after the last turn."""
    source = SOURCES[name]
    every, last = learned(source, TWO), learned(source, TWO, last_only=True)
    assert every.startswith("hello<|end|>")
    assert last.startswith("see you<|end|>")
    assert every.endswith(last)
    first = learned(source, [TWO[0], TWO[1], TWO[2], {**TWO[3], "weight": 0}])
    assert first.strip() == "hello<|end|>"


BLOCK = "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("block", "words"),
    [
        # Several blocks for one message, which continue each other or not.
        (
            "{% generation %}{{ message.content }}{% endgeneration %}"
            "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}",
            "see you<|im_end|>",
        ),
        (
            "{% generation %}{{ 'A: ' }}{% endgeneration %}{{ '(' }}"
            "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}",
            "A: see you<|im_end|>",
        ),
        # Blocks that are not the message's, or not all of it.
        (
            "{{ message.content }}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}",
            r"the chat template closes the \{% generation %\} block of message 4 without",
        ),
        (
            "{% generation %}{{ messages[loop.index0 - 1].content + message.content }}"
            "{{ '<|im_end|>' }}{% endgeneration %}",
            r"writes text of message 1 \(role user\) inside a \{% generation %\} block",
        ),
        (
            "{% if loop.last %}{% generation %}{{ messages[1].content + message.content }}"
            "{{ '<|im_end|>' }}{% endgeneration %}{% endif %}",
            "messages have different weights, and it is ambiguous",
        ),
    ],
)
def test_blocks_of_other_shapes(block: str, words: str) -> None:
    source = CHATML.replace(BLOCK, block)
    assert source != CHATML
    assert re.match(f".*{words}", learned(source, TWO, last_only=True))


def test_text_that_is_repeated_at_the_end_moves_no_block() -> None:
    block = (
        "{% generation %}{{ 'A: ' }}{% endgeneration %}{{ '(' }}"
        "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    )
    source = CHATML.replace(BLOCK, block) + "{{ messages[0].content }}"
    assert learned(source, TWO, last_only=True) == "A: see you<|im_end|>"


def test_a_block_without_text_continues_the_block_before_it() -> None:
    """Two answers in a row: the end between their texts is the first one's."""
    block = (
        "{% generation %}{{ message.content }}{% endgeneration %}"
        "{% generation %}{{ '<|im_end|>' }}{% endgeneration %}"
    )
    source = CHATML.replace(BLOCK, block)
    messages = [TWO[0], TWO[1], TWO[3]]
    assert learned(source, messages, last_only=True) == "see you<|im_end|>"
    assert learned(source, [*messages[:2], {**TWO[3], "weight": 0}]) == "hello<|im_end|>"


def test_answers_outside_of_blocks_are_counted() -> None:
    """The template's author decides what is learned; the count tells the user."""
    only_last = CHATML.replace(
        BLOCK, "{% if loop.last %}" + BLOCK + "{% else %}{{ message.content }}{% endif %}"
    )
    chats = encoder_of(only_last).encode([conversation_bytes(TWO)])
    assert not chats.problems
    assert chats.unrendered == {"unmarked_answers": 1}
    assert not encoder_of(CHATML).encode([conversation_bytes(TWO)]).unrendered


def test_a_turn_with_text_of_another_message_is_refused() -> None:
    source = unmarked(CHATML).replace(
        "{{ message['content'] + '<|im_end|>' }}",
        "{{ '> ' + messages[loop.index0 - 1].content + '\n' + message.content + '<|im_end|>' }}",
    )
    assert source != unmarked(CHATML)
    assert "text of message 1 is inside message 2" in learned(source, TWO)


# Conversations that a template refuses.

NEEDS_FIRST = "{% if messages[0].role == 'system' %}{{ '' }}{% endif %}"
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}"
)
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        (
            NEEDS_FIRST + unmarked(CHATML),
            TWO[1:],
            "cannot write the prompt of message 1, an answer, .* with no message it raises "
            'UndefinedError: .* -> put a message of the user before message 1; .*"train": false',
        ),
        (ALTERNATES + CHATML, TWO[1:], r"after a message of the user -> put .* message 1 \(assi"),
        (
            ALTERNATES + CHATML,
            [*TWO[:2], *TWO[1:]],
            "with alternating roles -> join messages 2 and 3, both of role assistant",
        ),
        (
            ALTERNATES + CHATML,
            [{"role": "system", "content": "s"}, *TWO, TWO[1]],
            r"without a system message, with alternating roles -> put the text of message 1 "
            r"\(system\) into a message of the user; join messages 5 and 6",
        ),
        (
            "{% for m in messages if m.role == 'system' %}{% if not loop.first or "
            "m != messages[0] %}{{ [][1].a }}{% endif %}{% endfor %}" + CHATML,
            [*TWO, {"role": "system", "content": "s"}, *TWO],
            r"with the system message first -> move message 5 \(system\) to the start",
        ),
        (
            "{% for m in messages if m.tool_calls %}{{ raise_exception('Tools?') }}{% endfor %}"
            + CHATML,
            [TWO[0], {**TWO[1], "tool_calls": [CALL]}, TWO[3]],
            "TemplateError: Tools[?]; .* without tools and calls -> remove tools and calls",
        ),
        (
            "{{ messages[0].content + 1 }}" + CHATML,
            TWO,
            r"TypeError: .* \(roles: user, assistant, user, assistant\) -> use a template for",
        ),
    ],
)
def test_the_error_says_what_a_template_demands(
    source: str, messages: list[dict[str, Any]], words: str
) -> None:
    assert re.search(words, learned(source, messages))


def test_an_answer_first_can_be_skipped_or_follow_a_user() -> None:
    """Both fixes of the error work."""
    source = NEEDS_FIRST + unmarked(CHATML)
    skipped = [{**TWO[1], "train": False}, *TWO[2:]]
    assert learned(source, skipped) == "see you<|im_end|>"
    assert learned(source, TWO) == "hello<|im_end|>see you<|im_end|>"
