"""DeepSpeed's own log: into log.txt instead of among a run's lines, or shown on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_NAME = "DeepSpeed"


class _LogLines(logging.Handler):
    """Hands each record on as one text, several lines of it where it has several."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Also called from other threads."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        lines = record.getMessage().splitlines() or [""]
        self._write("\n".join(f"{_NAME}{level}: {line}" for line in lines))


@contextmanager
def import_log(*, shown: bool) -> Iterator[list[str]]:
    """Inside, DeepSpeed is imported; yields what it logs meanwhile, which is not shown unless
    `shown`. As it is imported, it makes its own handler, so this filters its logger."""
    logger, lines = logging.getLogger(_NAME), list[str]()
    handler = _LogLines(lines.append)

    def keep(record: logging.LogRecord) -> bool:
        handler.emit(record)
        return shown

    logger.addFilter(keep)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)


@contextmanager
def deepspeed_log(write: Callable[[str], None], *, shown: bool) -> Iterator[None]:
    """Inside, `write` gets what DeepSpeed logs, from INFO on; `shown`: standard output gets it as
    well, as DeepSpeed has it. Its errors are shown in either case."""
    logger = logging.getLogger(_NAME)
    level, levels = logger.level, [(handler, handler.level) for handler in logger.handlers]
    lines = _LogLines(write)
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    for handler, _ in levels:
        handler.setLevel(logging.INFO if shown else logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)
        for handler, before in levels:
            handler.setLevel(before)
