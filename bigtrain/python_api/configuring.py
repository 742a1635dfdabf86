"""Loading and checking of a run's configuration, and training it in this process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError, LaunchError, Problem
from bigtrain.run.output_directory import check_output
from bigtrain.settings.accelerate import AccelerateSettings, read_accelerate
from bigtrain.settings.compatibility.facts import Device
from bigtrain.settings.extensions import check_callback, check_samples, is_stream
from bigtrain.settings.hf_config_keys import missing_model
from bigtrain.settings.loading import load_run_config, parse_run_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run, resolve_run_files
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import GIVEN
from bigtrain.settings.sections.optimizer import check_optimizer_package
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.world import World, read_world

if TYPE_CHECKING:
    from bigtrain.data.shards.dataset import Level
    from bigtrain.run.run_view import TrainingResult


Config = RunConfig | Mapping[str, Any] | str | Path
"""A run: loaded, as a mapping of sections, or as a path of a run YAML or name of a recipe."""


def load_config(config: Config, *overrides: str) -> RunConfig:
    """Load the run that `config` and ``section.key=value`` `overrides` describe.

    Reads the run YAML only: no torch, no network. Raises ConfigError with all problems.
    """
    if isinstance(config, str | Path):
        return load_run_config(str(config), overrides)
    if isinstance(config, RunConfig):
        if not overrides:
            return config
        return parse_run_config(config.model_dump(mode="json", exclude_unset=True), overrides)
    return parse_run_config(config, overrides)


def check(
    config: Config,
    *overrides: str,
    world_size: int = 1,
    deepspeed_config: str | Path | None = None,
    device: Device | None = None,
    inputs: bool = False,
) -> ResolvedRun:
    """Resolve the run for `world_size` ranks: batch arithmetic, the DeepSpeed configuration.

    deepspeed_config: a DeepSpeed JSON or its name in ``ds_configs/`` (default: the run's).
    device: "cpu" or "cuda": also refuse settings that this kind of device does not support.
    inputs: also open the data and test the model's own code, which takes seconds and imports torch.

    Raises ConfigError with all problems, CheckpointError if the run's directory has
    another run; with `inputs` also DataError and ModelError.
    """
    resolved, _ = checked(config, overrides, world_size, deepspeed_config, device, inputs=inputs)
    return resolved


def checked(
    config: Config,
    overrides: Sequence[str],
    world_size: int,
    deepspeed_config: str | Path | None = None,
    device: Device | None = None,
    *,
    inputs: bool = False,
) -> tuple[ResolvedRun, list[str]]:
    """Return the result of `check`, with lines on the run's automatic choices and its resume."""
    resolved = resolve(config, overrides, world_size, deepspeed_config, device=device)
    missing = missing_model(resolved.config.model)
    if resolved.config.objective.teacher_model is not None:
        from bigtrain.settings.teacher import of_teacher, teacher_run

        teacher_problems = missing_model(teacher_run(resolved.config).model)
        missing += [of_teacher(resolved.config, problem) for problem in teacher_problems]
    if missing:
        raise ConfigError(missing, str(config) if isinstance(config, str | Path) else "the run")
    resolved, notes = _check_inputs(resolved) if inputs else _check_settings(resolved)
    return resolved, [*resolved.engine.notes, *notes]


def _check_inputs(resolved: ResolvedRun) -> tuple[ResolvedRun, list[str]]:
    """Return the run with epochs counted as steps, and lines on its automatic choices. Raise the
    errors that the run would raise about data, model and the checkpoint from which it resumes."""
    from bigtrain.run.checkpointing.changed_settings import refuse_other_run
    from bigtrain.run.preflight import check_base_weights, check_prompts
    from bigtrain.run.segments import inspect_segments

    # The data and the model of the first phase. A run with phases has no epochs to count.
    segments, epoch_lines = inspect_segments(resolved)
    inputs = segments[0].inputs
    resolved = resolved if resolved.phases else segments[0].run
    check_base_weights(resolved.config, inputs)
    check_prompts(resolved.config, inputs)
    checkpoint = refuse_other_run(resolved.config, inputs.sources, inputs.model_plan.parameters)
    lines = [f"data: {len(inputs.datasets)} opened, model: {inputs.hf_config.model_type}"]
    lines += inputs.model_plan.lines(resolved.plan.accumulation)
    return resolved, [*lines, *epoch_lines, *inputs.notes, *_resume_lines(checkpoint)]


def _check_settings(resolved: ResolvedRun) -> tuple[ResolvedRun, list[str]]:
    """Return the run, with its epochs counted as steps if the data is on this machine, and lines on
    the count and on the checkpoint that the run resumes from.

    Raise ConfigError for a directory with other files, a memory directory that is not in memory, or
    a missing package; ModelError for a base without readable weights; CheckpointError for a
    checkpoint of other settings. The data is not compared.
    """
    # Imports inside are of modules that only some runs need.
    directory = Path(resolved.config.output.directory)
    problems = list(check_output(directory, is_here=False))
    if resolved.config.checkpoint.memory is not None:
        from bigtrain.run.shared_memory import check_memory_directory

        problems += check_memory_directory(resolved.config)
    problems += check_optimizer_package(resolved.config.optimizer)
    config = resolved.config
    from bigtrain.run.named_files import check_manifests

    if any(isinstance(name, str) for name in (config.model.path, config.objective.teacher_model)):
        from bigtrain.run.named_files import check_base_files, check_weight_files

        problems += check_base_files(config)
        check_weight_files(config)
    if problems:
        raise ConfigError(problems, "the run's settings")
    if problems := check_manifests(config):
        raise ConfigError(problems, "the run's inputs")
    epoch_lines: tuple[str, ...] = ()
    if resolved.config.epoch_settings:
        from bigtrain.run.length import with_steps_if_known

        resolved, epoch_lines = with_steps_if_known(resolved)
    # Settings can be compared with a checkpoint's once epochs are counted as steps.
    has_uncounted_epochs = bool(resolved.config.epoch_settings)
    if has_uncounted_epochs or not (directory / "checkpoints").exists():
        return resolved, [*epoch_lines]  # without the import of numpy
    from bigtrain.run.checkpointing.changed_settings import refuse_other_run

    return resolved, [*epoch_lines, *_resume_lines(refuse_other_run(resolved.config))]


def _resume_lines(checkpoint: Path | None) -> list[str]:
    return [] if checkpoint is None else [f"resumes from {checkpoint}"]


def resolve(
    config: Config,
    overrides: Sequence[str],
    world_size: int,
    deepspeed_config: str | Path | None = None,
    *,
    device: Device | None = None,
    accelerate: AccelerateSettings | None = None,
    scores: bool = False,
) -> ResolvedRun:
    """Resolve only the settings, for `check`, `train_run` and, with `scores`,
    `bigtrain.python_api.scoring.score`."""
    name = None if deepspeed_config is None else str(deepspeed_config)
    if isinstance(config, str | Path):
        # Problems of the YAML and of the DeepSpeed JSON are one error.
        return resolve_run_files(
            str(config), overrides, world_size, name, device, accelerate, scores=scores
        )
    run = load_config(config, *overrides)
    return resolve_run(run, world_size, name, device, accelerate, scores=scores)


def train_run(
    config: Config,
    *overrides: str,
    deepspeed_config: str | Path | None = None,
    model: type | None = None,
    data: object = None,
    loss: object = None,
    callbacks: Sequence[object] = (),
) -> TrainingResult:
    """Train a run in this process to its last step, from its newest checkpoint if there is one.

    One rank in a plain process; under a launcher (deepspeed, torchrun, accelerate) its ranks, and
    then collective: every rank calls it with the same arguments. It does the same as ``train.py``,
    and writes the same files into ``output.directory``.

    model: a PreTrainedModel class of yours, as ``model.type`` names it.
    data: training data: a directory of shards, or a dataset of them; or an object with ``__len__``
    and ``__getitem__`` whose items are samples, with the tokenizer of the run's ``data.path``; or a
    stream of them (``__iter__``, ``state_dict``, ``load_state_dict``), from its next item on.
    loss: the objective: a function of a `bigtrain.ObjectiveBatch` that returns the loss summed over
    its units (target tokens, or its attribute ``unit``), an object with such a method ``loss``, or
    a class of such objects. With several ranks from a module, since each imports it.
    callbacks: objects with methods of a callback (docs/howto/extend.md), called after those of the
    run; the run directory does not record them.

    Ctrl-C (an interrupted notebook cell), SIGTERM and SIGUSR1 end the run after a saved
    step, and the result reports it; before the first step and during the export Ctrl-C raises
    KeyboardInterrupt. Afterwards process group, signal handlers, environment, threads and torch's
    random generator on the CPU are as before, and so is the state of a stream. A hung run ends its
    process (exit code 76), by the run YAML's ``watchdog``.

    Raises ConfigError, DataError, ModelError, CheckpointError, OutputError, TrainingError,
    ExtensionError, LaunchError: each is a BigtrainError.
    """
    from bigtrain.python_api.given_loss import given_loss

    _check_callbacks(callbacks)
    if model is not None:
        overrides = (*overrides, f"model.type={_import_name(model)}")
    samples, data_overrides = _samples_and_settings(data)
    overrides = (*overrides, *data_overrides)
    world = read_world(os.environ)
    with given_loss(loss, world.size) as loss_overrides:
        run = resolve(
            config,
            (*overrides, *loss_overrides),
            world.size,
            deepspeed_config,
            accelerate=read_accelerate(os.environ),
        )
        _refuse_other_group()
        import torch

        with (
            _restoring_stream(samples),
            torch.random.fork_rng(devices=[]),
            StopSignals(interrupts=True) as signals,
        ):
            return train_resolved(run, world, signals, callbacks=callbacks, samples=samples)


def train_resolved(
    run: ResolvedRun,
    world: World,
    signals: StopSignals,
    importing: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    callbacks: Sequence[object] = (),
    samples: object = None,
) -> TrainingResult:
    """Train `run` as a rank of `world`. Collective over all ranks.

    `signals`: the handlers of this process. `importing`: context for importing large libraries.
    `callbacks`, `samples`: of the calling program.
    """
    # Imports are inside, so that an invalid configuration is refused before torch is imported, and
    # invalid inputs before DeepSpeed, which probes devices and prints on import.
    with importing():
        from bigtrain.engine.startup.device import refuse_for_device
        from bigtrain.run.checkpointing.changed_settings import refuse_other_run
        from bigtrain.run.reporting.library_log import import_log, library_log
        from bigtrain.run.segments import inspect_segments

    refuse_for_device(run.config, world.size)
    # Keep what libraries log before the run directory exists, for its log.txt.
    library_lines: list[str] = []
    is_shown = run.config.logging.deepspeed == "shown"
    with library_log(library_lines.append, is_shown=is_shown), importing():
        # One rank per host compares the sizes of the shards' files; other ranks read the list.
        level: Level = "sizes" if world.local_rank == 0 else "listed"
        segments, epoch_lines = inspect_segments(run, level, samples)
        first = segments[0]
        inputs = replace(first.inputs, notes=(*epoch_lines, *first.inputs.notes))
        segments = (replace(first, inputs=inputs), *segments[1:])
        if world.local_rank == 0:
            parameters = inputs.model_plan.parameters
            refuse_other_run(first.run.recorded_config, inputs.sources, parameters)
        with import_log(is_shown=is_shown) as deepspeed_lines:
            from bigtrain.run.training import train_inputs

    lines = [*library_lines, *deepspeed_lines]
    return train_inputs(segments, world, signals, lines, callbacks)


def _import_name(model: object) -> str:
    """Return the name ``module:Class`` by which `model`, an argument of `train_run`, is imported.
    Raises ConfigError if it is not a class, or a class inside a function."""
    name = getattr(model, "__qualname__", repr(model))
    if not isinstance(model, type):
        rule, remedy = "is not a class", "a PreTrainedModel class; its settings go to model.config"
    elif "<locals>" in name:
        rule = "is defined inside a function"
        remedy = "define it at the top of a module or notebook"
    else:
        return f"{model.__module__}:{name}"
    raise ConfigError(Problem("model", name, rule, remedy), "the arguments of train_run")


def _samples_and_settings(data: object) -> tuple[object, tuple[str, ...]]:
    """Return `data`, an argument of `train_run`, if it is an object with samples, else None; and
    the settings of the section ``data`` for it. Raises ConfigError for an object that is not
    data."""
    if data is None:
        return None, ()
    is_path = isinstance(data, str | Path)
    path = data if is_path else getattr(data, "path", None)
    is_token_dataset = isinstance(path, Path) and hasattr(data, "table")
    if is_path or is_token_dataset:
        return None, (f"data.path={json.dumps(str(path))}", "data.sources=[]")
    if problems := check_samples("data", type(data).__name__, data):
        raise ConfigError(problems, "the arguments of train_run")
    return data, (f"data.samples.type={GIVEN}",)


@contextmanager
def _restoring_stream(samples: object) -> Iterator[None]:
    """Restore the state of the calling program's stream, so that the program can train again."""
    if not is_stream(samples):
        yield
        return
    stream: Any = samples
    try:
        saved_state = json.dumps(stream.state_dict())
    except Exception:  # the run reports it
        saved_state = None
    try:
        yield
    finally:
        if saved_state is not None:
            with suppress(Exception):
                stream.load_state_dict(json.loads(saved_state))


def _check_callbacks(callbacks: Sequence[object]) -> None:
    """Raise ConfigError for objects that are not callbacks."""
    problems: list[Problem] = []
    for number, callback in enumerate(callbacks):
        key = f"callbacks[{number}]"
        if isinstance(callback, type):
            rule = "is a class, not an object of it"
            problems.append(Problem(key, callback.__name__, rule, f"{callback.__name__}(...)"))
        else:
            problems += check_callback(key, type(callback).__name__, callback)
    if problems:
        raise ConfigError(problems, "the arguments of train_run")


def _refuse_other_group() -> None:
    """Raise LaunchError if this process is in a process group already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        raise LaunchError(
            "this process is in a torch.distributed process group already, and a run opens its own "
            "-> call torch.distributed.destroy_process_group() before, or train in another process"
        )
