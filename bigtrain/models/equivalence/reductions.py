"""Changes that make a configuration smaller and keep every option of the architecture."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig

from bigtrain.models.configuration import auto_class, text_config
from bigtrain.settings.hf_config_keys import CHOSEN_EXPERTS, EXPERTS

VOCABULARY = 64
MAX_PARAMETERS = 300_000_000
"""Limit for small models."""
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
_HEAD_SIZE = 16
"""Size of heads on which nothing else depends."""
_EXPANSIONS = ("mamba_expand", "expand")
_RECURRENT_HEADS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("num_heads", "head_dim", "n_groups"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
)
"""Keys of a recurrent layer's heads, their size and the groups of heads that share a state."""

Change = Callable[[Any], None]
BuiltT = TypeVar("BuiltT")


def fewer_layers(config: Any) -> None:
    """Reduce to four layers, or to as many as contain a layer of every type."""
    layer_types = getattr(config, "layer_types", None)
    count = min(_LAYERS, config.num_hidden_layers)
    if layer_types:
        first_indices = [layer_types.index(layer_type) for layer_type in set(layer_types)]
        count = max(count, max(first_indices) + 1)
        with suppress(AttributeError):  # some classes derive the types from the number of layers
            config.layer_types = list(layer_types[:count])
    config.num_hidden_layers = count


def fewer_tokens(config: Any) -> None:
    """Reduce the vocabulary to between `VOCABULARY` and twice as many tokens. Special tokens become
    the first tokens, which no sample of a small model contains."""
    config.vocab_size = max(VOCABULARY, min(config.vocab_size, 2 * VOCABULARY))
    if isinstance(getattr(config, "vocab_size_per_layer_input", None), int):
        config.vocab_size_per_layer_input = config.vocab_size
    for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if getattr(config, name, None) is not None:
            setattr(config, name, number)


def build_smallest(
    hf_config: PreTrainedConfig,
    reductions: Sequence[Change],
    build: Callable[[PreTrainedConfig], BuiltT],
    *,
    all_layers: bool = False,
) -> BuiltT:
    """Return the result of `build` for the smallest configuration that it accepts. No class accepts
    every change, so the last configuration is the full one. `reductions`: changes of sizes, the
    smallest result first. `all_layers`: no layer is removed. Raises ValueError with the first error
    if `build` accepts no configuration."""
    layers: list[Change] = [] if all_layers else [fewer_layers]
    attempts = [[*layers, fewer_tokens, reduction] for reduction in reductions]
    attempts += [[fewer_tokens, reduction] for reduction in reductions]
    attempts += [[*layers, fewer_tokens], layers, []]
    failure: Exception | None = None
    for changes in attempts:
        config = copy.deepcopy(hf_config)
        try:
            for change in changes:
                change(text_config(config))
            return build(config)
        except Exception as error:  # constructors raise any error for odd values
            failure = failure or error
    raise ValueError(failure) from failure


def check_size(config: PreTrainedConfig) -> None:
    """Raise ValueError if a model of `config` is too large to be tested on a CPU."""
    with torch.device("meta"):
        model = auto_class(config).from_config(copy.deepcopy(config), dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"it still has {num_parameters} parameters")


def with_heads(
    heads: int, key_value_heads: int | None = None, head_size: int | None = None
) -> Change:
    """Return the change to `heads` attention heads of `head_size` (None: unchanged, since rotary
    embeddings depend on it), and to inner widths in proportion. key_value_heads: used if the
    configuration has them; None for half as many with grouped-query attention."""

    def change(config: Any) -> None:
        if getattr(config, "num_attention_heads", None) is None:  # recurrent layers only
            _reduce_width(config, heads, heads * (head_size or _HEAD_SIZE))
            return
        key_heads, size = key_value_heads, head_size
        # Values of single layers hide the configuration's own values, which are changed first.
        layer_values: dict[str, dict[str, Any]] = {}
        if getattr(config, "is_heterogeneous", False):
            layer_values = config.to_dict()["per_layer_config"]
            config.per_layer_config = None
        if key_heads is None:
            is_grouped = getattr(config, "num_key_value_heads", None) != config.num_attention_heads
            key_heads = heads // 2 if is_grouped else heads
        head_dim = getattr(config, "head_dim", None)
        if size is None:
            size = head_dim or config.hidden_size // config.num_attention_heads
        elif head_dim:
            config.head_dim = size
        _fewer_linear_heads(config, heads)
        if getattr(config, "attention_hidden_size", None):  # wider than the hidden states
            factor = config.attention_hidden_size // config.hidden_size
            size = config.hidden_size // config.num_attention_heads
            config.attention_hidden_size = heads * size * factor
            config.head_dim = size * factor
        _fit_recurrent_heads(config, heads, heads * size)
        config.hidden_size = heads * size
        config.num_attention_heads = heads
        # Sub-configurations of attention and experts repeat the widths and heads.
        for part in _with_sub_configs(config):
            if hasattr(part, "hidden_size"):
                part.hidden_size = config.hidden_size
            for name in _KEY_HEADS:
                if getattr(part, name, None):
                    setattr(part, name, key_heads)
            for name in _INNER_WIDTHS:
                width_before = getattr(part, name, None)
                if isinstance(width_before, int):
                    setattr(part, name, config.hidden_size)
                elif isinstance(width_before, list):  # one for each layer
                    setattr(part, name, [config.hidden_size] * len(width_before))
        sizes = {"num_attention_heads": heads, **dict.fromkeys(_KEY_HEADS, key_heads)}
        sizes |= dict.fromkeys(_INNER_WIDTHS, config.hidden_size)
        if layer_values:
            head_scale = size / head_dim if head_dim else 1.0
            config.per_layer_config = {
                index: _reduced_layer_values(values, sizes, head_scale)
                for index, values in layer_values.items()
                if int(index) < config.num_hidden_layers
            }

    return change


