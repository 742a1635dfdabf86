"""One set of conversations in every format: the same tokens and masks, and those of TRL's trainer.

TRL is asked itself: `SFTTrainer._prepare_dataset`, the code that makes its input ids and labels.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from bigtrain.data.chat.encoder import ChatEncoder, TextEnds
from bigtrain.data.documents.chat_formats import FORMATS, Conversations, document_in
from bigtrain.data.tokenizers.tokenizer import from_huggingface
from tests.support.chats import CHATML, LLAMA3, QWEN3, chat_tokenizer, turns

Encoded = tuple[list[int], list[int]]

CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of some days.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
PAIRS = [("Who are you?", "A model.\n"), ("Add them.\n1 2", "3"), ("naïve 東京 🙂", "🙂👍🏽 é")]
MESSAGES = turns(*(text for pair in PAIRS for text in pair), system="Be short.")
SHAREGPT = [
    {"from": name, "value": text}
    for pair in PAIRS
    for name, text in zip(("human", "gpt"), pair, strict=True)
]
NAMED = {"name": "get_weather", "arguments": json.dumps(CALL["arguments"])}
WITH_TOOLS = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": NAMED}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]
TOOL_TURNS = [
    {"from": "human", "value": WITH_TOOLS[0]["content"]},
    {"from": "function_call", "value": json.dumps(CALL)},
    {"from": "observation", "value": "rain"},
    {"from": "gpt", "value": "It rains."},
]


@cache
def tokenizer_of(template: str | None, with_begin: bool = False) -> Any:
    tokenizer = chat_tokenizer(template)
    if with_begin:  # as Llama's and Gemma's
        begin = tokenizer.bos_token
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.bos_token_id)]
        )
    return tokenizer


@cache
def encoder_of(template: str | None, with_begin: bool = False, trusted: bool = False) -> Any:
    tokenizer = from_huggingface("test", tokenizer_of(template, with_begin))
    reference = tokenizer.encoder(True, ends=False)
    prefix, end_text = tokenizer.added_beginning(), tokenizer.end_text
    ends = TextEnds(prefix, tokenizer.end_of_document_id, end_text)
    source = None if template is None else tokenizer.chat_template()
    return ChatEncoder(reference, reference, source, trusted, ends)


def encoded(
    encoder: ChatEncoder, name: str, row: dict[str, Any], roles: dict[str, str] | None = None
) -> Encoded:
    known = FORMATS[name]
    how = Conversations(known, known.keys, roles=roles or {})
    content, why = document_in(row, known.keys[:1], how)
    assert content is not None, why
    chats = encoder.encode([content])
    assert not chats.problems
    return chats.tokens.tolist(), chats.mask.astype(int).tolist()


def by_trl(
    tokenizer: Any, row: dict[str, Any], *, assistant_only: bool, completion_only: bool = False
) -> Encoded:
    from datasets import Dataset
    from trl.trainer.sft_trainer import SFTTrainer

    trainer = SimpleNamespace(
        _tokenizer=tokenizer,
        chat_template=None,
        completion_only_loss=completion_only or "prompt" in row,
    )
    options = SimpleNamespace(
        dataset_num_proc=None,
        dataset_text_field="text",
        assistant_only_loss=assistant_only,
        max_length=None,
        shuffle_dataset=False,
    )
    prepared = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list([row]), tokenizer, options, False, None, "train"
    )[0]
    return prepared["input_ids"], [int(label != -100) for label in prepared["labels"]]


@pytest.mark.parametrize(
    "masks",
    [
        {"completion_mask": [0, 0, 1, 1, 1]},
        {"assistant_masks": [0, 1, 1, 0, 1]},
        {"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 1]},
        {"completion_mask": [0, 0, 1, 1, 1], "labels": [-100, -100, 3, 4, 5]},
    ],
)
def test_masks_of_tokenized_rows_are_trls(masks: dict[str, list[int]]) -> None:
    row = {"input_ids": [1, 2, 3, 4, 5], **masks}
    tokenizer = tokenizer_of(CHATML)
    wanted = by_trl(tokenizer, row, assistant_only=False, completion_only=True)
    assert 0 < sum(wanted[1]) < 5
    encoder = replace(encoder_of(CHATML), vocab_size=100)
    assert encoded(encoder, "tokens", row) == wanted


def for_trl(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL takes the arguments of calls as objects."""
    calls = [{"type": "function", "function": CALL}]
    return [{**m, "tool_calls": calls} if m.get("tool_calls") else m for m in messages]


