"""Chat templates by name write what other trainers write under these names."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import bigtrain
from bigtrain.data.chat.named_templates import CONTROL_TOKENS, find_chat_template
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from tests.support.chats import chat_tokenizer, turns, unmarked

ROLES = ("system", "user", "assistant")
# Slots of LLaMA-Factory's templates (src/llamafactory/data/template.py): what is written around the
# content of a message, by role, and before the first message.
SLOTS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "chatml": {role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ROLES},
    "llama3": {
        role: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>") for role in ROLES
    },
    "phi4": {role: (f"<|im_start|>{role}<|im_sep|>", "<|im_end|>") for role in ROLES},
}
CONVERSATIONS = [
    turns("Hello.", "Hi!"),
    turns("One?", "Two.", "Three?", "Four."),
    turns("Hello.", "Hi!", system="Be brief."),
    turns("Only a question?"),
]
PROMPTS = [False, True]


def rendered(template: str, messages: list[dict[str, Any]], prompt: bool) -> str:
    tokenizer = chat_tokenizer(template)
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    )


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_it_writes_what_llama_factory_writes(
    name: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    slots = SLOTS[name]
    expected = "<|begin_of_text|>" if name == "llama3" else ""
    for message in messages:
        before, after = slots[message["role"]]
        expected += before + message["content"] + after
    expected += slots["assistant"][0] if prompt else ""
    template = find_chat_template(name).read_text(encoding="utf-8")
    assert rendered(template, messages, prompt) == expected


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("messages", [*CONVERSATIONS, turns("  spaces \n", " trimmed ")])
def test_llama3_is_trl_s(messages: list[dict[str, Any]], prompt: bool) -> None:
    pytest.importorskip("trl")
    text = (files("trl") / "chat_templates" / "llama3.jinja").read_text(encoding="utf-8")
    template = find_chat_template("llama3").read_text(encoding="utf-8")
    assert rendered(unmarked(template), messages, prompt) == rendered(text, messages, prompt)


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_data_is_tokenized_by_a_name(name: str, tmp_path: Path) -> None:
    """The same shards as by the file; answers and their end are learned."""
    chat_tokenizer(None).save_pretrained(str(tmp_path / "tokenizer"))
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "the cat"}, '
                    '{"role": "assistant", "content": "sat"}]}\n')  # fmt: skip
    sources = (data, tmp_path / "tokenizer")
    by_name = bigtrain.tokenize(*sources, tmp_path / "a", chat_template=name)
    by_file = bigtrain.tokenize(*sources, tmp_path / "b", chat_template=find_chat_template(name))
    assert by_name.manifest.splits == by_file.manifest.splits
    document = by_name[0]
    learned = document["input_ids"][document["labels"] != -100].tolist()
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    assert tokenizer.decode(learned) == "sat" + CONTROL_TOKENS[name][-1]


def test_what_cannot_be_rendered_is_refused(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    chat_tokenizer(None).save_pretrained(str(tokenizer))
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(DataError, match=r"phi4 writes <\|im_sep\|>, which tokenizer"):
        bigtrain.tokenize(data, tokenizer, tmp_path / "out", chat_template="phi4")
    with pytest.raises(DataError, match="chatlm: neither a file nor the name of a template"):
        bigtrain.tokenize(data, tokenizer, tmp_path / "out", chat_template="chatlm")
    assert not (tmp_path / "out").exists()
