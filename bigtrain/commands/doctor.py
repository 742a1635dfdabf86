"""`bigtrain doctor`: check every host before a run is started on it."""

from __future__ import annotations

import argparse
import os
import sys

from bigtrain.errors import EXIT_USER_ERROR


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
    return EXIT_USER_ERROR if any(finding.failed for finding in findings) else 0
