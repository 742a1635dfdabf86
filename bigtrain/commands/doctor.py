"""`bigtrain doctor`: check every host before a run is started on it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from bigtrain.commands.arguments import add_count, positive_int
from bigtrain.errors import EXIT_USER_ERROR


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `bigtrain doctor`."""
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, reached over ssh")
    hosts.add_argument("--slurm", action="store_true", help="the hosts of the current Slurm job")
    parser.add_argument(
        "--slots",
        type=positive_int,
        metavar="N",
        help="ranks per host, without --hostfile (default: from Slurm, or 1)",
    )
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where runs will write, on all hosts (default: runs)",
    )
    parser.add_argument(
        "--port", type=positive_int, metavar="N", help="the port a run will use (default: any)"
    )
    add_count(parser, "--seconds", 120, "S", "time limit of each check")
    parser.add_argument(
        "--least-gib",
        type=float,
        default=10.0,
        metavar="G",
        help="free memory and disk that each host must have (default: 10)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="do not load torch to compute and communicate"
    )


def run(args: argparse.Namespace) -> int:
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
    what = Examination(
        hosts=hosts,
        transport="srun" if args.slurm else "ssh",
        directory=args.directory.absolute(),
        port=args.port,
        limit_seconds=args.seconds,
        least_gib=args.least_gib,
        compute=not args.quick,
    )
    findings, lines = examine(what, say=lambda line: print(line, file=sys.stderr, flush=True))
    print("\n".join([render(hosts, findings), *describe_unequal(hosts), *lines]))
    return EXIT_USER_ERROR if any(finding.failed for finding in findings) else 0
