"""Probe of devices and network that `bigtrain doctor` starts on all hosts at once under torchrun.

One matrix product per device, timed; latency and bandwidth of all-reduce within each host and over
all hosts; rank 0 prints one line of JSON.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from bigtrain.launchers.doctor.host_probe import MARK

_REPEATS = 5


def main(seconds: str) -> int:
    """Measure. Collective over all ranks that torchrun started."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=float(seconds))
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timeout)
    world_size, local_size = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    # The group of this host's ranks. Every rank has to create the groups of all hosts.
    host_by_rank: list[int] = [0] * world_size
    dist.all_gather_object(host_by_rank, int(os.environ["GROUP_RANK"]))
    host_group = None
    for host in sorted(set(host_by_rank)):
        group = dist.new_group([rank for rank in range(world_size) if host_by_rank[rank] == host])
        if host == host_by_rank[dist.get_rank()]:
            host_group = group
    # Measure.
    num_elements = 2**24 if cuda else 2**18
    matrix_size = 8192 if cuda else 512
    dtype = torch.bfloat16 if cuda else torch.float32
    matrix = torch.ones(matrix_size, matrix_size, device=device, dtype=dtype)
    measured = {
        "host": socket.gethostname(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        # The best time is least disturbed by other programs.
        "matmul_seconds": min(_times(lambda: torch.mm(matrix, matrix), device)),
        "within": _all_reduce(device, num_elements, host_group) if local_size > 1 else None,
        "between": _all_reduce(device, num_elements, None) if world_size > local_size else None,
    }
    measured_by_rank: list[object] = [None] * world_size
    dist.all_gather_object(measured_by_rank, measured)
    if dist.get_rank() == 0:
        print(MARK + json.dumps(measured_by_rank), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _all_reduce(
    device: torch.device, num_elements: int, group: dist.ProcessGroup | None
) -> dict[str, float]:
    """Return the latency of 4 bytes, and the bus bandwidth of `num_elements` float32 (nccl-tests'
    definition)."""
    group_size = dist.get_world_size(group)
    small = torch.zeros(1, device=device)
    large = torch.zeros(num_elements, device=device)
    latency = statistics.median(_times(lambda: dist.all_reduce(small, group=group), device))
    seconds = statistics.median(_times(lambda: dist.all_reduce(large, group=group), device))
    bus_bytes = 4 * num_elements * 2 * (group_size - 1) / group_size
    return {"latency_seconds": latency, "bytes_per_second": bus_bytes / seconds}


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of every repeat, after a warm-up."""
    times = []
    for _ in range(_REPEATS + 1):
        started_at = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started_at)
    return times[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
