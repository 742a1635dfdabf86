"""How many processes build shards, and with how many threads, where the user does not say. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.machine import Machine

BYTES_PER_PROCESS = 256 << 20
"""Of input, at least, for each process of several: it starts in half a second, and its encoder has
to see words again that another has seen. Measured: two are even with one at twice as much."""
MEMORY_BYTES_PER_PROCESS = 1 << 30
"""Of what the machine has free: batches, and the encoder's caches of at most half of it."""


@dataclass(frozen=True)
class Workers:
    """`num_processes`, each of which has `num_threads` threads for encoding.

    `started`: the command starts them; otherwise it is the only one itself.
    """

    num_processes: int
    num_threads: int
    started: bool = True


def divide(workers: int | None, num_units: int, num_bytes: int, machine: Machine) -> Workers:
    """The processes for `num_units` units of work, `num_bytes` of input together.

    `workers` is what the user wants: 1 is one process with all cores, otherwise so many threads in
    as many processes as there are units for. None: all cores, in processes as far as each has
    enough to do and to hold it in. An input of unknown size (0 bytes) gets one process.
    """
    if workers == 1:
        return Workers(1, machine.num_cores, started=False)
    if workers is not None:
        num_processes = max(1, min(workers, num_units))
        return Workers(num_processes, workers // num_processes)
    limits = [
        machine.num_cores,
        num_units,
        num_bytes // BYTES_PER_PROCESS,
        machine.memory_bytes // MEMORY_BYTES_PER_PROCESS,
    ]
    num_processes = max(1, min(limits))
    num_threads = machine.num_cores // num_processes
    return Workers(num_processes, num_threads, started=num_processes > 1)
