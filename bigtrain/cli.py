"""The `bigtrain` command: finds the subcommand and calls it. Imports nothing heavy itself.

A subcommand is a module in `bigtrain/commands/` with ``run(args) -> int`` (the exit code); `args`
is a dataclass whose fields are the command line. It imports torch and the like inside ``run``, so
that ``bigtrain --help`` takes no longer than Python's own start.
"""

from __future__ import annotations

import gc
import logging
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

from bigtrain.commands.registry import COMMANDS, build_parser, command_module
from bigtrain.errors import BigtrainError
from bigtrain.system.arguments import read_arguments
from bigtrain.system.processes import exit_process

GC_THRESHOLD = 50_000
"""New objects between two garbage collections; Python's own default is 700."""


_IMPORT_NOISE = {"torchao": logging.ERROR, "torch.utils._pytree": logging.ERROR}
"""Loggers that warn, while torchao is imported, of kernels for other devices and of its own use of
torch; levels at which they are shown. A run writes them to its log.txt."""


# As a shell tells the end of other programs by these signals.
_EXIT_SIGPIPE = 128 + 13
_EXIT_SIGINT = 128 + 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Returns the exit code: 0, or 2 for an error the user can fix."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if word in COMMANDS), None)
    # argparse accepts the beginning of an option: --he is --help.
    asks_help = any(
        word.startswith("-h") or (len(word) > 2 and "--help".startswith(word)) for word in arguments
    )
    only_runs = command is not None and arguments[0] == command and not asks_help
    parser = build_parser(command, only_runs=only_runs)
    if not arguments:
        parser.print_help()
        return 0
    namespace = parser.parse_args(arguments)
    try:
        return int(command_module(namespace.command).run(read_arguments(namespace)))
    except BigtrainError as error:
        notes = getattr(error, "__notes__", ())
        print(f"bigtrain {namespace.command}: {error}", *notes, sep="\n", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # A broken pipe is no error if it is the standard output: its reader (`| head`) has ended.
        # A broken socket is an error.
        poll = select.poll()
        poll.register(sys.stdout, 0)
        if not any(state & select.POLLERR for _, state in poll.poll(0)):
            raise
        return _EXIT_SIGPIPE


def program() -> NoReturn:
    """Entry point: run `main` on ``sys.argv`` and end the process with its exit code."""
    # Commands make millions of objects with hardly a reference cycle, and import large libraries;
    # with Python's own threshold the collector would traverse all objects very often.
    gc.set_threshold(GC_THRESHOLD, 10, 10)
    for name, level in _IMPORT_NOISE.items():
        logging.getLogger(name).setLevel(level)
    try:
        code = main()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = _EXIT_SIGINT
    exit_process(code)


if __name__ == "__main__":
    program()
