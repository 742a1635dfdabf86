"""Prints of DeepSpeed while it builds an engine, sent to its log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


@contextmanager
def prints_logged() -> Iterator[None]:
    """Send what is printed to standard output inside the block (memory of `see_memory_usage`, a
    table of stages) to DeepSpeed's logger, whose records a run writes to log.txt."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            if line.strip():
                logging.getLogger("DeepSpeed").info(line.rstrip())
