"""Files selected by an input that is an address."""

from __future__ import annotations

import glob
import re
from dataclasses import dataclass

from bigtrain.errors import DataError
from bigtrain.system.storage.addresses import name_of, scheme_of, without_secrets
from bigtrain.system.storage.open_store import store_of
from bigtrain.system.storage.retries import persistently
from bigtrain.system.storage.stores import Gone, RemoteStat


@dataclass(frozen=True)
class RemoteEntry:
    """Remote file: its address, its path below the requested address, and its status."""

    address: str
    below: str
    stat: RemoteStat


def is_pattern(address: str) -> bool:
    """Return whether it has a ``*``, ``?`` or ``[...]`` to match; for web servers these are
    literal."""
    return scheme_of(address) not in ("http", "https") and glob.has_magic(address)


def file_at(address: str) -> RemoteEntry | None:
    """Return the file at `address`; None if there is none, but possibly a folder. Raises
    DataError."""
    store = store_of(address)
    is_folder = address.endswith("/") and scheme_of(address) not in ("http", "https")
    try:
        if not is_folder:
            stat = persistently(address, "cannot be read", lambda: store.stat(address))
            return RemoteEntry(address, name_of(address).rpartition("/")[2], stat)
    except Gone:
        if scheme_of(address) in ("http", "https"):
            raise
    return None


def find_remote_files(pattern: str) -> list[RemoteEntry]:
    """Return the files below an address, or those that match its ``*``, ``?`` and ``[...]``,
    sorted.

    ``**`` matches any number of folders. Raises DataError if there are none.
    """
    store = store_of(pattern)
    folder = pattern
    if is_pattern(pattern):
        folder = re.split(r"[*?[]", pattern, maxsplit=1)[0].rpartition("/")[0]
    entries = persistently(folder, "cannot be listed", lambda: store.find(folder))
    if is_pattern(pattern):
        known = re.compile(_pattern_of(pattern))
        entries = [entry for entry in entries if known.fullmatch(entry[0])]
    if not entries:
        raise DataError(f"--input {without_secrets(pattern)}: no file there")
    begin = len(folder.rstrip("/")) + 1
    return [RemoteEntry(address, address[begin:], stat) for address, stat in entries]


def _pattern_of(pattern: str) -> str:
    """Return a regular expression: a ``*`` stays within a folder, unless it is ``**``."""
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    expressions = []
    for token in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|[^*?\[]+|\[", pattern):
        if token in known:
            expressions.append(known[token])
        elif token.startswith("[") and len(token) > 1:
            inner = token[1:-1].replace("\\", "\\\\")
            expressions.append(f"[^{inner[1:]}]" if inner.startswith("!") else f"[{inner}]")
        else:
            expressions.append(re.escape(token))
    return "".join(expressions)
