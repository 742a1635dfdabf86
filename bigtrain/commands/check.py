"""`bigtrain check`: the run as it would be started, or everything that stands against it."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args

import yaml

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.compatibility.check import Device
from bigtrain.settings.resolve import ResolvedRun, resolve_run_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the subcommand."""
    parser.add_argument("--config", required=True, help="run YAML, or the name of a recipe")
    parser.add_argument(
        "--world-size", type=int, default=1, metavar="N", help="number of processes (default: 1)"
    )
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="NAME_OR_PATH",
        help="DeepSpeed JSON or its name in ds_configs/ (default: engine.deepspeed_config)",
    )
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        help="also refuse what this kind of device cannot do (default: not known)",
    )
    parser.add_argument(
        "--show",
        metavar="SECTION.KEY",
        help="print only this setting of the run, for scripts (output.directory, say)",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")


def run(args: argparse.Namespace) -> int:
    """Print the resolved run. Raises ConfigError with every problem found."""
    resolved = resolve_run_files(
        args.config, args.overrides, args.world_size, args.deepspeed_config, args.device
    )
    print(describe(resolved) if args.show is None else setting(resolved, args.show))
    return 0


def setting(resolved: ResolvedRun, key: str) -> str:
    """One setting of the run as text; what is no text itself as JSON. Raises ConfigError."""
    value: Any = resolved.config.model_dump(mode="json")
    for name in key.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ConfigError(Problem("--show", key, "the run has no such setting"))
        value = value[name]
    return value if isinstance(value, str) else json.dumps(value)


def describe(resolved: ResolvedRun) -> str:
    """The resolved run as text: a stream of two YAML documents (JSON is YAML) with comments."""
    run_yaml = yaml.safe_dump(resolved.config.model_dump(mode="json"), sort_keys=False)
    engine = resolved.engine
    processes = resolved.topology.world_size
    return "\n".join(
        [
            f"# The run, resolved for {processes} process{'es' if processes != 1 else ''}",
            run_yaml,
            f"# {resolved.plan.equation()}",
            "---",
            f"# What DeepSpeed is given ({engine.source}, ZeRO {engine.zero_stage})",
            json.dumps(engine.deepspeed, indent=2),
        ]
    )
