"""`bigtrain init`: write a commented run YAML from options or a few questions."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bigtrain.commands.arguments import positive_int
from bigtrain.errors import ConfigError, Problem
from bigtrain.python_api.new_run import NewRun, write_new_run
from bigtrain.settings.hf_config_keys import missing_model
from bigtrain.settings.run_config import ModelSection

# Options that answer a question; with any option no questions are asked.
_ANSWERS = (
    "model",
    "new_model",
    "data",
    "shards",
    "chat",
    "adapters",
    "devices",
    "steps",
    "sequence_length",
    "global_batch_size",
    "lr",
    "run_directory",
)


def run(args: argparse.Namespace) -> int:
    """Write the YAML and print the next commands. Raises ConfigError, ModelError, OutputError."""
    answers = {name: getattr(args, name) for name in _ANSWERS if getattr(args, name) is not None}
    if args.output.exists() and not args.force:
        rule = "exists, and may have been edited"
        remedy = "another --output, or --force to replace it"
        raise ConfigError(Problem("--output", str(args.output), rule, remedy))
    if not answers and sys.stdin.isatty():
        answers = _ask()
    missing = [] if answers.keys() & {"model", "new_model"} else ["--model or --new-model"]
    missing += [] if "data" in answers else ["--data"]
    if missing:
        rule = "is required when stdin is not a terminal"
        raise ConfigError(Problem(" and ".join(missing), None, rule, "bigtrain init --help"))
    new_run = NewRun(**answers)
    if new_run.names_nothing_here and (close := _similar(new_run.data)):
        rule, remedy = "does not exist", f"did you mean {close}?"
        raise ConfigError(Problem("--data", new_run.data, rule, remedy))
    written = write_new_run(new_run, args.output, force=args.force)
    if new_run.names_nothing_here:
        print(f"note: {new_run.data} does not exist yet", file=sys.stderr)
    print(f"wrote {' and '.join(map(str, written.files))}; next:")
    for command in written.next_commands:
        print(f"  {command}")
    return 0


def _similar(path: str) -> str | None:
    """Return a file or folder next to the missing `path` with a similar name."""
    parent = Path(path).parent
    if not parent.is_dir():
        return None
    names = [entry.name for entry in parent.iterdir()]
    close = difflib.get_close_matches(Path(path).name, names, n=1)
    return str(parent / close[0]) if close else None


def _ask() -> dict[str, Any]:
    """Return the answers of a user at a terminal; an empty one selects the default. Raise
    ConfigError if input ends."""
    try:
        defaults = NewRun(data="")
        print("A run YAML from a few answers; press Enter to accept the default in brackets.")
        answers: dict[str, Any] = {}
        trained = _yes("Start from trained weights (no: a new model with random weights)?", True)
        if trained:
            answers["model"] = _existing(
                "Model (directory or Hugging Face name)",
                lambda answer: bool(missing_model(ModelSection(path=answer))),
            )
            answers["adapters"] = _yes("Train LoRA adapters only?", False)
        else:
            text = "Configuration (directory, Hugging Face name or recipe)"
            answers["new_model"] = _text(text, "quickstart")
        text = "Data (shards, or files, a folder or a Hub dataset to tokenize)"
        answers["data"] = _existing(text, lambda answer: NewRun(data=answer).names_nothing_here)
        answers["chat"] = _yes("Are the data conversations?", False)
        devices = _text(
            "Devices to plan for, such as 8xH100-80GB or 2xCPU (empty: one, unplanned)", ""
        )
        if devices:
            answers["devices"] = devices
        answers["steps"] = _count("Optimizer steps", defaults.steps)
        length = _count("Tokens per sample (1024, or the model's positions)", 0)
        if length:
            answers["sequence_length"] = length
        answers["global_batch_size"] = _count("Samples per step", defaults.global_batch_size)
        return answers
    except EOFError:
        print()
        rule = "the input ends before the last question"
        raise ConfigError(Problem("bigtrain init", None, rule, "bigtrain init --help")) from None


def _existing(question: str, is_missing: Callable[[str], bool]) -> str:
    """Ask for a name until it exists or is given twice."""
    refused = None
    while True:
        answer = _text(question)
        if answer == refused or not is_missing(answer):
            return answer
        close = _similar(answer)
        hint = f"did you mean {close}?" if close else "enter it again to use it anyway"
        print(f"{answer} does not exist; {hint}")
        refused = answer


def _text(question: str, default: str | None = None) -> str:
    hint = f" [{default}]" if default else ""
    while True:
        answer = input(f"{question}{hint}: ").strip()
        if answer or default is not None:
            return answer or str(default)


def _yes(question: str, default: bool) -> bool:
    while True:
        answer = input(f"{question} [{'yes' if default else 'no'}]: ").strip().lower()
        if not answer:
            return default
        if answer in ("y", "yes", "n", "no"):
            return answer[0] == "y"
        print("answer yes or no")


def _count(question: str, default: int) -> int:
    """Ask for a number; an empty answer selects `default`, which is not shown if 0."""
    while True:
        answer = _text(question, str(default or ""))
        if not answer:
            return default
        try:
            return positive_int(answer)
        except (ValueError, argparse.ArgumentTypeError):
            print("enter an integer of at least 1")
