"""Running a command on hosts: locally, over ssh or as a Slurm job step, always with a timeout."""

from __future__ import annotations

import json
import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from bigtrain.launchers.deepspeed_env import KEEP_ALIVE, select_environment
from bigtrain.launchers.doctor.host_probe import MARK
from bigtrain.launchers.hostfile import Host
from bigtrain.system.shipped_files import checkout

Transport = Literal["ssh", "srun"]
MOST_AT_ONCE = 128
"""Hosts probed at the same time; each takes a process and some open files here."""
_FILES_PER_HOST, _SPARE_FILES = 4, 16
_GRACE_SECONDS = 15  # for the connection, in addition to the probe's own limit
_KILLED_SECONDS = 5
_TIMED_OUT = 124  # exit code of `timeout`


@dataclass(frozen=True)
class Reply:
    """Reply of a host: the probe's result, or the reason (one line) for its absence.

    sent_at, received_at: this machine's clock, in seconds since the epoch.
    """

    result: Any
    problem: str | None
    sent_at: float
    received_at: float


def most_at_once() -> int:
    """Return how many hosts can be probed at once within this process's open-file limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = soft - len(os.listdir("/dev/fd")) - _SPARE_FILES
    return max(1, min(MOST_AT_ONCE, free // _FILES_PER_HOST))


def ask_all(
    hosts: Sequence[Host],
    commands: Mapping[str, Sequence[str]],
    transport: Transport,
    limit_seconds: int,
    on_reply: Callable[[Host, Reply], None] = lambda _host, _reply: None,
) -> dict[str, Reply]:
    """Run the command of every host on that host, `most_at_once` at a time. Return the replies in
    the order of `hosts`.

    `on_reply` is called with each reply as it arrives, in this thread. Every command is killed
    `_GRACE_SECONDS` after `limit_seconds`.
    """
    if not hosts:
        return {}
    with ThreadPoolExecutor(max_workers=min(len(hosts), most_at_once())) as pool:
        host_by_future = {
            pool.submit(_ask, host, commands[host.name], transport, limit_seconds): host
            for host in hosts
        }
        replies = {}
        for future in as_completed(host_by_future):
            host = host_by_future[future]
            replies[host.name] = future.result()
            on_reply(host, replies[host.name])
        return {host.name: replies[host.name] for host in hosts}


def probe_command(probe: str, limit_seconds: int, **arguments: Any) -> list[str]:
    """Return the command that runs a probe of `bigtrain.launchers.doctor.host_probe`."""
    module = [sys.executable, "-m", "bigtrain.launchers.doctor.host_probe", probe]
    return [*module, json.dumps(arguments), str(limit_seconds)]


def _ask(host: Host, command: Sequence[str], transport: Transport, limit_seconds: int) -> Reply:
    """Run a command on a host; return the probe's result, or why there is none."""
    sent_at = time.time()
    timeout_text = f"no answer within {limit_seconds} s"
    # Files, not pipes: a grandchild that outlives the command would keep a pipe open forever.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                _remote_command(host, command, transport),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            return Reply(None, str(error), sent_at, time.time())
        try:
            code = process.wait(limit_seconds + _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # blocked by an unreachable file system
                process.wait(_KILLED_SECONDS)
            return Reply(None, timeout_text, sent_at, time.time())
        received_at = time.time()

        # A probe marks its line; shells and drivers may print more.
        for line in _lines(output):
            _, mark, text = line.partition(MARK)
            if mark:
                return Reply(json.loads(text), None, sent_at, received_at)
        if code in (-signal.SIGALRM, 128 + signal.SIGALRM, _TIMED_OUT):
            return Reply(None, timeout_text, sent_at, received_at)
        lines = _lines(errors) or ["no error output"]
        return Reply(None, f"exit code {code}: {lines[-1][:200]}", sent_at, received_at)


def _lines(file: IO[bytes]) -> list[str]:
    """Return the lines of a file that are not blank."""
    file.seek(0)
    lines = file.read().decode("utf-8", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _remote_command(host: Host, command: Sequence[str], transport: Transport) -> list[str]:
    """Return the local command line that runs `command` on `host`, in this working directory."""
    variables = select_environment(os.environ).variables
    variables["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(checkout()), variables.get("PYTHONPATH")])
    )
    env = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    if transport == "srun":
        step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"]
        return [*step, "--immediate=30", "--quiet", *env]
    if host.name in ("localhost", "127.0.0.1", socket.gethostname()):
        return env
    options = ["-o", "BatchMode=yes", *shlex.split(KEEP_ALIVE)]
    return [
        "ssh",
        *options,
        "--",
        host.name,
        f"cd {shlex.quote(str(Path.cwd()))} && {shlex.join(env)}",
    ]
