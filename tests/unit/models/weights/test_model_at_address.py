"""A model at an address: its configuration and weights are those of the directory."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from bigtrain.errors import ConfigError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.hf_config_keys import missing_model
from bigtrain.settings.loading import load_run_config
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.storage.copies import fetched_copy
from bigtrain.system.storage.stores import NotFoundError

ADDRESS = "memory://bucket/models/of/tiny"


def test_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    fetched_copy.cache_clear()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "tiny"), "/bucket/models/of/tiny", recursive=True)
    section = ModelSection(path=ADDRESS)
    assert missing_model(section) == []
    here = load_hf_config(ModelSection(path=str(tmp_path / "tiny")))
    there = load_hf_config(section)
    assert there.to_diff_dict() == here.to_diff_dict()
    # Of weights nothing was copied for that.
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    models = [LlamaForCausalLM(config) for _ in range(2)]
    for model, source in zip(models, (str(tmp_path / "tiny"), ADDRESS), strict=True):
        find_weights(source, here).fill_model(model)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(NotFoundError, match="memory://bucket/none: no file there"):
        load_hf_config(ModelSection(path="memory://bucket/none"))


def test_addresses_are_where_they_can_be_used() -> None:
    name = "https://host/model?X-Amz-Signature=letmein"
    with pytest.raises(ValidationError, match="settings are recorded and logged") as error:
        ModelSection(path=name)
    assert "credentials by the environment" in str(error.value)
    for override, words in (
        (
            "output.copy_to=https://host/x",
            r"output\.copy_to = 'https://host/x': must be an address",
        ),
        ("output.directory=s3://bucket/run", r"copies go to output\.copy_to"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_run_config("quickstart", [override])
