"""Loading and checking of a run's configuration, and training it in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.run.output_directory import check_output
from bigtrain.run.shared_memory import check_memory_directory
from bigtrain.settings.accelerate import AccelerateSettings, read_accelerate
from bigtrain.settings.compatibility.facts import Device
from bigtrain.settings.hf_config_keys import missing_model
from bigtrain.settings.loading import load_run_config, parse_run_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run, resolve_run_files
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.world import World, read_world

if TYPE_CHECKING:
    from bigtrain.run.reporting.closing import TrainingResult


Config = RunConfig | Mapping[str, Any] | str | Path
"""A run: loaded, as a mapping of sections, or the path of a run YAML or name of a recipe."""


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
    return checked(config, overrides, world_size, deepspeed_config, device, inputs=inputs)[0]


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
    resolved = resolve(config, overrides, world_size, deepspeed_config, device)
    if missing := missing_model(resolved.config.model):
        raise ConfigError(missing, str(config) if isinstance(config, str | Path) else "the run")
    return resolved, _try_inputs(resolved) if inputs else _try_settings(resolved)


def _try_inputs(resolved: ResolvedRun) -> list[str]:
    """Return lines on the run's automatic choices for its model. Raise the errors that the run
    itself would raise about its data, its model and a checkpoint that it would resume from."""
    from bigtrain.run.checkpointing.changed_settings import refuse_other_run
    from bigtrain.run.preflight import check_base_weights, inspect_inputs

    inputs = inspect_inputs(resolved)
    check_base_weights(resolved.config, inputs)
    checkpoint = refuse_other_run(
        resolved.config, inputs.sources, inputs.data_hash, inputs.model_plan.parameters
    )
    lines = [f"data: {len(inputs.datasets)} opened, model: {inputs.hf_config.model_type}"]
    lines += inputs.model_plan.lines(resolved.plan.accumulation)
    return [*lines, *inputs.notes, *_resumes_from(checkpoint)]


def _try_settings(resolved: ResolvedRun) -> list[str]:
    """Return a line on the checkpoint that the run would resume from. Raise ConfigError for a
    directory that cannot be a run's, or for checkpoints in memory that is none here,
    CheckpointError for a checkpoint of other settings; the data is not compared."""
    directory = Path(resolved.config.output.directory)
    problems = [*check_output(directory, is_here=False), *check_memory_directory(resolved.config)]
    if problems:
        raise ConfigError(problems, "the run's settings")
    if not (directory / "checkpoints").exists():
        return []  # without the import of numpy
    from bigtrain.run.checkpointing.changed_settings import refuse_other_run

    return _resumes_from(refuse_other_run(resolved.config))


def _resumes_from(checkpoint: Path | None) -> list[str]:
    return [] if checkpoint is None else [f"resumes from {checkpoint}"]


def resolve(
    config: Config,
    overrides: Sequence[str],
    world_size: int,
    deepspeed_config: str | Path | None = None,
    device: Device | None = None,
    accelerate: AccelerateSettings | None = None,
) -> ResolvedRun:
    """Resolve only the settings, for `check` and `bigtrain.python_api.configuring.train_run`."""
    name = None if deepspeed_config is None else str(deepspeed_config)
    if isinstance(config, str | Path):
        # Problems of the YAML and of the DeepSpeed JSON are one error.
        return resolve_run_files(str(config), overrides, world_size, name, device, accelerate)
    return resolve_run(load_config(config, *overrides), world_size, name, device, accelerate)


def train_run(
    config: Config, *overrides: str, deepspeed_config: str | Path | None = None
) -> TrainingResult:
    """Train a run in this process to its last step, from its newest checkpoint if there is one.

    One rank in a plain process; under a launcher (deepspeed, torchrun, accelerate) its ranks, and
    then collective: every rank calls it with the same arguments. It does the same as ``train.py``,
    and writes the same files into ``output.directory``.

    Ctrl-C (an interrupted notebook cell), SIGTERM and SIGUSR1 end the run after a saved
    step, and the result reports it; before the first step and during the export Ctrl-C raises
    KeyboardInterrupt. Afterwards process group, signal handlers, environment, threads and torch's
    random generator on the CPU are as before. A hung run ends its process (exit code 76), by
    the run YAML's ``watchdog``.

    Raises ConfigError, DataError, ModelError, CheckpointError, OutputError, TrainingError,
    LaunchError: all of them are BigtrainError.
    """
    world = read_world(os.environ)
    run = resolve(
        config, overrides, world.size, deepspeed_config, accelerate=read_accelerate(os.environ)
    )
    _refuse_other_group()
    import torch

    with torch.random.fork_rng(devices=[]), StopSignals(interrupts=True) as heard:
        return train_resolved(run, world, heard)


def train_resolved(
    run: ResolvedRun,
    world: World,
    signals: StopSignals,
    importing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> TrainingResult:
    """Train `run` as a rank of `world`. Collective over all of them.

    `signals`: the handlers of this process. `importing`: context for importing large libraries.
    """
    # Imported here, so that an invalid configuration is refused before torch is imported, and
    # invalid inputs before DeepSpeed, which probes devices and prints on import.
    with importing():
        from bigtrain.engine.startup.device import refuse_for_device
        from bigtrain.run.checkpointing.changed_settings import refuse_other_run
        from bigtrain.run.preflight import inspect_inputs

    refuse_for_device(run.config, world.size)
    with importing():  # the model's libraries
        # One rank of each host compares the sizes of the shards' files; the others read the list.
        inputs = inspect_inputs(run, "sizes" if world.local_rank == 0 else "listed")
        if world.local_rank == 0:
            parameters = inputs.model_plan.parameters
            refuse_other_run(run.config, inputs.sources, inputs.data_hash, parameters)
        from bigtrain.run.reporting.library_log import import_log

        with import_log(shown=run.config.logging.deepspeed == "shown") as said:
            from bigtrain.run.training import train_inputs

    return train_inputs(run, inputs, world, signals, said)


def _refuse_other_group() -> None:
    """Raise LaunchError if this process is in a process group already."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized():
        raise LaunchError(
            "this process is in a torch.distributed process group already, and a run opens its own "
            "-> call torch.distributed.destroy_process_group() before, or train in another process"
        )
