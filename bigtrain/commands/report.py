"""`bigtrain report`: a run, or several, as one page of curves, events and settings."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bigtrain.report.run_files import Run

DEFAULT_PORT = 8600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="run directory")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="directories of more runs, drawn into the same charts; may be repeated",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE.html",
        help="the page (default: report.html in the directory of --run); an older report there is "
        "replaced, any other file is not",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="write no file but serve the page, on this machine only, while the run trains; "
        "Ctrl-C ends it",
    )
    parser.add_argument(
        "--port",
        type=_port,
        metavar="N",
        help=f"port of --live, 1 to 65535 (default: {DEFAULT_PORT})",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: an integer from 1 to 65535")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Write the page, or serve it. Raises ConfigError, DataError, LaunchError and OutputError."""
    from bigtrain.errors import ConfigError, Problem
    from bigtrain.python_api.results import write_report
    from bigtrain.report.run_files import open_runs

    if args.live and args.output is not None:
        rule = "--live serves the page and does not write one"
        raise ConfigError(Problem("--output", str(args.output), rule, "remove one of them"))
    if args.port is not None and not args.live:
        rule = "applies only to --live"
        raise ConfigError(Problem("--port", args.port, rule, "remove it, or add --live"))
    begun = time.monotonic()
    if args.live:
        return _serve(open_runs([args.run, *args.compare], final=False), args.port or DEFAULT_PORT)
    written = write_report(args.run, compare=args.compare, output=args.output)
    steps = written.num_steps
    print(
        f"{written.path}: {steps:,} logged step{'s' if steps != 1 else ''}, "
        f"{written.num_bytes / 2**20:.1f} MiB, in {time.monotonic() - begun:.1f} s"
    )
    return 0


def _serve(runs: Sequence[Run], port: int) -> int:
    """Serve the page until Ctrl-C."""
    from bigtrain.report.live import ADDRESS, open_server

    with open_server(runs, port) as server:
        try:
            print(f"http://{ADDRESS}:{port}/ until Ctrl-C", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
    return 0
