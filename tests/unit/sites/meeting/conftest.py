"""What sites in threads open ends with each test: watching threads, and stores with their files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bigtrain.sites.meeting.doors import Door
from bigtrain.sites.meeting.roll_call import RollCall


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: dict[type, list[Any]] = {Door: [], RollCall: []}

    def remembers(kind: type) -> None:
        begin = getattr(kind, "__init__")  # noqa: B009

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            opened[kind].append(self)
            begin(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", __init__)

    for kind in opened:
        remembers(kind)
    yield
    for call in opened[RollCall]:
        call._ended.set()
    for call in opened[RollCall]:
        call.end()
    for door in opened[Door]:
        door.close()
        door.store = None
