"""`bigtrain doctor`: check every host before a run is started on it."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.errors import EXIT_USER_ERROR
from bigtrain.system.arguments import Argument, Directory, File, Positive
from bigtrain.system.next_commands import next_lines


@dataclass(frozen=True, kw_only=True)
class DoctorArguments:
    """Command line of `bigtrain doctor`."""

    hostfile: Annotated[File | None, Argument(one_of="at most one")] = None
    """hosts, reached over ssh"""
    slurm: Annotated[bool, Argument(one_of="at most one")] = False
    """the hosts of the current Slurm job"""
    slots: Positive | None = None
    """ranks per host, without --hostfile (default: from Slurm, or 1)"""
    directory: Directory = Path("runs")
    """where runs will write, on all hosts (default: runs)"""
    port: Positive | None = None
    """the port a run will use (default: any)"""
    seconds: Annotated[Positive, "S"] = 120
    """time limit of each check (default: 120)"""
    least_gib: Annotated[float, "G"] = 10.0
    """free memory and disk that each host must have (default: 10)"""
    quick: bool = False
    """do not load torch to compute and communicate"""


def run(args: DoctorArguments) -> int:
    """Print the table and the fixes; return 2 if anything failed. Raises LaunchError."""
    from bigtrain.launchers.doctor.examination import Examination, examine
    from bigtrain.launchers.doctor.verdicts import render
    from bigtrain.launchers.hostfile import Host, describe_unequal, hosts_of_slurm, read_hostfile

    if args.hostfile is not None:
        hosts = read_hostfile(args.hostfile)
    elif args.slurm:
        hosts = hosts_of_slurm(os.environ, args.slots)
    else:
        hosts = [Host("localhost", args.slots or 1, 1)]
    examination = Examination(
        hosts=hosts,
        transport="srun" if args.slurm else "ssh",
        directory=args.directory.absolute(),
        port=args.port,
        limit_seconds=args.seconds,
        least_gib=args.least_gib,
        compute=not args.quick,
    )
    findings, lines = examine(
        examination, say=lambda line: print(line, file=sys.stderr, flush=True)
    )
    print("\n".join([render(hosts, findings), *describe_unequal(hosts), *lines]))
    has_failed = any(finding.failed for finding in findings)
    if has_failed:
        return EXIT_USER_ERROR
    # The next command starts a run by a launcher that reaches these hosts.
    start = "python"
    if args.slurm:
        start = "srun python"
    elif args.hostfile is not None:
        start = f"deepspeed --hostfile {shlex.quote(str(args.hostfile))}"
    print(next_lines(f"{start} bigtrain/train.py --config RUN.yaml"))
    return 0
