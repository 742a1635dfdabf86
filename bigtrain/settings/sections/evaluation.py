"""Section on evaluation: measurements during training, the best checkpoint, early stopping."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from bigtrain.settings.sections.base import (
    Epochs,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
    refuse_two_units,
)

TASKS = "tasks"
"""Prefix of the names of metrics of lm-eval's tasks: ``tasks/TASK/METRIC``."""
HELD_OUT = "held_out_"
"""Prefix of the names of metrics of held-out samples, of all sets or of one: ``held_out_loss``,
``held_out_loss/SET``."""
ENTROPY_METRICS = ("loss", "perplexity", "bits_per_byte")
"""Metrics of held-out samples of every run, the last two of the cross-entropy only."""
_OF_TASKS = re.compile(rf"{TASKS}/[^/]+/.+")


class HeldOutSetSection(Section):
    """One more set to measure the loss on."""

    name: str = Field(min_length=1)
    """name of its metrics"""
    path: str
    """directory written by `bigtrain tokenize`, with the tokenizer of the training data: its
    held-out documents or, where it has none, all of them"""


@dataclass(frozen=True)
class HeldOutMetric:
    """Metric of held-out samples. name: without `HELD_OUT`; set_name: the set on which it is
    measured; None: all sets."""

    name: str
    set_name: str | None


class BestSection(Section):
    """Metric by which evaluations are compared."""

    metric: str = "held_out_loss"
    """held_out_loss, held_out_perplexity or held_out_bits_per_byte; held_out_NAME of a metric that
    the objective records, such as held_out_rewards/accuracies; with /SET appended of that set only;
    or tasks/TASK/METRIC, such as tasks/arc_easy/acc"""
    mode: Literal["min", "max"] = "min"
    """whether lower (min) or higher (max) is better"""

    @property
    def is_of_tasks(self) -> bool:
        """True if the metric is one of lm-eval's."""
        return self.metric.startswith(f"{TASKS}/")

    def held_out(
        self, recorded: Collection[str], set_names: Collection[str]
    ) -> HeldOutMetric | None:
        """Return the metric of held-out samples; None for a metric of lm-eval. recorded: names of
        metrics that the objective is known to record; set_names: of the sets."""
        if self.is_of_tasks:
            return None
        # NAME, or NAME/SET. A name may have a slash, too: try long names first.
        text = self.metric.removeprefix(HELD_OUT)
        for name in sorted((*ENTROPY_METRICS, *recorded), key=len, reverse=True):
            if text == name:
                return HeldOutMetric(name, None)
            if text.startswith(f"{name}/"):
                return HeldOutMetric(name, text.removeprefix(f"{name}/"))
        # An unknown name, which code of the user records.
        for set_name in set_names:
            if text.endswith(f"/{set_name}"):
                return HeldOutMetric(text.removesuffix(f"/{set_name}"), set_name)
        return HeldOutMetric(text, None)

    def is_better(self, value: float, than: float, margin: float = 0.0) -> bool:
        """Return whether `value` is better than the value `than` by more than `margin`."""
        return value < than - margin if self.mode == "min" else value > than + margin

    @model_validator(mode="after")
    def _metric_is_known(self) -> Self:
        if not (re.fullmatch(rf"{HELD_OUT}.+", self.metric) or _OF_TASKS.fullmatch(self.metric)):
            raise ValueError(
                f"evaluation.best.metric = {self.metric!r} is not measured by a run -> "
                "held_out_loss, held_out_perplexity or held_out_bits_per_byte, held_out_NAME of a "
                "metric that the objective records (of one set: held_out_loss/SET), or "
                "tasks/TASK/METRIC"
            )
        metric = self.held_out((), ())
        if metric is not None and metric.name in ENTROPY_METRICS and self.mode == "max":
            raise ValueError(
                f"evaluation.best.mode = 'max': a higher {self.metric} is worse -> min"
            )
        return self


