"""Proxy model of an architecture: a few small layers with every option of the real one.

Lengths at which a model's computation changes (sliding windows, attention chunks, long rotary
embeddings) are scaled down, since 24 tokens would never reach those of a run; but only those that
the run's samples cross, since one that a run never reaches must not rule it out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import one_line
from bigtrain.models.configuration import auto_class, scores_samples, text_config
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.settings.extensions import user_code_at
from bigtrain.settings.hf_config_keys import CHOSEN_EXPERTS, EXPERTS

TOKENS = 24
"""Length of the samples on which proxy models are tested."""

# Keys of text configurations, with the offset from the value to the longest sample that it does not
# affect. Block sizes of kernels, which change no result, are not among them.
_LENGTHS = {
    "attention_chunk_size": 0,
    "attention_window_size": 0,
    "floor_scale": -1,
    "index_topk": 0,
    "keep_window_size": 0,
    "local_attention": 0,
    "local_attention_window_len": 0,
    "log_scaling_n_floor": 0,
    "sliding_window": 0,
    "sliding_window_size": 0,
    "window_size": 0,
}
_ROTARY = "original_max_position_embeddings"


def cross_thresholds(config: Any, sequence_length: int, tokens: int = TOKENS) -> None:
    """Make `tokens` tokens cross what samples of `sequence_length` do in a text configuration.

    The shortest length becomes half of `tokens`, the next one more, equal ones stay equal. So half
    a sample crosses no length that the full sample does. Lengths that samples of
    `sequence_length` do not cross stay. Raises ValueError if `tokens` are too few for all.
    """
    crossed = sorted(length for length, _, _ in _lengths(config) if length < sequence_length)
    ranks = {length: rank for rank, length in enumerate(dict.fromkeys(crossed))}
    if tokens // 2 + len(ranks) > tokens:
        raise ValueError(f"{tokens} tokens do not cross {len(ranks)} different lengths")
    for length, holder, key in _lengths(config):
        if length not in ranks:
            continue
        small = tokens // 2 + ranks[length] - _LENGTHS.get(key, 0)
        if isinstance(holder, dict):
            holder[key] = small
        else:
            setattr(holder, key, small)


def document_positions(samples: int, tokens: int = TOKENS) -> torch.Tensor:
    """Positions in documents shorter and longer than the lengths that `cross_thresholds` sets.
    int64 [samples, tokens], counted from 0 in each document. Every other sample has only short
    documents, so that a dependence on the other samples of a micro-batch shows."""
    long, short = [3, tokens - 5, 2], [5] * (tokens // 5) + [tokens % 5]
    return torch.stack(
        [
            torch.cat([torch.arange(length) for length in (short if row % 2 else long)])
            for row in range(samples)
        ]
    )


def rotary_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the rotary embeddings of a text configuration: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in rope.values() if isinstance(value, dict)]
    return kinds or [rope]


def _lengths(config: Any) -> list[tuple[int, Any, str]]:
    """Return the longest sample that each length does not affect, and where the length is set."""
    lengths: list[tuple[int, Any, str]] = []
    for key, more in _LENGTHS.items():
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            lengths.append((length + more, config, key))
    # In other rope types it only sets the frequencies.
    holders: list[Any] = [
        parameters
        for parameters in rotary_parameters(config)
        if parameters.get("rope_type") == "longrope" or "llama_4_scaling_beta" in parameters
    ]
    if holders and isinstance(getattr(config, _ROTARY, None), int):
        holders.append(config)
    for holder in holders:
        length = holder.get(_ROTARY) if isinstance(holder, dict) else getattr(holder, _ROTARY)
        if isinstance(length, int):
            lengths.append((length, holder, _ROTARY))
    return lengths


VOCABULARY = 64
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
_KEY_HEADS = ("num_key_value_heads", "kv_n_heads")

MODEL_FAILURES = (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError)
"""Exceptions of a model's code that is used in a way its author did not expect."""


