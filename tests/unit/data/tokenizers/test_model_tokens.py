"""A run refuses shards whose ids mean other tokens than to the model that it begins with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from bigtrain.cli import main
from bigtrain.data.tokenizers.model_tokens import check_model_tokens
from bigtrain.settings.run_config import RunConfig
from tests.support.chats import chat_tokenizer
from tests.support.run_trees import run_config, run_tree

Change = Callable[[Any], None]


def config_of(model: Path, **data: Any) -> RunConfig:
    return run_config(model={"path": str(model)}, data={"path": "shards", **data})


def save(directory: Path, change: Change = lambda tree: None) -> Path:
    chat_tokenizer(None).save_pretrained(str(directory))
    path = directory / "tokenizer.json"
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    return directory


def swap(tree: Any) -> None:
    vocabulary = tree["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def rename(tree: Any) -> None:
    """As reserved tokens are renamed."""
    tree["added_tokens"][-1]["content"] = "<tool>"


def move(tree: Any) -> None:
    tree["added_tokens"][-1]["id"] += 5


def lowercase(tree: Any) -> None:
    tree["normalizer"] = json.loads(normalizers.Lowercase().__getstate__())


def grow(tree: Any) -> None:
    last = tree["added_tokens"][-1]
    tree["added_tokens"].append({**last, "id": last["id"] + 1, "content": "<new>"})


def rewrite(tree: Any) -> None:
    """Other spelling, same tokenizer."""
    tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
    tree["decoder"]["trim_offsets"] = False


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (swap, r"2 ids mean other tokens, such as \d+: '[ab]' in the data, '[ab]' for the model"),
        (rename, "1 ids mean other tokens, such as 411: '<tool>' in the data, '</think>' for"),
        (move, "the token '</think>' has id 416 in the data and 411 for the model"),
        (lowercase, "splits text differently"),
    ],
)
def test_other_tokens_are_refused(change: Change, words: str, tmp_path: Path) -> None:
    model, data = save(tmp_path / "model"), save(tmp_path / "data", change)
    (problem,) = check_model_tokens(config_of(model), data, "shards")
    assert re.search(words, str(problem)), str(problem)
    assert f"bigtrain tokenize --tokenizer {model}" in str(problem)
    assert "data.allow_other_tokenizer=true" in str(problem)
    assert not check_model_tokens(config_of(model, allow_other_tokenizer=True), data, "shards")


@pytest.mark.parametrize("changes", [(rewrite, None), (grow, None), (None, grow), (None, None)])
def test_the_same_and_grown_tokenizers_are_accepted(changes: Any, tmp_path: Path) -> None:
    places = []
    for name, change in zip(("data", "model"), changes, strict=True):
        places.append(save(tmp_path / name, change or (lambda tree: None)))
    assert not check_model_tokens(config_of(places[1]), places[0], "shards")


def test_a_run_and_its_checkpoint_are_models(tmp_path: Path) -> None:
    """Of `checkpoint.initialize_from`, and of a run that resumes with other data."""
    run, data = tmp_path / "run", save(tmp_path / "data", swap)
    save(run / "tokenizer")
    step = run / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    config = config_of(tmp_path / "no")
    for place in (run, step):
        section = config.checkpoint.model_copy(update={"initialize_from": str(place)})
        problems = check_model_tokens(config.model_copy(update={"checkpoint": section}), data, "d")
        assert "checkpoint.initialize_from" in str(*problems)
    output = config.output.model_copy(update={"directory": str(run)})
    resumed = config.model_copy(update={"output": output})
    assert "2 ids mean other" in str(*check_model_tokens(resumed, data, "d", resumes=True))
    assert not check_model_tokens(resumed, run / "tokenizer", "d", resumes=True)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert not check_model_tokens(config_of(tmp_path / "model"), save(tmp_path / "d"), "shards")


def write_run(place: Path, model: Path, shards: Path) -> list[str]:
    """Give a model's directory weights, and return `check --inputs` of a run of it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=412, **sizes, **heads)).save_pretrained(model)
    run, output = place / "run.yaml", {"directory": str(place / "run")}
    sections = {"model": {"path": str(model)}, "data": {"path": str(shards)}, "output": output}
    run.write_text(json.dumps(run_tree(**sections, precision={"dtype": "float32"})))
    return ["check", "--config", str(run), "--inputs", "--world-size", "1"]


def tokenize(place: Path, name: str, tokenizer: Path) -> None:
    source = place / "a.txt"
    source.write_text("a text about b. " * 50)
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer, "--output", place / name]
    assert main([*map(str, command)]) == 0


def test_check_refuses_what_the_run_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, other = save(tmp_path / "model"), save(tmp_path / "other", swap)
    tokenize(tmp_path, "shards", model)
    tokenize(tmp_path, "shards2", other)
    check = write_run(tmp_path, model, tmp_path / "shards")
    assert main([*check]) == 0
    capsys.readouterr()
    assert main([*check, f"data.path={tmp_path / 'shards2'}"]) == 2
    assert "2 ids mean other tokens" in capsys.readouterr().err
    allowed = ["data.allow_other_tokenizer=true"]
    assert main([*check, f"data.path={tmp_path / 'shards2'}", *allowed]) == 0


@pytest.mark.parametrize("is_added", [True, False])
def test_a_beginning_that_only_the_base_adds_is_named(
    is_added: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `check --inputs`, before hours of training without it."""

    def begin(tree: Any) -> None:
        (token, *_) = tree["added_tokens"]
        piece = {"SpecialToken": {"id": token["content"], "type_id": 0}}
        one = {"id": token["content"], "ids": [token["id"]], "tokens": [token["content"]]}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        tree["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [piece, text],
            "pair": [piece, text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token["content"]: one},
        }

    change: Change = begin if is_added else lambda tree: None
    model, tokenizer = save(tmp_path / "model", change), save(tmp_path / "data")
    tokenize(tmp_path, "plain", tokenizer)
    tokenize(tmp_path, "own", model)
    check = write_run(tmp_path, model, tmp_path / "plain")
    capsys.readouterr()
    assert main(check) == 0
    said = f"plain: texts begin with no special token; the tokenizer of model.path = {model}"
    assert (said in capsys.readouterr().out) == is_added
    assert main([*check, f"data.path={tmp_path / 'own'}"]) == 0
    assert "texts begin with" not in capsys.readouterr().out
