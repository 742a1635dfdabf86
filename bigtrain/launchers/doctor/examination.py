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
    """Parameters of a check. directory: below which runs will write; port: for connections between
    hosts (None: any free port); limit_seconds: of each step; least_gib: free memory and disk that
    a host needs; compute: whether to test devices and collectives."""

    hosts: Sequence[Host]
    transport: Transport
    directory: Path
    port: int | None
    limit_seconds: int
    least_gib: float
    compute: bool


def examine(
    examination: Examination, say: Callable[[str], None]
) -> tuple[list[Finding], list[str]]:
    """Check every host. Returns the findings, and lines of measurements.

    `say` is called with a line before each step.
    """
    # Facts of every host; hosts that do not answer are skipped afterwards.
    hosts, limit_seconds = examination.hosts, examination.limit_seconds
    say(f"{len(hosts)} hosts: reachable, versions, devices, memory, clock")
    command = probe_command("facts", limit_seconds, directory=str(examination.directory))
    commands = dict.fromkeys((host.name for host in hosts), command)
    on_reply = _report_replies(len(hosts), say)
    replies = ask_all(hosts, commands, examination.transport, limit_seconds, on_reply)
    findings = [verdicts.check_reachable(host, replies[host.name].problem) for host in hosts]
    reachable = [host for host in hosts if replies[host.name].problem is None]
    if not reachable:
        return findings, []
    facts_by_host = {host.name: replies[host.name].result for host in reachable}
    findings += verdicts.check_versions(facts_by_host)
    for host in reachable:
        reply, facts = replies[host.name], facts_by_host[host.name]
        findings += [
            verdicts.check_devices(host, facts),
            *verdicts.check_memory(host.name, facts, examination.least_gib),
            verdicts.check_clock(host.name, facts["time"], reply.sent_at, reply.received_at),
            verdicts.check_interface(host.name, facts, is_only_host=len(hosts) == 1),
            verdicts.check_environment(host.name, facts),
        ]

    # Checks between hosts: a shared file system, and the network.
    say(f"{len(reachable)} hosts: {examination.directory} shared")
    findings += _check_shared(examination, reachable)
    groups = _groups(reachable)
    suffix = f", in {len(groups)} groups that share a host" if len(groups) > 1 else ""
    say(f"{len(reachable)} hosts: network between each pair{suffix}")
    for group in groups:
        findings += _check_network(examination, group, facts_by_host)

    # Devices and collectives, where a test can succeed.
    lines: list[str] = []
    if examination.compute:
        if any(f.failed and f.check in ("versions", "devices", "network") for f in findings):
            lines.append(
                "compute test skipped: hosts failed its prerequisites (versions, devices, network)"
            )
        else:
            say(f"{len(reachable)} hosts: a matrix product per device, all-reduce{suffix}")
            for group in groups:
                group_findings, measurements = _test_devices(examination, group, facts_by_host)
                findings += group_findings
                group_name = f"{group[0].name} to {group[-1].name}: " if len(groups) > 1 else ""
                lines += [f"{group_name}{line}" for line in measurements]
    return findings, lines


def _report_replies(num_hosts: int, say: Callable[[str], None]) -> Callable[[Host, Reply], None]:
    """Return a callback that reports a host without a reply at once, and every `MOST_AT_ONCE`
    replies their number."""
    answered = itertools.count(1)

    def report(host: Host, reply: Reply) -> None:
        number = next(answered)
        if reply.problem is not None and num_hosts > 1:
            say(f"  {host.name}: {reply.problem}")
        if number % MOST_AT_ONCE == 0 and number < num_hosts:
            say(f"  {number} of {num_hosts} hosts probed")

    return report


def _groups(hosts: Sequence[Host]) -> list[Sequence[Host]]:
    """Return `hosts` in groups that can be probed simultaneously, for probes in which the hosts of
    a group communicate.

    The last host of a group is the first host of the next group, so that an isolated group is
    detected.
    """
    size = most_at_once()
    if len(hosts) <= size or size < 2:  # a group of one host has nobody to communicate with
        return [hosts]
    return [hosts[begin : begin + size] for begin in range(0, len(hosts) - 1, size - 1)]


