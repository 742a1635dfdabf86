"""A vocabulary that grows: under every topology the same run as one process makes whose model
transformers itself has resized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.vocabulary import base_configuration, grown_configuration, new_rows
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import SEED, VOCAB_SIZE, llama, run_config, train_cases
from tests.parity.plain import plain_training
from tests.support.datasets import write_dataset

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]

TOKENS = VOCAB_SIZE + 4
ROWS = 104  # padded to a multiple of 8
GROWS = {"new_rows": "mean_covariance", "pad_to_multiple_of": 8}
MODELS = {
    "tied": llama(num_hidden_layers=2),
    "untied": llama(num_hidden_layers=2, tie_word_embeddings=False),
    "phi": {  # whose head has a bias
        "model_type": "phi",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attention_dropout": 0.0,
    },
}
# By name: the model, parallel degrees, the DeepSpeed JSON.
CASES: dict[str, tuple[str, dict[str, int], str]] = {
    "tied, ZeRO 3": ("tied", {}, "zero3"),
    "untied, ZeRO 1": ("untied", {}, "zero1"),
    "tied, tensor 2": ("tied", {"tensor": 2}, "zero1"),
    "bias, tensor 2": ("phi", {"tensor": 2}, "zero0"),
    "tied, pipeline 2": ("tied", {"pipeline": 2}, "zero0"),
    "untied, pipeline 2": ("untied", {"pipeline": 2}, "zero0"),
}

FEW = ["tied, ZeRO 3", "bias, tensor 2", "tied, pipeline 2"]


def bases(directory: Path) -> dict[str, Path]:
    directories_by_name = {}
    for name, config in MODELS.items():
        section = ModelSection(config=config)
        model: Any = build_model(section, load_hf_config(section), seed=SEED)
        with torch.no_grad():  # a trained embedding has a mean, and a bias is not zero
            model.get_input_embeddings().weight += 0.1
            if model.get_output_embeddings().bias is not None:
                model.get_output_embeddings().bias.normal_()
        directories_by_name[name] = directory / name
        model.save_pretrained(directories_by_name[name])
    return directories_by_name


def resized(
    base: Path,
    directory: Path,
    grows: dict[str, Any] = GROWS,
    tokens: int = TOKENS,
    seed: int = SEED,
) -> Path:
    """The base as transformers resizes it, with bigtrain's rows: its own draws begin elsewhere."""
    section = ModelSection.model_validate({"path": str(base), "vocabulary": grows})
    grown, growth = grown_configuration(section, load_hf_config(section), tokens)
    assert growth is not None
    weights = find_weights(str(base), base_configuration(grown, growth))
    rows = new_rows(weights, grown, growth, section, seed)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(tokens, pad_to_multiple_of=grows["pad_to_multiple_of"])
    with torch.no_grad():
        for name, added in rows.items():
            model.get_parameter(name)[growth.before :] = added
    model.save_pretrained(directory)
    return directory


def test_growing_is_the_same_as_in_plain_training(tmp_path: Path) -> None:
    assert_as_plain(FEW, tmp_path)


@pytest.mark.slow
def test_growing_is_the_same_under_every_topology(tmp_path: Path) -> None:
    assert_as_plain([name for name in CASES if name not in FEW], tmp_path)


def assert_as_plain(names: list[str], tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "shards", vocab_size=TOKENS)
    directories_by_name = bases(tmp_path)
    cases, configs = {}, {}
    chosen = {name: CASES[name] for name in names}
    for name, (model, degrees, engine) in chosen.items():
        section = {"path": str(directories_by_name[model]), "vocabulary": GROWS}
        configs[name] = run_config(data, section, micro_batch_size=4, parallel=degrees)
        last = str(configs[name]["train"]["steps"])
        cases[name] = {
            "config": configs[name],
            "deepspeed_config": engine,
            "weights": {last: str(tmp_path / f"{name}.pt")},
        }
    results = train_cases(2, cases, tmp_path)
    plain = {
        model: plain_training(
            data,
            resized(directories_by_name[model], tmp_path / f"{model}-resized"),
            configs[names[0]],
        )
        for model in {model for model, *_ in chosen.values()}
    }
    for name, (model, *_) in chosen.items():
        expected = plain[model]
        assert results[name]["losses"] == pytest.approx(expected.losses, rel=1e-5), name
        assert results[name]["norms"] == pytest.approx(expected.norms, rel=1e-4), name
        trained = torch.load(tmp_path / f"{name}.pt")
        assert trained["model.embed_tokens.weight"].shape[0] == ROWS
        for key, weight in expected.weights.items():
            torch.testing.assert_close(
                trained[key], weight, rtol=0, atol=1e-5, msg=lambda m, at=(name, key): f"{at}: {m}"
            )
