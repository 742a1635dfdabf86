"""Lengths at which a model's computation changes, scaled down for proxy models.

A sliding window has no effect until a sample is longer; likewise chunked attention, factors of long
rotary embeddings and position-dependent scales. A proxy model tried on 24 tokens would never reach
what the run does at 8192. So its lengths are scaled down: those that the run's samples cross, and
only those, since a threshold that a run never reaches must not rule it out.
"""

from __future__ import annotations

from typing import Any

import torch

TOKENS = 24
"""Length of the samples on which proxy models are tried."""

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
    a sample crosses no length that the whole sample does. Lengths that samples of
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
    documents, so that a dependence on the other samples of a micro-batch shows.
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
    """The longest sample that each length does not affect, and where the length is set."""
    found: list[tuple[int, Any, str]] = []
    for key, more in _LENGTHS.items():
        length = getattr(config, key, None)
        if isinstance(length, int) and length > 0:
            found.append((length + more, config, key))
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
            found.append((length, holder, _ROTARY))
    return found
