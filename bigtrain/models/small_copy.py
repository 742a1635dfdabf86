"""A small copy of any model: its own code with few narrow layers, to try in a second what holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bigtrain.models.configuration import text_config

NUM_TOKENS = 64
"""Token ids below this are in every small copy's vocabulary."""

_MAX_PARAMETERS = 300_000_000
_LAYERS = 4

_INNER_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


def small_copy(
    hf_config: PreTrainedConfig, attention: str, *, num_heads: int = 2
) -> PreTrainedModel:
    """A float32 model of `hf_config` in evaluation mode, as narrow as its class can be built.

    It has at least `NUM_TOKENS` tokens and one layer of every kind. `num_heads` attention heads are
    asked for; an architecture that cannot be narrowed keeps its own. Raises ValueError where it
    cannot be built, or stays too large to try.
    """
    failure: Exception | None = None
    steps: tuple[tuple[Callable[[Any], None], ...], ...] = (
        (_fewer_layers, _fewer_tokens, partial(_narrower, num_heads=num_heads)),
        (_fewer_layers, _fewer_tokens),
        (_fewer_layers,),
    )
    for shrink in steps:
        config = copy.deepcopy(hf_config)
        try:
            for change in shrink:
                change(text_config(config))
            with torch.device("meta"):
                size = sum(p.numel() for p in _build(copy.deepcopy(config), attention).parameters())
            if size > _MAX_PARAMETERS:
                raise ValueError(f"it still has {size} parameters")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return _build(config, attention).eval()
        except Exception as error:  # whatever an architecture's constructor says to odd values
            failure = failure or error
    raise ValueError(failure)


def _build(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config,
        dtype=torch.float32,
        attn_implementation=None if attention == "auto" else attention,
    )
    return model


def _fewer_layers(config: Any) -> None:
    kinds = getattr(config, "layer_types", None)
    count = min(_LAYERS, config.num_hidden_layers)
    if kinds:
        # One layer of every kind at least.
        count = max(count, max(kinds.index(kind) for kind in set(kinds)) + 1)
        with suppress(AttributeError):  # some derive it from the number of layers
            config.layer_types = list(kinds[:count])
    config.num_hidden_layers = count


def _fewer_tokens(config: Any) -> None:
    config.vocab_size = max(NUM_TOKENS, min(config.vocab_size, 2 * NUM_TOKENS))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def _narrower(config: Any, num_heads: int) -> None:
    """Few attention heads of the size they have; rotary embeddings depend on it."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None)
    config.hidden_size = num_heads * head_size
    config.num_attention_heads = num_heads
    if key_heads:
        config.num_key_value_heads = num_heads if key_heads == heads else num_heads // 2
    for name in _INNER_WIDTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, num_heads * head_size)
