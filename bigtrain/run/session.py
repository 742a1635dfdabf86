"""Every process-wide effect of a run, begun on entry and undone on exit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import bigtrain
from bigtrain.data.directories import writing
from bigtrain.data.manifest import TOKENIZER_DIRECTORY
from bigtrain.engine.distributed import process_group
from bigtrain.engine.long_work import LongWork
from bigtrain.engine.resolve import ResolvedRun
from bigtrain.errors import BigtrainError, LostHoldError
from bigtrain.models.configuration import save_configuration
from bigtrain.models.huggingface import empty_model
from bigtrain.models.weight_files import BASE_MODEL, Sums, write_sums
from bigtrain.run import checkpoints, fencing
from bigtrain.run.export import MODEL_CONFIG
from bigtrain.run.flops import (
    ModelShape,
    flops_per_token,
    model_flops_utilization,
    model_shape,
    peak_flops_per_second,
)
from bigtrain.run.heartbeat import Heartbeat
from bigtrain.run.metrics import MetricsWriter
from bigtrain.run.preflight import Inputs
from bigtrain.run.progress import OUTPUT_REMEDY
from bigtrain.run.state import TrainState
from bigtrain.run.watchdog import Watchdog
from bigtrain.stop_signals import REQUEUE, StopSignals
from bigtrain.topology import AXES, Coordinates
from bigtrain.world import World

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "datasets", "numpy")


@dataclass
class Session:
    """A process's part in a run: its place, its device, and (main process) what it writes.

    hosts: of every rank. long_work: for what may take one rank long. hold: the main process's, on
    the run directory, from `hold_directory` on. base_model: checksums of the trained weights that
    this start has read.
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
    hold: fencing.Hold | None = field(default=None)
    base_model: Sums | None = field(default=None)
    _generation: int | None = field(default=None)
    _flops_per_token: int | None = field(default=None)
    _said_early: list[str] = field(default_factory=list)

    def hold_directory(self, state: TrainState) -> bool:
        """Take the run directory from any earlier start that may still live. Collective.

        Comes after everything that can refuse the run: a refused run takes it from nobody. False:
        an earlier start has saved until then, since `state` was read; read it again, and call this
        again. Raises SupersededError on every process (`bigtrain.run.fencing.take`), OutputError
        where the directory cannot be written.
        """

        def take() -> tuple[bool, int]:
            is_newest = True
            if self.hold is None:
                with writing(self.directory, OUTPUT_REMEDY):
                    self.hold = fencing.take(self.directory, os.environ)
                # A newer one that was passed over as damaged is so once more.
                is_newest = max(checkpoints.steps(self.directory), default=0) <= state.step
            return is_newest, self.hold.holder.generation

        is_newest, self._generation = self.long_work.on_main_rank(take)
        return is_newest

    def check_hold(self) -> None:
        """Raises on the main process where a later start holds the directory, or it is gone.

        Not collective; the other processes have no hold.
        """
        if self.hold is not None:
            self.hold.check()

    def trouble(self) -> BigtrainError | None:
        """Why the main process can write no more, or None; looks twice a second at most."""
        failure = None if self.metrics is None else self.metrics.failure
        if self.hold is not None and (failure is not None or self.hold.lost()):
            try:
                self.hold.check()  # whose text names the cause
            except LostHoldError as error:
                return error
        return failure

    def superseded(self) -> bool:
        """Whether a later start holds the run directory, as far as this process sees."""
        if self.hold is not None:
            return self.hold.superseded_by() is not None
        newest = fencing.newest_holder(self.directory)
        return newest is not None and newest.generation > (self._generation or 0)

    def begin_writing(self, state: TrainState) -> None:
        """Write down what the run is, and open metrics and log where it stands.

        On the main process. Comes after `hold_directory`, so that a refused run creates nothing,
        and overwrites nothing of the run it was not. Collective; raises on every process,
        OutputError where the directory cannot be written.
        """

        def begin() -> None:
            with writing(self.directory, OUTPUT_REMEDY):
                self._begin_writing(state)

        self.long_work.on_main_rank(begin)

    def _begin_writing(self, state: TrainState) -> None:
        config = self.run.config
        _write_run_directory(self)
        (self.directory / REQUEUE).unlink(missing_ok=True)
        self.metrics = MetricsWriter(
            self.directory,
            total_steps=config.train.steps,
            trackers=config.logging.trackers,
            project=config.logging.project,
            run_config=config.model_dump(mode="json"),
            resume_step=state.step,
            resume_samples=state.samples,
        )
        while self._said_early:
            self.metrics.info(self._said_early.pop(0))

    def say(self, text: str) -> None:
        """A line for people, from the main process; log.txt gets it as soon as there is one."""
        if self.metrics is not None:
            self.metrics.info(text)
        elif self.world.is_main:
            self._said_early.append(text)

    def close(self) -> None:
        """Close what is open, and say what nobody has heard yet. May be called again."""
        if self.metrics is not None:
            self.metrics.close()
        for text in self._said_early:
            print(text, file=sys.stderr, flush=True)
        self._said_early.clear()

    def utilization(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization, or None where the device's peak or the formula is not known."""
        if self.device.type != "cuda":
            return None
        peak = peak_flops_per_second(
            torch.cuda.get_device_name(self.device), self.run.config.precision.dtype
        )
        if self._flops_per_token is None:
            shape = _shape_of(empty_model(self.inputs.hf_config))
            if shape is None:
                return None
            self._flops_per_token = flops_per_token(shape, self.run.plan.sequence_length)
        return model_flops_utilization(
            tokens_per_second, self._flops_per_token, peak, num_devices=self.world.size
        )

    def seed_step(self, step: int) -> None:
        """Give this process the random stream of optimizer step `step`.

        Dropout is so a function of (seed, step) and what this process computes alone: equal in a
        tensor-parallel group, and a resumed run needs no generator states.
        """
        place = self.run.topology.coordinates(self.world.rank)
        torch.manual_seed(step_seed(self.run.config.seed, step, place))


def step_seed(seed: int, step: int, place: Coordinates) -> int:
    """The seed of optimizer step `step` on the process at `place` of a run seeded `seed`.

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
    """Join the process group; nothing is written yet. Collective over all processes.

    `signals`: those that the program has watched for since it began.
    """
    num_threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" not in os.environ and not torch.cuda.is_available():
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", 1)))
        torch.set_num_threads(max(1, num_threads // local_size))
    directory = Path(run.config.output.directory)
    patience = run.config.watchdog.arrival_timeout_seconds
    try:
        with (
            warnings.catch_warnings(),
            StopSignals() if signals is None else nullcontext(signals) as heard,
            process_group(world, patience) as joined,
        ):
            # DeepSpeed's own calls; nothing that a user could do about it.
            warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)
            warnings.filterwarnings("ignore", ".*reduce_scatter_tensor", FutureWarning)
            session = Session(
                run, world, joined.device, directory, inputs, heard, joined.hosts, joined.long_work
            )
            with Watchdog(
                run.config.watchdog, world, directory, session.heartbeat, session.superseded
            ):
                try:
                    yield session
                finally:
                    session.close()
    finally:
        torch.set_num_threads(num_threads)


def _write_run_directory(session: Session) -> None:
    directory, run = session.directory, session.run
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", run.config.model_dump(mode="json"))
    _write_json(directory / "deepspeed.json", run.engine.deepspeed)
    _write_json(directory / "environment.json", describe_environment(session))
    if session.base_model is not None:
        write_sums(directory / BASE_MODEL, session.base_model)
    save_configuration(run.config.model, session.inputs.hf_config, directory / MODEL_CONFIG)
    tokens = Path(run.config.data.mixture[0].path)  # all sources have the same tokenizer
    shutil.copytree(tokens / TOKENIZER_DIRECTORY, directory / "tokenizer", dirs_exist_ok=True)


def describe_environment(session: Session) -> dict[str, Any]:
    """Versions, git commit, topology and device: what is needed to run the same again."""
    device = session.device
    return {
        "bigtrain": bigtrain.__version__,
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "host": socket.gethostname(),
        "topology": asdict(session.run.topology),
        "rank_order": list(AXES),
        "hosts": {
            host: [rank for rank, name in enumerate(session.hosts) if name == host]
            for host in dict.fromkeys(session.hosts)
        },
        "batch": session.run.plan.equation(),
        "packing": [report.to_json() for report in session.inputs.packing],
    }


def _shape_of(model: Any) -> ModelShape | None:
    # Not of the engine's model, which has a part of the parameters, or a part of each.
    parameters = dict(model.named_parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    return model_shape(
        model.config.get_text_config(),
        [(name, p.numel()) for name, p in parameters.items()],
        next(name for name, p in parameters.items() if p is embedding),
        tied=head is not None and head.weight is embedding,
    )


def _git_commit() -> str | None:
    checkout = Path(bigtrain.__file__).resolve().parents[1]
    try:
        result = subprocess.run(
            ["git", "-C", str(checkout), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _write_json(path: Path, value: object) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.rename(path)
