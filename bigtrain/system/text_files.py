"""Text files that a user writes: configurations, templates, hostfiles. Pure but for reading."""

from __future__ import annotations

import codecs
from pathlib import Path

_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Encodings by the byte order mark that begins a file; a longer mark before its beginning."""


class TextFileError(Exception):
    """A file that cannot be read as text. rule: why; fix: what to do, or ""."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(f"{rule} -> {fix}" if fix else rule)
        self.rule = rule
        self.fix = fix


def read_text(path: Path) -> str:
    """Return the text of a UTF-8 file with line ends as newlines, without the byte order mark that
    editors on Windows write at its beginning, which would be a character of the first word. Raises
    TextFileError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TextFileError(f"cannot be read: {error.strerror or error}", "") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        for mark, name in _MARKS.items():
            if content.startswith(mark):
                fix = f"iconv -f {name} -t UTF-8 {path} > NEW"
                raise TextFileError(f"is {name}, not UTF-8", fix) from error
        rule = f"is not UTF-8 text: byte {content[error.start]:#04x} at {error.start}"
        fix = "save it as UTF-8, or name the right file if it is not a text"
        raise TextFileError(rule, fix) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
