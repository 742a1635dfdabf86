"""Checks of the doctor's measurements: one result per host and check. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigtrain.launchers.hostfile import Host
from bigtrain.system.machine import VERSIONS_REMEDY, other_versions

MOST_CLOCK_SKEW_SECONDS = 2.0
SLOW_DEVICE_FACTOR = 1.25  # a device this much slower than the median slows down every step
LEAST_SHM_GIB = 1.0
# DeepSpeed's CPU collectives create them and never remove them; bigtrain's runs do not create any.
SHARED_BUFFERS = "deepspeed_allreduce_buffer_*"


@dataclass(frozen=True)
class Finding:
    """Result of a check of a host: the observation, and a fix if the check failed."""

    host: str
    check: str
    text: str
    remedy: str | None = None

    @property
    def failed(self) -> bool:
        return self.remedy is not None


def check_reachable(host: Host, problem: str | None) -> Finding:
    """Return whether the host answered the first probe."""
    if problem is None:
        return Finding(host.name, "reachable", "yes")
    remedy = (
        f"`ssh {host.name} true` must work without a password, and this Python and this checkout "
        "must exist under the same paths; or remove the host"
    )
    return Finding(host.name, "reachable", problem, remedy)


def check_versions(facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """Report versions that differ from the versions of most hosts."""
    findings = []
    versions = {host: fact["versions"] for host, fact in facts.items()}
    for host, different in other_versions(versions).items():
        remedy = VERSIONS_REMEDY
        if "driver" in different:
            remedy += "; drivers are the administrator's to update"
        text = ", ".join(different.values()) or "equal"
        findings.append(Finding(host, "versions", text, remedy if different else None))
    return findings


def check_devices(host: Host, fact: Mapping[str, Any]) -> Finding:
    """Check that every slot has a GPU, or a core on hosts without GPUs."""
    noun, number = "GPUs", fact["devices"]
    if number is None:  # a host without NVIDIA's driver
        noun, number = "cores", fact["cores"]
    text = f"{number} {noun} for {host.slots} slots"
    if number >= host.slots:
        return Finding(host.name, "devices", text)
    remedy = f"slots={number} in the hostfile, or find the missing ones (nvidia-smi)"
    return Finding(host.name, "devices", text, remedy)


def check_memory(host: str, fact: Mapping[str, Any], least_gib: float) -> list[Finding]:
    """Check free memory, /dev/shm and disk."""
    findings = []
    more_shared = "give the container more: --shm-size 16g"
    left_behind = fact["shm_left_behind_gib"]
    if left_behind:
        more_shared = f"find /dev/shm -name '{SHARED_BUFFERS}' -mmin +60 -delete, or {more_shared}"
    for check, key, min_gib, remedy in (
        ("memory", "memory_available_gib", least_gib, "stop other processes there"),
        ("disk", "disk_free_gib", least_gib, "free space, or write elsewhere (--directory)"),
        ("/dev/shm", "shm_free_gib", LEAST_SHM_GIB, more_shared),
    ):
        gib = fact[key]
        text = f"{gib:.1f} GiB"
        if check == "/dev/shm" and left_behind:
            text += f", {left_behind:.1f} GiB of DeepSpeed runs that ended"
        fix = f"at least {min_gib:g} GiB: {remedy}" if gib < min_gib else None
        findings.append(Finding(host, check, text, fix))
    return findings


def check_clock(host: str, remote: float, sent_at: float, received_at: float) -> Finding:
    """Check the clock skew. remote: time of the host's clock, which was read between `sent_at` and
    `received_at` of this machine's clock."""
    # The least skew that the three times allow.
    ahead, behind = remote - received_at, sent_at - remote
    skew = max(ahead, behind, 0.0)
    if skew <= MOST_CLOCK_SKEW_SECONDS:
        return Finding(host, "clock", "right")
    direction = "ahead" if ahead > behind else "behind"
    text = f"{skew:.1f} s {direction}"
    return Finding(host, "clock", text, "synchronize it by NTP (timedatectl)")


