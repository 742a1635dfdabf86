"""Derived files that many processes need: one process makes the file, the others wait for it.

Thousands of ranks start at the same moment and need the same file. It is created once in a
directory that they share, or once per host if each host has its own. Waiting is never required: a
process that sees no live creator creates the file; if no directory is writable, each creates its
own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TypeVar

from bigtrain.system.files import whole_file
from bigtrain.system.leases import Leases

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.01, 1.0
# Checking the creator's lease takes several file-system calls, checking for the file only one.
_LOOK_FOR_MAKER_SECONDS = 5.0

Found = TypeVar("Found")


def made_once(
    places: Sequence[Path],
    read: Callable[[Path], Found | None],
    make: Callable[[IO[bytes]], None],
) -> Found | None:
    """Return `read` of the first of `places` that has the file; create it if none has.

    `read` returns None if there is no file, or not the expected one. An exception of `make`
    propagates to the caller, and the next process makes another attempt. None if no location
    is writable.
    """
    for place in places:
        content = read(place)
        if content is not None:
            return content
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            token = f"{os.getpid():x}{os.urandom(6).hex()}"
            leases = Leases(place.parent, token, lambda _name, _token: None)
            return _make_or_wait(place, leases, read, make)
        except OSError:
            continue
    return None


def _make_or_wait(
    place: Path,
    leases: Leases,
    read: Callable[[Path], Found | None],
    make: Callable[[IO[bytes]], None],
) -> Found | None:
    """Raise OSError if `place` is not writable."""
    while True:
        with leases.take(place.name) as mine:
            content = read(place)
            if content is None and mine:
                draft = place.with_name(f".{place.name}.{leases.token}")
                with whole_file(place, draft, durable=False) as file:
                    os.fchmod(file.fileno(), 0o644)
                    make(file)
                return read(place)
        pause, deadline = _SHORTEST_PAUSE_SECONDS, time.monotonic() + _LOOK_FOR_MAKER_SECONDS
        while content is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            content = read(place)
        if content is not None:
            return content
