"""Network namespaces on one switch, with links that can be disconnected and slowed down.

Needs root and iproute2, and changes nothing of the machine: switch and hosts are namespaces of
processes that end with the test. Addresses are 10.78.0.N; there is no route out.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.cluster import wait_until
from tests.support.worlds import ROOT

PROGRAMS = ("ip", "tc", "nsenter", "unshare")


def why_no_network() -> str | None:
    """Return why namespaces cannot be used here; None if they can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is not installed: make test-deps"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "this machine permits no namespaces"


@dataclass
class Network:
    """Hosts by name, each the process that holds its namespace; `switch` holds the bridge."""

    switch: subprocess.Popen[bytes]
    hosts: dict[str, subprocess.Popen[bytes]]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def address(self, host: str) -> str:
        return f"10.78.0.{10 + list(self.hosts).index(host)}"

    def start(
        self, host: str, log: Path, *command: str | Path, **env: str
    ) -> subprocess.Popen[bytes]:
        """Start Python with `command` on `host`; what it prints is appended to `log`."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0", **env}
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*_enter(self.hosts[host]), sys.executable, *map(str, command)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
            )
        self.started.append(process)
        return process

    def link(self, host: str, state: str) -> None:
        """Plug the cable of `host` in ("up") or out ("down")."""
        _run(*_enter(self.switch), "ip", "link", "set", f"v-{host}", state)

    def limit(self, host: str, rate: str) -> None:
        """Let `host` send and receive no faster than `rate`, as tc writes it (100mbit)."""
        bucket = ("tbf", "rate", rate, "burst", "64kb", "latency", "100ms")
        _run(*_enter(self.switch), "tc", "qdisc", "add", "dev", f"v-{host}", "root", *bucket)
        _run(*_enter(self.hosts[host]), "tc", "qdisc", "add", "dev", "eth0", "root", *bucket)

    def sent_bytes(self, host: str) -> int:
        """Return bytes that the link of `host` has carried from it, with all headers."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        command = [*_enter(self.hosts[host]), "unshare", "--mount", "sh", "-c"]
        script = f"mount -t sysfs none /sys && cat {path}"
        return int(subprocess.run([*command, script], check=True, capture_output=True).stdout)


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Open a switch and hosts with these names; all processes started there end with it."""
    holders = [_hold() for _ in range(1 + len(names))]
    net = Network(holders[0], dict(zip(names, holders[1:], strict=True)))
    try:
        own = os.readlink("/proc/self/ns/net")
        for holder in holders:
            wait_until("a namespace", lambda pid=holder.pid: _net(pid) not in ("", own))
        _run(*_enter(net.switch), "ip", "link", "add", "br0", "type", "bridge")
        _run(*_enter(net.switch), "ip", "link", "set", "br0", "up")
        for name, host in net.hosts.items():
            pair = ("type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
            _run(*_enter(net.switch), "ip", "link", "add", f"v-{name}", *pair)
            _run(*_enter(net.switch), "ip", "link", "set", f"v-{name}", "master", "br0", "up")
            _run(*_enter(host), "ip", "link", "set", "lo", "up")
            _run(*_enter(host), "ip", "addr", "add", f"{net.address(name)}/24", "dev", "eth0")
            _run(*_enter(host), "ip", "link", "set", "eth0", "up")
        yield net
    finally:
        for process in [*net.started, *holders]:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def _hold() -> subprocess.Popen[bytes]:
    """Return a process that does nothing in a network namespace of its own, and ends with this
    one."""
    limit = "3600"
    return subprocess.Popen(
        ["unshare", "--net", "sleep", limit], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def _net(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _enter(holder: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", "-t", str(holder.pid), "-n", "--"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
