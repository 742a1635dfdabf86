"""`bigtrain generate`: numbers out of range, weights that do not fit their configuration, and more
tokens than the model has positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import bigtrain
from bigtrain.cli import main
from bigtrain.errors import ConfigError
from tests.support.chats import save_chat_tokenizer

NUM_POSITIONS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_chat_tokenizer(tmp_path_factory.mktemp("generate") / "model", None)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=NUM_POSITIONS,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("option", "value", "rule"),
    [
        ("--max-new-tokens", "0", "is less than 1"),
        ("--max-new-tokens", "-3", "is less than 1"),
        ("--top-p", "0", "above 0 and at most 1"),
        ("--top-p", "1.5", "above 0 and at most 1"),
        ("--top-p", "nan", "above 0 and at most 1"),
        ("--temperature", "-0.1", "at least 0"),
        ("--temperature", "inf", "at least 0"),
        ("--seed", "-1", "from 0 to below 2^63"),
    ],
)
def test_numbers_out_of_range(
    option: str, value: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--model", "m", "--prompt", "x", f"{option}={value}"])
    assert exit_info.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"argument {option}: {value}" in line
    assert rule in line.partition(" -> ")[0]


def test_the_python_function_names_every_number_out_of_range() -> None:
    with pytest.raises(ConfigError) as raised:
        bigtrain.generate("m", "x", max_new_tokens=0, temperature=float("nan"), top_p=0, seed=-1)
    keys = [problem.key for problem in raised.value.problems]
    assert keys == ["max_new_tokens", "temperature", "top_p", "seed"]


def _with_weights(model: Path, target: Path, *, omits: str = "", **config: int) -> Path:
    """Copy `model` with other values in its config.json, without the tensors that `omits` names."""
    shutil.copytree(model, target)
    values = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(values | config))
    if omits:
        tensors = load_file(target / "model.safetensors")
        kept = {name: tensor for name, tensor in tensors.items() if omits not in name}
        assert len(kept) < len(tensors)
        save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(
    ("omits", "config", "rule"),
    [
        ("", {"num_hidden_layers": 3}, "no tensor there is the model's model.layers.2."),
        ("norm.weight", {}, "no tensor there is the model's model.layers.0.input_layernorm.weight"),
        ("lm_head", {}, "no tensor there is the model's lm_head.weight"),
        ("", {"intermediate_size": 48}, "has shape [32, 16] there, and [48, 16] by its config"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    omits: str,
    config: dict[str, int],
    rule: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = _with_weights(model, tmp_path / "broken", omits=omits, **config)
    assert main(["generate", "--model", str(broken), "--prompt", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--model = '{broken}'" in line
    assert rule in line.partition(" -> ")[0]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks for it
def test_adapters_are_loaded_into_a_complete_base(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(
        LlamaForCausalLM.from_pretrained(model), peft.LoraConfig(target_modules=["down_proj"])
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 100.0)
    folder = save_chat_tokenizer(tmp_path / "adapter", None)
    adapted.save_pretrained(folder)
    words = ["generate", "--model", str(folder), "--prompt", "x", "--temperature", "0"]
    settings = json.loads((folder / "adapter_config.json").read_text())

    def with_base(base: Path) -> None:
        settings["base_model_name_or_path"] = str(base)
        (folder / "adapter_config.json").write_text(json.dumps(settings))

    with_base(model)
    assert main([*words, "--max-new-tokens", "8"]) == 0
    text = capsys.readouterr().out
    assert main([*words[:2], str(model), *words[3:], "--max-new-tokens", "8"]) == 0
    assert text != capsys.readouterr().out
    with_base(_with_weights(model, tmp_path / "base", omits="layers.1.mlp"))
    assert main(words) == 2
    assert f"--model = '{tmp_path / 'base'}': its weights are not" in capsys.readouterr().err
    with_base(model)
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    assert main(words) == 2
    assert f"--model = '{folder}': cannot be loaded" in capsys.readouterr().err


def test_tokens_beyond_the_positions(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "--model", str(model), "--temperature", "0", "--prompt"]
    assert main([*words, "x"]) == 0
    assert "note: at most 15 new tokens instead of 128: the model has 16" in capsys.readouterr().err
    assert main([*words, "x", "--max-new-tokens", "15"]) == 0
    assert "note" not in capsys.readouterr().err
    assert main([*words, "x " * NUM_POSITIONS]) == 2
    assert "positions -> at most 15 tokens" in capsys.readouterr().err
