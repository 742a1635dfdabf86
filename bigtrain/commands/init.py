"""`bigtrain init`: write a commented run YAML from options or a few questions."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.system.arguments import Argument, File, Positive, above_zero, positive_int
from bigtrain.system.next_commands import next_lines


@dataclass(frozen=True, kw_only=True)
class InitArguments:
    """Command line of `bigtrain init`."""

    model: Annotated[str | None, "NAME_OR_DIR", Argument(one_of="at most one")] = None
    """start from these trained weights: directory or name on the Hugging Face hub"""
    new_model: Annotated[str | None, "NAME_OR_DIR", Argument(one_of="at most one")] = None
    """start from random weights with this configuration: directory, Hub name or recipe"""
    data: Annotated[str | None, "PATH"] = None
    """shards of `bigtrain tokenize`, or text to be tokenized"""
    shards: Annotated[str | None, "DIR"] = None
    """directory for the shards of such text (default: shards/)"""
    chat: bool | None = None
    """the data are conversations: pack complete ones into samples (default: by the manifest of
    shards, else text)"""
    preference: bool | None = None
    """the data are pairs of answers, chosen and rejected: train by DPO (default: by the manifest of
    shards)"""
    adapters: bool | None = None
    """train LoRA adapters for the weights of --model (default: all weights)"""
    devices: Annotated[str | None, "NxDEVICE"] = None
    """plan the layout for these: 8xH100-80GB, 2xCPU (default: one rank, not planned)"""
    steps: Positive | None = None
    """optimizer steps of the run (default: 1000)"""
    epochs: Annotated[float | None, above_zero, "E"] = None
    """instead of --steps: times that the data is read"""
    sequence_length: Positive | None = None
    """tokens per sample (default: 1024, or the model's positions)"""
    global_batch_size: Positive | None = None
    """samples per optimizer step (default: 64, or less for few shards)"""
    lr: Annotated[float | None, above_zero, "RATE"] = None
    """peak learning rate (default: 2e-5 for trained weights, 2e-4 for adapters, 3e-4 for a new
    model)"""
    run_directory: Annotated[str | None, "DIR"] = None
    """output directory of the run (default: runs/ and the model's name, and -2 and so on if that
    holds other files)"""
    output: File = Path("run.yaml")
    """the YAML to write (default: run.yaml)"""
    force: bool = False
    """replace --output if it exists (default: refuse)"""


def run(args: InitArguments) -> int:
    """Write the YAML and print the next commands. Raises ConfigError, ModelError, OutputError."""
    from bigtrain.python_api.new_run import NewRun, write_new_run

    # Options of the new run that are set. Questions are asked only without any.
    option_values = {field.name: getattr(args, field.name) for field in fields(NewRun)}
    answers = {name: value for name, value in option_values.items() if value is not None}
    if args.output.exists() and not args.force:
        rule = "exists, and may have been edited"
        remedy = "another --output, or --force to replace it"
        raise ConfigError(Problem("--output", str(args.output), rule, remedy))
    if not answers and sys.stdin.isatty():
        answers = _ask_questions()
    missing = []
    if not answers.keys() & {"model", "new_model"}:
        missing.append("--model or --new-model")
    if "data" not in answers:
        missing.append("--data")
    if missing:
        rule = "is required when stdin is not a terminal"
        raise ConfigError(Problem(" and ".join(missing), None, rule, "bigtrain init --help"))
    new_run = NewRun(**answers)
    if new_run.names_nothing_here and (close := _similar_path(new_run.data)):
        rule, remedy = "does not exist", f"did you mean {close}?"
        raise ConfigError(Problem("--data", new_run.data, rule, remedy))
    say = partial(print, file=sys.stderr, flush=True)
    written = write_new_run(new_run, args.output, force=args.force, say=say)
    if new_run.names_nothing_here:
        print(f"note: {new_run.data} does not exist yet", file=sys.stderr)
    print(f"wrote {' and '.join(map(str, written.files))}; {next_lines(*written.next_commands)}")
    return 0


def _similar_path(path: str) -> str | None:
    """Return a file or folder next to the missing `path` with a similar name."""
    parent = Path(path).parent
    if not parent.is_dir():
        return None
    names = [entry.name for entry in parent.iterdir()]
    close = difflib.get_close_matches(Path(path).name, names, n=1)
    return str(parent / close[0]) if close else None


def _ask_questions() -> dict[str, Any]:
    """Return a user's answers as arguments of `NewRun`; an empty answer selects the default. Raise
    ConfigError if input ends."""
    from bigtrain.python_api.new_run import DEFAULT_BATCH, DEFAULT_STEPS, NewRun
    from bigtrain.settings.hf_config_keys import missing_model
    from bigtrain.settings.run_config import ModelSection

    try:
        print("A run YAML from a few answers; press Enter to accept the default in brackets.")
        answers: dict[str, Any] = {}
        # The model.
        trained = _ask_yes_or_no(
            "Start from trained weights (no: a new model with random weights)?", True
        )
        if trained:
            answers["model"] = _ask_existing(
                "Model (directory or Hugging Face name)",
                lambda answer: bool(missing_model(ModelSection(path=answer))),
            )
            answers["adapters"] = _ask_yes_or_no("Train LoRA adapters only?", False)
        else:
            text = "Configuration (directory, Hugging Face name or recipe)"
            answers["new_model"] = _ask_text(text, "quickstart")
        # Data and devices.
        text = "Data (shards, or files, a folder or a Hub dataset to tokenize)"
        answers["data"] = _ask_existing(text, lambda answer: NewRun(data=answer).names_nothing_here)
        answers["chat"] = _ask_yes_or_no("Are the data conversations?", False)
        devices = _ask_text(
            "Devices to plan for, such as 8xH100-80GB or 2xCPU (empty: one, unplanned)", ""
        )
        if devices:
            answers["devices"] = devices
        answers["steps"] = _ask_count("Optimizer steps", DEFAULT_STEPS)
        length = _ask_count("Tokens per sample (1024, or the model's positions)", 0)
        if length:
            answers["sequence_length"] = length
        answers["global_batch_size"] = _ask_count("Samples per step", DEFAULT_BATCH)
        return answers
    except EOFError:
        print()
        rule = "the input ends before the last question"
        raise ConfigError(Problem("bigtrain init", None, rule, "bigtrain init --help")) from None


def _ask_existing(question: str, is_missing: Callable[[str], bool]) -> str:
    """Ask for a name until it exists, or the user repeats the name of a missing file."""
    previous = None
    while True:
        answer = _ask_text(question)
        if answer == previous or not is_missing(answer):
            return answer
        close = _similar_path(answer)
        hint = f"did you mean {close}?" if close else "enter it again to use it anyway"
        print(f"{answer} does not exist; {hint}")
        previous = answer


def _ask_text(question: str, default: str | None = None) -> str:
    """Ask for a text; without a default until the answer is not empty."""
    hint = f" [{default}]" if default else ""
    while True:
        answer = input(f"{question}{hint}: ").strip()
        if answer or default is not None:
            return answer or str(default)


def _ask_yes_or_no(question: str, default: bool) -> bool:
    while True:
        answer = input(f"{question} [{'yes' if default else 'no'}]: ").strip().lower()
        if not answer:
            return default
        if answer in ("y", "yes", "n", "no"):
            return answer[0] == "y"
        print("answer yes or no")


def _ask_count(question: str, default: int) -> int:
    """Ask for a number; an empty answer selects `default`, which is not shown if 0."""
    while True:
        answer = _ask_text(question, str(default or ""))
        if not answer:
            return default
        try:
            return positive_int(answer)
        except (ValueError, argparse.ArgumentTypeError):
            print("enter an integer of at least 1")
