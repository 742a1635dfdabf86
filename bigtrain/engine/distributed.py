"""The process group: opened once, closed in the order that lets every process exit cleanly."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist

from bigtrain.engine.device import device_kind
from bigtrain.world import World

PROCESS_GROUP_TIMEOUT = timedelta(minutes=30)


@contextmanager
def process_group(world: World) -> Iterator[torch.device]:
    """Join the world's process group (nccl on GPUs, gloo on CPUs); yields this process's device.

    Collective over all processes, on entry and on exit. On an exception nobody waits for the
    others: they may be stuck in a collective, and it is the launcher that ends them.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    added = _single_process_environment(world)
    kind = device_kind()
    device = torch.device(kind, world.local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    deepspeed.init_distributed(
        dist_backend="nccl" if kind == "cuda" else "gloo",
        auto_mpi_discovery=False,
        timeout=PROCESS_GROUP_TIMEOUT,
        verbose=False,
    )
    try:
        yield device
        # Leaving while a peer still talks aborts it at exit (`docs/architecture.md`).
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in added:
            os.environ.pop(name, None)


def cpu_group() -> dist.ProcessGroup:
    """A group of all processes on the CPU, apart from the one that trains. Collective.

    Gone with the process group.
    """
    group = dist.new_group(backend="gloo", timeout=PROCESS_GROUP_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _single_process_environment(world: World) -> list[str]:
    """Without a launcher, give torch the rendezvous it wants; returns the variables added."""
    if "MASTER_ADDR" in os.environ:
        return []
    assert world.size == 1
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    added = [name for name in values if name not in os.environ]
    os.environ.update(values)
    return added
