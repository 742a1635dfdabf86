"""Real text that any machine has: documentation, manuals in many languages, source code."""

from __future__ import annotations

import gzip
import hashlib
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

FOLDERS = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "/usr/include",
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/share/perl",
)
NOT_TEXT = frozenset(
    ".a .bz2 .dll .eot .exe .gif .ico .jpeg .jpg .mo .npy .npz .o .parquet .pdf .png .pyc .so .ttf "
    ".whl .woff .woff2 .xz .zip .zst".split()
)
LARGEST_BYTES = 4_000_000
SMALLEST_BYTES = 64


def machine_texts(num_bytes: int) -> list[str]:
    """Return text files of this machine until there are `num_bytes`, or all of them where there are
    less.

    Mixed, by a hash of their paths; each text once, since an encoder that has seen one before
    takes its tokens from a cache.
    """
    texts: dict[str, None] = {}
    left = num_bytes
    for path in sorted(set(_paths()), key=_scattered):
        text = _text_of(path)
        if text is None or text in texts:
            continue
        texts[text] = None
        left -= len(text)
        if left <= 0:
            break
    return list(texts)


def _paths() -> Iterator[str]:
    for root in FOLDERS:
        for folder, _, names in os.walk(root):
            for name in names:
                if os.path.splitext(name)[1].lower() not in NOT_TEXT:
                    yield os.path.join(folder, name)


def _scattered(path: str) -> bytes:
    return hashlib.blake2b(path.encode("utf-8", "surrogateescape"), digest_size=8).digest()


def _text_of(path: str) -> str | None:
    """Return the text of a file; None if it is binary, empty, or larger than a document usually
    is."""
    try:
        if os.path.islink(path) or os.path.getsize(path) > LARGEST_BYTES:
            return None
        content = Path(path).read_bytes()
        if path.endswith(".gz"):
            content = gzip.decompress(content)
        text = content.decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None
    return text if SMALLEST_BYTES <= len(content) <= LARGEST_BYTES and "\0" not in text else None
