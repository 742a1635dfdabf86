"""Logs and warnings of libraries: written to log.txt instead of a run's output, or shown on
request."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

_DEEPSPEED = "DeepSpeed"
_LIBRARIES = (
    *("accelerate", "bitsandbytes", "datasets", "huggingface_hub", "kernels", "liger_kernel"),
    *("peft", "tokenizers", "torch", "torchao", "transformers"),
)
"""Other libraries, by the first part of the names of their loggers."""


class _LogLines(logging.Handler):
    """Log handler that forwards each record of a library as one text, possibly of several lines."""

    def __init__(self, library: str, write: Callable[[str], None]) -> None:
        super().__init__()
        self._library = library
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record; also called from other threads."""
        level = "" if record.levelno == logging.INFO else f" {record.levelname.lower()}"
        lines = record.getMessage().splitlines() or [""]
        self._write("\n".join(f"{self._library}{level}: {line}" for line in lines))


@contextmanager
def import_log(*, is_shown: bool) -> Iterator[list[str]]:
    """Capture DeepSpeed's log during its import inside the block; yield the lines, which are shown
    only if `is_shown`. A filter of the logger is used, since the import adds a handler to it."""
    logger, lines = logging.getLogger(_DEEPSPEED), list[str]()
    handler = _LogLines(_DEEPSPEED, lines.append)

    def keep(record: logging.LogRecord) -> bool:
        handler.emit(record)
        return is_shown

    logger.addFilter(keep)
    try:
        yield lines
    finally:
        logger.removeFilter(keep)


@contextmanager
def library_log(write: Callable[[str], None], *, is_shown: bool) -> Iterator[None]:
    """Send the logs of DeepSpeed (from INFO on) and of other libraries, and Python's warnings from
    their code, to `write` inside the block; `is_shown`: also to the usual output. Errors are always
    shown, and torch's log if the user has set TORCH_LOGS."""
    with ExitStack() as stack:
        stack.enter_context(_logged(_DEEPSPEED, write, logging.INFO, is_shown=is_shown))
        for name in _LIBRARIES:
            if name != "torch" or "TORCH_LOGS" not in os.environ:
                stack.enter_context(_logged(name, write, None, is_shown=is_shown))
        if not is_shown:
            stack.enter_context(_warnings_written(write))
        yield


@contextmanager
def _logged(
    name: str, write: Callable[[str], None], new_level: int | None, *, is_shown: bool
) -> Iterator[None]:
    """Send one library's log to `write`, from `new_level` on (default: the logger's level)."""
    logger = logging.getLogger(name)
    old_level, old_propagate = logger.level, logger.propagate
    old_handler_levels = [(handler, handler.level) for handler in logger.handlers]
    added: list[logging.Handler] = [_LogLines(name, write)]
    if not is_shown:
        # Without a handler Python would print warnings to standard error.
        if not old_handler_levels:
            errors_only = logging.StreamHandler()
            errors_only.setLevel(logging.ERROR)
            added.append(errors_only)
        logger.propagate = False
    for handler in added:
        logger.addHandler(handler)
    if new_level is not None:
        logger.setLevel(new_level)
    for handler, old_handler_level in old_handler_levels:
        if not is_shown:
            handler.setLevel(logging.ERROR)
        elif new_level is not None:
            handler.setLevel(min(old_handler_level, new_level))
    try:
        yield
    finally:
        for handler in added:
            logger.removeHandler(handler)
        logger.setLevel(old_level)
        logger.propagate = old_propagate
        for handler, old_handler_level in old_handler_levels:
            handler.setLevel(old_handler_level)


@contextmanager
def _warnings_written(write: Callable[[str], None]) -> Iterator[None]:
    """Send Python's warnings from installed packages to `write`; others are shown."""
    show = warnings.showwarning

    def keep(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if {"site-packages", "dist-packages"} & set(Path(filename).parts):
            write(f"{category.__name__}: {message} ({filename}:{lineno})")
        else:
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = keep
    try:
        yield
    finally:
        warnings.showwarning = show
