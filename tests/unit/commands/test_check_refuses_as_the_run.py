"""`bigtrain check` without `--inputs` refuses what costs milliseconds to find, with the text of the
run; what is only true of this machine is a line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.python_api.configuring import check as check_run
from bigtrain.settings.run_config import ModelSection
from bigtrain.settings.sections.model import check_attention_package
from tests.support.chats import save_chat_tokenizer, turns

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "texts": {"text": "a text that is long enough"},
    "chats": {"messages": turns("Hi", "Hello")},
    "pairs": {"prompt": "is 1 even? ", "chosen": "no", "rejected": "yes"},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, shards of its tokenizer, and the YAML of a run."""
    monkeypatch.chdir(tmp_path)
    save_chat_tokenizer(tmp_path / "model")
    LlamaForCausalLM(LlamaConfig(vocab_size=512, **SIZES)).save_pretrained("model")
    _tokenize("texts")
    batch = {"sequence_length": 32, "global_batch_size": 2, "micro_batch_size": 1}
    tree = {
        "model": {"path": "model"},
        "data": {"path": "texts"},
        "batch": batch,
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": "float32"},
        "output": {"directory": "runs/one"},
    }
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


def _tokenize(name: str) -> None:
    Path(f"{name}.jsonl").write_text("\n".join([json.dumps(ROWS[name])] * 40))
    words = ["--input", f"{name}.jsonl", "--tokenizer", "model", "--output", name]
    assert main(["tokenize", *words]) == 0


def _check(*settings: str) -> int:
    return main(["check", "--config", "run.yaml", *settings])


def test_what_suits_is_accepted_without_numpy_and_torch() -> None:
    assert _check() == 0
    code = "import sys; from bigtrain.cli import main; code = main(sys.argv[1:]); "
    code += "assert not {'numpy', 'torch'} & set(sys.modules); sys.exit(code)"
    words = ["check", "--config", "run.yaml"]
    subprocess.run([sys.executable, "-c", code, *words], check=True, capture_output=True)


def _corrupt_manifest() -> None:
    Path("texts/manifest.json").write_text("{")


def _other_tokenizer() -> None:
    tokenizer = json.loads(Path("model/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[50:52]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    Path("model/tokenizer.json").write_text(json.dumps(tokenizer))


def _vocabulary(num_rows: int) -> None:
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "vocab_size": num_rows}))


def _prepare(change: str) -> None:
    changes = {
        "corrupt": _corrupt_manifest,
        "tokenizer": _other_tokenizer,
        "small": lambda: _vocabulary(100),
        "large": lambda: _vocabulary(5000),
        "pairs": lambda: _tokenize("pairs"),
        "chats": lambda: _tokenize("chats"),
    }
    if change:
        changes[change]()


@pytest.mark.parametrize(
    ("change", "settings", "problem"),
    [
        ("corrupt", [], "texts/manifest.json is corrupt: not JSON"),
        ("tokenizer", [], "was tokenized with a different tokenizer than that of model.path"),
        ("small", [], "model vocab_size = 100: too small"),
        ("large", [], "model vocab_size = 5000: too large"),
        ("", ["objective.type=preference"], "has no preference pairs"),
        ("pairs", ["data.path=pairs"], "data.path = 'pairs': "),
        ("chats", ["data.path=chats"], "data.packing=best_fit"),
        ("", ["model.path=model/config.json"], "is a file, and a run starts from the directory"),
        (
            "",
            ["model.attention=flash_attention_2", "--device", "cpu"],
            "the kernels of FlashAttention need a CUDA device -> model.attention=sdpa",
        ),
    ],
)
def test_what_does_not_suit_is_refused(
    change: str, settings: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _prepare(change)
    capsys.readouterr()
    assert _check(*settings) == 2
    assert problem in capsys.readouterr().err


def test_lines_on_what_is_not_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    assert _check("data.path=folder") == 0
    assert "not read: data.path = folder: has no manifest.json" in capsys.readouterr().out
    assert _check("checkpoint.initialize_from=model", "model.path=null", "model.config=model") == 0
    assert "not read: weights of checkpoint.initialize_from = model" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _check("model.attention=flash_attention_3") == 0
    said = capsys.readouterr().out
    assert (
        "not on this machine: model.attention = 'flash_attention_3': flash_attn_interface" in said
    )
    assert "this run can start where these can be used" in said


def test_a_package_is_named_with_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "kernels"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, one=module: name == one)
        section = ModelSection(path="model", attention="flash_attention_2")
        assert check_attention_package(section) == []
        assert check_attention_package(ModelSection(path="model", attention="sdpa")) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = check_attention_package(section)
    assert problem.remedy == "pip install flash-attn; or model.attention=sdpa"


def test_prompts_that_are_longer_than_the_model() -> None:
    prompts = ["a short one", "a long one " * 20, ""]
    tree = yaml.safe_load(Path("run.yaml").read_text())
    tree["evaluation"] = {"prompts": prompts, "max_new_tokens": 50}
    with pytest.raises(ConfigError) as raised:
        check_run(tree, inputs=True)
    keys = [problem.key for problem in raised.value.problems]
    assert keys == ["evaluation.prompts.1", "evaluation.prompts.2"]
    assert "the model has 64 positions" in raised.value.problems[0].rule
