"""One browser for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A Chromium with one page."""
    with Browser() as one:
        yield one
