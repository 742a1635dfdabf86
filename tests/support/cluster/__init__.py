"""Several hosts on one machine: network namespaces with their own sshd and, if asked for, Slurm.

Needs root and Debian's packages (`make test-deps`). Nothing of the machine changes: files of
/etc are bound inside the hosts only, there is no route out, and the end of the test process,
however it ends, ends every process of the cluster.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
BINARIES = Path(sys.executable).parent
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PROGRAMS = ("ip", "nsenter", "unshare")
SSH_PROGRAMS = ("sshd", "ssh-keygen", "pdsh")
SLURM_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--ipc", "--fork")
POLL_SECONDS = 0.1
READY_SECONDS = 60.0

_SSHD_CONFIG = """\
HostKey /etc/ssh/host_key
AuthorizedKeysFile /etc/ssh/authorized_keys
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 100
MaxSessions 100
"""
_SSH_CONFIG = """\
Host *
  IdentityFile /etc/ssh/identity
  StrictHostKeyChecking yes
  GlobalKnownHostsFile /etc/ssh/known_hosts
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


def why_not(*, slurm: bool, ssh: bool = True) -> str | None:
    """Return why a cluster cannot run here; None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in PROGRAMS + (SSH_PROGRAMS if ssh else ()) + (SLURM_PROGRAMS if slurm else ()):
        if shutil.which(program, path=f"{os.environ['PATH']}:{SYSTEM_PATH}") is None:
            return f"{program} is not installed: make test-deps"
    probe = subprocess.run(["unshare", *NAMESPACES, "true"], capture_output=True, check=False)
    return None if probe.returncode == 0 else "this machine permits no namespaces"


@dataclass
class Cluster:
    """Running hosts; `state` is their directory, `hosts` their addresses by name."""

    state: Path
    hosts: Mapping[str, str]
    environment: Mapping[str, str]
    _started: list[psutil.Popen] = field(default_factory=list)

    def start(self, host: str, *command: str | Path, cwd: Path, **env: str) -> psutil.Popen:
        """Start `command` on `host`, with both its outputs in one pipe."""
        process = psutil.Popen(
            [*self._enter(host, cwd), *map(str, command)],
            env={**self.environment, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def run(
        self, host: str, *command: str | Path, cwd: Path, timeout: float = 200, **env: str
    ) -> tuple[int, str]:
        """Run `command` on `host` to its end: exit code and output."""
        process = self.start(host, *command, cwd=cwd, **env)
        return finish(process, timeout)

    def link(self, host: str, state: str) -> None:
        """Plug `host`'s cable in ("up") or out ("down")."""
        switch = (self.state / "pid").read_text().strip()
        command = ["nsenter", "-t", switch, "-n", "ip", "link", "set", f"v-{host}", state]
        subprocess.run(command, check=True, env=dict(self.environment))

    def processes(self, host: str, word: str) -> list[psutil.Process]:
        """Return processes of `host`, of any parent, with `word` in their command line."""
        namespace = os.readlink(f"/proc/{self._pid(host)}/ns/pid")
        matches = []
        for process in psutil.process_iter():
            try:
                if os.readlink(f"/proc/{process.pid}/ns/pid") == namespace:
                    if word in " ".join(process.cmdline()):
                        matches.append(process)
            except (OSError, psutil.Error):  # it has ended meanwhile
                continue
        return matches

    def ranks(self, host: str) -> list[psutil.Process]:
        """Return the processes that train on `host` under torchrun's agent, forked or not."""
        started = [
            one
            for one in self.processes(host, "bigtrain/train.py")
            if "bigtrain.launchers.agent" not in one.cmdline()
        ]
        forked = [
            one
            for one in self.processes(host, "multiprocessing.forkserver")
            if one.name().startswith("rank-")
        ]
        return started + forked

    def tidy(self) -> None:
        """End what `start` started, and plug every cable in."""
        for process in self._started:
            end(process)
            process.wait()
            process.stdout.close()
        self._started.clear()
        for host in self.hosts:
            self.link(host, "up")

    def _pid(self, host: str) -> int:
        return int((self.state / host / "pid").read_text())

    def _enter(self, host: str, cwd: Path) -> list[str]:
        enter = ["nsenter", "-t", str(self._pid(host)), "-n", "-u", "-m", "-p", "-i"]
        return [*enter, f"--wd={cwd}", "--"]


