"""Names of the subcommands and their parser. Imports nothing heavy, and no command until its
arguments are needed."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from typing import Any, NoReturn, get_type_hints

from bigtrain import __version__
from bigtrain.commands.arguments import EXIT_CODES
from bigtrain.system.arguments import add_arguments, with_plain_types

COMMANDS = {
    "start": "train a model on a file, in one command: tokenize, plan, train, export",
    "init": "write a run YAML from options or a few questions",
    "convert": "write a run YAML from a configuration of Axolotl, LLaMA-Factory, TRL, HF Trainer, "
    "GPT-NeoX or Megatron-LM",
    "tokenizer": "train a byte-level BPE tokenizer on text, or add tokens to one",
    "tokenize": "turn text into token shards",
    "inspect": "show the contents of token shards",
    "manifest": "make Megatron's .bin/.idx files a dataset to train on, without copying them",
    "check": "resolve and check a run without starting it",
    "plan": "find the layouts that fit a number of devices, and their speed",
    "parity": "compare every legal topology of N ranks with a single-process run",
    "launch": "write a script for Slurm or torchrun, or Kubernetes manifests, that starts a run",
    "hostfile": "write or check a hostfile, and the environment of its hosts",
    "checkpoints": "list a run's checkpoints: complete or corrupt, which topology wrote each, and "
    "why it is kept",
    "verify": "read token shards or a run's checkpoints again and compare every checksum",
    "report": "write a run as one page: curves, events, settings; or serve it during the run",
    "outer-server": "keep the global weights of sites that can only open outgoing connections",
    "doctor": "check every host before a run is started on it",
    "fetch": "copy a run, a model or a dataset from an address (s3://, ...) to a directory",
    "export": "write a run's weights as a verified Hugging Face directory",
    "merge": "write the mean of several checkpoints as a verified Hugging Face directory",
    "score": "write log-probabilities of a run's data under its model, and filter documents by "
    "perplexity",
    "grow": "add embedding rows to a Hugging Face model for tokens added to its tokenizer",
    "generate": "continue a prompt with a Hugging Face directory, or chat with it",
    "schema": "print the JSON schema of the run YAML, for editors",
    "completion": "print a completion script for bash, zsh or fish",
}


TRAINING = "deepspeed bigtrain/train.py --config RUN.yaml"
_UNKNOWN_COMMAND = re.compile(
    r"argument COMMAND: invalid choice: '(.*?)' \("
)  # argparse's own words

SETTINGS = "[section.key=value ...]"
"""End of the usage of a command that accepts settings of a run."""


class CommandParser(argparse.ArgumentParser):
    """Parser that also accepts overrides between options, like train.py."""

    _is_intermixing = False  # while argparse parses options and overrides by a call of itself
    takes_settings = False  # whether the named command has overrides

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands: dict[str, argparse.ArgumentParser] = {}
        self.unread_words: list[str] = []
        self.named_command: argparse.ArgumentParser | None = None  # whose arguments are loaded

    def error(self, message: str) -> NoReturn:
        """Exit with code 2 and argparse's message as one line, with a fix after ``->``."""
        message = with_plain_types(message)
        if message.endswith("required: COMMAND") and self.unread_words:
            message = f"unrecognized arguments: {' '.join(self.unread_words)}"
        # An unknown command: similar commands, or the launcher's line for "train".
        match = _UNKNOWN_COMMAND.match(message)
        if match is not None:
            name = match[1]
            close = difflib.get_close_matches(name, [*COMMANDS, "train"], n=3)
            commands = [command for command in close if command != "train"]
            remedies = [f"did you mean {' or '.join(commands)}?"] if commands else []
            if "train" in close:
                remedies.append(f"a launcher starts training: {TRAINING}")
                remedies.append("bigtrain start --model MODEL --data FILE")
            message = f"unknown command {name} -> {' or '.join(remedies) or 'bigtrain --help'}"
        # An unknown argument: a similar option, or how the setting that it may mean is written.
        command = self.named_command or self
        if option := similar_option(message, command):
            message = f"{message} -> did you mean {option}?"
        elif self.takes_settings:
            from bigtrain.settings.loading import with_setting_names  # imports all sections

            message = with_setting_names(message)
        if " -> " not in message and "is written" not in message:
            message = f"{message} -> {command.prog} --help"
        self.exit(2, f"{self.prog}: error: {message}\n")  # without the usage: one line

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.unread_words = list(sys.argv[1:] if args is None else args)
        if self._is_intermixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._is_intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_intermixing = False


def similar_option(message: str, parser: argparse.ArgumentParser) -> str | None:
    """Return the option of `parser` that is similar to an unknown option in argparse's `message`;
    None without any."""
    words = message.partition("unrecognized arguments: ")[2].split()
    options = ["--help", *re.findall(r"--[\w-]+", parser.format_usage())]
    matches = [difflib.get_close_matches(word, options, n=1, cutoff=0.75) for word in words]
    return next((match[0] for match in matches if match), None)


def build_parser(*loaded: str | None, only_runs: bool = False) -> CommandParser:
    """Return the parser of the commands, with arguments for those that are `loaded`. only_runs: the
    command line runs a loaded command and asks for no help; other commands and texts of help, which
    take a tenth of the time of `bigtrain check`, are omitted."""
    parser = CommandParser(
        prog="bigtrain",
        description="Train any Hugging Face causal LM under DeepSpeed. "
        f"Training itself: {TRAINING}",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"bigtrain {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    names = [name for name in COMMANDS if not only_runs or name in loaded]
    for name in names:
        summary = COMMANDS[name]
        subparser = subparsers.add_parser(
            name, help=summary, description=summary[:1].upper() + summary[1:], epilog=EXIT_CODES
        )
        parser.commands[name] = subparser
        if name in loaded:
            _add_arguments(subparser, name, has_help=not only_runs)
            parser.named_command = subparser
            parser.takes_settings = subparser.format_usage().rstrip().endswith(SETTINGS)
    return parser


def _add_arguments(parser: CommandParser, command: str, *, has_help: bool) -> None:
    """Add the arguments of `command`; for a command with `KINDS` (launchers), a subcommand for each
    kind."""
    module = command_module(command)
    if not hasattr(module, "KINDS"):
        add_arguments(parser, get_type_hints(module.run)["args"], has_help=has_help)
        return
    records = module.KINDS
    subparsers = parser.add_subparsers(dest="kind", metavar="|".join(records), required=True)
    for name, record in records.items():
        parser.commands[name] = subparsers.add_parser(
            name, help=record.summary, description=f"Write {record.summary}", epilog=EXIT_CODES
        )
        add_arguments(parser.commands[name], record, has_help=has_help)


def command_module(command: str) -> Any:
    """Return the module of a command, which has its name with underscores."""
    return importlib.import_module(f"bigtrain.commands.{command.replace('-', '_')}")
