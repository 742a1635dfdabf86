"""`bigtrain generate --chat` with a model that knows one answer, and stops by itself."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from bigtrain.errors import DataError
from bigtrain.models.text_ids import end_of_turn_ids, write_stop_ids
from bigtrain.system.text_record import RECORD_NAME, TextRecord, read_record
from tests.support.chats import CHATML, LLAMA3, save_chat_tokenizer
from tests.support.worlds import ROOT


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Says "Hi" after a prompt, and then its end of turn: each token has one successor."""
    directory = save_chat_tokenizer(tmp_path_factory.mktemp("chat") / "model", CHATML)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    size = len(tokenizer)
    sizes = {"vocab_size": size, "hidden_size": size + size % 2, "intermediate_size": 2}
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": False}
    config = LlamaConfig(**sizes, **one, eos_token_id=None, bos_token_id=None)
    network = LlamaForCausalLM(config)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, return_dict=True
    ).input_ids
    answer = tokenizer("Hi", add_special_tokens=False).input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chain = [prompt[-1], *answer, end, answer[0]]
    with torch.no_grad():
        network.model.embed_tokens.weight.copy_(torch.eye(size, config.hidden_size))
        network.model.layers[0].self_attn.o_proj.weight.zero_()
        network.model.layers[0].mlp.down_proj.weight.zero_()
        network.lm_head.weight.zero_()
        for token, successor in pairwise(chain):
            network.lm_head.weight[successor, token] = 1.0
    network.save_pretrained(directory)
    return directory


def talk(model: Path, *options: str) -> int:
    words = ["generate", "--model", str(model), "--chat", "--temperature", "0"]
    return main([*words, *options])


def test_an_answer_ends_by_itself(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(model, "--prompt", "x") == 0
    assert capsys.readouterr().out == "Hi\n"
    file = tmp_path / "messages.json"
    file.write_text(json.dumps([{"role": "user", "content": "x"}]))
    assert talk(model, "--messages", str(file)) == 0
    assert capsys.readouterr().out == "Hi\n"
    file.write_text("{}")
    assert talk(model, "--messages", str(file)) == 2
    assert "not a JSON list of messages" in capsys.readouterr().err


def test_lines_of_standard_input_are_a_conversation(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert talk(model) == 0
    assert capsys.readouterr().out == "Hi\nHi\n"


def test_what_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(model)]) == 2
    assert "--prompt is missing" in capsys.readouterr().err
    assert main(["generate", "--model", str(model), "--messages", "x"]) == 2
    assert "-> add --chat" in capsys.readouterr().err
    plain = save_chat_tokenizer(tmp_path / "plain", None)
    assert talk(plain, "--prompt", "x") == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(("template", "name"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>")])
def test_the_end_of_a_turn_is_among_the_ends(template: str, name: str, tmp_path: Path) -> None:
    directory = save_chat_tokenizer(tmp_path / "t", template)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    (ending,) = end_of_turn_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(ending) == name
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "top_k": 7}))
    hf_config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0)
    for _ in range(2):
        write_stop_ids(directory, hf_config)
        settings = json.loads((directory / "generation_config.json").read_text())
        assert settings == {"eos_token_id": [0, ending], "top_k": 7}
    # Without settings readers take the end of config.json, which a new file would hide.
    (directory / "generation_config.json").unlink()
    hf_config.save_pretrained(directory)
    write_stop_ids(directory, hf_config)
    settings = json.loads((directory / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [0, ending]}


def test_the_ends_of_the_record_are_among_the_ends(tmp_path: Path) -> None:
    """The template alone does not show all of them: a tool call ends in another role's token."""
    directory = save_chat_tokenizer(tmp_path / "t", CHATML)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    usual, other = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|user|>"])
    TextRecord((), 0, (0, other)).save(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0]}))
    write_stop_ids(directory, LlamaConfig(vocab_size=len(tokenizer)))
    settings = json.loads((directory / "generation_config.json").read_text())
    assert settings == {"eos_token_id": [0, other, usual]}


def test_the_token_of_the_next_role_is_among_the_ends(tmp_path: Path) -> None:
    source = (ROOT / "tests/data/chat_templates/glm4moe.jinja").read_text()
    directory = save_chat_tokenizer(tmp_path / "t", source)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer)) == ["<|user|>"]


def test_a_record_of_other_content_is_refused(tmp_path: Path) -> None:
    for text in ("[]", "{", '{"beginning_ids": [1]}', '{"beginning_ids": "x"}'):
        (tmp_path / RECORD_NAME).write_text(text)
        with pytest.raises(DataError, match="is corrupt"):
            read_record(tmp_path)
