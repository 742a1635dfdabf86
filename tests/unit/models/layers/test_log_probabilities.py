"""Log-probabilities in chunks, and their gradients, are those of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.models.layers.chunked_loss import ChunkedLoss
from tests.support.comparison import gradients

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("chunk_tokens", [7, 100])
@pytest.mark.parametrize("model_type", ["gemma2", "gpt2"])
def test_values_and_gradients(model_type: str, chunk_tokens: int) -> None:
    """Gemma 2 caps its logits, and ties its head to the embedding like GPT-2."""
    torch.manual_seed(0)
    gpt2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2}
    values = gpt2 if model_type == "gpt2" else SMALL
    model: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values)).eval()
    ids, labels = torch.randint(1, 40, (3, 9)), torch.randint(1, 40, (3, 9))
    labels[0, 2:6] = labels[2] = -100
    upstream = torch.randn(3, 9)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    expected = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    expected = expected * (labels != -100)
    of_logits = gradients(model, (expected * upstream).sum())
    chunked = ChunkedLoss(model, chunk_tokens)
    outputs = model(input_ids=ids, use_cache=False, targets=labels, per_token=True)
    torch.testing.assert_close(outputs.loss, expected.detach(), rtol=1e-5, atol=1e-6)
    # Another pass before the backward one, as of a reference model.
    with torch.no_grad():
        again = model(input_ids=ids, use_cache=False, targets=labels, per_token=True).loss
    assert torch.equal(again, outputs.loss)
    of_chunks = gradients(model, (outputs.loss * upstream).sum())
    assert of_chunks.keys() == of_logits.keys()
    for name, gradient in of_logits.items():
        torch.testing.assert_close(of_chunks[name], gradient, rtol=1e-4, atol=1e-6)
    chunked.remove()
