"""Loading and checking of a run's configuration: the work of `bigtrain check` before it prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError
from bigtrain.run.output_directory import check_output
from bigtrain.settings.accelerate import AccelerateSettings
from bigtrain.settings.compatibility.facts import Device
from bigtrain.settings.hf_config_keys import missing_model
from bigtrain.settings.loading import load_run_config, parse_run_config
from bigtrain.settings.resolve import ResolvedRun, resolve_run, resolve_run_files
from bigtrain.settings.run_config import RunConfig

Config = RunConfig | Mapping[str, Any] | str | Path
"""A run: loaded, as a mapping of sections, or the path of a run YAML or name of a recipe."""


def load_config(config: Config, *overrides: str) -> RunConfig:
    """Load the run that `config` and ``section.key=value`` `overrides` describe.

    Reads the run YAML only: no torch, no network. Raises ConfigError with every problem found.
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

    Raises ConfigError with every problem found, CheckpointError if the run's directory has
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
    """A line on the checkpoint that the run would resume from, if there is one. Raises ConfigError
    for a directory that cannot be a run's, CheckpointError if the checkpoint is of a run with other
    settings; the data is not compared."""
    directory = Path(resolved.config.output.directory)
    if problems := check_output(directory, is_here=False):
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
    """Resolve only the settings, for `check` and `bigtrain.python_api.training.train_run`."""
    name = None if deepspeed_config is None else str(deepspeed_config)
    if isinstance(config, str | Path):
        # Problems of the YAML and of the DeepSpeed JSON are one error.
        return resolve_run_files(str(config), overrides, world_size, name, device, accelerate)
    return resolve_run(load_config(config, *overrides), world_size, name, device, accelerate)
