"""Sources of a few samples, whose order is computed for few samples at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bigtrain.data.samples import mixture


@pytest.fixture(scope="module", autouse=True)
def few_blocks_at_once() -> Iterator[None]:
    """The same order: of 16 blocks, a source of ten samples has more than a thousand epochs."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mixture, "BLOCKS_AT_ONCE", 2)
        yield
