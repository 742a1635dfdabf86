"""Whether logits of a token depend on later tokens, tested on a proxy model. A next-token loss then
teaches a model to copy the token that it is shown: its loss falls, and nothing is learned."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from bigtrain.errors import Problem
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    build_proxy_model,
    check_runs,
    proxy_tokens,
    rescale_weights,
)

_TOLERANCE = 1e-4
"""Of the largest logit: far above float32 rounding, far below what a token does."""
_SWITCHES = ("is_decoder", "causal")
"""Keys of configurations whose value False makes attention bidirectional (BERT, XLM)."""


def check_causality(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, key: str
) -> list[Problem]:
    """Return the problem of a causal LM of `hf_config` that sees later tokens; empty for one that
    cannot be run, which other trials report. `key`: the setting that names the model. Takes a tenth
    of a second or so."""
    try:
        model = build_proxy_model(
            hf_config, attention, usable=check_runs, sequence_length=sequence_length
        )
        rescale_weights(model).eval()
        ids = proxy_tokens(model)
        other_ids = ids.clone()
        other_ids[:, TOKENS // 2 :] = ids[:, TOKENS // 2 :].flip(0)  # the other sample's
        with torch.no_grad():
            logits, other_logits = (
                model(input_ids=tokens, use_cache=False).logits[:, : TOKENS // 2].float()
                for tokens in (ids, other_ids)
            )
    except MODEL_FAILURES:
        return []
    if logits.shape != other_logits.shape or logits.shape[:2] != (2, TOKENS // 2):
        return []
    difference = float((logits - other_logits).abs().max())
    if difference <= _TOLERANCE * float(logits.abs().max()):
        return []
    rule = (
        f"a {hf_config.model_type} with this configuration sees later tokens, which a next-token "
        "loss would teach it to copy"
    )
    language_config = text_config(hf_config)
    off = [name for name in _SWITCHES if getattr(language_config, name, None) is False]
    fix = " or ".join(f"model.overrides.{name}=true" for name in off)
    return [Problem(key, hf_config.model_type, rule, fix or "a model with causal attention")]
