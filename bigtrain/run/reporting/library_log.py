"""DeepSpeed's own log: written to log.txt instead of a run's output, or shown on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NAME = "DeepSpeed"


class _LogLines(logging.Handler):
    """Log handler that forwards each record as one text, possibly of several lines."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; also called from other threads."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        lines = record.getMessage().splitlines() or [""]
        self._write("\n".join(f"{_NAME}{level}: {line}" for line in lines))


@contextmanager
def import_log(*, is_shown: bool) -> Iterator[list[str]]:
    """Capture DeepSpeed's log during its import inside the block; yield the lines, which are shown
    only if `is_shown`. The import creates DeepSpeed's own handler, so this filters its logger."""
    logger, lines = logging.getLogger(_NAME), list[str]()
    handler = _LogLines(lines.append)

    def keep(record: logging.LogRecord) -> bool:
        handler.emit(record)
        return is_shown

    logger.addFilter(keep)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)


@contextmanager
def deepspeed_log(write: Callable[[str], None], *, is_shown: bool) -> Iterator[None]:
    """Send DeepSpeed's log from INFO on to `write` inside the block; `is_shown`: also to standard
    output, in DeepSpeed's format. Its errors are always shown."""
    logger = logging.getLogger(_NAME)
    level, levels = logger.level, [(handler, handler.level) for handler in logger.handlers]
    lines = _LogLines(write)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    for handler, _ in levels:
        handler.setLevel(logging.INFO if is_shown else logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
        for handler, before in levels:
            handler.setLevel(before)
