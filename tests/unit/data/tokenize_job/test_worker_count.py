"""How many processes tokenize where nobody says: what the machine gives, what there is to do."""

from __future__ import annotations

import pytest

from bigtrain.data.tokenize_job.request import Workers, divide
from bigtrain.system.machine import Machine

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("workers", "num_units", "num_bytes", "machine", "expected"),
    [
        # Nobody says: a process for each core, as far as each has enough to do.
        (None, 1, 100, Machine(64, 256 * GIB), Workers(1, 64, started=False)),
        (None, 2, 500 * MIB, Machine(2, 24 * GIB), Workers(1, 2, started=False)),
        (None, 2, 512 * MIB, Machine(2, 24 * GIB), Workers(2, 1)),
        (None, 400, 100 * GIB, Machine(64, 256 * GIB), Workers(64, 1)),
        (None, 10, 100 * GIB, Machine(64, 256 * GIB), Workers(10, 6)),
        # A single compressed file, and inputs whose size nobody knows.
        (None, 1, 100 * GIB, Machine(64, 256 * GIB), Workers(1, 64, started=False)),
        (None, 50, 0, Machine(64, 256 * GIB), Workers(1, 64, started=False)),
        # As many as memory is free for, and one where there is hardly any.
        (None, 400, 100 * GIB, Machine(64, 8 * GIB), Workers(8, 8)),
        (None, 400, 100 * GIB, Machine(64, 100 * MIB), Workers(1, 64, started=False)),
        # What is asked for holds, whatever there is.
        (1, 400, 100 * GIB, Machine(64, 256 * GIB), Workers(1, 64, started=False)),
        (4, 400, 100, Machine(2, GIB), Workers(4, 1)),
        (6, 3, 100, Machine(2, GIB), Workers(3, 2)),
        (3, 1, 100, Machine(2, GIB), Workers(1, 3)),
    ],
)
def test_processes_and_threads(
    workers: int | None, num_units: int, num_bytes: int, machine: Machine, expected: Workers
) -> None:
    assert divide(workers, num_units, num_bytes, machine) == expected
