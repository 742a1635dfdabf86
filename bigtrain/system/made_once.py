"""Files that are made from others, by one of all processes that want them; the others wait.

Thousands of ranks start at the same moment and want the same. Where they see one directory it is
made once, where each host has its own, once a host. Nothing depends on the waiting: whoever finds
no maker alive makes it, and where no directory can be written, every process makes its own.
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
# To look whether somebody makes it costs several calls of the file system, to look for it one.
_LOOK_FOR_MAKER_SECONDS = 5.0

Found = TypeVar("Found")


def made_once(
    places: Sequence[Path],
    read: Callable[[Path], Found | None],
    make: Callable[[IO[bytes]], None],
) -> Found | None:
    """What `read` gives of the first of `places` that has it, or once `make` has written it there.

    `read` returns None where there is no file, or another one than it expects. What `make` raises,
    its caller gets; the next process tries again. None where no place can be written.
    """
    for place in places:
        found = read(place)
        if found is not None:
            return found
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
    """Raises OSError where `place` cannot be written."""
    while True:
        with leases.take(place.name) as mine:
            found = read(place)
            if found is None and mine:
                draft = place.with_name(f".{place.name}.{leases.token}")
                with whole_file(place, draft, durable=False) as file:
                    os.fchmod(file.fileno(), 0o644)
                    make(file)
                return read(place)
        pause, deadline = _SHORTEST_PAUSE_SECONDS, time.monotonic() + _LOOK_FOR_MAKER_SECONDS
        while found is None and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            found = read(place)
        if found is not None:
            return found
