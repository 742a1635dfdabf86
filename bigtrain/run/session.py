"""Open resources of a run on a rank (process group, watchdog, metrics, ...), closed on exit."""

from __future__ import annotations

import hashlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bigtrain.engine.startup.long_work import LongWork
from bigtrain.engine.startup.process_group import process_group
from bigtrain.engine.startup.runtime import runtime_settings
from bigtrain.errors import BigtrainError, LostRunTokenError
from bigtrain.models.build import empty_model
from bigtrain.models.export.base_record import BASE, record_base
from bigtrain.models.weights.checksums import Sums
from bigtrain.models.weights.import_hf import Weights
from bigtrain.planner.flops import (
    ModelShape,
    flops_per_token,
    model_flops_utilization,
    model_shape,
    peak_flops_per_second,
)
from bigtrain.planner.run_prediction import RunPrediction
from bigtrain.run.health import fencing
from bigtrain.run.health.heartbeat import Heartbeat
from bigtrain.run.health.watchdog import Watchdog
from bigtrain.run.preflight import Inputs
from bigtrain.run.reporting.library_log import deepspeed_log
from bigtrain.run.reporting.metrics import MetricsWriter
from bigtrain.run.reporting.phase_memory import PhaseMemory
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.reporting.run_copies import RunCopies
from bigtrain.run.run_directory import note_start, write_run_directory
from bigtrain.run.state import TrainState
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.settings.topology import Coordinates
from bigtrain.system.files import writing
from bigtrain.system.stop_signals import REQUEUE, StopSignals
from bigtrain.system.world import World


