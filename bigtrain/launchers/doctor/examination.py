"""The steps of `bigtrain doctor`; hosts that do not answer the first one are skipped afterwards.

Every wait has a timeout, and the files it writes are deleted.
"""

from __future__ import annotations

import itertools
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import LaunchError
from bigtrain.launchers.doctor import verdicts
from bigtrain.launchers.doctor.transport import (
    MOST_AT_ONCE,
    Reply,
    Transport,
    ask_all,
    most_at_once,
    probe_command,
)
from bigtrain.launchers.doctor.verdicts import Finding
from bigtrain.launchers.hostfile import Host


@dataclass(frozen=True)
class Examination:
    """Parameters of a check: hosts, the directory below which runs will write, a port (None: any
    free one), the limit of each step in seconds, the free GiB required, and whether to test devices
    and collectives."""

    hosts: Sequence[Host]
    transport: Transport
    directory: Path
    port: int | None
    limit_seconds: int
    least_gib: float
    compute: bool


def examine(what: Examination, say: Callable[[str], None]) -> tuple[list[Finding], list[str]]:
    """Check every host. Returns the findings, and lines of measurements.

    `say` is called with a line before each step.
    """
    say(f"{len(what.hosts)} hosts: reachable, versions, devices, memory, clock")
    replies = ask_all(
        what.hosts,
        {
            h.name: probe_command("facts", what.limit_seconds, directory=str(what.directory))
            for h in what.hosts
        },
        what.transport,
        what.limit_seconds,
        _report_replies(len(what.hosts), say),
    )
    findings = [verdicts.check_reachable(host, replies[host.name].problem) for host in what.hosts]
    there = [host for host in what.hosts if replies[host.name].problem is None]
    if not there:
        return findings, []
    facts = {host.name: replies[host.name].result for host in there}
    findings += verdicts.check_versions(facts)
    for host in there:
        findings += _check_facts(
            host, replies[host.name], what.least_gib, alone=len(what.hosts) == 1
        )
    say(f"{len(there)} hosts: {what.directory} shared")
    findings += _shared(what, there)
    groups = _groups(there)
    suffix = f", in {len(groups)} groups that share a host" if len(groups) > 1 else ""
    say(f"{len(there)} hosts: network between each pair{suffix}")
    network = [f for group in groups for f in _network(what, group, facts)]
    findings += network
    lines: list[str] = []
    if what.compute:
        if any(f.failed and f.check in ("versions", "devices", "network") for f in findings):
            lines.append(
                "compute test skipped: hosts failed its prerequisites (versions, devices, network)"
            )
        else:
            say(f"{len(there)} hosts: a matrix product per device, all-reduce{suffix}")
            for group in groups:
                computed, figures = _compute(what, group, facts)
                findings += computed
                ends = f"{group[0].name} to {group[-1].name}: " if len(groups) > 1 else ""
                lines += [f"{ends}{line}" for line in figures]
    return findings, lines


def _report_replies(num_hosts: int, say: Callable[[str], None]) -> Callable[[Host, Reply], None]:
    """Return a callback that reports hosts without a reply at once, and progress if there are
    many."""
    answered = itertools.count(1)

    def tell(host: Host, reply: Reply) -> None:
        number = next(answered)
        if reply.problem is not None and num_hosts > 1:
            say(f"  {host.name}: {reply.problem}")
        if number % MOST_AT_ONCE == 0 and number < num_hosts:
            say(f"  {number} of {num_hosts} hosts probed")

    return tell


def _groups(hosts: Sequence[Host]) -> list[Sequence[Host]]:
    """Return groups of hosts small enough to run a probe at once, for probes in which they
    communicate.

    The last host of a group is the first of the next, so that a group isolated from the rest is
    detected.
    """
    size = most_at_once()
    if len(hosts) <= size or size < 2:
        return [hosts]
    return [hosts[begin : begin + size] for begin in range(0, len(hosts) - 1, size - 1)]


