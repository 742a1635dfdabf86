"""Replaced part of accelerate's trackers (1.15): its `PartialState` sets devices, thread counts and
environment variables when it is created, and may wait for other processes. accelerate is imported
when this is called. `tests/unit/run/reporting/test_accelerate_patches.py` has its contract test."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def standard_logging() -> Iterator[None]:
    """Let accelerate's trackers log without a PartialState, which `tracking.logger` requires."""
    from accelerate import tracking

    original = tracking.logger
    tracking.logger = _StandardLogger(logging.getLogger(tracking.__name__), {})
    try:
        yield
    finally:
        tracking.logger = original


class _StandardLogger(logging.LoggerAdapter[logging.Logger]):
    """accelerate's logger for one process: accepts its extra arguments, needs no PartialState."""

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs = {k: v for k, v in kwargs.items() if k not in ("main_process_only", "in_order")}
        return msg, kwargs

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        self.warning(*args, **kwargs)
