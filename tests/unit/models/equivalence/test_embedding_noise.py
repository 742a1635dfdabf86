"""To which models noise on embeddings can be added, and how large it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook

from bigtrain.models.equivalence.embedding_noise import check_embedding_noise
from bigtrain.models.layers.embedding_noise import add_embedding_noise
from tests.unit.models.layers.test_chunked_loss import COMMON


def config_of(model_type: str) -> Any:
    values = {name: value for name, value in COMMON.items() if name != "head_dim"}
    return CONFIG_MAPPING[model_type](**values)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2"])
def test_models_that_embed_each_token_once(model_type: str) -> None:
    assert check_embedding_noise(config_of(model_type), 5.0, "auto", 16) == []


@pytest.mark.parametrize(
    ("embedding", "why"),
    [
        (nn.Embedding(2, 2), "does not embed each token of a sample once"),
        (None, "has no input embedding to add noise to"),
    ],
)
def test_another_embedding_is_refused(
    embedding: nn.Module | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the model never calls would train without noise."""
    monkeypatch.setattr(LlamaForCausalLM, "get_input_embeddings", lambda _: embedding)
    (problem,) = check_embedding_noise(config_of("llama"), 5.0, "auto", 16)
    assert str(problem).startswith("model.neftune_noise_alpha = 5.0: ")
    assert why in str(problem)
    assert str(problem).endswith("-> model.neftune_noise_alpha=null")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers_hook_bit_for_bit(dtype: torch.dtype) -> None:
    module = nn.Embedding(11, 6, dtype=dtype)
    model: Any = SimpleNamespace(get_input_embeddings=lambda: module)
    add_embedding_noise(model, 7.5)
    ids = torch.arange(10).view(2, 5)
    torch.manual_seed(3)
    outputs = [module(ids), module(ids)]
    torch.manual_seed(3)
    plain: Any = nn.Embedding.from_pretrained(module.weight.detach()).train()
    plain.neftune_noise_alpha = 7.5
    expected = [neftune_post_forward_hook(plain, None, plain(ids)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert not torch.equal(*outputs)
    assert torch.equal(module.eval()(ids), plain(ids))
