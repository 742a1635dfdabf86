"""Test that noise on a model's embedding reaches its layers, on a proxy model."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from bigtrain.errors import ModelError, Problem
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    failure_text,
    proxy_tokens,
)
from bigtrain.models.equivalence.reductions import deterministic

KEY = "model.neftune_noise_alpha"


@torch.no_grad()
def check_embedding_noise(
    hf_config: PreTrainedConfig, alpha: float, attention: str, sequence_length: int
) -> list[Problem]:
    """Return the problem of a model that does not embed each token of a sample exactly once by the
    module of `get_input_embeddings`, to which the noise is added."""
    shapes: list[tuple[int, ...]] = []

    def record(_module: object, _inputs: Any, output: Any) -> None:
        shapes.append(tuple(output.shape) if torch.is_tensor(output) else ())

    model_name = f"a {hf_config.model_type}"
    try:
        model = build_proxy_model(
            deterministic(hf_config), attention, sequence_length=sequence_length
        )
        ids = proxy_tokens(model)
        model.get_input_embeddings().register_forward_hook(record)
        model(input_ids=ids, use_cache=False)
        if len(shapes) == 1 and len(shapes[0]) == 3 and shapes[0][:2] == tuple(ids.shape):
            return []
        rule = f"the input embedding of {model_name} does not embed each token of a sample once"
    except (ModelError, *MODEL_FAILURES) as error:
        rule = f"{model_name} has no input embedding to add noise to: {failure_text(error)}"
    return [Problem(KEY, alpha, rule, f"{KEY}=null")]
