"""Conversion of a file of another trainer to a run YAML (`bigtrain convert`). Pure, except that it
reads files.

Every key is used, listed, or refused: a run that another trainer would not compute is written only
if the user omits the key by name.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.conversion import axolotl, llama_factory, megatron, megatron_keys, trainer
from bigtrain.settings.conversion.axolotl_keys import AXOLOTL_NAME, AXOLOTL_TABLE
from bigtrain.settings.conversion.common import read_values
from bigtrain.settings.conversion.draft import MISSPELLING_SIMILARITY, Draft, is_unset
from bigtrain.settings.conversion.tables import Table
from bigtrain.settings.conversion.trainer_keys import TRAINER_NAME, TRAINER_TABLE
from bigtrain.settings.deepspeed.keys import key_table
from bigtrain.settings.loading import apply_overrides, parse_run_config, parse_yaml
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.text_files import TextFileError, read_text


@dataclass(frozen=True)
class Trainer:
    """Another trainer.

    table: rows of keys. owns: whether the keys of a file are the trainer's. fill: sets the
    settings that follow from several keys; its second argument is ``--task``. flat: the keys of a
    file without its nesting. keys_of_other_files: keys that files next to the file have. defaults:
    of keys.
    """

    name: str
    table: Table
    owns: Callable[[Mapping[str, Any]], bool]
    fill: Callable[[Draft, str | None], None]
    flat: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    keys_of_other_files: Callable[[Mapping[str, Any], Path], Mapping[str, Any]] = (
        lambda keys, folder: {}
    )
    defaults: Mapping[str, Any] = field(default_factory=dict)


TRAINERS: Mapping[str, Trainer] = {
    "axolotl": Trainer(AXOLOTL_NAME, AXOLOTL_TABLE, axolotl.is_axolotl, axolotl.fill, axolotl.flat),
    "llama-factory": Trainer(
        llama_factory.NAME,
        llama_factory.TABLE,
        llama_factory.is_llama_factory,
        llama_factory.fill,
        keys_of_other_files=llama_factory.dataset_info,
    ),
    "gpt-neox": Trainer(
        megatron_keys.NEOX_NAME,
        megatron_keys.NEOX_TABLE,
        megatron.is_neox,
        megatron.fill_neox,
        megatron.flat,
        defaults=megatron_keys.NEOX_DEFAULTS,
    ),
    "megatron": Trainer(
        megatron_keys.MEGATRON_NAME,
        megatron_keys.MEGATRON_TABLE,
        megatron.is_megatron,
        megatron.fill_megatron,
        megatron.flat,
        defaults=megatron_keys.MEGATRON_DEFAULTS,
    ),
    "trainer": Trainer(
        TRAINER_NAME,
        TRAINER_TABLE,
        lambda keys: "learning_rate" in keys or "per_device_train_batch_size" in keys,
        trainer.fill,
    ),
}
"""Trainers by ``--from``, in the order in which a file is compared with them."""


_NOT_CONVERTED: Mapping[tuple[str, ...], str] = {
    ("train_dataset", "model_class", "dist_config"): "has keys of LLaMA-Factory's new trainer (v1)",
    ("reward_funcs", "num_generations", "use_vllm"): "is of reinforcement learning",
    ("trl", "ebft", "vllm"): "is of reinforcement learning",
    ("train_impl", "dataset_impl", "pos_train_data_paths"): "is of GPT-NeoX's post-training",
}
"""Files that are refused: keys by which they are detected, and the end of "the file ..."."""


@dataclass(frozen=True)
class Conversion:
    """The run of another trainer's file. tree: sections of the run YAML. commands: that make the
    data. notes: lines on keys without counterpart, and on differences."""

    trainer: str
    tree: dict[str, Any]
    config: RunConfig
    commands: Sequence[str]
    notes: Sequence[str]


def convert(
    files: Sequence[Path],
    *,
    world_size: int | None = None,
    trainer_name: str | None = None,
    task: str | None = None,
    omitted: Collection[str] = (),
    overrides: Sequence[str] = (),
    more_words: Sequence[str] = (),
) -> Conversion:
    """Return the run of `files`, in which later files replace keys of earlier ones.

    world_size: ranks; needed if the file has the batch of a device only. trainer_name: of
    `TRAINERS`; None: detect it by the keys. task: trainer of TRL. omitted: keys to do without.
    overrides: settings of the run, as ``section.key=value``. more_words: further options of the
    command line, for the command that an error suggests. Raises ConfigError with every key that is
    unknown, or changes the mathematics and has no counterpart, and for a run that bigtrain refuses.
    """
    # The keys of the files, and the settings that the user gives.
    label = ", ".join(map(str, files))
    tree: dict[str, Any] = {}
    for file in files:
        tree.update(read_tree(file))
    source = find_trainer(tree, label, trainer_name)
    keys = source.flat(tree)
    keys.update(source.keys_of_other_files(keys, files[0].parent))
    given_settings = {}
    for override in overrides:
        path, _, text = override.partition("=")
        given_settings[path] = text
    draft = Draft(
        source.name,
        keys,
        {*omitted},
        world_size,
        source.defaults,
        given_settings,
    )
    draft.problems += [
        Problem(f"--omit {key}", None, "the file has no such key", "a key of the file")
        for key in omitted
        if not _has_key(draft, key, source.table)
    ]
    # Replace values by what the trainer reads, apply the rows of the keys, then set what follows
    # from several keys.
    read_values(draft, source.table)
    draft.apply(source.table)
    draft.run.setdefault("optimizer", {})
    source.fill(draft, task)
    apply_overrides(draft.run, overrides)
    if draft.problems:
        option_words = []
        for option, value in (
            ("--world-size", world_size),
            ("--from", trainer_name),
            ("--task", task),
        ):
            if value is not None:
                option_words += [option, str(value)]
        command = _whole_command(draft, files, overrides, [*option_words, *more_words])
        raise ConfigError([*draft.problems, *command], label)
    try:
        config = parse_run_config(draft.run)
        if world_size is not None:
            resolve_run(config, world_size)
    except ConfigError as error:
        raise ConfigError(_by_keys_of_file(error.problems, draft, source.table), label) from error
    return Conversion(source.name, draft.run, config, draft.commands, draft.notes)


def _has_key(draft: Draft, path: str, table: Table) -> bool:
    """Return whether a key can be omitted: the file has it, or the table has a row for it in the
    dictionary that contains it. path: dotted, as datasets.0.type."""
    *parent_names, name = path.split(".")
    keys = draft.value_in_file(".".join(parent_names)) if parent_names else draft.keys
    for parent_name in parent_names:
        if not parent_name.isdecimal():
            table = table[parent_name].members if parent_name in table else {}
    return isinstance(keys, Mapping) and (name in keys or name in table)


class _KeyOfSetting(NamedTuple):
    """A key of the file that decides a setting; is_inexact: also further settings."""

    is_unset: bool
    is_inexact: bool
    key: str


def _by_keys_of_file(problems: Sequence[Problem], draft: Draft, table: Table) -> list[Problem]:
    """Return the problems of settings as problems of the keys of the file that decide the settings,
    one for each key. Problems of settings that no key decides are returned unchanged."""
    problem_of_key: dict[str, Problem] = {}
    for problem in problems:
        setting = problem.key
        # Keys whose row names the setting, a section around it, or a setting within it.
        candidates: list[_KeyOfSetting] = []
        for key, row in table.items():
            for name in [row.path, *re.findall(r"`([a-z_.]+)`", row.text)]:
                is_within = f"{setting}.".startswith(f"{name}.") or name.startswith(f"{setting}.")
                if name and is_within and row.kind in ("sets", "read"):
                    is_key_unset = is_unset(draft.value(key))
                    candidates.append(_KeyOfSetting(is_key_unset, name != setting, key))
        if not candidates or setting in draft.given_settings:
            problem_of_key[setting] = problem
            continue
        # Prefer a key with a value, then an exact key; of equal ones the first in the table.
        best = min(candidates, key=lambda candidate: (candidate.is_unset, candidate.is_inexact))
        key = best.key
        row_path = table[key].path or setting
        fix = f"{key}: VALUE in the file, or {row_path}=VALUE after the file"
        if draft.value(key) is None:
            problem_of_key.setdefault(key, Problem(key, None, "is missing", fix))
        else:
            rule = f"{problem.rule} ({setting})"
            problem_of_key.setdefault(
                key, Problem(key, draft.keys.get(key), rule, problem.remedy or fix)
            )
    return list(problem_of_key.values())


def _whole_command(
    draft: Draft, files: Sequence[Path], overrides: Sequence[str], option_words: Sequence[str]
) -> list[Problem]:
    """Return one problem whose fix names all options that the problems suggest: the complete
    command if the options solve every problem, else the options. Empty for a single key to omit,
    whose own problem names the option. option_words: options that the user gave."""
    omitted = [
        p.key
        for p in draft.problems
        if f"--omit {p.key} " in f"{p.remedy} " and not p.remedy.startswith("did you mean")
    ]
    settings = [f"{path}=VALUE" for path in draft.missing_settings]
    if not settings and len(omitted) < 2:
        return []
    all_omitted = list(dict.fromkeys((*draft.omitted, *omitted)))
    options = ["--omit", *all_omitted] if all_omitted else []
    rule = "a run without them is another one" if omitted else "the value is yours to choose"
    if len(draft.problems) > len(omitted) + len(settings):
        return [Problem("all of these", None, rule, shlex.join([*settings, *options]))]
    first, *further_files = map(str, files)
    # Settings come before the options: an option of several words would take them, too.
    words = ["bigtrain", "convert", first, *overrides, *settings]
    if further_files:
        words += ["--also", *further_files]
    command = shlex.join([*words, *option_words, *options])
    return [Problem("the command", None, rule, command)]


def find_trainer(tree: Mapping[str, Any], label: str, name: str | None) -> Trainer:
    """Return the trainer of a file, by `name` or else by its keys. Raises ConfigError for a file
    of no trainer."""
    # Files that are no trainer's, or not converted.
    for marker_keys, reason in _NOT_CONVERTED.items():
        if markers := sorted({*marker_keys} & tree.keys()):
            rule = f"{reason}, which is not converted"
            raise ConfigError(Problem(label, markers[0], rule, "write the run by `bigtrain init`"))
    if len({"model", "data", "batch", "train", "optimizer", "output"} & tree.keys()) > 2:
        fix = f"bigtrain check --config {shlex.quote(label)}"
        raise ConfigError(Problem(label, None, "is a run of bigtrain already", fix))
    if tree and tree.keys() <= key_table()["keys"].keys():
        fix = f"bigtrain check --config RUN.yaml --deepspeed_config {shlex.quote(label)}"
        raise ConfigError(Problem(label, None, "is a DeepSpeed JSON, not a trainer's file", fix))
    if name is not None:
        return TRAINERS[name]
    owner = next((source for source in TRAINERS.values() if source.owns(source.flat(tree))), None)
    # The key by which a trainer is detected may be misspelled. Then this trainer knows more keys of
    # the file than the detected owner, and owns the file with corrected keys.
    num_owner_keys = len(owner.flat(tree).keys() & owner.table.keys()) if owner else 0
    for candidate in TRAINERS.values():
        keys = candidate.flat(tree)
        corrections: dict[str, str] = {}
        for key in keys.keys() - candidate.table.keys():
            cutoff = MISSPELLING_SIMILARITY
            if similar := difflib.get_close_matches(key, candidate.table, n=1, cutoff=cutoff):
                corrections[key] = similar[0]
        has_more_keys = len(keys.keys() & candidate.table.keys()) > num_owner_keys
        if corrections and has_more_keys and not candidate.owns(keys):
            corrected = {corrections.get(key, key): value for key, value in keys.items()}
            if candidate.owns(corrected):
                rule = f"is not a key of {candidate.name}, whose other keys the file has"
                raise ConfigError(
                    [
                        Problem(key, keys[key], rule, f"did you mean {corrected_key}?")
                        for key, corrected_key in corrections.items()
                    ],
                    label,
                )
    if owner is not None:
        return owner
    names = ", ".join(candidate.name for candidate in TRAINERS.values())
    raise ConfigError(
        Problem(label, None, f"is not a file of {names}", f"--from {' or '.join(TRAINERS)}")
    )


def read_tree(path: Path) -> dict[str, Any]:
    """Return the keys of a YAML or JSON file. Raises ConfigError."""
    try:
        text = read_text(path)
    except TextFileError as error:
        raise ConfigError(Problem(str(path), None, error.rule, error.fix)) from error
    try:
        tree = json.loads(text)
    except ValueError:
        tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(Problem(str(path), None, "must hold keys and values"))
    return tree