def failure_text(error: BaseException) -> str:
    """Return the text of an error that a model's code raised, with the file and line of the user's
    class, if it was raised there."""
    raised_in = user_code_at(error)
    return f"{one_line(error)} ({raised_in})" if raised_in else one_line(error)


Change = Callable[[Any], None]


def build_proxy_model(
    hf_config: PreTrainedConfig,
    attention: str,
    reductions: Sequence[Change],
    usable: Callable[[PreTrainedModel], None] = lambda model: None,
    *,
    all_layers: bool = False,
    sequence_length: int = 0,
    tokens: int = TOKENS,
) -> PreTrainedModel:
    """Return a float32 model on the CPU, as small as its class can be built; the same on every
    rank.

    `reductions`: changes that make a text configuration smaller, the smallest result first
    (`smaller`). `usable` raises for a model that cannot be used, and the next larger one is tested.
    It has a few layers, at least one of every kind, or `all_layers`. Samples of `tokens` cross
    every length that those of `sequence_length` do (`cross_thresholds`). `attention`: one without
    float32 on a CPU is replaced by transformers' default. Raises ValueError with the first reason
    if none can be built.
    """
    if attention not in ("sdpa", "eager"):
        attention = "auto"
    failure: Exception | None = None
    shorter: tuple[Change, ...] = () if all_layers else (fewer_layers,)
    steps: tuple[tuple[Change, ...], ...] = (
        *((*shorter, fewer_tokens, change) for change in reductions),
        *((fewer_tokens, change) for change in reductions),
        (*shorter, fewer_tokens),
        shorter,
        (),
    )
    for shrink in steps:
        config = copy.deepcopy(hf_config)
        try:
            for change in shrink:
                change(text_config(config))
            cross_thresholds(text_config(config), sequence_length, tokens)
            if scores_samples(config):
                text_config(config).pad_token_id = 0  # not among `proxy_tokens`
            with torch.device("meta"):
                size = sum(p.numel() for p in _build(copy.deepcopy(config), attention).parameters())
            if size > _MAX_PARAMETERS:
                raise ValueError(f"it still has {size} parameters")
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                model = _build(config, attention)
            usable(model)
            return model
        except Exception as error:  # constructors raise anything for odd values
            failure = failure or error
    raise ValueError(failure) from failure


def _build(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    model: PreTrainedModel = auto_class(config).from_config(
        config, dtype=torch.float32, attn_implementation=None if attention == "auto" else attention
    )
    fit_experts(model)
    return model


@torch.no_grad()
def rescale_weights(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with matrices scaled to preserve the norm of their inputs. With initial weights,
    small layers hardly change the residual stream and attention is almost uniform: which token
    attends to which would not show in the logits."""
    for parameter in model.parameters():
        if parameter.ndim >= 2 and (spread := float(parameter.std())) > 0:
            parameter.div_(spread * parameter.shape[-1] ** 0.5)
    return model


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


def build_noisy_proxy(
    hf_config: PreTrainedConfig,
    attention: str,
    reductions: Sequence[Change],
    usable: Callable[[PreTrainedModel], None] = lambda model: None,
    **options: Any,
) -> PreTrainedModel:
    """Return `build_proxy_model` without dropout, and with noise on every parameter."""

    def with_noise(model: PreTrainedModel) -> None:
        _add_noise(model)
        usable(model)

    return build_proxy_model(deterministic(hf_config), attention, reductions, with_noise, **options)


def deterministic(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration without dropout or noise."""
    config = copy.deepcopy(hf_config)
    for part in {id(c): c for c in (config, text_config(config))}.values():
        for name, value in vars(part).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(part, name, 0.0)
    return config


@torch.no_grad()
def _add_noise(model: PreTrainedModel) -> None:
    """Add noise to every parameter: ones and zeros would hide errors."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all():  # not initialized by the constructor
            parameter.zero_()
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def proxy_tokens(model: PreTrainedModel, length: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Return random token ids for a proxy model: int64 [2, length]."""
    vocabulary = min(VOCABULARY, int(text_config(model.config).vocab_size))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (2, length), generator=generator)
