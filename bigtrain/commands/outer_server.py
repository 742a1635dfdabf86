"""`bigtrain outer-server`: membership of sites, and global weights for those behind firewalls."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

from bigtrain.system.arguments import Directory, File, Port
from bigtrain.system.extras import install_line


def seconds(text: str) -> float:
    """Parse a duration in seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: a number above 0")
    return value


@dataclass(frozen=True, kw_only=True)
class OuterServerArguments:
    """Command line of `bigtrain outer-server`."""

    directory: Directory
    """where the state is stored; a server that is restarted with it continues"""
    token_file: File
    """a secret of at least 16 bytes, which sites need too (sites.token_file); it signs all messages
    and is never sent"""
    host: str = "127.0.0.1"
    """address of this machine at which sites reach it; 0.0.0.0: all (default: 127.0.0.1)"""
    port: Port = 29700
    """(default: 29700)"""
    certificate: File | None = None
    """serve https with it; with --key"""
    key: File | None = None
    """of the certificate"""
    window_seconds: Annotated[float, seconds, "S"] = 300.0
    """how long the first site at an outer step waits for the others, which are skipped then; less
    than their sites.timeout_seconds (default: 300)"""
    asynchronous: bool = False
    """make an outer step for every delivery, weighted by its staleness, instead of one for all
    sites"""
    until_left: bool = False
    """end when every site that joined has left, or none was heard of for an hour"""


def run(args: OuterServerArguments) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises ConfigError, LaunchError and OutputError."""
    from bigtrain.errors import ConfigError, LaunchError, Problem

    if (args.certificate is None) != (args.key is None):
        rule = "--certificate and --key belong together"
        raise ConfigError(Problem("--certificate", str(args.certificate), rule, "give both"))
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"the outer server requires {' and '.join(missing)} -> {install_line('sites')}"
        )
    from bigtrain.sites.client import read_token
    from bigtrain.sites.server.app import Place, serve
    from bigtrain.sites.server.members import Rules
    from bigtrain.system.listening import exposure

    token = read_token(args.token_file)
    endpoint = Place(args.host, args.port, args.certificate, args.key)
    rules = Rules(args.asynchronous, args.window_seconds)
    scheme = "http" if args.certificate is None else "https"
    _say(f"outer server at {scheme}://{args.host}:{args.port}, directory {args.directory}")
    # Print which hosts can reach the server before it serves.
    reached_from = exposure(args.host)
    if not reached_from:
        _say("only sites on this machine can reach it -> --host ADDRESS for sites on other hosts")
    elif args.certificate is None:
        _say(
            f"it listens {reached_from}, without encryption -> --certificate and --key, or a "
            "private network"
        )
    serve(args.directory, endpoint, token, rules, _say, until_left=args.until_left)
    _say("stopped; restart with the same directory to continue")
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