def finish(process: psutil.Popen, timeout: float) -> tuple[int, str]:
    """Exit code and output of a process of `Cluster.start`; fails, with it, after `timeout` s."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:  # somebody else's child holds the pipe
            output = "(its output cannot be read)"
        raise AssertionError(f"not finished after {timeout} s:\n{output[-6000:]}") from None
    return process.returncode, output


def end(process: psutil.Popen) -> None:
    """Kill `process` and its descendants by pid: nsenter hands no signal on."""
    if process.poll() is not None:
        return
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        try:
            one.kill()
        except psutil.Error:
            continue


def wait_until(what: str, true: Callable[[], object], timeout: float = READY_SECONDS) -> None:
    """Return as soon as `true()` is; fails after `timeout` s, naming `what`."""
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(POLL_SECONDS)


@contextmanager
def cluster(
    state: Path, num_hosts: int, *, slurm: bool, ssh: bool = True, subnet: str = "10.77.0"
) -> Iterator[Cluster]:
    """Hosts n0, n1, ... with Slurm's controller on n0 and nodes on the others, if `slurm`, and with
    sshd, if `ssh`."""
    hosts = {f"n{i}": f"{subnet}.{10 + i}" for i in range(num_hosts)}
    _write_state(state, hosts, slurm=slurm, ssh=ssh)
    home = state / "home"
    home.mkdir()
    environment = {
        # Little of this process's: launchers hand theirs on, and accelerate writes it to a file.
        "PATH": f"{BINARIES}:{SYSTEM_PATH}",
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    reader, writer = os.pipe()
    with (state / "log").open("w") as log:
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
        addresses = [f"{name}={address}" for name, address in hosts.items()]
        switch = psutil.Popen(
            [*command, HERE / "switch.sh", state, str(reader), str(int(slurm)), *addresses],
            env=environment,
            pass_fds=[reader],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(reader)
    try:
        running = Cluster(state, hosts, environment)
        try:
            _wait_for_hosts(running, switch, slurm=slurm)
        except AssertionError as error:
            logs = "".join(path.read_text() for path in sorted(state.rglob("*log")))
            raise AssertionError(f"{error}\n{logs[-6000:]}") from None
        yield running
        running.tidy()
    finally:
        os.close(writer)
        try:
            switch.wait(10)
        except psutil.TimeoutExpired:
            switch.send_signal(signal.SIGKILL)
            switch.wait()


def _wait_for_hosts(running: Cluster, switch: psutil.Popen, *, slurm: bool) -> None:
    def ready() -> bool:
        assert switch.poll() is None, "the switch ended"
        return all((running.state / name / "pid").exists() for name in running.hosts)

    wait_until("every host is up", ready)
    [init] = switch.children()
    (running.state / "pid").write_text(str(init.pid))
    if slurm:
        idle = ("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")

        def nodes_idle() -> bool:
            code, output = running.run("n0", *idle, cwd=running.state)
            return code == 0 and len(set(output.split())) == len(running.hosts) - 1

        wait_until("every node of Slurm is idle", nodes_idle)


def _write_state(state: Path, hosts: Mapping[str, str], *, slurm: bool, ssh: bool) -> None:
    (state / "ssh").mkdir(parents=True)
    for name in hosts:
        (state / name / "munge").mkdir(parents=True, mode=0o700)
        (state / name / "hostname").write_text(f"{name}\n")
    (state / "pkill").write_text("#!/bin/sh\nexit 1\n")
    (state / "pkill").chmod(0o755)
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
    (state / "hosts").write_text("\n".join(lines) + "\n")
    # A "!" for a password is a locked account, which sshd refuses.
    accounts = [line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()]
    (state / "shadow").touch(mode=0o600)
    (state / "shadow").write_text("".join(f"{name}:*:19000:0:99999:7:::\n" for name in accounts))
    if ssh:
        _write_ssh_files(state / "ssh", hosts)
    if slurm:
        _write_slurm_state(state, list(hosts))


def _write_ssh_files(folder: Path, hosts: Mapping[str, str]) -> None:
    for key in ("host_key", "identity"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
        subprocess.run(command, check=True)
    shutil.move(folder / "identity.pub", folder / "authorized_keys")
    public = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = (f"{name},{address} {public}\n" for name, address in hosts.items())
    (folder / "known_hosts").write_text("".join(known))
    (folder / "sshd_config").write_text(_SSHD_CONFIG)
    (folder / "ssh_config").write_text(_SSH_CONFIG)


def _write_slurm_state(state: Path, names: list[str]) -> None:
    controller, *nodes = names
    (state / controller / "controller").touch()
    (state / "slurm.state").mkdir()
    for name in nodes:
        (state / f"slurmd.{name}").mkdir()
    (state / "munge.key").write_bytes(os.urandom(128))
    (state / "munge.key").chmod(0o400)
    settings = (HERE / "slurm.conf.in").read_text()
    for key, value in {"CONTROLLER": controller, "NODES": ",".join(nodes), "STATE": state}.items():
        settings = settings.replace(f"@{key}@", str(value))
    etc = state / "slurm.etc"
    etc.mkdir()
    (etc / "slurm.conf").write_text(settings)
    (etc / "gres.conf").write_text("Name=gpu File=/dev/tty[1-2]\n")  # devices that exist anywhere
    (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
