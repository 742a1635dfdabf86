"""Chat templates by name write what other trainers write under these names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

import bigtrain
from bigtrain.data.chat.named_templates import CONTROL_TOKENS, find_chat_template
from bigtrain.data.tokenizers.tokenizer import load_tokenizer
from bigtrain.errors import DataError
from tests.support.chats import chat_tokenizer, turns, unmarked


@dataclass(frozen=True)
class Slots:
    """Slots of a template of LLaMA-Factory (src/llamafactory/data/template.py, of August 2026):
    BOS and EOS are the tokenizer's tokens. header: the end of the user's slot, before an answer.
    is_merged: the system message is written after the user's `before` (Llama2Template)."""

    user: tuple[str, str]
    header: str
    end: str
    tail: str = ""
    system: tuple[str, str] = ("", "")
    prefix: str = ""
    lead: str = ""
    default_system: str | None = None
    is_merged: bool = False

    def render(self, messages: list[dict[str, str]], *, prompt: bool) -> str:
        rows = list(messages)
        system = self.default_system
        if rows[0]["role"] == "system":
            system = rows.pop(0)["content"]
        text = self.prefix
        written = "" if system is None else self.system[0] + system + self.system[1]
        if not self.is_merged:
            text, written = text + written, ""
        for row in rows:
            if row["role"] == "user":
                text += self.user[0] + written + row["content"] + self.user[1]
                written = ""
            else:
                text += self.header + self.lead + row["content"] + self.end + self.tail
        return text + (self.header if prompt else "")


IM = {"system": ("<|im_start|>system\n", "<|im_end|>\n"), "header": "<|im_start|>assistant\n"}
CHATML = Slots(user=("<|im_start|>user\n", "<|im_end|>\n"), end="<|im_end|>", tail="\n", **IM)
SLOTS: Mapping[str, Slots] = {
    "chatml": CHATML,
    "llama3": Slots(
        prefix="BOS",
        system=("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        user=("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        header="<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
    ),
    "phi4": Slots(
        system=("<|im_start|>system<|im_sep|>", "<|im_end|>"),
        user=("<|im_start|>user<|im_sep|>", "<|im_end|>"),
        header="<|im_start|>assistant<|im_sep|>",
        end="<|im_end|>",
    ),
    "phi3": Slots(
        system=("<|system|>\n", "<|end|>\n"),
        user=("<|user|>\n", "<|end|>\n"),
        header="<|assistant|>\n",
        end="<|end|>",
        tail="\n",
    ),
    "qwen2_5": replace(
        CHATML,
        default_system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    ),
    # An answer without reasoning begins with an empty one, which is learned.
    "qwen3": replace(CHATML, lead="<think>\n\n</think>\n\n"),
    "gemma3": Slots(
        prefix="BOS",
        system=("", "\n\n"),
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        header="<start_of_turn>model\n",
        end="<end_of_turn>",
        tail="\n",
        is_merged=True,
    ),
    "mistral": Slots(
        prefix="BOS",
        system=("", "\n\n"),
        user=("[INST] ", "[/INST]"),
        header="",
        lead=" ",
        end="EOS",
        is_merged=True,
    ),
    "llama2": Slots(
        system=("<<SYS>>\n", "\n<</SYS>>\n\n"),
        user=("BOS[INST] ", " [/INST]"),
        header="",
        end="EOS",
        is_merged=True,
    ),
    "zephyr": Slots(
        system=("<|system|>\n", "EOS"),
        user=("<|user|>\n", "EOS"),
        header="<|assistant|>\n",
        end="EOS",
        default_system="You are Zephyr, a helpful assistant.",
    ),
    "vicuna": Slots(
        user=("USER: ", ""),
        header=" ASSISTANT:",
        end="EOS",
        default_system="A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    ),
    "alpaca": Slots(
        user=("### Instruction:\n", "\n\n"),
        header="### Response:\n",
        end="EOS",
        tail="\n\n",
        default_system="Below is an instruction that describes a task. Write a response that "
        "appropriately completes the request.\n\n",
    ),
    "deepseek": Slots(
        prefix="BOS",
        system=("", "\n\n"),
        user=("User: ", "\n\n"),
        header="Assistant:",
        end="EOS",
    ),
    "deepseek3": Slots(
        prefix="BOS", user=("<\uff5cUser\uff5c>", ""), header="<\uff5cAssistant\uff5c>", end="EOS"
    ),
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
    tokenizer = chat_tokenizer(None)
    tokens = {"BOS": tokenizer.bos_token, "EOS": tokenizer.eos_token}
    expected = SLOTS[name].render(messages, prompt=prompt)
    for slot, token in tokens.items():
        expected = expected.replace(slot, token)
    template = find_chat_template(name).read_text(encoding="utf-8")
    assert rendered(template, messages, prompt) == expected


TRL_NAMES = {"qwen2_5": "qwen2_5", "qwen3": "qwen3_training", "gemma3": "gemma3"}
"""Files of TRL that write the same, by our names; of DeepSeek-V3 without the prompt, which begins
with reasoning there."""


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", [*TRL_NAMES, "deepseek3"])
def test_it_writes_what_trl_writes(name: str, messages: list[dict[str, Any]], prompt: bool) -> None:
    pytest.importorskip("trl")
    if name == "deepseek3" and prompt:
        return
    file = files("trl") / "chat_templates" / f"{TRL_NAMES.get(name, 'deepseekv3')}.jinja"
    template = find_chat_template(name).read_text(encoding="utf-8")
    theirs = unmarked(file.read_text(encoding="utf-8"))
    # DeepSeek's end-of-sequence token, by its name.
    theirs = theirs.replace("'<\uff5cend\u2581of\u2581sentence\uff5c>'", "eos_token")
    assert rendered(unmarked(template), messages, prompt) == rendered(theirs, messages, prompt)


@pytest.mark.parametrize("name", CONTROL_TOKENS)
def test_answers_are_learned_with_their_end(name: str, tmp_path: Path) -> None:
    """Of each answer the text and the token that ends it; nothing of prompts and headers."""
    tokenizer = chat_tokenizer(None)
    special = [AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS[name]]
    tokenizer.add_tokens(special)
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    data = tmp_path / "data.jsonl"
    messages = turns("the cat", "sat", "on", "the mat", system="be brief")
    data.write_text(json.dumps({"messages": messages}) + "\n")
    dataset = bigtrain.tokenize(data, tmp_path / "tokenizer", tmp_path / "out", chat_template=name)
    document, slots = dataset[0], SLOTS[name]
    learned = document["input_ids"][document["labels"] != -100].tolist()
    end = slots.end.replace("EOS", str(tokenizer.eos_token))
    expected = "".join(slots.lead + answer + end for answer in ("sat", "the mat"))
    assert load_tokenizer(str(tmp_path / "tokenizer")).decode(learned) == expected


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