def _check_shared(examination: Examination, hosts: Sequence[Host]) -> list[Finding]:
    """Check that every host sees a file of this machine, and this machine the files of the
    hosts."""
    directory, token = str(examination.directory), secrets.token_hex(8)
    written = _ask_here(examination, "announce", directory=directory, token=token)
    if written.problem or written.result["problem"]:
        problem = written.problem or written.result["problem"]
        raise LaunchError(f"{directory} cannot be written here: {problem}")
    probes = {
        host.name: probe_command(
            "shared", examination.limit_seconds, directory=directory, token=token, name=host.name
        )
        for host in hosts
    }
    replies = ask_all(hosts, probes, examination.transport, examination.limit_seconds)
    made_folders = written.result["made"]
    visible = _ask_here(examination, "collect", directory=directory, token=token, made=made_folders)
    findings = []
    for host in hosts:
        reply = replies[host.name]
        problem = reply.problem or reply.result["problem"] or visible.problem
        if problem is None and host.name not in visible.result["hosts"]:
            problem = "files it writes there are not visible here"
        findings.append(verdicts.check_shared(host.name, directory, problem))
    return findings


def _ask_here(examination: Examination, probe: str, **arguments: Any) -> Reply:
    """Run a probe on this machine in a separate process: a file system that does not respond
    would block the doctor forever."""
    this_host = Host("localhost", 1, 0)
    command = probe_command(probe, examination.limit_seconds, **arguments)
    return ask_all([this_host], {this_host.name: command}, "ssh", examination.limit_seconds)[
        this_host.name
    ]


def _check_network(
    examination: Examination, hosts: Sequence[Host], facts_by_host: dict[str, Any]
) -> list[Finding]:
    """Check that every host can listen on its port and connect to the other hosts."""
    if len(hosts) == 1 and examination.port is None:
        return []
    ports = {host.name: examination.port or facts_by_host[host.name]["free_port"] for host in hosts}
    probes = {
        host.name: probe_command(
            "network",
            examination.limit_seconds,
            port=ports[host.name],
            peers={name: port for name, port in ports.items() if name != host.name},
            me=host.name,
            seconds=examination.limit_seconds * 0.5,
        )
        for host in hosts
    }
    replies = ask_all(hosts, probes, examination.transport, examination.limit_seconds)
    return [
        verdicts.check_network(name, reply.result, reply.problem) for name, reply in replies.items()
    ]


def _test_devices(
    examination: Examination, hosts: Sequence[Host], facts_by_host: dict[str, Any]
) -> tuple[list[Finding], list[str]]:
    """Compute on every device of `hosts`, with collectives; return the findings, and lines with the
    measured speeds."""
    port = examination.port or facts_by_host[hosts[0].name]["free_port"]
    main_address = "127.0.0.1" if len(hosts) == 1 else hosts[0].name
    limit_seconds = str(examination.limit_seconds)
    commands = {
        host.name: [
            # `timeout` also ends the probe on its host if the connection from here is lost.
            *("timeout", "-k", "10", limit_seconds, sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(len(hosts)), "--nproc_per_node", str(host.slots)),
            *("--node_rank", str(rank), "--master_addr", main_address),
            *("--master_port", str(port)),
            *("-m", "bigtrain.launchers.doctor.collective_probe", limit_seconds),
        ]
        for rank, host in enumerate(hosts)
    }
    replies = ask_all(hosts, commands, examination.transport, examination.limit_seconds)
    main_reply = replies[hosts[0].name]
    if main_reply.problem is None:
        devices = main_reply.result
        return verdicts.check_compute(hosts, devices), verdicts.describe_collectives(devices)
    problems = [
        f"{host.name}: {replies[host.name].problem}" for host in hosts if replies[host.name].problem
    ]
    remedy = (
        "use a longer --seconds, or run it with TORCH_DISTRIBUTED_DEBUG=DETAIL and NCCL_DEBUG=INFO"
    )
    return [Finding(hosts[0].name, "compute", "; ".join(problems), remedy)], []
