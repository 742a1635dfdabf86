from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.errors import ModelError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config, vocabulary_size
from bigtrain.models.layers.parameters import seed_of
from bigtrain.models.weights.import_hf import Weights, find_weights
from bigtrain.models.weights.vocabulary import (
    base_configuration,
    grown_configuration,
    new_rows,
    with_new_rows,
)
from bigtrain.settings.run_config import ModelSection

BEFORE, AFTER, HIDDEN, SEED = 200, 216, 16, 5


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "phi",
        "vocab_size": BEFORE,
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        **changes,
    }


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    section = ModelSection(config=config_of(tie_word_embeddings=request.param))
    model: Any = build_model(section, load_hf_config(section), seed=1)
    with torch.no_grad():
        model.get_input_embeddings().weight += torch.randn(HIDDEN)
        model.get_output_embeddings().bias.normal_()
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def section_of(base: Path, new_rows: str = "mean_covariance", **more: Any) -> ModelSection:
    vocabulary = {"new_rows": new_rows, **more}
    return ModelSection.model_validate({"path": str(base), "vocabulary": vocabulary})


def rows_of(section: ModelSection, tokens: int = AFTER) -> tuple[Weights, dict[str, torch.Tensor]]:
    grown, growth = grown_configuration(section, load_hf_config(section), tokens)
    assert growth is not None
    weights = find_weights(str(section.path), base_configuration(grown, growth))
    return weights, new_rows(weights, grown, growth, section, SEED)


def test_rows_are_those_of_transformers(base: Path) -> None:
    """Bit for bit: its own functions, from the same seeds."""
    _, rows = rows_of(section_of(base))
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    added = AFTER - BEFORE
    large = torch.nn.Linear(HIDDEN, AFTER)
    modules = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    is_tied = embedding.weight is head.weight
    assert set(rows) == {*list(modules)[: 1 if is_tied else 2], "lm_head.bias"}
    for name, module in modules.items():
        if name in rows:
            torch.manual_seed(seed_of(SEED, name))
            model._init_added_embeddings_weights_with_mean(module, large, BEFORE, added)
            assert torch.equal(rows[name], large.weight[-added:])
    torch.manual_seed(seed_of(SEED, "lm_head.bias"))
    model._init_added_lm_head_bias_with_mean(head, large, added)
    assert torch.equal(rows["lm_head.bias"], large.bias[-added:])


def test_they_have_the_mean_and_the_covariance_of_the_old_ones(base: Path) -> None:
    weights, rows = rows_of(section_of(base), tokens=BEFORE + 20_000)
    old = weights.tensors["model.embed_tokens.weight"].read().double()
    embeddings = rows["model.embed_tokens.weight"].double()
    # The spread is 3e-5 of the old one; float32 resolves a hundredth of that here.
    expected = 1e-9 * torch.cov(old.T, correction=0)
    scale = expected.diagonal().max()
    torch.testing.assert_close(embeddings.mean(0), old.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cov(embeddings.T), expected, rtol=0, atol=0.06 * float(scale))


def test_other_ways(base: Path) -> None:
    weights, rows = rows_of(section_of(base, "mean"))
    old = weights.tensors["model.embed_tokens.weight"].read()
    assert torch.equal(rows["model.embed_tokens.weight"], old.mean(0).expand(AFTER - BEFORE, -1))
    _, rows = rows_of(section_of(base, "normal"), tokens=BEFORE + 5000)
    embeddings = rows["model.embed_tokens.weight"]
    spread = load_hf_config(ModelSection(path=str(base))).initializer_range
    assert float(embeddings.std()) == pytest.approx(spread, rel=0.02)
    assert float(embeddings.mean()) == pytest.approx(0, abs=spread / 50)
    assert not rows["lm_head.bias"].any()


def test_any_rectangle_is_read_across_the_boundary(base: Path) -> None:
    weights, rows = rows_of(section_of(base))
    name = "model.embed_tokens.weight"
    grown = with_new_rows(weights, rows)
    whole = torch.cat([weights.tensors[name].read(), rows[name]])
    assert grown.tensors[name].shape == (AFTER, HIDDEN)
    part = torch.empty(6, 3)
    grown.fill(name, (BEFORE - 2, 5), part)
    assert torch.equal(part, whole[BEFORE - 2 : BEFORE + 4, 5:8])
    is_tied = weights.tensors[name] is weights.tensors["lm_head.weight"]
    assert is_tied == (grown.tensors[name] is grown.tensors["lm_head.weight"])
    assert weights.tensors[name].shape == (BEFORE, HIDDEN)


def test_fewer_tokens_than_dimensions_leave_the_mean(tmp_path: Path) -> None:
    """As in transformers: there is no positive definite covariance."""
    section = ModelSection(config=config_of(vocab_size=8))
    build_model(section, load_hf_config(section), seed=1).save_pretrained(tmp_path / "base")
    weights, rows = rows_of(section_of(tmp_path / "base"), tokens=11)
    old = weights.tensors["lm_head.weight"].read()
    assert torch.equal(rows["lm_head.weight"], old.mean(0).expand(3, -1))


@pytest.mark.parametrize(
    ("tokens", "multiple", "rows"),
    [(150, None, 200), (201, None, 201), (201, 64, 256), (9, 64, 256)],
)
def test_how_many_rows(base: Path, tokens: int, multiple: int | None, rows: int) -> None:
    section = section_of(base, pad_to_multiple_of=multiple)
    hf_config = load_hf_config(section)
    grown, growth = grown_configuration(section, hf_config, tokens)
    assert vocabulary_size(grown) == rows
    assert vocabulary_size(hf_config) == BEFORE
    assert (growth is None) == (rows == BEFORE)
    plain = ModelSection(path=str(base))
    assert grown_configuration(plain, hf_config, tokens) == (hf_config, None)


def test_what_transformers_does_not_grow_is_refused(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No architecture is known to have it: here the head stands for something else by token."""
    section = section_of(base)
    hf_config = load_hf_config(section)
    monkeypatch.setattr(
        "bigtrain.models.weights.vocabulary._by_token", lambda model: [model.get_input_embeddings()]
    )
    with pytest.raises(ModelError, match=r"lm_head\S+ \[200.* of a phi depends on the vocabulary"):
        grown_configuration(section, hf_config, AFTER)
