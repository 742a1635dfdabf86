"""The limit on descriptors that tests leave open."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.descriptors import COLLECT_ABOVE, MAX_OPEN, check_descriptors, open_files


def test_descriptors_that_are_left_open_are_named(tmp_path: Path) -> None:
    (tmp_path / "left.bin").touch()
    with ExitStack() as stack:
        for _ in range(MAX_OPEN):
            stack.enter_context((tmp_path / "left.bin").open())
        with pytest.raises(AssertionError, match=rf"{MAX_OPEN} of left\.bin"):
            check_descriptors()
    check_descriptors()


def test_files_in_reference_cycles_are_closed(tmp_path: Path) -> None:
    class Opened:
        def __init__(self) -> None:
            self.descriptor = os.open(tmp_path, os.O_RDONLY)
            self.itself = self

        def __del__(self) -> None:
            os.close(self.descriptor)

    for _ in range(MAX_OPEN):
        Opened()
    check_descriptors()
    assert len(open_files()) <= COLLECT_ABOVE