class EarlyStoppingSection(Section):
    """End of a run before train.steps; the run is then saved, exported and complete."""

    patience: PositiveInt
    """evaluations in a row without a better evaluation.best.metric after which the run ends"""
    min_delta: NonNegativeFloat = 0.0
    """the patience starts again only when the metric improves by more than this; the best
    evaluation is the best one by any amount"""


class EvaluationSection(Section):
    """Measurements while the run trains: loss on held-out documents, samples, tasks."""

    every_steps: PositiveInt | None = None
    """optimizer steps between evaluations (held-out loss, prompts); default: only at the end"""
    every_epochs: Epochs | None = None
    """instead of every_steps: epochs between evaluations, such as 1 or 0.25, counted as the nearest
    number of steps before the run starts"""
    samples: PositiveInt = 256
    """held-out samples per evaluation, always the same ones; of each source"""
    held_out: tuple[HeldOutSetSection, ...] = ()
    """sets to measure in addition to the held-out documents of the data"""
    prompts: tuple[str, ...] = ()
    """texts that the model continues at each evaluation, to samples.jsonl and the trackers"""
    max_new_tokens: PositiveInt = 64
    """tokens of such a continuation"""
    temperature: NonNegativeFloat = 0.0
    """for these, at which tokens are drawn; 0: the most probable token"""
    tasks: tuple[str, ...] = ()
    """tasks and groups of lm-eval, of its own or of tasks_directory"""
    tasks_directory: str | None = None
    """directory with YAML files of further tasks"""
    tasks_every_steps: PositiveInt | None = None
    """optimizer steps between runs of the tasks; default: at the end"""
    tasks_limit: PositiveInt | None = None
    """documents of each task, the first ones; default: all"""
    tasks_fewshot: NonNegativeInt | None = None
    """examples before each question; default: the task's own number"""
    tasks_chat: bool = False
    """render questions with the tokenizer's chat template"""
    best: BestSection = BestSection.model_construct()
    early_stopping: EarlyStoppingSection | None = None
    """end the run when the best metric gets no better; absent: never"""

    @property
    def best_every_steps(self) -> int | None:
        """Optimizer steps between measurements of the best metric; None: only at the end."""
        return self.tasks_every_steps if self.best.is_of_tasks else self.every_steps

    @property
    def best_every_key(self) -> str:
        """Setting that decides `best_every_steps`."""
        name = "tasks_every_steps" if self.best.is_of_tasks else "every_steps"
        return f"evaluation.{name}"

    @model_validator(mode="after")
    def _tasks_are_named(self) -> Self:
        options = [
            name
            for name in ("directory", "every_steps", "limit", "fewshot", "chat")
            if getattr(self, f"tasks_{name}") not in (None, False)  # unset
        ]
        if options and not self.tasks:
            raise ValueError(
                f"evaluation.tasks_{options[0]} has no meaning without evaluation.tasks -> name "
                "tasks, such as evaluation.tasks=[arc_easy], or omit it"
            )
        if self.best.is_of_tasks and not self.tasks:
            raise ValueError(
                f"evaluation.best.metric = {self.best.metric!r} is measured by lm-eval, and "
                "evaluation.tasks names no task -> name it there"
            )
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError("evaluation.tasks: a task is listed twice -> once")
        return self

    @model_validator(mode="after")
    def _stopping_metric_is_measured(self) -> Self:
        refuse_two_units("evaluation", self.every_steps, self.every_epochs)
        has_epochs = self.every_epochs is not None and not self.best.is_of_tasks
        is_measured_before_end = self.best_every_steps is not None or has_epochs
        if self.early_stopping is not None and not is_measured_before_end:
            raise ValueError(
                f"evaluation.early_stopping depends on {self.best.metric}, which is measured only "
                f"at the end -> set {self.best_every_key}"
            )
        names = [held_out_set.name for held_out_set in self.held_out]
        if len(set(names)) != len(names):
            raise ValueError("evaluation.held_out: two sets have the same name")
        return self
