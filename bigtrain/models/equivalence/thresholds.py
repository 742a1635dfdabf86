"""Lengths at which a model begins to compute something else, brought within reach of few tokens.

A sliding window does nothing until a sample is longer than it; so with chunks of attention, with
the factors of long rotary embeddings and with scales that grow with the position. A proxy model
that is tried on 24 tokens would never come to what the run does at 8192. So its lengths are made
small with it: those that the run's samples pass, and only those. What a run never comes to cannot
rule it out.
"""

from __future__ import annotations

from typing import Any

import torch

TOKENS = 24
"""Of the samples that proxy models are tried on."""

# Keys of text configurations, and what is to be added for the longest sample that is the same with
# and without. Sizes of blocks in which kernels compute the same thing are none.
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

    The shortest length becomes half of `tokens`, the next one more, equal ones stay equal. So of
    any equal parts of a sample the first do not cross what the whole does. Those that samples of
    `sequence_length` do not pass stay. Raises ValueError where `tokens` are too few for all.
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
    """Positions in documents on both sides of what `cross_thresholds` makes of lengths.

    int64 [samples, tokens], counted from 0 in each document. Every other sample has short documents
    alone, so that what depends on all of a micro-batch depends on how samples are divided.
    """
    long, short = [3, tokens - 5, 2], [5] * (tokens // 5) + [tokens % 5]
    return torch.stack(
        [
            torch.cat([torch.arange(length) for length in (short if row % 2 else long)])
            for row in range(samples)
        ]
    )


def rotary_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary embeddings of a text configuration: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in found.values() if isinstance(value, dict)]
    return kinds or [found]


def _lengths(config: Any) -> list[tuple[int, Any, str]]:
    """The longest sample that each length leaves as it is, and where it stands."""
    found: list[tuple[int, Any, str]] = []
    for key, more in _LENGTHS.items():
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            found.append((length + more, config, key))
    # By others than these it only sets the frequencies.
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
            found.append((length, holder, _ROTARY))
    return found
