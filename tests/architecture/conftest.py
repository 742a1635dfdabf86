"""Trees of the package's files have millions of nodes, which are read by many tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_garbage() -> Iterator[None]:
    """Garbage collections would look at each node again and again."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()
