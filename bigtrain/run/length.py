"""Lengths in epochs, of a run and between its saves and evaluations, counted as steps before it
starts. No torch.

Every later part of a run, its checkpoints and its records have only the steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from bigtrain.data.loading.dataset_checks import (
    check_given_stream,
    check_length,
    count_samples,
    open_checked,
)
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.errors import ConfigError, DataError, Problem
from bigtrain.settings.extensions import check_schedule
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import is_imported

UNKNOWN = "{} = {:g}: its steps are counted with the data, which is not here"


def with_steps(
    run: ResolvedRun, datasets: Sequence[TokenDataset]
) -> tuple[ResolvedRun, tuple[str, ...]]:
    """Return `run` with its epochs of `datasets`, the datasets of the mixture, as steps, and lines
    on the steps: none if the length is given in steps. Raises ConfigError if the steps do not fit
    the schedule, and without samples."""
    config = run.config
    if not config.epoch_settings:
        return run, ()
    if problems := check_given_stream(config, datasets):
        raise ConfigError(problems, "the run's settings")
    samples = [count_samples(config, dataset, "train") for dataset in datasets]
    if not sum(samples):
        raise ConfigError(check_length(config, datasets), "the run's inputs")
    config, lines = _with_distances(config, samples)
    if config.train.epochs is None:
        return replace(run, config=config), lines
    steps, line = count_steps(config, samples)
    warmup = config.schedule.count_warmup_steps(steps)
    if warmup > steps:
        rule = f"more than the run's steps; {line}"
        raise ConfigError(Problem("schedule.warmup_steps", warmup, rule, f"{steps} or less"))
    schedule = config.schedule
    if is_imported(schedule.type):  # its values were not checked without the steps
        settings = schedule.settings
        if problems := check_schedule("schedule.type", schedule.type, settings, steps):
            raise ConfigError(problems, "the run's settings")
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    return replace(run, config=config.model_copy(update={"train": train})), (line, *lines)


def _with_distances(config: RunConfig, samples: Sequence[int]) -> tuple[RunConfig, tuple[str, ...]]:
    """Return `config` with saves and evaluations by steps, and a line for each that was by
    epochs: the nearest number of steps, at least one."""
    steps_per_epoch = Fraction(samples_of_epoch(config, samples), config.batch.samples_per_step)
    lines = []
    for name in ("checkpoint", "evaluation"):
        section = getattr(config, name)
        if section.every_epochs is None:
            continue
        steps = max(1, round(Fraction(repr(section.every_epochs)) * steps_per_epoch))
        counted = section.model_copy(update={"every_steps": steps, "every_epochs": None})
        config = config.model_copy(update={name: counted})
        lines.append(
            f"{name}.every_epochs = {section.every_epochs:g} of "
            f"{float(steps_per_epoch):,.10g} steps is {name}.every_steps = {steps}"
        )
    return config, tuple(lines)


def with_steps_if_known(run: ResolvedRun) -> tuple[ResolvedRun, tuple[str, ...]]:
    """Return the result of `with_steps` if the data can be opened; otherwise `run` itself, and a
    line that says so. Raises ConfigError as `with_steps`."""
    if not run.config.epoch_settings:
        return run, ()
    datasets, problems = open_checked(run.config, "listed")
    try:
        if not problems:
            return with_steps(run, datasets)
    except DataError:  # from an index that packing reads
        pass
    return run, tuple(UNKNOWN.format(*setting) for setting in run.config.epoch_settings.items())


def samples_of_epoch(config: RunConfig, samples: Sequence[int]) -> Fraction:
    """Return the samples of one epoch of the run. `samples`: as in `count_steps`."""
    # Exact decimal numbers, so that 0.1 of 30 samples is 3 samples on every machine.
    source_epochs = [Fraction(repr(source.epochs or 1.0)) for source in config.data.mixture]
    parts = (part * count for part, count in zip(source_epochs, samples, strict=True))
    return sum(parts, Fraction(0))


def count_steps(config: RunConfig, samples: Sequence[int]) -> tuple[int, str]:
    """Return the steps of ``train.epochs`` and a line on them. `samples`: of the training split of
    each source. The last step is a full one, and may begin the next epoch."""
    epochs = config.train.epochs
    assert epochs is not None
    sources = config.data.mixture
    one_epoch = samples_of_epoch(config, samples)
    total = math.ceil(Fraction(repr(epochs)) * one_epoch)
    batch = config.batch.samples_per_step
    steps = max(1, math.ceil(Fraction(total, batch)))
    split_name = "the training split" if len(sources) == 1 else "the sources by their epochs"
    line = f"train.epochs = {epochs:g} of {float(one_epoch):,.10g} samples ({split_name}) is "
    line += f"train.steps = {steps} of {batch} samples"
    num_further = steps * batch - total
    if num_further:
        line += f"; the last step reads {num_further} of the next epoch"
    return steps, line
