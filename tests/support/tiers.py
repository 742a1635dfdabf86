"""Amount of repetition in tests: all by `make test-full`, which sets TEST_TIER."""

from __future__ import annotations

import os

FULL = os.environ.get("TEST_TIER") == "full"

STEPS = 20 if FULL else 6
"""Of every comparison with plain PyTorch; warm-up, decay and clipping are in both."""


def examples(number: int) -> int:
    """Return the number of hypothesis examples: all of them, or a quarter."""
    return number if FULL else max(10, number // 4)
