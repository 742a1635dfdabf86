"""Rendezvous before any process group exists: waits for all ranks, and names missing ranks."""

from __future__ import annotations

import base64
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bigtrain.errors import LaunchError
from bigtrain.system.listening import listen_only_at
from bigtrain.system.world import World

log = logging.getLogger(__name__)

_ATTEMPT_TIMEOUT = timedelta(seconds=10)  # signals are handled between attempts to connect
_LOG_AFTER_SECONDS = 30.0
_ACKNOWLEDGE_SECONDS = 5.0
_OUTCOME = "bigtrain/outcome"  # set by the main rank: empty, or the reason of the failure
_NUM_ACKNOWLEDGED = "bigtrain/num_acknowledged"


@contextmanager
def all_ranks_joined(world: World, timeout_seconds: float) -> Iterator[None]:
    """Wait until every rank of `world` has joined at MASTER_ADDR:MASTER_PORT. Collective. Inside
    the context the main rank keeps the server with which torch then makes the process group.

    Raises LaunchError, on every rank that has joined, if some ranks have not joined within
    `timeout_seconds`, with the missing ranks and the hosts of the joined ranks; and if the main
    rank cannot be reached.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield  # torchrun's agents start all ranks only after a rendezvous
        return
    store = _join(world, time.monotonic() + timeout_seconds)
    store.set(_host_key(world.rank), socket.gethostname())
    # The timeout counts from here on, when the main rank has joined.
    if world.is_main:
        failure = _wait_for_all(store, world, time.monotonic() + timeout_seconds)
    else:
        failure = _wait_for_main(store, timeout_seconds)
    if failure:
        raise LaunchError(failure)
    yield


def _host_key(rank: int) -> str:
    return f"bigtrain/host/{rank}"


def _join(world: World, end: float) -> dist.TCPStore:
    """Return a connection to the main rank's server, which the main rank starts; try until `end`
    (monotonic). Raises LaunchError."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    bound = listen_only_at(address, port) if world.is_main else None
    while True:
        try:
            return dist.TCPStore(
                address,
                port,
                is_master=world.is_main,
                timeout=min(_ATTEMPT_TIMEOUT, timedelta(seconds=max(0.1, end - time.monotonic()))),
                wait_for_workers=False,
                multi_tenant=True,
                master_listen_fd=bound.detach() if bound is not None else None,
            )
        except dist.DistError as error:
            if world.is_main or time.monotonic() > end:
                raise LaunchError(
                    f"the main rank, {address}:{port} (MASTER_ADDR, MASTER_PORT), cannot be "
                    f"reached from {socket.gethostname()}: {error} -> see the output of that "
                    "host's process; bigtrain doctor tests every pair of hosts"
                ) from error


def _polls() -> Iterator[float]:
    """Yield the time of every poll. The `wait` of the store would print a warning each time."""
    pause = 0.01
    while True:
        yield time.monotonic()
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _wait_for_all(store: dist.TCPStore, world: World, end: float) -> str:
    """Wait for all ranks until `end` (monotonic), on the main rank, and tell all ranks the outcome;
    return the reason of a failure, or an empty text."""
    missing = list(range(world.size))
    failure = ""
    logged_at = time.monotonic()
    for now in _polls():
        missing = [rank for rank in missing if not store.check([_host_key(rank)])]
        if not missing:
            break
        if now > end:
            failure = (
                f"{_who_is_missing(store, world, missing)} -> see what the launcher printed for "
                "them; bigtrain doctor tests every host; "
                "watchdog.rendezvous_timeout_seconds sets the timeout"
            )
            break
        if now - logged_at > _LOG_AFTER_SECONDS:
            logged_at = now
            log.warning("waiting: %s", _who_is_missing(store, world, missing))
    store.set(_OUTCOME, failure)
    if failure:  # the server ends with this process: let all ranks read it first
        num_others = world.size - len(missing) - 1
        for now in _polls():
            if store.add(_NUM_ACKNOWLEDGED, 0) >= num_others or now > end + _ACKNOWLEDGE_SECONDS:
                break
    return failure


def _wait_for_main(store: dist.TCPStore, timeout_seconds: float) -> str:
    """Wait for the main rank's outcome; return the reason of a failure, or an empty text."""
    # Longer than the main rank's timeout, so that it reports the reason first.
    limit = timedelta(seconds=timeout_seconds + 2 * _ACKNOWLEDGE_SECONDS)
    try:
        store.wait([_OUTCOME], limit)
        failure = store.get(_OUTCOME).decode()
        store.add(_NUM_ACKNOWLEDGED, 1)
    except dist.DistError:
        return (
            "the main rank exited or stopped responding before all ranks connected: see its output"
        )
    return failure


def _who_is_missing(store: dist.TCPStore, world: World, missing: list[int]) -> str:
    """Return a text with the missing and the joined ranks by host; an unknown host is empty."""
    joined_by_host: dict[str, list[int]] = {}
    for rank in sorted(set(range(world.size)) - set(missing)):
        joined_by_host.setdefault(store.get(_host_key(rank)).decode(), []).append(rank)
    # DeepSpeed's launcher on each host has the complete hostfile in its command line (0.19.8,
    # launcher/launch.py, --world_info: base64 of JSON, host name to local ranks).
    host_of_rank: list[str] = []
    with suppress(OSError, IndexError, ValueError, AttributeError):  # another launcher
        command = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
        world_info = [word for word in command if word.startswith("--world_info=")]
        hosts = json.loads(base64.urlsafe_b64decode(world_info[0].partition("=")[2]))
        host_of_rank = [host for host, slots in hosts.items() for _ in slots]
    missing_by_host: dict[str, list[int]] = {}
    for rank in missing:
        host = host_of_rank[rank] if rank < len(host_of_rank) else ""
        missing_by_host.setdefault(host, []).append(rank)
    return (
        f"{len(missing)} of {world.size} ranks have not joined: {_hosts_text(missing_by_host)}; "
        f"joined: {_hosts_text(joined_by_host)}"
    )


def _hosts_text(ranks_by_host: dict[str, list[int]]) -> str:
    parts = []
    for host, ranks in ranks_by_host.items():
        rank_list = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        parts.append(f"{host} (rank {rank_list})" if host else f"rank {rank_list}")
    return ", ".join(parts)
