"""Process group: opened once, closed in the order that lets every rank exit cleanly."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from bigtrain.engine.deepspeed_patches.startup import restore_process_state
from bigtrain.engine.startup.device import device_kind
from bigtrain.engine.startup.long_work import LongWork
from bigtrain.engine.startup.operators import operators_without_locks
from bigtrain.engine.startup.rendezvous import all_ranks_joined
from bigtrain.errors import LaunchError
from bigtrain.settings.sections.running import (
    COLLECTIVE_TIMEOUT_SECONDS,
    RENDEZVOUS_TIMEOUT_SECONDS,
)
from bigtrain.system.listening import is_loopback, try_port
from bigtrain.system.machine import VERSIONS_REMEDY, library_versions, other_versions
from bigtrain.system.slurm import srun_rendezvous
from bigtrain.system.world import World, is_of_mpirun, is_of_srun, without_foreign

# World size from which gloo connects two ranks when they first communicate, as few pairs do.
# Otherwise each rank is connected to all ranks: with two CPU groups of 4,096 ranks by 8,190
# sockets, and the usual limit of open files is 1,024. The limit is also raised to the hard limit.
_MANY_RANKS = 64
DEFAULT_PORT = "29500"  # default of torch and DeepSpeed, if the launcher sets no port


@dataclass(frozen=True)
class Joined:
    """This rank's device, the host of every rank, and the world's `LongWork`."""

    device: torch.device
    hosts: tuple[str, ...]
    long_work: LongWork


@contextmanager
def process_group(
    world: World,
    rendezvous_timeout_seconds: float = RENDEZVOUS_TIMEOUT_SECONDS,
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
) -> Iterator[Joined]:
    """Join the world's process group (nccl on GPUs, gloo on CPUs). Collective on entry and on exit;
    after an exception no rank waits for another rank, and the launcher ends all ranks.

    Raises LaunchError if ranks cannot reach the main rank, if some have not joined within
    `rendezvous_timeout_seconds`, or if hosts have different versions.
    """
    with restore_process_state(), without_foreign(world, os.environ):
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        with _opened_group(world, rendezvous_timeout_seconds, collective_timeout_seconds) as joined:
            yield joined


@contextmanager
def _opened_group(
    world: World, rendezvous_timeout_seconds: float, collective_timeout_seconds: float
) -> Iterator[Joined]:
    """Do the work of `process_group`, whose process state is restored by the caller."""
    added = _complete_environment(world)
    device_type = device_kind()
    if device_type == "cuda":
        num_seen = torch.cuda.device_count()
        if world.local_rank >= num_seen:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            visible_text = "" if visible is None else f" (CUDA_VISIBLE_DEVICES = {visible!r})"
            raise LaunchError(
                f"rank {world.rank} has local rank {world.local_rank} and sees {num_seen} GPUs"
                f"{visible_text}: every process of a host must see all its GPUs -> with srun "
                "--gpus-per-node=N instead of --gpus-per-task and --gpu-bind; else start no more "
                "processes than GPUs"
            )
        device = torch.device(device_type, world.local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    with operators_without_locks():
        with all_ranks_joined(world, rendezvous_timeout_seconds):
            deepspeed.init_distributed(
                dist_backend="nccl" if device_type == "cuda" else "gloo",
                auto_mpi_discovery=False,
                timeout=timedelta(seconds=collective_timeout_seconds),
                verbose=False,
            )
        try:
            hosts, token = _gather_hosts(world)
            yield Joined(device, hosts, LongWork(world, token))
            # If a rank exits while a peer still communicates, the peer may abort at exit: this
            # happened in 7 of 37 successful runs without this barrier, and in none with it.
            dist.barrier()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            for name in added:
                os.environ.pop(name, None)


def _gather_hosts(world: World) -> tuple[tuple[str, ...], str]:
    """Return the host of every rank, and a token for this launch. Collective. Raises LaunchError on
    all ranks if hosts have different versions."""
    if world.size == 1:
        return (socket.gethostname(),), ""
    facts: list[Any] = [None] * world.size  # host, versions and a random token of each rank
    dist.all_gather_object(facts, (socket.gethostname(), library_versions(), secrets.token_hex(8)))
    different = other_versions({host: versions for host, versions, _ in facts})
    lines = [f"  {host}: {', '.join(texts.values())}" for host, texts in different.items() if texts]
    if lines:
        rule = f"hosts have different versions -> {VERSIONS_REMEDY}"
        raise LaunchError("\n".join([rule, *lines]))
    _, _, token = facts[0]
    return tuple(host for host, _, _ in facts), token


def _complete_environment(world: World) -> list[str]:
    """Set the variables that torch needs and the launcher did not set; return the names of the
    added variables. Raises LaunchError, on the main rank, if the rendezvous port is taken, or if
    mpirun or srun was given another address than the main rank's host, at which all other ranks
    would wait until the timeout."""
    values = {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "MASTER_PORT": DEFAULT_PORT,
    }
    is_srun = is_of_srun(os.environ)
    if is_srun:
        values |= srun_rendezvous(os.environ)
    elif "MASTER_ADDR" not in os.environ:
        assert world.size == 1
        values |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(try_port())}
    address = os.environ.get("MASTER_ADDR", values.get("MASTER_ADDR", ""))
    if is_loopback(address) and "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"  # else gloo listens at the address of this host's name
    if world.size >= _MANY_RANKS:
        values["TORCH_GLOO_LAZY_INIT"] = "1"
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    added = [name for name in values if name not in os.environ]
    if world.is_main and world.size > 1 and (is_srun or is_of_mpirun(world, os.environ)):
        _refuse_other_host(address, "srun" if is_srun else "mpirun")
    # Under torchrun its agent holds the port already.
    if world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        port = os.environ.get("MASTER_PORT", values["MASTER_PORT"])
        try:
            try_port(int(port), may_be_bound=True)
        except (OSError, ValueError, OverflowError) as error:
            raise LaunchError(
                f"port {port} of {socket.gethostname()} (MASTER_PORT), at which the ranks "
                f"meet, cannot be used: {error} -> end what holds it, or give the launcher another "
                "(deepspeed --master_port, torchrun --master_port, accelerate "
                "--main_process_port; with srun, export MASTER_PORT)"
            ) from error
    os.environ.update({name: values[name] for name in added})
    return added


def _refuse_other_host(address: str, launcher: str) -> None:
    """Raise LaunchError if `address` is not an address of this host, which has rank 0 of
    `launcher`."""
    try:
        addresses = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    # Only an address of this host can be bound.
    for family, _, _, _, socket_address in addresses:
        with socket.socket(family) as probe, suppress(OSError):
            probe.bind(socket_address)
            return
    host = socket.gethostname()
    remedy = {
        "mpirun": "mpirun starts rank 0 on the host that calls mpirun, if the hostfile has that "
        f"host, else on the file's first host -> -x MASTER_ADDR={host}",
        "srun": f"-> export MASTER_ADDR={host}, or give srun no --distribution",
    }
    raise LaunchError(
        f"MASTER_ADDR = {address}, the rendezvous address, is not {host}, where {launcher} "
        f"started rank 0: {remedy[launcher]}"
    )
