"""Train: the program that every launcher starts.

    deepspeed --num_accelerators 2 bigtrain/train.py --config quickstart train.steps=20
    torchrun --nproc_per_node 2 bigtrain/train.py --config RUN.yaml --deepspeed_config zero3

Exit code 0 when the run is complete, 2 for an error the user can fix (one text, no traceback), 75
when a signal stopped it, saved, before its end, 77 when a later start of the run holds its
directory (docs/checkpoints.md).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Launchers put bigtrain/ itself first on sys.path, which would make its modules importable
    # under names such as `config`; the checkout belongs there instead.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

from bigtrain.system.processes import LaunchNotes, importing, leave
from bigtrain.system.stop_signals import StopSignals, ask_for_restart

if __name__ == "__main__":
    _signals = StopSignals()
    _signals.listen()  # before imports that take seconds

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals

from bigtrain.errors import BigtrainError
from bigtrain.settings.accelerate import read_accelerate
from bigtrain.settings.resolve import ResolvedRun, resolve_run_files
from bigtrain.system.world import World, has_other_hosts, read_world


def build_parser() -> argparse.ArgumentParser:
    """The arguments of train.py."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train a causal LM.")
    parser.add_argument("--config", required=True, help="run YAML, or the name of a recipe")
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        help="DeepSpeed JSON, or the name of one in ds_configs/ (default: the run's)",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE")
    return parser


def main(argv: Sequence[str] | None = None, signals: StopSignals | None = None) -> int:
    """Run to the end, from wherever the run directory stands. Returns the exit code.

    `signals`: those that this process has watched for since it began.
    """
    args = build_parser().parse_intermixed_args(argv)
    try:
        world = read_world(os.environ)
    except BigtrainError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return error.exit_code
    notes = LaunchNotes(os.environ)
    with StopSignals() if signals is None else nullcontext(signals) as heard:
        try:
            run = resolve_run_files(
                args.config,
                args.overrides,
                world.size,
                args.deepspeed_config,
                accelerate=read_accelerate(os.environ),
            )
            heard.leave_by(partial(_leave_unstarted, Path(run.config.output.directory), world))
            return train_run(run, world, heard)
        except BigtrainError as error:
            heard.listen()  # whose end the launcher asks for, now says why
            # As a rule every process fails alike.
            if world.size == 1 or notes.is_first(str(error)):
                who = "" if world.is_main else f" (rank {world.rank} of {world.size})"
                print(f"train.py: {error}{who}", file=sys.stderr, flush=True)
            return error.exit_code


def _leave_unstarted(directory: Path, world: World, received: Signals) -> None:
    """Ask for another start of a run that a signal ends before it has written anything.

    But where a process of this launch has failed, the launcher ends the others for that.
    """
    if LaunchNotes(os.environ).is_any():
        return
    # A failure on another host is not seen here; a run that it refused must leave nothing.
    may_be_refused = (
        received == SIGTERM and not directory.exists() and has_other_hosts(world, os.environ)
    )
    if received != SIGINT and not may_be_refused:
        ask_for_restart(directory, received.name, None)
    if world.is_main:
        print(
            f"train.py: stopped by {received.name} before the first step, so there was nothing to "
            "save; the same command goes on where the run stands",
            file=sys.stderr,
        )


def train_run(run: ResolvedRun, world: World, signals: StopSignals) -> int:
    """Train a resolved run; returns the exit code. Collective over all processes of `world`."""
    # Here, so that a configuration that is wrong is refused before torch is imported, and inputs
    # that are wrong before DeepSpeed, which looks for devices and talks while it is.
    with importing():
        from bigtrain.engine.startup.device import refuse_for_device
        from bigtrain.run.preflight import inspect_inputs

    refuse_for_device(run.config, world.size)
    with importing():  # the model's libraries
        # Of many shards one rank of each host looks at the files.
        inputs = inspect_inputs(run, "sizes" if world.local_rank == 0 else "listed")
        from bigtrain.run.training import train_inputs

    return train_inputs(run, inputs, world, signals)


if __name__ == "__main__":
    leave(main(signals=_signals))
