"""Rotary embeddings with other frequencies for long texts."""

from __future__ import annotations

from typing import Any


def longrope(frequencies: int, original: int, **more: Any) -> dict[str, Any]:
    """Return keys of a model whose heads have twice as many elements as `frequencies`; texts of
    more than `original` tokens are long."""
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": original,
            "short_factor": [1.0] * frequencies,
            "long_factor": [2.0 + number for number in range(frequencies)],
            **more,
        },
    }
