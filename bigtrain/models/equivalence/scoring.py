"""Test that a model scores a sample at its last token, with any padding, on a proxy model: an
encoder with a head scores the first token, and reads padding that no mask excludes."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from bigtrain.errors import ModelError, Problem
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    add_noise,
    build_proxy_model,
    failure_text,
    proxy_tokens,
)
from bigtrain.models.equivalence.reductions import deterministic
from bigtrain.models.equivalence.trial import largest_value

_PADDING = 8
_TOLERANCE = 1e-4


@torch.no_grad()
def check_scoring(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, key: str
) -> list[Problem]:
    """Return a problem if a model with a score head cannot be trained on samples in padded rows.
    `key`: the setting that names the model."""
    remedy = "a causal language model with such a class, such as llama or qwen3"
    model_name = f"a {hf_config.model_type} with a score head"
    try:
        model = build_proxy_model(
            deterministic(hf_config), attention, usable=add_noise, sequence_length=sequence_length
        ).eval()
        ids = proxy_tokens(model)
        padding = torch.full((len(ids), _PADDING), model.config.get_text_config().pad_token_id)
        changed_ids = ids.clone()
        changed_ids[:, -1] = ids[:, -1] % 2 + 3  # tokens of the proxy, never equal to `ids`
        scores, padded, changed = (
            model(input_ids=input_ids, use_cache=False).logits.float()
            for input_ids in (ids, torch.cat([ids, padding], 1), changed_ids)
        )
        limit = _TOLERANCE * largest_value(scores)
        if largest_value(padded - scores) > limit:
            rule = f"the scores of {model_name} depend on the padding after a sample"
        elif largest_value(changed - scores) <= limit:
            rule = f"the scores of {model_name} do not depend on the last token of a sample"
        else:
            return []
    except (ModelError, *MODEL_FAILURES) as error:
        rule = f"{model_name} fails: {failure_text(error)}"
    return [Problem(key, hf_config.model_type, rule, remedy)]
