"""Run YAMLs from the configurations of other trainers: `bigtrain convert`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.errors import ConfigError, OutputError, Problem
from bigtrain.settings.commented_yaml import commented_yaml
from bigtrain.settings.conversion.convert import convert as convert_files
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.files import write_whole
from bigtrain.system.next_commands import train_line

_SUFFIXES = (".yaml", ".yml", ".json")
"""Endings of names of files that are converted."""


@dataclass(frozen=True)
class Converted:
    """A written run YAML. trainer: name of the file's trainer. notes: lines on keys without a
    setting, and on differences. next_commands: that make the data, check the run and start it."""

    trainer: str
    config: RunConfig
    notes: Sequence[str]
    next_commands: Sequence[str]


def convert(
    *files: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
    trainer: str | None = None,
    task: str | None = None,
    omit: Sequence[str] = (),
    output: str | Path = "run.yaml",
    force: bool = False,
) -> Converted:
    """Write the run YAML of another trainer's configuration: Axolotl, LLaMA-Factory, HF
    TrainingArguments, TRL, GPT-NeoX, Megatron-LM.

    files: YAML or JSON; of several files a key counts in the last one. overrides: settings of the
    run, as ``section.key=value``. world_size: devices that the file was run with. trainer: whose
    file it is, as ``--from`` (default: as its keys say). task: pretrain (run_clm.py), or the
    trainer of TRL: sft, dpo, orpo, kto, reward. omit: keys to do without. force: replace `output`.

    Raises ConfigError with every key that is unknown, or that changes the mathematics and has no
    counterpart, and for a run that is refused; OutputError.
    """
    # Refuse before anything is read.
    path = Path(output)
    problems = []
    for file in map(Path, files):
        if file.is_dir():
            paths = sorted(str(path) for path in file.iterdir() if path.suffix in _SUFFIXES)
            fix = f"the path of one file: {', '.join(paths) or 'it has no YAML or JSON'}"
            problems.append(Problem(str(file), None, "is a directory", fix))
        elif not file.is_file():
            fix = "the path of the other trainer's file"
            problems.append(Problem(str(file), None, "no such file", fix))
    if problems:
        raise ConfigError(problems)
    if path.exists() and not force:
        rule = "exists, and may have been edited"
        fix = "another --output, or --force to replace it"
        raise ConfigError(Problem("--output", str(path), rule, fix))
    # Convert, and check the run as its start would.
    more_words = [] if path == Path("run.yaml") else ["--output", str(path)]
    if force:
        more_words.append("--force")
    converted = convert_files(
        [Path(file) for file in files],
        world_size=world_size,
        trainer_name=trainer,
        task=task,
        omitted=omit,
        overrides=overrides,
        more_words=more_words,
    )
    if world_size is None:  # otherwise the conversion has resolved the run
        resolve_run(converted.config, 1)
    # Comments at the head of the YAML name the file, and what was not converted.
    names = ", ".join(str(file) for file in files)
    head = [
        f"From {names}, a file of {converted.trainer}, by bigtrain convert.",
        *(f"- {note}" for note in converted.notes),
    ]
    try:
        write_whole(path, commented_yaml(converted.tree, head).encode())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    num_ranks = world_size or 1
    next_commands = [
        *converted.commands,
        f"bigtrain check --config {shlex.quote(str(path))} --world-size {num_ranks} --inputs",
        train_line(["--config", str(path)], num_ranks),
    ]
    return Converted(converted.trainer, converted.config, converted.notes, next_commands)
