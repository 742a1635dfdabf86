"""Cost of the steps of a run, their metrics and monitoring for one of many ranks: parts of
`benchmarks/scale.py`."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from benchmarks.support.simulated import RANKS_OF_HOST, Cost, Meter
from bigtrain.run.diagnostics.stragglers import find_stragglers
from bigtrain.run.health.status_store import Position, StatusStore, StoreLocation, diagnose
from bigtrain.run.reporting.metrics_lines import cut_lines
from bigtrain.settings.topology import Topology
from bigtrain.system.files import sync_to_disk
from bigtrain.system.world import World

LINES_OF_RANK = 250
OTHERS_POLLING = 2


def measure_metrics(num_ranks: int, size: int, directory: Path) -> Cost:
    path, last = directory / "metrics.jsonl", LINES_OF_RANK * num_ranks
    line = '{{"step": {0}, "samples": {1}, "loss": 2.5, "padding": "' + "x" * 160 + '"}}\n'
    with path.open("w") as file:
        file.writelines(line.format(step, step * 4) for step in range(1, last + 1))
    sync_to_disk(path)  # else the fsync of what is measured waits for all of it
    meter = Meter()
    cut_lines(path, last - 10, (last - 10) * 4)
    return meter.read(bytes=path.stat().st_size)


@contextmanager
def _polling(port: int, keys: list[str]) -> Iterator[None]:
    """Other processes that read all of `keys` as fast as the store answers."""
    children = []
    for _ in range(OTHERS_POLLING):
        child = os.fork()
        if child == 0:
            os.setsid()
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
            while True:
                store.multi_get(keys)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def measure_watchdog(num_ranks: int, size: int, directory: Path) -> Cost:
    """Measure the watchdog. quiet: seconds of the clock with no other client at the store; wall:
    with two others."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = StoreLocation("127.0.0.1", server.port, "token")
    place.create_entries(num_ranks)
    board = StatusStore(place, World(0, num_ranks, 0))
    told = dist.PrefixStore(f"watchdog/{place.token}", server)
    texts = [
        Position(rank, f"host{rank // RANKS_OF_HOST}", 1, 10, "forward pass", None, None).to_json()
        for rank in range(num_ranks)
    ]
    keys = [f"answer/{rank}" for rank in range(num_ranks)]
    told.multi_set(keys, texts)
    quiet = Meter()
    assert board.answers(seconds=30) is not None
    alone = quiet.read()
    with _polling(server.port, [f"watchdog/{place.token}/{key}" for key in keys]):
        meter = Meter()
        answers = board.answers(seconds=30)
        cost = meter.read(bytes=float(sum(map(len, texts))), quiet=alone["wall"])
    assert answers is not None
    assert len(answers) == num_ranks
    diagnose(answers, {}, [f"host{rank // RANKS_OF_HOST}" for rank in range(num_ranks)])
    board.close()
    return cost


def measure_stragglers(num_ranks: int, size: int, directory: Path) -> Cost:
    stages = min(8, num_ranks)
    topology = Topology(data_size=num_ranks // stages, pipeline_size=stages)
    generator = random.Random(0)
    work = [generator.uniform(1.0, 1.1) for _ in range(num_ranks)]
    work[num_ranks // 2] = 3.0
    meter = Meter()
    peers = [topology.coordinates(rank).pipeline_rank for rank in range(num_ranks)]
    stragglers = find_stragglers(work, peers, 4.0, 1.5)
    assert [one.rank for one in stragglers] in ([num_ranks // 2], [])
    return meter.read()
