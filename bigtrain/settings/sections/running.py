"""Sections on the run itself: parallelism, output, failures (hangs, slow ranks, bad steps), length
and learning rate."""

import math
import os
import re
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from bigtrain.settings.degrees import MODEL_DEGREES, ModelDegrees
from bigtrain.settings.sections.base import (
    Epochs,
    Fraction,
    NonNegativeInt,
    PositiveInt,
    Section,
    refuse_two_units,
)
from bigtrain.settings.sections.extensions import (
    CodeSettings,
    ImportedName,
    is_imported,
    known_or_imported,
)
from bigtrain.system.storage.stores import is_address, scheme_of


class SequenceSection(Section):
    """Kinds of sequence parallelism, which multiply: ranks that share a sample are ulysses x
    ring."""

    ulysses: PositiveInt = 1
    """ranks that exchange tokens for heads around attention (all-to-all): must divide the attention
    heads; neighbors, so that they are on one host"""
    ring: PositiveInt = 1
    """ranks, or groups of them, that pass keys and values on during attention: any number, since
    every rank has all heads; each has two chunks of a sample, so that causal attention is
    balanced"""

    @property
    def size(self) -> int:
        """Ranks that share a sample."""
        return self.ulysses * self.ring


class ParallelSection(Section):
    """Parallel degrees; the data-parallel size is what remains of the world."""

    tensor: PositiveInt = 1
    """tensor-parallel size"""
    pipeline: PositiveInt = 1
    """pipeline stages"""
    sequence: PositiveInt | SequenceSection = 1
    """sequence-parallel size, by Ulysses; or the sizes of both kinds, as {ulysses: 2, ring: 4}"""
    expert: PositiveInt = 1
    """expert-parallel size: ranks, neighbours within data x sequence, which share the experts of
    each layer; not a factor of the world size"""

    @property
    def degrees(self) -> ModelDegrees:
        """The degrees, as other modules use them."""
        sequence = self.sequence
        if isinstance(sequence, int):
            sequence = SequenceSection(ulysses=sequence)
        sizes = {f"{name}_size": value for name, value in self if name != "sequence"}
        return ModelDegrees(**sizes, sequence_size=sequence.size, ring_size=sequence.ring)

    @staticmethod
    def tree_of(degrees: ModelDegrees) -> dict[str, Any]:
        """Return the section with `degrees`, without degrees of 1."""
        tree: dict[str, Any] = {}
        for name in MODEL_DEGREES:
            if name != "ring_size" and getattr(degrees, name) > 1:
                tree[name.removesuffix("_size")] = getattr(degrees, name)
        if degrees.ring_size > 1:  # both factors of sequence_size
            sequence_sizes = {"ulysses": degrees.ulysses_size, "ring": degrees.ring_size}
            tree["sequence"] = {method: size for method, size in sequence_sizes.items() if size > 1}
        return tree


DEFAULT_MEMORY_DIRECTORY = "/dev/shm"

GENERATIONS_IN_MEMORY = 2
"""Checkpoints in memory at the peak: the one before stays until the next one is complete."""


def copies_stored(partner_copies: int) -> int:
    """Return the peak number of copies of a rank's part of a checkpoint in memory of a host, with
    the `partner_copies` that another host sends."""
    return GENERATIONS_IN_MEMORY * (1 + partner_copies)


class MemoryCheckpointSection(Section):
    """Checkpoints in shared memory of the hosts, between those on disk, for restarts."""

    every_steps: PositiveInt
    """optimizer steps between them, from 1"""
    copies: Annotated[int, Field(ge=0, le=1)] = 0
    """further copies: 1 sends each rank's part to the next host too, so that the loss of one host
    leaves them complete"""
    directory: str = DEFAULT_MEMORY_DIRECTORY
    """file system in memory (tmpfs) of every host that holds them, with two of them for each copy;
    processes end without losing it"""

    @field_validator("directory")
    @classmethod
    def _is_absolute(cls, directory: str) -> str:
        if not directory.startswith("/"):
            raise ValueError("must be an absolute path of a file system in memory, as /dev/shm")
        return directory


class CheckpointSection(Section):
    """Writing and retention of checkpoints."""

    every_steps: PositiveInt | None = None
    """optimizer steps between saves; default: only at the end"""
    every_epochs: Epochs | None = None
    """instead of every_steps: epochs between saves, such as 1 or 0.25, counted as the nearest
    number of steps before the run starts"""
    keep_last: PositiveInt = 2
    """newest complete checkpoints kept"""
    keep_every_steps: PositiveInt | None = None
    """checkpoints of multiples of this many steps are kept permanently"""
    keep_best: NonNegativeInt = 0
    """checkpoints kept because they are the best by evaluation.best"""
    verify: Literal["sizes", "contents"] = "sizes"
    """of tensor files before a resume: compare sizes, or also read all of them and compare
    checksums; what a resume reads of them is verified in either case"""
    asynchronous: bool = True
    """continue training while a copy in host memory is written; false: wait for the disk"""
    memory: MemoryCheckpointSection | None = None
    """also keep checkpoints in memory of the hosts, from which a restart resumes if they are newer
    than those on disk; absent: only on disk"""
    max_failures: PositiveInt = 3
    """consecutive failed saves after which the run ends"""
    initialize_from: str | None = None
    """run directory, checkpoint, Hugging Face directory or hub name from which a new run takes its
    initial weights, and nothing else; the model is that of model.config"""
    allow_changes: tuple[str, ...] = ()
    """settings that may differ from the checkpoint's when a run resumes: sections or keys, such as
    data, batch.sequence_length, optimizer.lr; with changed data each source continues at its
    position, and nothing is read twice in its epoch"""

    @model_validator(mode="after")
    def _saves_by_one_unit(self) -> Self:
        refuse_two_units("checkpoint", self.every_steps, self.every_epochs)
        return self


