"""Keep lines that are typed as they stand apart from those of tests beside them."""

from __future__ import annotations

import pytest

from tests.support.worlds import free_port


@pytest.fixture(autouse=True)
def own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give torchrun a free port instead of its default one."""
    monkeypatch.setenv("PET_MASTER_PORT", str(free_port()))
