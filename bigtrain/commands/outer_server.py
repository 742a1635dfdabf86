"""`bigtrain outer-server`: membership of sites, and global weights for those behind firewalls."""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec

DEFAULT_PORT = 29700


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
    from bigtrain.system.listening import exposure

    token = read_token(args.token_file)
    endpoint = Place(args.host, args.port, args.certificate, args.key)
    rules = Rules(args.asynchronous, args.window_seconds)
    scheme = "http" if args.certificate is None else "https"
    _say(f"outer server at {scheme}://{args.host}:{args.port}, directory {args.directory}")
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