class LoggingSection(Section):
    """Log and trackers of the training."""

    every_steps: PositiveInt = 10
    """optimizer steps between lines of metrics.jsonl and the log; the loss in a line is the mean
    over them"""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "comet_ml"], ...] = ()
    """trackers of accelerate.tracking that get the same metrics"""
    project: str = "bigtrain"
    """project name given to the trackers"""
    deepspeed: Literal["file", "shown"] = "file"
    """log lines and warnings of DeepSpeed and other libraries; file: only in log.txt, except
    errors; shown: also where they print them"""


class ProfileSection(Section):
    """Optimizer steps recorded by the torch profiler, to RUN/profile/."""

    steps: tuple[PositiveInt, PositiveInt] | None = None
    """first and last optimizer step, counted from 1; default: none"""
    ranks: tuple[NonNegativeInt, ...] = (0,)
    """ranks that record"""

    @model_validator(mode="after")
    def _steps_ascend(self) -> Self:
        if self.steps is not None and self.steps[0] > self.steps[1]:
            raise ValueError(
                f"profile.steps = {list(self.steps)}: the first step is after the last"
            )
        return self


class OutputSection(Section):
    """Output directory of the run, its export and copies."""

    directory: str
    """run directory; everything a run writes is below it"""
    export: bool = True
    """write a verified Hugging Face directory at the end of the run"""
    copy_to: str | None = None
    """address, such as s3://bucket/runs/mine, to which checkpoints and the export are copied once
    they are written, while the run continues; `bigtrain fetch` downloads them"""
    copy_wait_seconds: NonNegativeInt = 600
    """how long the end of a run waits for copies that are under way"""

    @field_validator("directory")
    @classmethod
    def _names_a_directory(cls, directory: str) -> str:
        if not directory.strip():
            raise ValueError("must name the directory of the run, such as runs/mine")
        if directory.startswith("~") or re.search(r"\$(\w|\{)", directory):
            raise ValueError(
                "must be written out: ~ and variables are expanded by a shell, not in a file -> "
                f"output.directory={os.path.expandvars(os.path.expanduser(directory))}"
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
        return copy_to.rstrip("/")


class EngineSection(Section):
    """DeepSpeed JSON that configures the engine."""

    deepspeed_config: str = "zero1"
    """name in ds_configs/ or path of a DeepSpeed JSON; --deepspeed_config wins"""
    refuse_too_large: bool = True
    """refuse to start a run that is predicted not to fit the device's memory; false: warn and
    start"""
    cpu_threads: PositiveInt | None = None
    """threads of each rank for computation on the CPU; default: its share of the cores where there
    is any (an optimizer in host memory, or no GPU), unless OMP_NUM_THREADS is set (other than to
    torchrun's 1)"""
    bind_cores: bool | None = None
    """bind each rank to its share of the host's cores; default: where several ranks of a host have
    GPUs and keep their optimizer in host memory, and are not bound yet"""


Seconds = Annotated[float, Field(gt=0)]
RENDEZVOUS_TIMEOUT_SECONDS = 600.0
COLLECTIVE_TIMEOUT_SECONDS = 1800.0


class WatchdogSection(Section):
    """Limits after which a run without progress ends and slow ranks are reported."""

    timeout_seconds: Seconds | None = 600.0
    """without progress of any rank, after which all ranks dump their stacks and exit (exit code
    76); null turns the watchdog off"""
    slow_timeout_seconds: Seconds = 1800.0
    """the same in phases where one operation may take long: start, first step, waiting for a save,
    rolling back, outer steps, tasks, callbacks, export"""
    rendezvous_timeout_seconds: Seconds = RENDEZVOUS_TIMEOUT_SECONDS
    """for all ranks to join at the start, after which the missing ranks are named and the others
    exit"""
    collective_timeout_seconds: Seconds = COLLECTIVE_TIMEOUT_SECONDS
    """for one collective operation, after which it fails on the ranks that wait in it; work that
    only one rank does (exports, checks of data) is not waited for in a collective"""
    straggler_factor: Annotated[float, Field(gt=1)] = 1.5
    """a rank whose own work takes more than this many times the median of its peers is named in the
    log"""
    straggler_seconds: Seconds = 60.0
    """shortest training time over which that work is averaged"""


class GuardSection(Section):
    """Rules for skipping updates and rolling a run back."""

    enabled: bool = True
    """skip the update of a step whose loss or gradient norm is not finite"""
    spike_sigma: Annotated[float, Field(gt=0)] | None = None
    """also skip the update of a step whose loss or gradient norm is more than this many standard
    deviations (estimated by the median absolute deviation) above the median of the recent steps;
    default: off"""
    window: Annotated[int, Field(ge=2)] = 100
    """recent steps that a spike is compared with; until there are as many, no step is a spike"""
    max_consecutive: PositiveInt = 10
    """bad steps in a row after which the run is rolled back to the last checkpoint before them, and
    continues with the samples after them"""
    max_rollbacks: NonNegativeInt = 3
    """rollbacks to the same checkpoint after which the run fails"""
    compare_every_steps: PositiveInt | None = None
    """optimizer steps between comparisons of parameters that several ranks hold alike; if some
    differ, the run names their ranks and repeats the steps since a checkpoint from before;
    default: never"""


class TrainSection(Section):
    """Length of the training, in steps or in epochs. A run and its checkpoints have it in steps."""

    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """instead of train.steps: times that all training samples are read, rounded up to full steps
    (multiplies the epochs of data.sources); counted as train.steps before the run starts"""
    steps: PositiveInt | None = Field(default=None, validate_default=True)
    """optimizer steps of the run; required without train.epochs"""

    @field_validator("steps")
    @classmethod
    def _gives_one_length(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("epochs")
        if steps is None and "epochs" in info.data and epochs is None:
            raise ValueError(
                "is required -> add train.steps to the file or as train.steps=VALUE, or "
                "train.epochs"
            )
        if steps is not None and epochs is not None:
            raise ValueError(
                f"train.epochs = {epochs:g} gives the length of the run, too -> keep one of them, "
                "and set the other to null"
            )
        return steps

    @property
    def total_steps(self) -> int:
        """Optimizer steps of a run whose epochs are counted (`bigtrain.run.length`)."""
        assert self.steps is not None, "train.epochs is not counted yet"
        return self.steps


KnownSchedule = Literal["cosine", "linear", "constant", "wsd"]


class ScheduleSection(Section):
    """Learning rate over steps: linear warm-up, then `type`; or a function of yours for all steps.
    See `bigtrain.settings.lr_schedule` and docs/howto/extend.md."""

    type: KnownSchedule | ImportedName = "cosine"
    """after the warm-up; or, as package.module:function, a function of yours of step (from 0) and
    total steps, which returns the factor of optimizer.lr for all steps"""
    warmup_steps: NonNegativeInt = 0
    """optimizer steps from zero to the peak"""
    warmup_ratio: Fraction | None = None
    """instead of warmup_steps: the warm-up as a fraction of the run's steps, rounded up to full
    steps"""
    cycles: PositiveInt = 1
    """cosine: times that the rate falls from the peak to the minimum, beginning at the peak again
    (restarts)"""
    decay_steps: PositiveInt | None = None
    """cosine and linear: steps after warm-up until the minimum (default: the rest of the run); wsd:
    length of the final decay (default: a tenth of the run)"""
    min_lr_ratio: Fraction = 0.1
    """final learning rate as a fraction of the peak"""
    settings: CodeSettings = Field(default_factory=dict)
    """further arguments of a function of yours, by name"""

    @field_validator("type", mode="before")
    @classmethod
    def _is_known(cls, name: object) -> object:
        return known_or_imported(name, get_args(KnownSchedule))

    def count_warmup_steps(self, total_steps: int) -> int:
        """Return the steps of the warm-up of a run of `total_steps`: a ratio as transformers rounds
        it (`TrainingArguments.get_warmup_steps`)."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return math.ceil(total_steps * self.warmup_ratio)

    @model_validator(mode="after")
    def _has_one_warmup(self) -> Self:
        if self.warmup_ratio is not None and self.warmup_steps:
            raise ValueError(
                f"schedule.warmup_ratio = {self.warmup_ratio:g} gives the warm-up, too, and "
                f"schedule.warmup_steps = {self.warmup_steps} -> keep one of them"
            )
        if self.cycles != 1 and self.type != "cosine":
            raise ValueError(
                f"schedule.cycles = {self.cycles} has no effect with schedule.type = "
                f"{self.type!r} -> type: cosine, or omit it"
            )
        return self

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if not is_imported(self.type):
            if self.settings:
                raise ValueError(
                    f"schedule.settings are arguments of a function of yours, and schedule.type = "
                    f"{self.type!r} is bigtrain's own -> omit them"
                )
            return self
        names = ("warmup_steps", "warmup_ratio", "cycles", "decay_steps", "min_lr_ratio")
        unread_settings = [
            f"schedule.{name} = {getattr(self, name)}"
            for name in names
            if getattr(self, name) != type(self).model_fields[name].default
        ]
        if unread_settings:
            raise ValueError(
                f"{' and '.join(unread_settings)} would have no effect: {self.type} returns the "
                "factor of every step, warm-up and decay included -> pass it in schedule.settings"
            )
        return self