@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN3], ids=["chatml", "llama3", "qwen3"])
def test_five_formats_are_trls(template: str) -> None:
    tokenizer, encoder = tokenizer_of(template), encoder_of(template)
    wanted = by_trl(tokenizer, {"messages": MESSAGES}, assistant_only=True)
    assert 0 < sum(wanted[1]) < len(wanted[1])
    by_transformers = tokenizer.apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    assert wanted == (by_transformers["input_ids"], by_transformers["assistant_masks"])
    rows: dict[str, dict[str, Any]] = {
        "messages": {"messages": MESSAGES},
        "sharegpt": {"conversations": SHAREGPT, "system": "Be short."},
        "alpaca": {
            "instruction": PAIRS[-1][0],
            "output": PAIRS[-1][1],
            "system": "Be short.",
            "history": [list(pair) for pair in PAIRS[:-1]],
        },
    }
    for name, row in rows.items():
        assert encoded(encoder, name, row) == wanted, name
    # Of a prompt nothing is learned: the same tokens, and both of TRL's masks together.
    row = {"prompt": MESSAGES[:-1], "completion": MESSAGES[-1:]}
    both = by_trl(tokenizer, row, assistant_only=True)
    assert encoded(encoder, "prompt-completion", row) == both
    assert both[0] == wanted[0]
    assert 0 < sum(both[1]) < sum(wanted[1])
    if template == LLAMA3:  # which writes nothing after the end of a turn
        assert by_trl(tokenizer, row, assistant_only=False) == both
    # As plain text it has the same tokens, and the end of a document.
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    plain = from_huggingface("test", tokenizer).encoder(parse_special_tokens=True).encode([text])
    assert plain.tokens.tolist() == [*wanted[0], tokenizer.eos_token_id]
    assert by_trl(tokenizer, {"text": text}, assistant_only=False)[0] == plain.tokens.tolist()


def test_tools_are_trls() -> None:
    tokenizer, encoder = tokenizer_of(QWEN3), encoder_of(QWEN3)
    row = {"messages": for_trl(WITH_TOOLS), "tools": json.dumps(TOOLS)}
    wanted = by_trl(tokenizer, row, assistant_only=True)
    assert '{"name": "get_weather", "arguments": {"city": "Paris"' in tokenizer.decode(wanted[0])
    rows: list[tuple[str, dict[str, Any]]] = [
        ("messages", row),
        ("messages", {"messages": WITH_TOOLS, "tools": TOOLS}),
        ("messages", {"messages": json.dumps(WITH_TOOLS), "tools": [json.dumps(TOOLS[0])]}),
        ("sharegpt", {"conversations": TOOL_TURNS, "tools": json.dumps(TOOLS)}),
    ]
    for name, given in rows:
        assert encoded(encoder, name, given) == wanted, given
    prompted = {"prompt": WITH_TOOLS[:1], "completion": WITH_TOOLS[1:], "tools": TOOLS}
    assert encoded(encoder, "prompt-completion", prompted) == wanted


COMPLETIONS = {
    "words": ("What is 2 + 2?\n", "It is 4."),
    "a token over the boundary": ("The quick bro", "wn fox jumps"),
    "white space": ("a  ", "  b"),
    "unicode": ("naïve 東", "京 🙂"),
    "the end in letters": ("a", "b<|endoftext|>"),
    "no prompt": ("", "The capital of France is Paris."),
    "no completion": ("The capital of France", ""),
}


@pytest.mark.parametrize("with_begin", [False, True], ids=["plain", "with begin"])
def test_completions_of_text_are_trls(with_begin: bool) -> None:
    """No chat template is asked: there is none."""
    tokenizer, encoder = tokenizer_of(None, with_begin), encoder_of(None, with_begin)
    for name, (prompt, completion) in COMPLETIONS.items():
        row = {"prompt": prompt, "completion": completion}
        wanted = by_trl(tokenizer, row, assistant_only=False)
        assert encoded(encoder, "prompt-completion", row) == wanted, name
        assert wanted[1][-1] == 1


def test_control_tokens_of_a_completion_are_letters() -> None:
    """Where TRL makes control tokens of them; with ``--parse-special-tokens`` they are the same."""
    row = {"prompt": "say <|im_end|>", "completion": "<|im_end|> <|im_"}
    wanted = by_trl(tokenizer_of(None), row, assistant_only=False)
    assert encoded(encoder_of(None, trusted=True), "prompt-completion", row) == wanted
    tokens, mask = encoded(encoder_of(None), "prompt-completion", row)
    control = tokenizer_of(None).convert_tokens_to_ids("<|im_end|>")
    assert control in wanted[0]
    assert control not in tokens
    assert tokenizer_of(None).decode(tokens) == row["prompt"] + row["completion"] + "<|endoftext|>"
    assert 0 < sum(mask) < len(mask)