@dataclass
class Session:
    """Session of a rank in a run: its coordinates, its device, and (main rank) its output files.

    hosts: of every rank. long_work: for work that may take one rank a long time. run_token: the
    main rank's, from `bigtrain.run.checkpointing.resume.acquire_run_directory` on. base_model:
    checksums of the pretrained weight files that this launch has read. memory: peaks of this rank's
    device. copies: the main rank's, if checkpoints are copied to an address.
    """

    run: ResolvedRun
    world: World
    device: torch.device
    directory: Path
    inputs: Inputs
    signals: StopSignals
    hosts: tuple[str, ...]
    long_work: LongWork
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    metrics: MetricsWriter | None = field(default=None)
    run_token: fencing.RunToken | None = field(default=None)
    base_model: Sums | None = field(default=None)
    base_weights: Weights | None = field(default=None)
    generation: int | None = field(default=None)
    prediction: RunPrediction | None = field(default=None)
    copies: RunCopies | None = field(default=None)
    memory: PhaseMemory = field(init=False)
    _flops_per_token: int | None = field(default=None)
    _said_early: list[str] = field(default_factory=list)
    _noted_early: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = PhaseMemory(self.device.type)

    def check_run_token(self) -> None:
        """Raise on the main rank if a later launch holds the directory, or it was deleted.

        Not collective; the other ranks have no run token.
        """
        if self.run_token is not None:
            self.run_token.check()

    def write_failure(self) -> BigtrainError | None:
        """Return the error after which the main rank cannot write, or None; checks at most twice a
        second."""
        failure = None if self.metrics is None else self.metrics.failure
        if self.run_token is not None and (failure is not None or self.run_token.lost()):
            try:
                self.run_token.check()  # raises with the cause
            except LostRunTokenError as error:
                return error
        return failure

    def _has_lost_token(self) -> bool:
        return self.run_token is not None and self.run_token.lost()

    def is_stale(self) -> bool:
        """Return whether a later launch holds the run directory, if this rank can see it."""
        if self.run_token is not None:
            return self.run_token.newer_launch() is not None
        newest = fencing.newest_holder(self.directory)
        return newest is not None and newest.generation > (self.generation or 0)

    def begin_writing(self, state: TrainState) -> None:
        """Record the run in its directory, and open metrics and log at `state`. Collective.

        The main rank writes. Called after
        `bigtrain.run.checkpointing.resume.acquire_run_directory`, so that a refused run creates
        and overwrites nothing. Raises OutputError on every rank if the directory cannot be written.
        """

        def begin() -> None:
            with writing(self.directory, OUTPUT_REMEDY):
                self._begin_writing(state)

        self.long_work.on_main_rank(begin)

    def _begin_writing(self, state: TrainState) -> None:
        config = self.run.config
        write_run_directory(
            self.directory, self.run, self.inputs, self.hosts, self.device, self.base_model
        )
        if self.base_weights is not None and config.model.path is not None:
            record_base(config.model.path, self.base_weights, self.directory / BASE)
        if self.prediction is not None:
            self.prediction.write(self.directory)
        (self.directory / REQUEUE).unlink(missing_ok=True)
        note_start(
            self.directory,
            generation=None if self.run_token is None else self.run_token.holder.generation,
            step=state.step,
            samples=state.samples,
            world_size=self.world.size,
        )
        self.metrics = MetricsWriter(
            self.directory,
            total_steps=config.train.steps,
            trackers=config.logging.trackers,
            project=config.logging.project,
            run_config=config.model_dump(mode="json"),
            resume_step=state.step,
            resume_samples=state.samples,
            is_stale=self._has_lost_token,
        )
        if config.output.copy_to is not None:
            self.copies = RunCopies(self.directory, config.output.copy_to)
            # The previous launch may not have finished copying it.
            for path in sorted((self.directory / "checkpoints").glob("step-????????"))[-1:]:
                self.copies.add(path)
        while self._said_early:
            self.metrics.info(self._said_early.pop(0))
        while self._noted_early:
            self.metrics.note(self._noted_early.pop(0))

    def log(self, text: str) -> None:
        """Show a line, on the main rank; it is written to log.txt as soon as that is open."""
        if self.metrics is not None:
            self.metrics.info(text)
        elif self.world.is_main and text not in self._said_early:
            # The checkpoints are read a second time if the newest is corrupt, or if an
            # earlier launch has saved since: skip repeated lines.
            self._said_early.append(text)

    def log_to_file(self, text: str) -> None:
        """Write a line to log.txt only, as soon as that is open; on the main rank."""
        if self.metrics is not None:
            self.metrics.note(text)
        elif self.world.is_main:
            self._noted_early.append(text)

    def close(self) -> None:
        """Close what is open, and print the lines not shown yet. May be called again."""
        if self.metrics is not None:
            self.metrics.close()
        for text in self._said_early:
            print(text, file=sys.stderr, flush=True)
        self._said_early.clear()

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return model FLOPs utilization, or None if the device's peak or the formula is
        unknown."""
        if self.device.type != "cuda":
            return None
        peak = peak_flops_per_second(
            torch.cuda.get_device_name(self.device), self.run.config.precision.dtype
        )
        if self._flops_per_token is None:
            shape = _shape_of(empty_model(self.inputs.hf_config))
            if shape is None:
                return None
            self._flops_per_token = flops_per_token(
                shape,
                self.run.plan.sequence_length,
                frozen=self.run.config.adapters is not None,
            )
        return model_flops_utilization(
            tokens_per_second, self._flops_per_token, peak, num_devices=self.world.size
        )

    def seed_step(self, step: int) -> None:
        """Seed this rank's random generators for optimizer step `step`.

        So dropout depends only on (seed, step) and the rank's coordinates: it is equal in a
        tensor-parallel group, and a resumed run needs no generator states. Sites count as replicas.
        """
        place = self.run.topology.coordinates(self.world.rank)
        place = replace(place, data_rank=self.run.plan.reader(place.data_rank))
        torch.manual_seed(step_seed(self.run.config.seed, step, place))


def step_seed(seed: int, step: int, place: Coordinates) -> int:
    """Return the seed of optimizer step `step` on the rank at `place` of a run seeded `seed`.

    Equal in a tensor-parallel group, different everywhere else.
    """
    key = f"{seed}:{step}:{place.data_rank}"
    if place.pipeline_rank or place.sequence_rank:
        key += f":{place.pipeline_rank}:{place.sequence_rank}"
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@contextmanager
def open_session(
    run: ResolvedRun, inputs: Inputs, world: World, signals: StopSignals | None = None
) -> Iterator[Session]:
    """Join the process group; nothing is written yet. Collective over all ranks.

    `signals`: the handler that the program installed at its start; None installs one.
    """
    directory = Path(run.config.output.directory)
    watchdog = run.config.watchdog
    limits = watchdog.rendezvous_timeout_seconds, watchdog.collective_timeout_seconds
    with (
        warnings.catch_warnings(),
        StopSignals() if signals is None else nullcontext(signals) as heard,
        runtime_settings(run, world) as settings,
        process_group(world, *limits) as joined,
    ):
        # Caused by DeepSpeed's own calls; users cannot avoid them.
        warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
        warnings.filterwarnings("ignore", ".*reduce_scatter_tensor", FutureWarning)
        session = Session(
            run, world, joined.device, directory, inputs, heard, joined.hosts, joined.long_work
        )
        with (
            Watchdog(
                run.config.watchdog,
                world,
                directory,
                session.heartbeat,
                session.is_stale,
                session.hosts,
            ),
            deepspeed_log(session.log_to_file, shown=run.config.logging.deepspeed == "shown"),
        ):
            try:
                for line in settings:
                    session.log(line)
                yield session
            finally:
                session.close()


def _shape_of(model: Any) -> ModelShape | None:
    # Not the engine's model, which may have only some parameters, or a shard of each.
    parameters = dict(model.named_parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    return model_shape(
        model.config.get_text_config(),
        [(name, p.numel()) for name, p in parameters.items()],
        next(name for name, p in parameters.items() if p is embedding),
        tied=head is not None and head.weight is embedding,
    )
