"""`bigtrain outer-server`: membership of sites, and global weights for those behind firewalls."""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

DEFAULT_PORT = 29700
WINDOW_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--directory",
        required=True,
        type=Path,
        metavar="DIR",
        help="where the state is stored; a server that is restarted with it continues",
    )
    parser.add_argument(
        "--token-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="a secret of at least 16 bytes, which sites need too (sites.token_file); it signs all "
        "messages and is never sent",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen at (default: all)")
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="N", help=f"(default: {DEFAULT_PORT})"
    )
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE", help="serve https with it; with --key"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="of the certificate")
    parser.add_argument(
        "--window-seconds",
        type=_seconds,
        default=WINDOW_SECONDS,
        metavar="S",
        help="how long the first site at an outer step waits for the others, which are skipped "
        f"then; less than their sites.timeout_seconds (default: {WINDOW_SECONDS:g})",
    )
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="make an outer step for every delivery, weighted by its staleness, instead of one for "
        "all sites",
    )
    parser.add_argument(
        "--until-left",
        action="store_true",
        help="end when every site that joined has left, or none was heard of for an hour",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: an integer from 1 to 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration: a number above 0")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises ConfigError, LaunchError and OutputError."""
    from bigtrain.errors import ConfigError, LaunchError, Problem

    if (args.certificate is None) != (args.key is None):
        rule = "--certificate and --key belong together"
        raise ConfigError(Problem("--certificate", str(args.certificate), rule, "give both"))
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise LaunchError(
            f"the outer server requires {' and '.join(missing)} -> pip install 'bigtrain[sites]'"
        )
    from bigtrain.sites.client import read_token
    from bigtrain.sites.server.app import Place, serve
    from bigtrain.sites.server.members import Rules

    token = read_token(args.token_file)
    place = Place(args.host, args.port, args.certificate, args.key)
    rules = Rules(args.asynchronous, args.window_seconds)
    scheme = "http" if args.certificate is None else "https"
    _say(f"outer server at {scheme}://{args.host}:{args.port}, directory {args.directory}")
    serve(args.directory, place, token, rules, _say, until_left=args.until_left)
    _say("stopped; restart with the same directory to continue")
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
