"""`bigtrain hostfile`: write or check a hostfile, and the environment of its hosts."""

from __future__ import annotations

import glob
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

from bigtrain.launchers.deepspeed_env import (
    KEEP_ALIVE,
    NAME,
    inspect_environment_file,
    instead_of_command_lines,
    select_environment,
    write_environment,
)
from bigtrain.launchers.hostfile import (
    Host,
    describe_unequal,
    hosts_of_slurm,
    read_hostfile,
    render_hostfile,
)
from bigtrain.system.arguments import Argument, File, Positive
from bigtrain.system.files import write_new
from bigtrain.system.next_commands import next_lines

_RESOLVE_SECONDS = 10
_LOOKUP_THREADS = 256  # most of them wait for the network


@dataclass(frozen=True, kw_only=True)
class HostfileArguments:
    """Command line of `bigtrain hostfile`."""

    check: Annotated[File | None, Argument(one_of="exactly one")] = None
    """report the problems of a file"""
    slurm: Annotated[bool, Argument(one_of="exactly one")] = False
    """write one for the current Slurm job"""
    environment: Annotated[bool, Argument(one_of="exactly one")] = False
    """write .deepspeed_env: the variables that DeepSpeed sends to the hosts, without secrets"""
    slots: Positive | None = None
    """with --slurm: ranks on each host (default: its GPUs, or else its tasks)"""
    include: Annotated[tuple[str, ...], "NAME", Argument(nargs="+")] = ()
    """with --environment: additional variables; secret ones are refused"""
    output: File | None = None
    """file to write (default: with --slurm print it, with --environment .deepspeed_env here)"""


def run(args: HostfileArguments) -> int:
    """Check, write a hostfile, or write the environment. Raises LaunchError; then nothing is
    written."""
    if args.check is not None:
        return _check_hostfile(args.check)
    if args.environment:
        return _write_environment(args.output or Path(NAME), args.include)
    text = render_hostfile(hosts_of_slurm(os.environ, args.slots))
    if args.output is None:
        print(text, end="")
    else:
        write_new(args.output, text)
        print(f"{args.output}: {len(text.splitlines())} hosts")
        print(next_lines(f"bigtrain doctor --hostfile {shlex.quote(str(args.output))}"))
    return 0


def _check_hostfile(path: Path) -> int:
    """Print the hosts and processes of a hostfile. Raises LaunchError with all its problems."""
    hosts = read_hostfile(path, _unresolved_names)
    num_processes = sum(host.slots for host in hosts)
    unequal_lines = describe_unequal(hosts)
    factors = f"{len(hosts)} hosts"
    if not unequal_lines:
        factors += f" x {hosts[0].slots} slots"
    print(f"{path}: {factors} = {num_processes} processes")
    for line in unequal_lines:
        print(f"  {line}")
    print(next_lines(f"bigtrain doctor --hostfile {shlex.quote(str(path))}"))
    return 0


def _unresolved_names(hosts: list[Host]) -> list[str]:
    """Return the problems of hosts whose names have no address."""
    rule = "this host name does not resolve here or in ssh's configuration"
    with ThreadPoolExecutor(_LOOKUP_THREADS) as pool:
        resolves = list(pool.map(_has_address_by_ssh, (host.name for host in hosts)))
    return [
        f"line {host.line}: {host.name}: {rule} -> fix the name, or remove it"
        for host, has_address in zip(hosts, resolves, strict=True)
        if not has_address
    ]


def _has_address_by_ssh(name: str) -> bool:
    """Return whether `name`, or its HostName in ssh's configuration, has an address."""
    if _has_address(name):
        return True
    if not ssh_settings_name_hosts():
        return False
    try:
        result = subprocess.run(
            ["ssh", "-G", "--", name], capture_output=True, text=True, timeout=_RESOLVE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    lines = (line.split() for line in result.stdout.splitlines())
    ssh_name = next((words[1] for words in lines if words[:1] == ["hostname"]), None)
    return ssh_name is not None and ssh_name != name and _has_address(ssh_name)


def _has_address(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, 22))
    except (OSError, UnicodeError):
        return False


@cache
def ssh_settings_name_hosts() -> bool:
    """Return whether ssh's configuration may replace host names; if not, `ssh -G` is not needed.

    Searches HostName and CanonicalizeHostname (man ssh_config) in the configurations of the user
    and the machine, and in files that they include.
    """
    files = [Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")]
    read_paths: set[Path] = set()
    while files:
        path = files.pop()
        if path in read_paths or not path.is_file():
            continue
        read_paths.add(path)
        for line in path.read_text(errors="replace").splitlines():
            word, *value = re.split(r"[\s=]+", line.strip(), maxsplit=1)
            if word.lower() in ("hostname", "canonicalizehostname"):
                return True
            if word.lower() == "include" and value:
                for pattern in shlex.split(value[0]):
                    include = path.parent / Path(pattern).expanduser()
                    files += map(Path, glob.glob(str(include)))
    return False


def _write_environment(path: Path, include: Sequence[str]) -> int:
    """Write DeepSpeed's environment file, and print its variables and those that it lacks."""
    selection = select_environment(os.environ, include)
    # DeepSpeed also reads the file in the home directory, before the one in the working directory.
    for candidate in {path.absolute(), Path.home() / NAME}:
        for problem in inspect_environment_file(candidate):
            print(f"warning: {problem}", file=sys.stderr)
    write_environment(path, selection.variables)
    print(f"{path}: {', '.join(selection.variables) or 'no variables'}")
    variables = selection.variables.items()
    quoted_names = [name for name, value in variables if shlex.quote(value) != value]
    if quoted_names:
        print(f"  quoted, which only pdsh removes again: {', '.join(quoted_names)}")
    if selection.secrets:
        print("  secrets, not written, since DeepSpeed puts the file into command lines:")
        for name in selection.secrets:
            print(f"    {name}: use {instead_of_command_lines(name)}")
    if selection.exposed:
        rule = "DeepSpeed itself puts into command lines on every host: unset these"
        print(f"  secrets that {rule}: {', '.join(selection.exposed)}")
    if selection.dropped:
        print(f"  not written (--include NAME adds one): {', '.join(selection.dropped)}")
    if path.name != NAME:
        print(f"  DeepSpeed reads it with  DS_ENV_FILE={shlex.quote(path.name)}")
    # With ssh options that end the run if a host dies.
    start = "deepspeed --hostfile HOSTFILE bigtrain/train.py --config RUN.yaml"
    print(next_lines(f"PDSH_SSH_ARGS_APPEND={shlex.quote(KEEP_ALIVE)} {start}"))
    return 0
