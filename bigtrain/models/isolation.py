"""Whether a model keeps documents apart that share a sample: tried on a small copy of it.

transformers sees from ``position_ids`` which start anew where documents begin, and builds a
block-diagonal causal mask (``masking_utils.find_packed_sequence_indices``). That is up to every
architecture's own code: some take no positions (ALiBi), some have state that runs through
(recurrent layers, convolutions), and nothing says so. So it is tried, not looked up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from bigtrain.errors import Problem
from bigtrain.models.configuration import text_config

TOLERANCE = 1e-4
"""Of the largest logit: far above float32 rounding, far below what one wrong token does."""

_DOCUMENT_TOKENS = ((7, 9, 8), (1, 20, 3))
_VOCABULARY = 64
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


def check_isolation(hf_config: PreTrainedConfig, attention: str) -> list[Problem]:
    """Problems with isolating documents in a model of `hf_config`; empty where it is shown to hold.

    Builds a few narrow layers of it with random weights on the CPU and compares the logits of two
    samples of three documents each with those of the six documents alone. Takes a second or so.
    """
    try:
        model = small_model(hf_config, attention)
        if model.config._attn_implementation not in ("sdpa", "eager"):
            return [_refusal(hf_config, f"its attention is {model.config._attn_implementation}")]
        alone, packed, mixed = _logits(model)
    except (ValueError, TypeError, RuntimeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return [_refusal(hf_config, f"a small copy of it could not be tried: {reason}")]
    limit = TOLERANCE * float(alone.abs().max())
    if not float((mixed - alone).abs().max()) > 10 * limit:
        return [_refusal(hf_config, "random weights do not show whether documents see each other")]
    difference = float((packed - alone).abs().max())
    if not difference <= limit:
        return [
            _refusal(
                hf_config,
                "it does not: documents that share a sample have other logits than alone (by "
                f"{difference:.2g}, rounding is below {limit:.2g})",
            )
        ]
    return []


def _refusal(hf_config: PreTrainedConfig, reason: str) -> Problem:
    return Problem(
        "data.document_boundaries",
        "isolate",
        f"cannot be had of model_type {hf_config.model_type}: {reason}",
        "set data.document_boundaries=ignore, or take another architecture",
    )


@torch.no_grad()
def _logits(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [B, T, V] of documents alone, of samples with boundaries, and of samples without."""
    rows = len(_DOCUMENT_TOKENS)
    tokens = sum(_DOCUMENT_TOKENS[0])
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, _VOCABULARY, (rows, tokens), generator=generator)
    positions = torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in _DOCUMENT_TOKENS]
    )
    alone = torch.stack(
        [
            torch.cat(
                [
                    model(input_ids=document[None], use_cache=False).logits[0]
                    for document in ids[row].split(list(lengths))
                ]
            )
            for row, lengths in enumerate(_DOCUMENT_TOKENS)
        ]
    )
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    mixed = model(input_ids=ids, use_cache=False).logits
    return alone, packed, mixed


def small_model(
    hf_config: PreTrainedConfig, attention: str, *, all_layers: bool = False
) -> PreTrainedModel:
    """A float32 model in evaluation mode, as narrow as its class can be built.

    It has a few layers, of every kind one, or `all_layers`. Raises ValueError where none can be.
    """
    failure: Exception | None = None
    shorter = () if all_layers else (_fewer_layers,)
    steps: tuple[tuple[Callable[[Any], None], ...], ...] = (
        (*shorter, _fewer_tokens, _narrower),
        (*shorter, _fewer_tokens),
        shorter,
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
    config.vocab_size = max(_VOCABULARY, min(config.vocab_size, 2 * _VOCABULARY))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, None)


def _narrower(config: Any) -> None:
    """Two attention heads of the size they have; rotary embeddings depend on it."""
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_heads = getattr(config, "num_key_value_heads", None)
    config.hidden_size = 2 * head_size
    config.num_attention_heads = 2
    if key_heads:
        config.num_key_value_heads = 2 if key_heads == heads else 1
    for name in _INNER_WIDTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, 2 * head_size)
