"""Limit on the file descriptors that the tests of a process keep open.

`select.select`, which pexpect and others call, takes descriptors below 1,024 only: tests that leave
files open fail another test, an hour later.
"""

from __future__ import annotations

import gc
import os
from collections import Counter

COLLECT_ABOVE = 200
"""Open descriptors above which garbage is collected: mapped files in reference cycles."""

MAX_OPEN = 400
"""Open descriptors that may remain; 166 were seen in a run of all tests."""


def check_descriptors() -> None:
    """Raise AssertionError if more than `MAX_OPEN` descriptors of this process are open, and name
    the files that most of them are of."""
    if len(open_files()) <= COLLECT_ABOVE:
        return
    gc.collect()
    files = open_files()
    if len(files) > MAX_OPEN:
        common = Counter(os.path.basename(file) for file in files).most_common(5)
        raise AssertionError(
            f"tests of this process have left {len(files)} descriptors open, {MAX_OPEN} may be: "
            + ", ".join(f"{count} of {name}" for name, count in common)
        )


def open_files() -> list[str]:
    """Return what each open descriptor of this process leads to."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue  # the listing's own
    return files