def check_interface(host: str, fact: Mapping[str, Any], *, is_only_host: bool) -> Finding:
    """Check that gloo and NCCL can find the network interface through which others reach this host.

    A single host (`is_only_host`) may use its loopback interface.
    """
    variables, interfaces = fact["interface_variables"], fact["interfaces"]
    for variable, value in variables.items():
        # NCCL's notation: prefixes of names, after ^ to exclude them or = for complete names.
        is_exclusion, names = value.startswith("^"), value.lstrip("^=").split(",")
        if "=" in value[:2]:
            listed = {name for name in interfaces if name in names}
        else:
            listed = {name for name in interfaces if name.startswith(tuple(names))}
        # Loopback remains of every exclusion, and reaches no other host.
        usable = set(interfaces) - listed - {"lo"} if is_exclusion else listed
        if not usable:
            text = f"{variable}={value}, and the interfaces are {', '.join(interfaces)}"
            return Finding(host, "interface", text, f"set {variable} to one of those")
    address = fact["own_address"]
    is_loopback = address is None or address.startswith("127.")
    if not is_only_host and not variables and is_loopback:
        problem = (
            f"its host name resolves to {address}" if address else "its host name does not resolve"
        )
        remedy = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or fix its /etc/hosts"
        return Finding(host, "interface", problem, remedy)
    return Finding(host, "interface", ", ".join(variables.values()) or str(address))


def check_environment(host: str, fact: Mapping[str, Any]) -> Finding:
    """Check for ``.deepspeed_env`` files with secrets, or with lines on which DeepSpeed crashes."""
    problems = fact["environment_files"]
    if not problems:
        return Finding(host, ".deepspeed_env", "safe")
    return Finding(host, ".deepspeed_env", "unsafe", "; ".join(problems))


def check_shared(host: str, directory: str, problem: str | None) -> Finding:
    """Check that the host shares `directory` with this machine, in both directions."""
    if problem is None:
        return Finding(host, "shared", "yes")
    remedy = (
        f"mount the same file system at {directory} on every host, or choose another --directory"
    )
    return Finding(host, "shared", problem, remedy)


def check_network(host: str, result: Mapping[str, Any] | None, problem: str | None) -> Finding:
    """Check that the host could listen on its port and reach every other host."""
    if result is None:
        return Finding(host, "network", problem or "", "see the host's output; run it again")
    if result["port"]:
        return Finding(
            host,
            "network",
            result["port"],
            "stop the process that uses it, or choose another --port",
        )
    if result["unreachable"]:
        text = ", ".join(f"{name} ({error})" for name, error in result["unreachable"].items())
        remedy = "open the ports between them (firewall), or set the interface that connects them"
        return Finding(host, "network", f"cannot reach {text}", remedy)
    return Finding(host, "network", "reaches all")


def check_compute(hosts: Sequence[Host], devices: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Report devices that are slower than their peers, by host."""
    median = statistics.median(device["matmul_seconds"] for device in devices)
    findings = []
    remaining = iter(devices)  # in rank order
    for host in hosts:
        host_devices = list(itertools.islice(remaining, host.slots))  # takes them off `remaining`
        slow = [d for d in host_devices if d["matmul_seconds"] > SLOW_DEVICE_FACTOR * median]
        if not slow:
            host_median = statistics.median(d["matmul_seconds"] for d in host_devices)
            text = f"{host_median * 1e3:.2f} ms per product"
            findings.append(Finding(host.name, "compute", text))
            continue
        slow_devices = ", ".join(
            f"device {d['local_rank']} takes {d['matmul_seconds'] / median:.2f} times the median"
            for d in slow
        )
        remedy = (
            "check for overheating, power limits and other programs (nvidia-smi -q -d PERFORMANCE)"
        )
        findings.append(Finding(host.name, "compute", slow_devices, remedy))
    return findings


def describe_collectives(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on all-reduce within hosts and over all hosts; the slowest rank counts."""
    lines = []
    for key, scope in (("within", "within each host"), ("between", "over all hosts")):
        speeds = [device[key] for device in devices if device[key] is not None]
        if speeds:
            latency = max(speed["latency_seconds"] for speed in speeds) * 1e6
            bandwidth = min(speed["bytes_per_second"] for speed in speeds) / 1e9
            lines.append(f"all-reduce {scope}: {latency:.0f} us, {bandwidth:.2f} GB/s")
    return lines


def render(hosts: Sequence[Host], findings: Sequence[Finding]) -> str:
    """Return a table of hosts and checks, then every failure with its fix."""
    checks = list(dict.fromkeys(finding.check for finding in findings))
    cells = {(f.host, f.check): "FAIL" if f.failed else f.text for f in findings}
    rows = [["host", *checks]]
    rows += [[h.name, *(cells.get((h.name, check), "-") for check in checks)] for h in hosts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    for finding in findings:
        if finding.failed:
            lines.append(f"{finding.host}: {finding.check}: {finding.text}\n  -> {finding.remedy}")
    return "\n".join(lines)
