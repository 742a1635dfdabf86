"""Training in this process: the work of `train.py` after its settings are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.errors import LaunchError
from bigtrain.python_api.configuring import Config, resolve
from bigtrain.settings.accelerate import read_accelerate
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.stop_signals import StopSignals
from bigtrain.system.world import World, read_world

if TYPE_CHECKING:
    from bigtrain.run.reporting.closing import TrainingResult


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
        config,
        overrides,
        world.size,
        deepspeed_config,
        accelerate=read_accelerate(os.environ),
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
