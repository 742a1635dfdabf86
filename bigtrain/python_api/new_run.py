"""First run YAML for a user's model, data and devices: `bigtrain init`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError, OutputError, Problem
from bigtrain.objectives.preference import PAIRS
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import ROWS
from bigtrain.python_api.configuring import check, load_config
from bigtrain.python_api.new_run_inputs import (
    ShardFacts,
    inspect_data,
    model_problems,
    read_shards,
    row_problems,
    template_problems,
)
from bigtrain.run.output_directory import check_output
from bigtrain.settings.commented_yaml import commented_yaml
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config, read_deepspeed_config
from bigtrain.settings.hf_config_keys import (
    TEXT_IDS,
    inspect_configuration,
    written_configuration,
)
from bigtrain.settings.loading import recipe_names
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import ModelSection, RunConfig
from bigtrain.system.files import whole_file
from bigtrain.system.next_commands import RANKS_PER_NODE, train_line
from bigtrain.system.storage.stores import is_address
from bigtrain.system.units import GIB

if TYPE_CHECKING:
    from bigtrain.python_api.planning import Plan

# Common peak learning rates of AdamW: full fine-tuning, adapters, random weights of small models.
_LR_BY_WEIGHTS = {"trained": 2.0e-5, "adapters": 2.0e-4, "random": 3.0e-4}
# Learning rates of DPO, of zephyr's and TRL's recipes (arXiv 2310.16944).
_PREFERENCE_LR_BY_WEIGHTS = {"trained": 5.0e-7, "adapters": 5.0e-6, "random": 5.0e-7}
_SEQUENCE_LENGTH = 1024
DEFAULT_STEPS, DEFAULT_BATCH = 1000, 64
_MAX_DEFAULT_LENGTH, _LENGTH_MULTIPLE = 8192, 64
"""Largest default length of a sample, and the number of which default lengths are multiples."""
_WARMUP_FRACTION, _NUM_SAVES, _MIN_STEPS_PER_EPOCH = 0.03, 10, 10


@dataclass(frozen=True)
class NewRun:
    """Answers to `bigtrain init`.

    model: directory or Hub name of trained weights to start from; or new_model: configuration, or
    name of a recipe, for a model with random weights. data: token shards, or untokenized text whose
    shards will be written to `shards`. chat: untokenized data are conversations; preference: pairs
    of answers; the manifest of shards determines both. adapters: train LoRA adapters for the
    model's weights. devices: as 8xH100-80GB or 2xCPU; None: one rank, without a plan. steps, or
    epochs: length of the run (default: 1000 steps). sequence_length: default: 1024, or the model's
    number of positions if smaller; for shards of conversations or pairs, the tokens that 99% of
    them need. global_batch_size: default: 64; for shards, so that an epoch has ten steps or more.
    run_directory: default: runs/NAME of the model, or runs/NAME-2, ... if it has other files.
    """

    data: str
    model: str | None = None
    new_model: str | None = None
    shards: str = "shards/"
    chat: bool = False
    preference: bool = False
    adapters: bool = False
    devices: str | None = None
    steps: int | None = None
    epochs: float | None = None
    sequence_length: int | None = None
    global_batch_size: int | None = None
    lr: float | None = None
    run_directory: str | None = None

    @property
    def is_tokenized(self) -> bool:
        """True if `data` is a directory that `bigtrain tokenize` wrote."""
        return (Path(self.data) / "manifest.json").is_file()

    @property
    def tokenizer(self) -> str:
        """Tokenizer in a suggested command: the model, or a placeholder for a new model."""
        return self.model or "TOKENIZER"

    @property
    def rows(self) -> Rows | None:
        """Rows of answers that the options name; None for documents."""
        return PAIRS.name if self.preference else None

    @property
    def names_nothing_here(self) -> bool:
        """True if `data` is a missing path on this machine."""
        is_no_path = is_address(self.data) or self.data == "-" or "*" in self.data
        if is_no_path or Path(self.data).exists():
            return False
        may_be_hub_name = self.data.count("/") < 2 and not Path(self.data).suffix
        return not may_be_hub_name or self.data.endswith("/")


@dataclass(frozen=True)
class WrittenRun:
    """Written files, the next command lines, and the layout: ranks, and whether they are GPUs."""

    files: tuple[Path, ...]
    next_commands: tuple[str, ...]
    num_ranks: int
    ranks_per_node: int
    on_gpus: bool


def write_new_run(
    new_run: NewRun,
    output: Path,
    *,
    force: bool = False,
    say: Callable[[str], None] | None = None,
    command: str = "bigtrain init",
) -> WrittenRun:
    """Write a commented run YAML, which `bigtrain check` accepts, to `output`.

    With `new_run.devices` it uses the fastest layout that is predicted to fit them; a DeepSpeed
    JSON for the layout is written next to the YAML if none of ``ds_configs/`` matches. Replaces no
    file without `force`. say: gets a line on a model or data that could not be checked, and before
    work that takes seconds. command: name of the command, for errors. Raises ConfigError,
    DataError, ModelError, OutputError; then nothing is written.
    """
    # The sections, and the layout for the devices.
    say = say or (lambda text: None)
    new_run = with_checked_inputs(new_run, say, command)
    sections = _sections(new_run, command)
    head = ["Written by `bigtrain init`. Every setting: docs/reference/configuration.md"]
    engine: dict[str, Any] | None = None
    plan = None
    if new_run.devices is not None:
        say(f"planning for {new_run.devices}: the model is traced, which takes some seconds once")
        plan = _plan_for(new_run.devices, sections)
        planned_sections, engine = plan.run_tree()
        sections = _in_reference_order({**sections, **planned_sections})
        head += _prediction_lines(plan)

    # The DeepSpeed JSON is written only if none is shipped that equals it.
    files = [output]
    engine_path = output.with_name(f"{output.stem}.deepspeed.json")
    if engine is not None:
        name = _shipped_config_name(engine)
        sections["engine"] = {"deepspeed_config": name or str(engine_path)}
        if name is None:
            files.append(engine_path)
    existing = [str(path) for path in files if path.exists()]
    if existing and not force:
        rule, fix = "exists, and may have been edited", "another --output, or --force to replace it"
        raise ConfigError(Problem("--output", existing[0], rule, fix))

    # Check the data and the YAML. A new DeepSpeed JSON, which the YAML names, is written first.
    if new_run.is_tokenized:
        from bigtrain.data.loading.dataset_checks import check_shards

        problems = check_shards(load_config(sections))
        if problems:
            raise ConfigError(problems, "the run's inputs")
    text = commented_yaml(sections, head, output.parent)
    world_size = 1 if plan is None else plan.cluster.num_devices
    if len(files) > 1:
        _write(engine_path, json.dumps(engine, indent=2) + "\n")
        resolve_run(load_config(sections), world_size)
    else:
        check(sections, world_size=world_size)
    _write(output, text)
    ranks_per_node = RANKS_PER_NODE if plan is None else plan.cluster.device.devices_per_node
    next_commands = tuple(_next_commands(new_run, output, world_size, ranks_per_node))
    on_gpus = plan is not None and not plan.cluster.device.is_cpu
    return WrittenRun(tuple(files), next_commands, world_size, ranks_per_node, on_gpus)


def _plan_for(devices: str, sections: Mapping[str, Any]) -> Plan:
    """Return the plan of the fastest layout of `sections` on `devices`. Raises ConfigError, with
    --devices in place of the option --gpus of `bigtrain plan`."""
    from bigtrain.python_api.planning import plan as plan_layouts

    try:
        return plan_layouts(sections, devices, varies=False)
    except ConfigError as error:
        problems = [
            replace(problem, key="--devices") if problem.key == "--gpus" else problem
            for problem in error.problems
        ]
        if any(problem.key == "model" for problem in problems):
            rule = "cannot be planned for without the model's configuration"
            remedy = "remove it, and plan on a machine that can reach the Hub: bigtrain plan"
            problems.append(Problem("--devices", devices, rule, remedy))
        raise ConfigError(problems, error.source) from error


def with_checked_inputs(
    new_run: NewRun,
    say: Callable[[str], None],
    command: str = "bigtrain init",
    *,
    infers_rows: bool = False,
    is_text: bool = False,
) -> NewRun:
    """Return `new_run`, checked against the first row of its data, and with `infers_rows` with the
    options `chat` and `preference` that fit this row.

    is_text: the data are documents, whatever their first row is. `say` gets a note on a model or
    data that could not be checked. Raises ConfigError for a missing model, for data that are
    missing or have no rows, for options that contradict the data, and for conversations without a
    chat template.
    """
    # The model exists, here or on the Hub.
    problems: list[Problem] = []
    for option, name in (("--model", new_run.model), ("--new-model", new_run.new_model)):
        is_recipe = name in recipe_names() and not Path(str(name)).exists()
        if name is not None and is_recipe and option == "--model":
            rule = "is a recipe, whose weights are random"
            remedy = "a directory, or a name on the Hugging Face Hub (bigtrain init: --new-model)"
            problems.append(Problem(option, name, rule, remedy))
        if name is None or is_recipe:
            continue
        name_problems, note = model_problems(option, name)
        problems += name_problems
        if note:
            say(f"note: {note}")
    # The first row has the format that the options name.
    template_option = "--chat" if new_run.chat else "--model"
    row_format = None
    if not new_run.is_tokenized and not new_run.names_nothing_here:
        row_format, data_problems, note = inspect_data(
            new_run.data, new_run.tokenizer, is_text=is_text, has_pairs=new_run.preference
        )
        problems += data_problems
        if note:
            say(f"note: {note}")
    if row_format is not None:
        problems += row_problems(
            new_run.data,
            new_run.tokenizer,
            row_format,
            chat=new_run.chat,
            preference=new_run.preference,
            infers=infers_rows,
        )
        if infers_rows:
            is_chat = row_format not in ("text", "tokens", *ROWS)
            is_preference = row_format == PAIRS.name
            new_run = replace(
                new_run,
                chat=new_run.chat or is_chat,
                preference=new_run.preference or is_preference,
            )
    if new_run.chat and not new_run.is_tokenized and new_run.model is not None and not problems:
        problems += template_problems(template_option, new_run.model)
    if problems:
        raise ConfigError(problems, f"the options of {command}")
    return new_run


def check_settings(new_run: NewRun, command: str) -> None:
    """Raise ConfigError for options of `command` that the run would refuse whatever tokens the data
    has, and ModelError for weights whose files' headers do not fit the model."""
    if not new_run.is_tokenized:
        # Existing shards in that directory may be of other data, so no tokens are counted.
        new_run = replace(new_run, epochs=None, shards=str(Path(new_run.shards, "unwritten")))
    run = check(_sections(new_run, command))
    path = run.config.model.path
    if path is None or not Path(path).is_dir():
        return
    from bigtrain.models.configuration import load_hf_config, with_mtp_layers
    from bigtrain.models.weights.import_hf import find_weights

    trains_mtp = run.config.objective.mtp_weight > 0
    find_weights(path, with_mtp_layers(load_hf_config(run.config.model), trains=trains_mtp))


