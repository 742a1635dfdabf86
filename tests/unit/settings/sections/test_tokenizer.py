"""Tokens that a run adds: what follows from them, and what cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from bigtrain.errors import ConfigError
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.run_config import RunConfig, VocabularySection
from tests.support.run_trees import run_tree


def run(*overrides: str, **tokenizer: Any) -> RunConfig:
    return parse_run_config(run_tree(model={"path": "base"}, tokenizer=tokenizer), overrides)


def test_weights_grow_for_added_tokens() -> None:
    config = run(add_tokens=["a", "b"], add_special_tokens=["<x>"])
    assert config.model.vocabulary == VocabularySection()
    assert config.base_tokenizer == "base"
    assert config.tokenizer is not None
    assert config.tokenizer.added == ("<x>", "a", "b")
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    padded = run("model.vocabulary.pad_to_multiple_of=8", add_tokens=["a"]).model.vocabulary
    assert padded == VocabularySection(pad_to_multiple_of=8)
    assert run("model.vocabulary=null", add_tokens=["a"]).model.vocabulary is None
    assert run("tokenizer=null").model.vocabulary is None
    new = run("model={config: {model_type: llama}}", add_tokens=["a"], base="other")
    assert (new.model.vocabulary, new.base_tokenizer) == (None, "other")


@pytest.mark.parametrize(
    ("overrides", "tokenizer", "message"),
    [
        ([], {}, r"tokenizer adds no tokens -> name them in tokenizer\.add_special_tokens or "),
        ([], {"base": "x"}, "adds no tokens .*data.tokenizer names one"),
        ([], {"add_tokens": ["a", "a"]}, "tokenizer.add_tokens: a is to be added twice -> once"),
        (
            [],
            {"add_tokens": ["a"], "add_special_tokens": ["a"]},
            "tokenizer.add_special_tokens: a is to be added twice",
        ),
        ([], {"add_special_tokens": [" "]}, "add_special_tokens: ' ' must have characters other"),
        ([], {"add_tokens": "a"}, r"write a list: tokenizer\.add_tokens=\[a\]"),
        ([], {"new_special_tokens": ["a"]}, "did you mean tokenizer.add_special_tokens"),
        ([], {"add_tokens": ["a"], "base": "s3://me:pw@b/t"}, "contains a password"),
        (
            ["model={config: {model_type: llama}}"],
            {"add_tokens": ["a"]},
            "tokenizer.base is missing: model.config has no tokenizer .* tokenizer.base=DIRECTORY",
        ),
        (["adapters={rank: 4}"], {"add_tokens": ["a"]}, "grow the base by `bigtrain grow`"),
    ],
)
def test_what_is_refused(overrides: list[str], tokenizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        run(*overrides, **tokenizer)
    assert "pw" not in str(error.value)
