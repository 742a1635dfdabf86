"""Sections on the run itself: parallelism, output, failures (hangs, slow ranks, bad steps), length
and learning rate."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from bigtrain.settings.degrees import MODEL_AXES, ModelDegrees
from bigtrain.settings.sections.base import (
    Fraction,
    NonNegativeInt,
    PositiveInt,
    Section,
    refuse_secrets,
)
from bigtrain.system.storage.stores import is_address, scheme_of


class ParallelSection(Section):
    """Parallel degrees; the data-parallel size is what remains of the world."""

    tensor: PositiveInt = Field(default=1, description="tensor-parallel size")
    pipeline: PositiveInt = Field(default=1, description="pipeline stages")
    sequence: PositiveInt = Field(default=1, description="sequence-parallel (Ulysses) size")
    expert: PositiveInt = Field(
        default=1,
        description="expert-parallel size: ranks, neighbours within data x sequence, which "
        "share the experts of each layer; not a factor of the world size",
    )

    @property
    def degrees(self) -> ModelDegrees:
        """The degrees, as the rest of the package uses them."""
        return ModelDegrees(**{f"{axis}_size": getattr(self, axis) for axis in MODEL_AXES})


DEFAULT_MEMORY_DIRECTORY = "/dev/shm"


class MemoryCheckpointSection(Section):
    """Checkpoints in shared memory of the hosts, between those on disk, for restarts."""

    every_steps: PositiveInt = Field(description="optimizer steps between them, from 1")
    copies: Annotated[int, Field(ge=0, le=1)] = Field(
        default=0,
        description="further copies: 1 sends each rank's part to the next host too, so that the "
        "loss of one host leaves them complete",
    )
    directory: str = Field(
        default=DEFAULT_MEMORY_DIRECTORY,
        description="file system in memory (tmpfs) of every host that holds them, with two of "
        "them for each copy; processes end without losing it",
    )

    @field_validator("directory")
    @classmethod
    def _is_absolute(cls, directory: str) -> str:
        if not directory.startswith("/"):
            raise ValueError("must be an absolute path of a file system in memory, as /dev/shm")
        return directory

    @property
    def copies_held(self) -> int:
        """How often a host's part of a checkpoint is in its memory at the peak: the copy that is
        taken between two steps, and two generations of each stored copy."""
        return 1 + 2 * (1 + self.copies)


class CheckpointSection(Section):
    """Writing and retention of checkpoints."""

    every_steps: PositiveInt | None = Field(
        default=None, description="optimizer steps between saves; default: only at the end"
    )
    keep_last: PositiveInt = Field(default=2, description="newest complete checkpoints kept")
    keep_every_steps: PositiveInt | None = Field(
        default=None, description="checkpoints of multiples of this many steps are kept permanently"
    )
    keep_best: NonNegativeInt = Field(
        default=0, description="checkpoints kept because they are the best by evaluation.best"
    )
    verify: Literal["sizes", "contents"] = Field(
        default="sizes",
        description="of tensor files before a resume: compare sizes, or also read all of them and "
        "compare checksums; what a resume reads of them is verified in either case",
    )
    asynchronous: bool = Field(
        default=True,
        description="continue training while a copy in host memory is written; false: wait for "
        "the disk",
    )
    memory: MemoryCheckpointSection | None = Field(
        default=None,
        description="also keep checkpoints in memory of the hosts, from which a restart resumes "
        "if they are newer than those on disk; absent: only on disk",
    )
    max_failures: PositiveInt = Field(
        default=3, description="consecutive failed saves after which the run ends"
    )
    initialize_from: str | None = Field(
        default=None,
        description="run directory, checkpoint, Hugging Face directory or hub name from which a "
        "new run takes its initial weights, and nothing else; the model is that of model.config",
    )
    allow_changes: tuple[str, ...] = Field(
        default=(),
        description="settings that may differ from the checkpoint's when a run resumes: sections "
        "or keys, such as data, batch.sequence_length, optimizer.lr; with changed data each source "
        "continues at its position, and nothing is read twice in its epoch",
    )


class LoggingSection(Section):
    """Log and trackers of the training."""

    every_steps: PositiveInt = Field(
        default=10,
        description="optimizer steps between lines of metrics.jsonl and the log; the loss in a "
        "line is the mean over them",
    )
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "comet_ml"], ...] = Field(
        default=(), description="trackers of accelerate.tracking that get the same metrics"
    )
    project: str = Field(default="bigtrain", description="project name given to the trackers")
    deepspeed: Literal["file", "shown"] = Field(
        default="file",
        description="DeepSpeed's own log lines; file: only in log.txt, except errors; shown: "
        "also on standard output",
    )


class ProfileSection(Section):
    """Optimizer steps recorded by the torch profiler, to RUN/profile/."""

    steps: tuple[PositiveInt, PositiveInt] | None = Field(
        default=None, description="first and last optimizer step, counted from 1; default: none"
    )
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), description="ranks that record")

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ValueError(
                f"profile.steps = {list(self.steps)}: the first step is after the last"
            )
        return self


class OutputSection(Section):
    """Output directory of the run, its export and copies."""

    directory: str = Field(description="run directory; everything a run writes is below it")
    export: bool = Field(
        default=True, description="write a verified Hugging Face directory at the end of the run"
    )
    copy_to: str | None = Field(
        default=None,
        description="address, such as s3://bucket/runs/mine, to which checkpoints and the export "
        "are copied once they are written, while the run continues; `bigtrain fetch` "
        "downloads them",
    )
    copy_wait_seconds: NonNegativeInt = Field(
        default=600, description="how long the end of a run waits for copies that are under way"
    )

    @field_validator("directory")
    @classmethod
    def _names_a_directory(cls, directory: str) -> str:
        if not directory.strip():
            raise ValueError("must name the directory of the run, such as runs/mine")
        if directory.startswith("~") or re.search(r"\$(\w|\{)", directory):
            raise ValueError(
                "must be written out: ~ and variables are expanded by a shell, not in a file; "
                f"here they are {os.path.expandvars(os.path.expanduser(directory))!r}"
            )
        if is_address(directory):
            raise ValueError(
                "must be on a disk, which every host sees; copies go to output.copy_to"
            )
        return directory

    @field_validator("copy_to")
    @classmethod
    def _takes_files(cls, copy_to: str | None) -> str | None:
        if copy_to is None:
            return None
        if not is_address(copy_to) or scheme_of(copy_to) in ("http", "https"):
            raise ValueError("must be an address that takes files, such as s3://bucket/runs/mine")
        refuse_secrets(copy_to)
        return copy_to.rstrip("/")


class EngineSection(Section):
    """DeepSpeed JSON that configures the engine."""

    deepspeed_config: str = Field(
        default="zero1",
        description="name in ds_configs/ or path of a DeepSpeed JSON; --deepspeed_config wins",
    )
    refuse_too_large: bool = Field(
        default=True,
        description="refuse to start a run that is predicted not to fit the device's memory; "
        "false: warn and start",
    )
    cpu_threads: PositiveInt | None = Field(
        default=None,
        description="threads of each rank for computation on the CPU; default: its share of the "
        "cores where there is any (an optimizer in host memory, or no GPU), unless OMP_NUM_THREADS "
        "is set (other than to torchrun's 1)",
    )
    bind_cores: bool | None = Field(
        default=None,
        description="bind each rank to its share of the host's cores; default: where several ranks "
        "of a host have GPUs and keep their optimizer in host memory, and are not bound yet",
    )


Seconds = Annotated[float, Field(gt=0)]
RENDEZVOUS_TIMEOUT_SECONDS = 600.0
COLLECTIVE_TIMEOUT_SECONDS = 1800.0


class WatchdogSection(Section):
    """Limits after which a run without progress ends and slow ranks are reported."""

    timeout_seconds: Seconds | None = Field(
        default=600.0,
        description="without progress of any rank, after which all ranks dump their stacks and "
        "exit (exit code 76); null turns the watchdog off",
    )
    slow_timeout_seconds: Seconds = Field(
        default=1800.0,
        description="the same while the run starts, in its first step, while it waits for a save "
        "to be written and while it exports, where one operation may take long",
    )
    rendezvous_timeout_seconds: Seconds = Field(
        default=RENDEZVOUS_TIMEOUT_SECONDS,
        description="for all ranks to join at the start, after which the missing ranks are named "
        "and the others exit",
    )
    collective_timeout_seconds: Seconds = Field(
        default=COLLECTIVE_TIMEOUT_SECONDS,
        description="for one collective operation, after which it fails on the ranks that wait in "
        "it; work that only one rank does (exports, checks of data) is not waited for in a "
        "collective",
    )
    straggler_factor: Annotated[float, Field(gt=1)] = Field(
        default=1.5,
        description="a rank whose own work takes more than this many times the median of its "
        "peers is named in the log",
    )
    straggler_seconds: Seconds = Field(
        default=60.0, description="shortest training time over which that work is averaged"
    )


class GuardSection(Section):
    """Rules for skipping updates and rolling a run back."""

    enabled: bool = Field(
        default=True,
        description="skip the update of a step whose loss or gradient norm is not finite",
    )
    spike_sigma: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="also skip the update of a step whose loss or gradient norm is more than this "
        "many standard deviations (estimated by the median absolute deviation) above the median of "
        "the recent steps; default: off",
    )
    window: Annotated[int, Field(ge=2)] = Field(
        default=100,
        description="recent steps that a spike is compared with; until there are as many, no step "
        "is a spike",
    )
    max_consecutive: PositiveInt = Field(
        default=10,
        description="bad steps in a row after which the run is rolled back to the last checkpoint "
        "before them, and continues with the samples after them",
    )
    max_rollbacks: NonNegativeInt = Field(
        default=3, description="rollbacks to the same checkpoint after which the run fails"
    )


class TrainSection(Section):
    """Length of the training."""

    steps: PositiveInt = Field(description="optimizer steps of the run")


class ScheduleSection(Section):
    """Learning rate over steps: linear warm-up, then `type`. See
    `bigtrain.settings.lr_schedule`."""

    type: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = Field(
        default=0, description="optimizer steps from zero to the peak"
    )
    decay_steps: PositiveInt | None = Field(
        default=None,
        description="cosine and linear: steps after warm-up until the minimum (default: the rest "
        "of the run); wsd: length of the final decay (default: a tenth of the run)",
    )
    min_lr_ratio: Fraction = Field(
        default=0.1, description="final learning rate as a fraction of the peak"
    )