def _model_section(new_run: NewRun) -> dict[str, Any]:
    """Return the section ``model``: trained weights, or the configuration of a new model, which a
    recipe's name may stand for. Raises ConfigError unless exactly one option names a model."""
    if (new_run.model is None) == (new_run.new_model is None):
        rule = "either trained weights or a new model is required"
        raise ConfigError(Problem("--model", new_run.model, rule, "or --new-model, but not both"))
    if new_run.model is not None:
        return {"path": new_run.model}
    if new_run.adapters:
        rule = "require trained weights, and a new model has none"
        raise ConfigError(Problem("--adapters", None, rule, "--model instead of --new-model"))
    if new_run.new_model in recipe_names():
        recipe = load_config(str(new_run.new_model)).model
        return {"config": recipe.path if recipe.config is None else recipe.config}
    return {"config": new_run.new_model}


def _sections(new_run: NewRun, command: str) -> dict[str, Any]:
    """Return the sections of the run YAML. Raises ConfigError for options that contradict other
    options or the shards."""
    model = _model_section(new_run)
    # Shards determine vocabulary, format of rows and number of samples; untokenized data does not.
    shards = read_shards(new_run.data) if new_run.is_tokenized else None
    if shards is not None:
        _check_rows(new_run, shards, command)
        if new_run.new_model is not None:
            model = _with_vocabulary(model, shards.vocab_size)
    length = new_run.sequence_length or _sequence_length(model, new_run, shards)
    batch_size = new_run.global_batch_size or _batch_size(new_run, length, shards)
    # The length of the run. Its steps, also as estimated from epochs, decide how often it saves.
    if new_run.steps is not None and new_run.epochs is not None:
        rule = "is the length of the run, and so is --steps"
        raise ConfigError(Problem("--epochs", new_run.epochs, rule, "one of them"))
    steps = new_run.steps or DEFAULT_STEPS
    train: dict[str, float] = {"steps": steps}
    if new_run.epochs is not None:
        train = {"epochs": new_run.epochs}
        if shards is not None:
            num_samples = new_run.epochs * shards.num_samples(length)
            steps = max(1, round(num_samples / batch_size))
    # Defaults: the usual learning rate, float32 on a CPU or without `devices`, ten checkpoints.
    weights_kind = "random" if new_run.model is None else "trained"
    if new_run.adapters:
        weights_kind = "adapters"
    rows = new_run.rows if shards is None else shards.rows
    rates = _PREFERENCE_LR_BY_WEIGHTS if rows == PAIRS.name else _LR_BY_WEIGHTS
    on_cpu = new_run.devices is None or new_run.devices.strip().lower().endswith("cpu")
    steps_per_save = max(1, steps // _NUM_SAVES)
    tree: dict[str, Any] = {
        "model": model,
        "data": {"path": new_run.data if new_run.is_tokenized else new_run.shards},
        "batch": {
            "sequence_length": length,
            "global_batch_size": batch_size,
            "micro_batch_size": 1,
        },
        "train": train,
        "optimizer": {"lr": new_run.lr or rates[weights_kind]},
        "schedule": {
            "type": "cosine",
            "warmup_steps": round(steps * _WARMUP_FRACTION),
        },
        "precision": {"dtype": "float32" if on_cpu else "bfloat16"},
        "checkpoint": {"every_steps": steps_per_save},
        "evaluation": {"every_steps": steps_per_save},
        "logging": {"every_steps": min(10, steps_per_save)},
        "output": {"directory": new_run.run_directory or _run_directory(new_run)},
    }
    if shards is not None and not shards.num_held_out:
        del tree["evaluation"]
    if rows is not None:
        tree["objective"] = {"type": rows}
    elif new_run.chat or (shards is not None and shards.is_chat):
        tree["data"]["packing"] = "best_fit"
    if new_run.adapters:
        tree["adapters"] = {"rank": 16, "alpha": 32, "targets": "all-linear"}
    return _in_reference_order(tree)


def _check_rows(new_run: NewRun, shards: ShardFacts, command: str) -> None:
    """Raise ConfigError if the options name other rows than the shards have."""
    problems = []
    if new_run.chat and (not shards.is_chat or shards.rows is not None):
        rule = f"{new_run.data} has {shards.rows or 'text'}, not conversations"
        problems.append(Problem("--chat", None, rule, "remove it, or tokenize conversations"))
    if new_run.rows not in (None, shards.rows):
        rule = f"{new_run.data} has no preference pairs"
        remedy = f"remove it, or bigtrain tokenize --format {new_run.rows}"
        problems.append(Problem("--preference", None, rule, remedy))
    if problems:
        raise ConfigError(problems, f"the options of {command}")


def _with_vocabulary(model: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the section `model` of a new model with `vocab_size` tokens, and without its special
    tokens' ids: the run takes the ids of the shards' tokenizer."""
    configuration = written_configuration(ModelSection.model_validate(model))
    if not configuration or configuration.get("vocab_size") == vocab_size:
        return model
    if isinstance(model["config"], str):
        return {**model, "overrides": {"vocab_size": vocab_size}}
    config = {name: value for name, value in model["config"].items() if name not in TEXT_IDS}
    return {**model, "config": {**config, "vocab_size": vocab_size}}


def _sequence_length(model: dict[str, Any], new_run: NewRun, shards: ShardFacts | None) -> int:
    """Return the default length: at most the model's number of positions, if known. Samples hold
    99% of the shards' conversations or pairs completely; of text, an epoch has ten steps."""
    dimensions, _ = inspect_configuration(ModelSection.model_validate(model))
    max_length = dimensions.num_positions or _MAX_DEFAULT_LENGTH
    if shards is None:
        return min(_SEQUENCE_LENGTH, max_length)
    if shards.is_chat or shards.rows is not None:
        rounded_up = -(-shards.long_document // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        return min(rounded_up, _MAX_DEFAULT_LENGTH, max_length)
    length = min(_SEQUENCE_LENGTH, max_length)
    batch_size = new_run.global_batch_size or DEFAULT_BATCH
    while (
        length > _LENGTH_MULTIPLE and length * batch_size * _MIN_STEPS_PER_EPOCH > shards.num_tokens
    ):
        length //= 2
    return length


def _batch_size(new_run: NewRun, length: int, shards: ShardFacts | None) -> int:
    """Return the default number of samples per step, a multiple of the devices; for shards, halved
    until an epoch has ten steps."""
    batch_size = DEFAULT_BATCH
    if shards is not None:
        while batch_size > 1 and shards.num_samples(length) < batch_size * _MIN_STEPS_PER_EPOCH:
            batch_size //= 2
    count_match = re.match(r"\s*(\d+)\s*x", new_run.devices or "")
    num_devices = 1 if count_match is None else max(1, int(count_match[1]))
    return max(1, batch_size // num_devices) * num_devices


def _in_reference_order(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of `tree` in the order of the reference, without empty ones."""
    return {name: tree[name] for name in RunConfig.model_fields if tree.get(name) not in (None, {})}


def _run_directory(new_run: NewRun) -> str:
    """Return the first of runs/NAME, runs/NAME-2, ... without files other than a run's."""
    name = Path(str(new_run.model or new_run.new_model).rstrip("/")).name or "mine"
    names = (f"runs/{name}" if number == 1 else f"runs/{name}-{number}" for number in count(1))
    return next(path for path in names if not check_output(Path(path), is_here=False))


def _prediction_lines(plan: Plan) -> list[str]:
    """Return the plan's prediction, rounded to three significant digits."""
    number, cluster = plan.default_choice, plan.cluster  # from 1
    best = plan.fitting[number - 1]
    choice = "the first" if number == 1 else f"line {number}, the first that is not tight,"
    rate = float(f"{best.tokens_per_second / cluster.num_devices:.3g}")
    return [
        f"Layout: {choice} of `bigtrain plan` for {cluster.num_devices}x{cluster.device.name}: "
        f"{best.layout.describe()}",
        f"predicted, not measured: {best.memory.total / GIB:.3g} GiB of "
        f"{cluster.usable_memory / GIB:.3g} on the fullest device, {rate:,.0f} tokens/s on each",
    ]


def _shipped_config_name(engine: dict[str, Any]) -> str | None:
    """Return the name in ds_configs/ of a DeepSpeed JSON equal to `engine`."""
    for stage in range(4):
        for offload in ("", "_offload"):
            try:
                path = find_deepspeed_config(f"zero{stage}{offload}")
            except ConfigError:
                continue
            if read_deepspeed_config(path) == engine:
                return path.stem
    return None


def _write(path: Path, text: str) -> None:
    """Write a complete file, also its directory. Raises OutputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, path.with_name(f".{path.name}.tmp")) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error


def _next_commands(
    new_run: NewRun, output: Path, num_ranks: int, ranks_per_node: int
) -> Iterator[str]:
    """Yield the next commands, in order."""
    quoted_yaml = shlex.quote(str(output))
    if not new_run.is_tokenized:
        words = f"--input {shlex.quote(new_run.data)} --tokenizer {shlex.quote(new_run.tokenizer)}"
        if new_run.rows is not None:  # a row of pairs may be a conversation, too
            words += f" --format {new_run.rows}"
        yield f"bigtrain tokenize {words} --held-out 0.02 --output {shlex.quote(new_run.shards)}"
    yield f"bigtrain check --config {quoted_yaml} --world-size {num_ranks}"
    yield train_line(["--config", str(output)], num_ranks, ranks_per_node)
    directory = load_config(output).output.directory
    is_chat = new_run.chat or (new_run.is_tokenized and read_shards(new_run.data).has_template)
    option = "--chat" if is_chat else "--prompt TEXT"
    yield f"bigtrain generate --model {shlex.quote(f'{directory}/hf')} {option}"
