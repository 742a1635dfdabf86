"""Files that launch commands write for people: whole or not at all, and never over another."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from bigtrain.errors import LaunchError


def write_new(path: Path, text: str, mode: int = 0o666) -> None:
    """Write `text` as UTF-8 to `path`, with what the umask leaves of `mode`.

    Raises LaunchError where another text stands there, which somebody may have edited, and where
    it cannot be written; then nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise LaunchError(f"{path} exists and differs: delete it, or name another --output")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            temporary.rename(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        remedy = "name another --output, or free what hinders it"
        raise LaunchError(f"cannot write {path}: {error.strerror} -> {remedy}") from error
