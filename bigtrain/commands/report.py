"""`bigtrain report`: a run, or several, as one page of curves, events and settings."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.system.arguments import Argument, Directory, Port
from bigtrain.system.next_commands import next_lines

DEFAULT_PORT = 8600


@dataclass(frozen=True, kw_only=True)
class ReportArguments:
    """Command line of `bigtrain report`."""

    run: Directory
    """run directory"""
    compare: Annotated[tuple[Directory, ...], Argument(nargs="+")] = ()
    """directories of more runs, drawn into the same charts; may be repeated"""
    output: Annotated[Path | None, "FILE.html"] = None
    """the page (default: report.html in the directory of --run); an older report there is replaced,
    any other file is not"""
    live: bool = False
    """write no file but serve the page, on this machine only, while the run trains; Ctrl-C ends
    it"""
    port: Port | None = None
    """port of --live, 1 to 65535 (default: 8600)"""


def run(args: ReportArguments) -> int:
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
    # Serve until Ctrl-C, or write the page.
    started_at = time.monotonic()
    if args.live:
        from bigtrain.report.live import ADDRESS, open_server

        runs = open_runs([args.run, *args.compare], final=False)
        port = args.port or DEFAULT_PORT
        with open_server(runs, port) as server:
            try:
                print(f"http://{ADDRESS}:{port}/ until Ctrl-C", flush=True)
                server.serve_forever()
            except KeyboardInterrupt:
                print("ended")
        return 0
    written = write_report(args.run, compare=args.compare, output=args.output)
    steps = written.num_steps
    print(
        f"{written.path}: {steps:,} logged step{'s' if steps != 1 else ''}, "
        f"{written.num_bytes / 2**20:.1f} MiB, in {time.monotonic() - started_at:.1f} s"
    )
    print(next_lines(f"xdg-open {shlex.quote(str(written.path))}   # or any browser"))
    return 0
