"""Changes that make a configuration smaller and keep every option of the architecture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from bigtrain.models.configuration import text_config
from bigtrain.settings.hf_config_keys import CHOSEN_EXPERTS, EXPERTS

VOCABULARY = 64
_LAYERS = 4

_INNER_WIDTHS = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "ffn_hidden_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_KEY_HEADS = ("num_key_value_heads", "kv_n_heads")

Change = Callable[[Any], None]


def fewer_layers(config: Any) -> None:
    """Four layers, or as many as it takes to have one of every kind."""
    kinds = getattr(config, "layer_types", None)
    count = min(_LAYERS, config.num_hidden_layers)
    if kinds:
        # One layer of every kind at least.
        count = max(count, max(kinds.index(kind) for kind in set(kinds)) + 1)
        with suppress(AttributeError):  # some derive it from the number of layers
            config.layer_types = list(kinds[:count])
    config.num_hidden_layers = count


def fewer_tokens(config: Any) -> None:
    """A vocabulary of `VOCABULARY` to twice as many tokens, none of them special."""
    config.vocab_size = max(VOCABULARY, min(config.vocab_size, 2 * VOCABULARY))
    if isinstance(getattr(config, "vocab_size_per_layer_input", None), int):
        config.vocab_size_per_layer_input = config.vocab_size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def with_heads(
    heads: int, key_value_heads: int | None = None, head_size: int | None = None
) -> Change:
    """Return the change to `heads` attention heads of `head_size` (None: unchanged, since rotary
    embeddings depend on it), and to inner widths in proportion. key_value_heads: only if the
    configuration has it; None for half as many with grouped-query attention."""

    def change(config: Any) -> None:
        key_heads, size = key_value_heads, head_size
        if key_heads is None:
            own_key_heads = getattr(config, "num_key_value_heads", None)
            key_heads = heads // 2 if own_key_heads != config.num_attention_heads else heads
        own = getattr(config, "head_dim", None)
        if size is None:
            size = own or config.hidden_size // config.num_attention_heads
        elif own:
            config.head_dim = size
        if getattr(config, "linear_num_heads", None):  # linear attention, slow without kernels
            config.linear_num_heads = heads
        config.hidden_size = heads * size
        config.num_attention_heads = heads
        for part in _parts(config):
            _set_widths(part, config.hidden_size, key_heads)

    return change


def _set_widths(part: Any, width: int, key_value_heads: int) -> None:
    if hasattr(part, "hidden_size"):
        part.hidden_size = width
    for name in _KEY_HEADS:
        if getattr(part, name, None):
            setattr(part, name, key_value_heads)
    for name in _INNER_WIDTHS:
        own = getattr(part, name, None)
        if isinstance(own, int):
            setattr(part, name, width)
        elif isinstance(own, list):  # one for each layer
            setattr(part, name, [width] * len(own))


def _parts(config: Any) -> list[Any]:
    """`config`, and what it has of its own for attention or experts (Dbrx)."""
    parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", {}))
    return [
        config,
        *(
            part
            for part in parts
            if isinstance(part, PreTrainedConfig) and not hasattr(part, "num_hidden_layers")
        ),
    ]


def fewer_experts(config: Any, divisor: int = 2) -> None:
    """Twice as many experts as a token is routed to, rounded up to a multiple of `divisor`."""
    for part in _parts(config):
        chosen = [getattr(part, name) for name in CHOSEN_EXPERTS if getattr(part, name, None)]
        for name in EXPERTS:
            if isinstance(getattr(part, name, None), int) and chosen:
                enough = -(-2 * int(chosen[0]) // divisor) * divisor
                setattr(part, name, min(getattr(part, name), enough))


def smaller(*heads: Change, divisor: int = 2) -> list[Change]:
    """Return reductions for `build_proxy_model`: `heads`, the smallest first, with fewer experts;
    then only one of both."""

    def both(change: Change, config: Any) -> None:
        change(config)
        fewer_experts(config, divisor)

    experts = partial(fewer_experts, divisor=divisor)
    return [*(partial(both, change) for change in heads), experts, heads[-1]]


def deterministic(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration without dropout or noise."""
    config = copy.deepcopy(hf_config)
    for part in {id(c): c for c in (config, text_config(config))}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config
