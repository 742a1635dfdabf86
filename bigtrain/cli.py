"""The `bigtrain` command: finds the subcommand and calls it. Imports nothing heavy itself.

A subcommand is a module in `bigtrain/commands/` with ``add_arguments(parser)`` and
``run(args) -> int`` (the exit code). It imports torch and the like inside ``run``, so that
``bigtrain --help`` takes no longer than Python's own start.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from bigtrain import __version__
from bigtrain.errors import BigtrainError
from bigtrain.settings.field_names import with_setting_names
from bigtrain.system.processes import exit_process

GC_THRESHOLD = 50_000
"""New objects between two garbage collections; Python's own default is 700."""

COMMANDS = {
    "tokenizer": "train a byte-level BPE tokenizer on text, or add tokens to one",
    "tokenize": "turn text into token shards",
    "inspect": "show what is in token shards",
    "check": "resolve and check a run without starting it",
    "plan": "say what fits a number of devices, and how fast it will be",
    "parity": "compare every legal topology of N ranks with a single-process run",
    "launch": "write what starts a run: a script for Slurm or torchrun, Kubernetes manifests",
    "hostfile": "write or check a hostfile, and the environment its hosts are given",
    "checkpoints": "list a run's checkpoints: complete or corrupt, which topology wrote each, and "
    "why it is kept",
    "verify": "read token shards or a run's checkpoints again and compare every checksum",
    "report": "write a run as one page: curves, events, settings; or serve it while it goes on",
    "outer-server": "hold the global weights of sites that can only open connections outwards",
    "doctor": "look at every host before a run is started on it",
    "fetch": "copy a run, a model or a dataset from an address (s3://, ...) to a directory",
    "export": "write a run's weights as a verified Hugging Face directory",
    "grow": "give a Hugging Face model rows for the tokens that were added to its tokenizer",
    "generate": "continue a prompt with a Hugging Face directory",
}


SETTINGS = "[section.key=value ...]"
"""How the usage of a command ends that takes settings of a run."""


class _Parser(argparse.ArgumentParser):
    """Accepts overrides between options too, as train.py does."""

    _intermixing = False
    takes_settings = False  # whether the command that was named does

    def error(self, message: str) -> NoReturn:
        super().error(with_setting_names(message) if self.takes_settings else message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._intermixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._intermixing = True  # what follows comes through here
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixing = False


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of all commands; only the arguments of `command` are loaded (None: none)."""
    parser = _Parser(
        prog="bigtrain",
        description="Train any Hugging Face causal LM under DeepSpeed. "
        "Training itself: deepspeed bigtrain/train.py --config RUN.yaml",
    )
    parser.add_argument("--version", action="version", version=f"bigtrain {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=_sentence(summary))
        if name == command:
            _module(name).add_arguments(subparser)
            parser.takes_settings = subparser.format_usage().rstrip().endswith(SETTINGS)
    return parser


def _module(command: str) -> Any:
    """The module of a command: its name, with underscores."""
    return importlib.import_module(f"bigtrain.commands.{command.replace('-', '_')}")


def _sentence(summary: str) -> str:
    return summary[:1].upper() + summary[1:]  # capitalize() would write hugging face


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code: 0, or 2 for an error the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if word in COMMANDS), None)
    args = build_parser(command).parse_args(arguments)
    try:
        return int(_module(args.command).run(args))
    except BigtrainError as error:
        print(f"bigtrain {args.command}: {error}", file=sys.stderr)
        return error.exit_code


def program() -> NoReturn:
    """Entry point: run `main` on ``sys.argv`` and end the process with its exit code."""
    # Commands make millions of objects with hardly a reference cycle, and import large libraries;
    # with Python's own threshold the collector would traverse them again and again.
    gc.set_threshold(GC_THRESHOLD, 10, 10)
    exit_process(main())


if __name__ == "__main__":
    program()
