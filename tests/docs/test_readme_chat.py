"""The page on conversations, as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.cli import build_parser
from bigtrain.data.chat.encoder import ChatEncoder, ChatRules
from bigtrain.data.documents.conversations import conversation_bytes
from bigtrain.data.tokenizers.tokenizer import describe
from bigtrain.train import build_parser as train_parser
from tests.support.chats import chat_tokenizer, write_readme_chats
from tests.support.worlds import ROOT


def commands() -> list[list[str]]:
    page = (ROOT / "docs/howto/chat.md").read_text()
    (block,) = re.findall(r"^```\n(.*?)^```", page, flags=re.M | re.S)[:1]
    return [shlex.split(line) for line in block.splitlines()]


def test_arguments_exist() -> None:
    tokenize, train = commands()
    assert build_parser("tokenize").parse_args(tokenize[1:])
    assert train_parser().parse_intermixed_args(train[2:]).overrides


def test_the_template_with_tools_and_reasoning() -> None:
    """Nothing of a conversation is dropped, and every answer is learned through its end."""
    page = (ROOT / "docs/howto/chat.md").read_text()
    _, source = re.findall(r"^```jinja\n(.*?)^```", page, flags=re.M | re.S)
    wrapped = chat_tokenizer(source.removesuffix("\n"))
    wrapped.eos_token = "<|endoftext|>"
    tokenizer = describe("of the page", wrapped)
    reference = tokenizer.encoder(True, ends=False)
    rules = ChatRules(tuple(tokenizer.generation_ends().values()))
    encoder = ChatEncoder(reference, reference, tokenizer.chat_template(), False, rules=rules)
    call = {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
    tool = {"name": "get_weather", "description": "The weather.", "parameters": {}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I have to look.",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": {"sky": "grey"}},
        {"role": "assistant", "content": "It rains.", "reasoning_content": "Grey."},
    ]
    tools = [{"type": "function", "function": tool}]
    chats = encoder.encode([conversation_bytes(messages, tools)])
    assert not chats.problems
    assert not chats.unrendered
    assert chats.ends == {"<|im_end|>"}
    text = tokenizer.decode(chats.tokens)
    assert text.count("Be brief.") == text.count('{"sky": "grey"}') == 1
    assert tokenizer.decode(chats.tokens[chats.mask]) == (
        '<think>\nI have to look.\n</think>\n\n<tool_call>{"name": "get_weather", "arguments": '
        '{"city": "Paris", "days": 3}}</tool_call><|im_end|>'
        "<think>\nGrey.\n</think>\nIt rains.<|im_end|>"
    )
    plain = encoder.encode([conversation_bytes([messages[0], *messages[1:2], messages[4]])])
    assert tokenizer.decode(plain.tokens).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")


@pytest.mark.slow
def test_the_page_as_it_stands(tmp_path: Path) -> None:
    for name in ("bigtrain", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    write_readme_chats(tmp_path)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    for words in commands():
        result = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout}\n{result.stderr}"
    run = tmp_path / "runs/chat"
    assert (run / "hf/config.json").is_file()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any("held_out_loss" in line for line in metrics)
    assert "packing of chat-shards/, train: " in (run / "log.txt").read_text()
    train, held_out = json.loads((run / "environment.json").read_text())["packing"]
    assert (train["split"], held_out["split"]) == ("train", "held_out")
    assert 0 < train["padding_fraction"] < 0.1