def _reduced_layer_values(
    values: Mapping[str, Any], sizes: Mapping[str, Any], head_scale: float
) -> dict[str, Any]:
    """Return the `values` of a layer with `sizes`, and a head size scaled by `head_scale`."""
    reduced = {name: sizes.get(name, value) for name, value in values.items()}
    if "head_dim" in values and head_scale != 1.0:
        reduced["head_dim"] = int(values["head_dim"] * head_scale)
    return reduced


def _reduce_width(config: Any, heads: int, hidden_size: int) -> None:
    """Change the widths of a model without attention, in proportion to the hidden size. Raises
    ValueError for xLSTM, whose constructor demands other head sizes."""
    if hasattr(config, "embedding_dim"):
        raise ValueError("its head sizes do not follow its width")
    _fit_recurrent_heads(config, heads, hidden_size)
    for name in ("intermediate_size", "attention_hidden_size"):
        width = getattr(config, name, None)
        if isinstance(width, int):
            setattr(config, name, width * hidden_size // config.hidden_size)
    config.hidden_size = hidden_size


def _fewer_linear_heads(config: Any, heads: int) -> None:
    """Change linear attention, which is slow without kernels, to `heads` small key heads, each with
    an unchanged number of value heads."""
    if getattr(config, "linear_num_heads", None):
        config.linear_num_heads = heads
    key_heads = getattr(config, "linear_num_key_heads", None)
    if key_heads:
        config.linear_num_value_heads = heads * (config.linear_num_value_heads // key_heads)
        config.linear_num_key_heads = heads
    for name in ("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"):
        if getattr(config, name, None):
            setattr(config, name, min(_HEAD_SIZE, getattr(config, name)))


def _fit_recurrent_heads(config: Any, divisor: int, hidden_size: int) -> None:
    """Change the heads of recurrent layers whose total width is the hidden size times an expansion
    to `hidden_size` times this expansion, as the constructors demand. The number of heads is a
    multiple of the groups, and of `divisor`, so that as many ranks can divide the heads."""
    expansions = [getattr(config, name, None) for name in _EXPANSIONS]
    for expansion in (value for value in expansions if value is not None):
        for heads_name, size_name, groups_name in _RECURRENT_HEADS:
            heads, size = getattr(config, heads_name, None), getattr(config, size_name, None)
            if not isinstance(heads, int) or not isinstance(size, int):
                continue
            if heads * size == int(expansion * config.hidden_size):
                width = int(expansion * hidden_size)
                unit = math.lcm(getattr(config, groups_name, None) or 1, divisor)
                num_heads = unit * max(1, width // (size * unit))
                setattr(config, heads_name, num_heads)
                setattr(config, size_name, width // num_heads)


def _with_sub_configs(config: Any) -> list[Any]:
    """Return `config` and its sub-configurations of attention or experts (Dbrx)."""
    parts = [config]
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig) and not hasattr(part, "num_hidden_layers"):
            parts.append(part)
    return parts


def fewer_experts(config: Any, divisor: int = 2) -> None:
    """Reduce to twice as many experts as a token is routed to, rounded up to a multiple of
    `divisor`."""
    for part in _with_sub_configs(config):
        experts_per_token = [
            getattr(part, name) for name in CHOSEN_EXPERTS if getattr(part, name, None)
        ]
        for name in EXPERTS:
            if isinstance(getattr(part, name, None), int) and experts_per_token:
                num_multiples = math.ceil(2 * int(experts_per_token[0]) / divisor)
                setattr(part, name, min(getattr(part, name), num_multiples * divisor))


def smaller(*heads: Change, divisor: int = 2) -> list[Change]:
    """Return reductions for `build_proxy_model`: each of `heads`, the smallest first, with fewer
    experts; then fewer experts only; then the last of `heads` only. `divisor`: of the number of
    experts."""

    def reduce_both(change_heads: Change, config: Any) -> None:
        change_heads(config)
        fewer_experts(config, divisor)

    reduce_experts = partial(fewer_experts, divisor=divisor)
    return [*(partial(reduce_both, change) for change in heads), reduce_experts, heads[-1]]


def deterministic(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration without dropout or noise."""
    config = copy.deepcopy(hf_config)
    for part in (config, text_config(config)):  # one object, if the model has only text
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config
