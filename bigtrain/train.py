"""Train: the program that every launcher starts.

    deepspeed --num_accelerators 2 bigtrain/train.py --config quickstart train.steps=20
    torchrun --nproc_per_node 2 bigtrain/train.py --config RUN.yaml --deepspeed_config zero3

Exit code 0 when the run is complete, 2 for an error the user can fix (one text, no traceback), 75
when a signal stopped it before its last step and it was saved, 77 when a newer launch of the run
holds its directory (docs/checkpoints.md).
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Launchers put bigtrain/ itself first on sys.path, so that its modules could be imported under
    # names such as `settings`; put the checkout there instead.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

    # One line for a Python without bigtrain's packages, until the imports below are done.
    from bigtrain.system.missing_package import report_missing_package

    sys.excepthook = report_missing_package

from bigtrain.system.processes import HostErrorLog, exit_process, importing
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
from typing import NoReturn

from bigtrain.errors import BigtrainError
from bigtrain.python_api.configuring import train_resolved
from bigtrain.settings.accelerate import read_accelerate
from bigtrain.settings.loading import with_setting_names
from bigtrain.settings.resolve import resolve_run_files
from bigtrain.system.world import World, has_other_hosts, read_world

_EXIT_CODES = (
    "Exit codes: 0 the run is complete; 2 something to fix, told in one text; 75 stopped by a "
    "signal, and saved; 76 no rank made progress; 77 a newer launch of the run holds its "
    "directory; 78 this host computes wrong bits; 1 an error of bigtrain itself, with a traceback."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, without argparse's usage, and with a fix to type.
        text = with_setting_names(message)
        if "required: --config" in text:
            text += " -> --config RUN.yaml, or the name of a recipe"
        elif "is written" not in text:
            text += " -> train.py --help"
        self.exit(2, f"{self.prog}: error: {text}\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of train.py's arguments."""
    parser = _Parser(prog="train.py", description="Train a causal LM.", epilog=_EXIT_CODES)
    parser.add_argument("--config", required=True, help="run YAML, or the name of a recipe")
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        help="DeepSpeed JSON, or the name of one in ds_configs/ (default: the run's)",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    # DeepSpeed's own flag, which its scripts are started with; every run here is under DeepSpeed.
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="SECTION.KEY=VALUE",
        help="settings of the run to change, such as train.steps=20 (default: none)",
    )
    return parser


def main(argv: Sequence[str] | None = None, signals: StopSignals | None = None) -> int:
    """Train to the last step, from the newest checkpoint if there is one. Returns the exit code.

    `signals`: the handlers that this process installed when it started, if it did.
    """
    args = build_parser().parse_intermixed_args(argv)
    try:
        world = read_world(os.environ)
    except BigtrainError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return error.exit_code
    host_errors = HostErrorLog(os.environ)
    with StopSignals() if signals is None else nullcontext(signals) as stop_signals:
        try:
            run = resolve_run_files(
                args.config,
                args.overrides,
                world.size,
                args.deepspeed_config,
                accelerate=read_accelerate(os.environ),
            )
            stop_signals.exit_after(
                partial(_exit_before_start, Path(run.config.output.directory), world)
            )
            return train_resolved(run, world, stop_signals, importing).exit_code
        except BigtrainError as error:
            # The launcher may send SIGTERM because this rank fails: print the error anyway.
            stop_signals.listen()
            # Usually every rank fails with the same error: one per host prints it.
            if world.size == 1 or host_errors.is_first(str(error)):
                rank_note = "" if world.is_main else f" (rank {world.rank} of {world.size})"
                print(f"train.py: {error}{rank_note}", file=sys.stderr, flush=True)
            return error.exit_code


def _exit_before_start(directory: Path, world: World, received: Signals) -> None:
    """Write the requeue marker of a run that a signal ends before it has written anything.

    No marker is written if a rank of this launch has failed: then the launcher has sent the signal,
    to end the other ranks.
    """
    if HostErrorLog(os.environ).is_any():
        return
    # A failure on another host is unknown here, and a run that was refused there must not leave
    # any files: write none in a directory that does not exist.
    may_be_refused = (
        received == SIGTERM and not directory.exists() and has_other_hosts(world, os.environ)
    )
    if received != SIGINT and not may_be_refused:
        ask_for_restart(directory, received.name, None)
    if world.is_main:
        print(
            f"train.py: stopped by {received.name} before the first step, so there was nothing to "
            "save; run the same command again to continue",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.excepthook = sys.__excepthook__
    exit_process(main(signals=_signals))