def _check_facts(host: Host, reply: Reply, least_gib: float, *, alone: bool) -> list[Finding]:
    fact = reply.result
    return [
        verdicts.check_devices(host, fact),
        *verdicts.check_memory(host.name, fact, least_gib),
        verdicts.check_clock(host.name, fact["time"], reply.sent_at, reply.received_at),
        verdicts.check_interface(host.name, fact, alone=alone),
        verdicts.check_environment(host.name, fact),
    ]


def _shared(what: Examination, hosts: Sequence[Host]) -> list[Finding]:
    """Check that every host sees a file written here, and this machine the files written there."""
    directory, token = str(what.directory), secrets.token_hex(8)
    written = _ask_here(what, "announce", directory=directory, token=token)
    if written.problem or written.result["problem"]:
        problem = written.problem or written.result["problem"]
        raise LaunchError(f"{directory} cannot be written here: {problem}")
    probes = {
        host.name: probe_command(
            "shared", what.limit_seconds, directory=directory, token=token, name=host.name
        )
        for host in hosts
    }
    replies = ask_all(hosts, probes, what.transport, what.limit_seconds)
    made = written.result["made"]
    read = _ask_here(what, "collect", directory=directory, token=token, made=made)
    findings = []
    for host in hosts:
        reply = replies[host.name]
        problem = reply.problem or reply.result["problem"] or read.problem
        if problem is None and host.name not in read.result["hosts"]:
            problem = "files it writes there are not visible here"
        findings.append(verdicts.check_shared(host.name, directory, problem))
    return findings


def _ask_here(what: Examination, probe: str, **arguments: Any) -> Reply:
    """Run a probe on this machine in a separate process: a file system that does not respond
    would block this one forever."""
    here = Host("localhost", 1, 0)
    command = probe_command(probe, what.limit_seconds, **arguments)
    return ask_all([here], {here.name: command}, "ssh", what.limit_seconds)[here.name]


def _network(what: Examination, hosts: Sequence[Host], facts: dict[str, Any]) -> list[Finding]:
    if len(hosts) == 1 and what.port is None:
        return []
    ports = {host.name: what.port or facts[host.name]["free_port"] for host in hosts}
    probes = {
        host.name: probe_command(
            "network",
            what.limit_seconds,
            port=ports[host.name],
            peers={name: port for name, port in ports.items() if name != host.name},
            me=host.name,
            seconds=what.limit_seconds * 0.5,
        )
        for host in hosts
    }
    replies = ask_all(hosts, probes, what.transport, what.limit_seconds)
    return [verdicts.check_network(n, reply.result, reply.problem) for n, reply in replies.items()]


def _compute(
    what: Examination, hosts: Sequence[Host], facts: dict[str, Any]
) -> tuple[list[Finding], list[str]]:
    port = what.port or facts[hosts[0].name]["free_port"]
    common = ["--nnodes", str(len(hosts))]
    main = "127.0.0.1" if len(hosts) == 1 else hosts[0].name
    address = ["--master_addr", main, "--master_port", str(port)]
    commands = {
        host.name: [
            # `timeout` also ends it on its host if the connection from here is lost.
            *(
                "timeout",
                "-k",
                "10",
                str(what.limit_seconds),
                sys.executable,
                "-m",
                "torch.distributed.run",
            ),
            *(*common, "--nproc_per_node", str(host.slots)),
            *("--node_rank", str(rank), *address),
            *("-m", "bigtrain.launchers.doctor.collective_probe", str(what.limit_seconds)),
        ]
        for rank, host in enumerate(hosts)
    }
    replies = ask_all(hosts, commands, what.transport, what.limit_seconds)
    main_reply = replies[hosts[0].name]
    if main_reply.problem is None:
        devices = main_reply.result
        return verdicts.check_compute(hosts, devices), verdicts.describe_collectives(devices)
    said = [
        f"{host.name}: {replies[host.name].problem}" for host in hosts if replies[host.name].problem
    ]
    remedy = (
        "use a longer --seconds, or run it with TORCH_DISTRIBUTED_DEBUG=DETAIL and NCCL_DEBUG=INFO"
    )
    return [Finding(hosts[0].name, "compute", "; ".join(said), remedy)], []
