"""Run YAML as frozen pydantic models: the one owner of everything that changes the mathematics.

Pure: no I/O here (`bigtrain.settings.loading` reads files), no torch. Unknown keys are errors at
any depth. Every field states its unit. The DeepSpeed JSON (`ds_configs/`) owns how the engine uses
memory and communication; the launcher owns where processes run.
"""

import difflib
from typing import Any, Self

from pydantic import model_validator

from bigtrain.objectives.section import ObjectiveSection
from bigtrain.settings.sections.adapters import AdaptersSection
from bigtrain.settings.sections.base import NonNegativeInt, Section
from bigtrain.settings.sections.data import (
    BatchSection,
    DataSection,
    SourceSection,
    TokenizerSection,
)
from bigtrain.settings.sections.evaluation import (
    ENTROPY_METRICS,
    HELD_OUT,
    BestSection,
    EvaluationSection,
    HeldOutMetric,
    HeldOutSetSection,
)
from bigtrain.settings.sections.extensions import SHIPPED_CALLBACKS, CallbackSection
from bigtrain.settings.sections.model import (
    ModelSection,
    MoeSection,
    PrecisionSection,
    VocabularySection,
)
from bigtrain.settings.sections.optimizer import OptimizerSection
from bigtrain.settings.sections.running import (
    CheckpointSection,
    EngineSection,
    GuardSection,
    LoggingSection,
    MemoryCheckpointSection,
    OutputSection,
    ParallelSection,
    ProfileSection,
    ScheduleSection,
    TrainSection,
    WatchdogSection,
)
from bigtrain.settings.sections.sites import OuterSection, SitesSection

__all__ = [
    "AdaptersSection",
    "BatchSection",
    "BestSection",
    "CallbackSection",
    "CheckpointSection",
    "DataSection",
    "EngineSection",
    "EvaluationSection",
    "GuardSection",
    "HeldOutSetSection",
    "LoggingSection",
    "MemoryCheckpointSection",
    "ModelSection",
    "MoeSection",
    "ObjectiveSection",
    "OptimizerSection",
    "OuterSection",
    "OutputSection",
    "ParallelSection",
    "PrecisionSection",
    "ProfileSection",
    "RunConfig",
    "ScheduleSection",
    "Section",
    "SitesSection",
    "SourceSection",
    "TokenizerSection",
    "TrainSection",
    "VocabularySection",
    "WatchdogSection",
]


class RunConfig(Section):
    """One training run. Read it with `bigtrain.settings.loading.load_run_config`."""

    model: ModelSection
    data: DataSection
    batch: BatchSection
    train: TrainSection
    optimizer: OptimizerSection
    output: OutputSection
    tokenizer: TokenizerSection | None = None
    """tokens added to a tokenizer, for which model.path's weights get rows; absent: the tokenizer
    of the data as it is"""
    adapters: AdaptersSection | None = None
    """train adapters, not the model's own weights; absent: train all weights"""
    sites: SitesSection | None = None
    """train with other sites; absent: a single site"""
    objective: ObjectiveSection = ObjectiveSection.model_construct()
    parallel: ParallelSection = ParallelSection.model_construct()
    moe: MoeSection = MoeSection.model_construct()
    schedule: ScheduleSection = ScheduleSection.model_construct()
    precision: PrecisionSection = PrecisionSection.model_construct()
    checkpoint: CheckpointSection = CheckpointSection.model_construct()
    logging: LoggingSection = LoggingSection.model_construct()
    evaluation: EvaluationSection = EvaluationSection.model_construct()
    profile: ProfileSection = ProfileSection.model_construct()
    watchdog: WatchdogSection = WatchdogSection.model_construct()
    guard: GuardSection = GuardSection.model_construct()
    engine: EngineSection = EngineSection.model_construct()
    callbacks: tuple[CallbackSection, ...] = ()
    """code that is called at points of the run, in this order"""
    seed: NonNegativeInt = 0
    """of weights, dropout and sample order"""

    @model_validator(mode="before")
    @classmethod
    def _added_tokens_get_rows(cls, tree: Any) -> Any:
        """Add ``model.vocabulary`` for the tokens of ``tokenizer`` if it is not set (null: the
        weights do not grow, since some have spare rows)."""
        model = tree.get("model") if isinstance(tree, dict) else None
        if not isinstance(model, dict) or model.get("path") is None:
            return tree
        if tree.get("tokenizer") is None or tree.get("adapters") is not None:
            return tree
        return {**tree, "model": {"vocabulary": {}, **model}}

    @model_validator(mode="after")
    def _added_tokens_have_a_base(self) -> Self:
        if self.tokenizer is None:
            return self
        if self.adapters is not None:
            raise ValueError(
                "tokenizer adds tokens, for which the base of adapters must already have rows -> "
                "omit it, grow the base by `bigtrain grow`, and set model.path to its "
                "output"
            )
        if self.tokenizer.base is None and self.model.path is None:
            raise ValueError(
                "tokenizer.base is missing: model.config has no tokenizer to add tokens to -> "
                "tokenizer.base=DIRECTORY, or a hub name"
            )
        return self

    @property
    def held_out_names(self) -> list[str]:
        """Names of the sets that may have held-out documents: sources of the data, then the sets
        of ``evaluation.held_out``."""
        return [*self.data.names, *(held_out.name for held_out in self.evaluation.held_out)]

    @property
    def best_held_out(self) -> HeldOutMetric | None:
        """Metric of held-out samples by which evaluations are compared; None if evaluations are
        compared by a metric of lm-eval."""
        objective_metrics = self.objective.kind.metrics or {}
        return self.evaluation.best.held_out(objective_metrics, self.held_out_names)

    @property
    def has_user_callbacks(self) -> bool:
        """Whether a callback is code of the user, which may record metrics and make requests."""
        return any(callback.type not in SHIPPED_CALLBACKS for callback in self.callbacks)

    @property
    def records_metrics(self) -> bool:
        """Whether code of the user, or the objective, may record metrics."""
        has_user_code = bool(self.model.type) or self.has_user_callbacks
        return has_user_code or not self.objective.kind.is_next_token

    @property
    def base_tokenizer(self) -> str | None:
        """Location of the tokenizer that ``tokenizer`` adds tokens to."""
        base = None if self.tokenizer is None else self.tokenizer.base
        return base or self.model.path

    @model_validator(mode="after")
    def _weights_have_one_source(self) -> Self:
        source = self.checkpoint.initialize_from
        if source is not None and self.model.path is not None:
            raise ValueError(
                f"checkpoint.initialize_from = {source!r} and model.path = {self.model.path!r} "
                "both name the weights to start from; set model.config instead of model.path, or "
                "omit checkpoint.initialize_from"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> Self:
        if self.adapters is None:
            return self
        if self.model.path is None:
            raise ValueError(
                "adapters are trained on existing weights, and model.path names none -> set "
                "model.path instead of model.config, or omit adapters"
            )
        if self.model.frozen:
            raise ValueError(
                f"model.frozen = {list(self.model.frozen)} has no meaning with adapters, which "
                "freeze all weights of the model -> omit it"
            )
        if self.model.vocabulary is not None:
            raise ValueError(
                "model.vocabulary has no meaning with adapters: the export would name a base "
                "without the new rows -> grow the base first, by `bigtrain grow`, set model.path "
                "to its output, and name embedding and head, if they are not tied, in "
                "adapters.modules_to_save"
            )
        return self

    @model_validator(mode="after")
    def _checkpoints_are_evaluated(self) -> Self:
        """Require an evaluation at every checkpoint, of which the best are kept."""
        epochs = self.checkpoint.every_epochs
        if self.checkpoint.keep_best and epochs is not None:
            evaluated_epochs = self.evaluation.every_epochs
            if evaluated_epochs != epochs or self.evaluation.best.is_of_tasks:
                raise ValueError(
                    f"checkpoint.keep_best = {self.checkpoint.keep_best} needs an evaluation at "
                    f"every checkpoint: evaluation.every_epochs = {evaluated_epochs} must be "
                    f"checkpoint.every_epochs = {epochs:g}"
                )
        if self.checkpoint.keep_best == 0 or self.checkpoint.every_steps is None:
            return self
        save_steps, evaluation_steps = self.checkpoint.every_steps, self.evaluation.best_every_steps
        if evaluation_steps is None or save_steps % evaluation_steps:
            metric = self.evaluation.best.metric
            metric_text = "held-out loss" if metric == "held_out_loss" else metric
            raise ValueError(
                f"checkpoint.keep_best = {self.checkpoint.keep_best} needs a {metric_text} at "
                f"every checkpoint: {self.evaluation.best_every_key} = {evaluation_steps} must "
                f"divide checkpoint.every_steps = {save_steps}"
            )
        return self

    @model_validator(mode="after")
    def _compared_steps_can_be_repeated(self) -> Self:
        compare_steps, checkpoint = self.guard.compare_every_steps, self.checkpoint
        kept_steps = (checkpoint.every_steps or 0) * (checkpoint.keep_last - 1)
        if compare_steps is not None and compare_steps > kept_steps:
            fix = f"guard.compare_every_steps={kept_steps}"
            if not kept_steps:
                fix = "set checkpoint.every_steps, and checkpoint.keep_last to 2 or more"
            raise ValueError(
                f"guard.compare_every_steps = {compare_steps}: a checkpoint from before the last "
                f"comparison must be there, and those that are kept reach back {kept_steps} steps "
                f"(checkpoint.every_steps x (checkpoint.keep_last - 1)) -> {fix}"
            )
        return self

    @model_validator(mode="after")
    def _sets_have_names_of_their_own(self) -> Self:
        sets = [held_out_set.name for held_out_set in self.evaluation.held_out]
        if twice := sorted({*sets} & {*self.data.names}):
            raise ValueError(
                f"evaluation.held_out: a source of the data is also called {twice[0]} -> another "
                "name"
            )
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Self:
        best, metric = self.evaluation.best, self.best_held_out
        if metric is None:
            return self
        # The metrics of the objective, each with its better side, min or max. Code of the user may
        # record further names, which are unknown before it runs.
        objective_metrics = self.objective.kind.metrics or {}
        names_are_known = self.objective.kind.metrics is not None and not self.model.type
        better = objective_metrics.get(metric.name)
        if names_are_known and metric.name not in (*ENTROPY_METRICS, *objective_metrics):
            choices = ", ".join(f"{HELD_OUT}{name}" for name in ("loss", *objective_metrics))
            raise ValueError(
                f"evaluation.best.metric = {best.metric!r} is not measured with objective.type = "
                f"{self.objective.type} -> {choices}"
            )
        if better is not None and best.mode != better:
            side = "higher" if better == "max" else "lower"
            raise ValueError(
                f"evaluation.best.mode = {best.mode!r}: a {side} {best.metric} is better -> "
                f"evaluation.best.mode={better}"
            )
        set_name, set_names = metric.set_name, self.held_out_names
        if set_name is not None and (set_name not in set_names or len(set_names) < 2):
            problem = f"{set_name} is the only set -> omit /{set_name}"
            if set_name not in set_names:
                problem = f"unknown held-out set {set_name!r} -> one of {', '.join(set_names)}"
            raise ValueError(f"evaluation.best.metric = {best.metric!r}: {problem}")
        return self

    @model_validator(mode="after")
    def _chunks_hold_samples(self) -> Self:
        length, chunk_length = self.batch.sequence_length, self.data.chunk_length
        if chunk_length is not None and chunk_length % length:
            raise ValueError(
                f"data.chunk_length = {chunk_length} is not a multiple of batch.sequence_length = "
                f"{length}; nearest: {-(-chunk_length // length) * length}"
            )
        return self

    @model_validator(mode="after")
    def _allowed_changes_name_settings(self) -> Self:
        for entry in self.checkpoint.allow_changes:  # a section, or section.key
            section, _, key = entry.partition(".")
            fields = getattr(type(getattr(self, section, None)), "model_fields", {})
            if entry == "seed":
                raise ValueError(
                    "checkpoint.allow_changes: seed cannot change in a run: it determines the "
                    "samples that were read"
                )
            if section not in type(self).model_fields or (key and key not in fields):
                names = [*type(self).model_fields]
                names += [f"{section}.{name}" for name in fields]
                close = difflib.get_close_matches(entry, names, n=1)
                raise ValueError(
                    f"checkpoint.allow_changes: {entry} is neither a section nor a key "
                    "(section.key) of a run" + (f" -> did you mean {close[0]}?" if close else "")
                )
        return self

    @model_validator(mode="after")
    def _sites_wait_less_than_the_watchdog(self) -> Self:
        limit = self.watchdog.slow_timeout_seconds
        has_watchdog = self.watchdog.timeout_seconds is not None
        if self.sites is not None and has_watchdog and self.sites.timeout_seconds >= limit:
            raise ValueError(
                f"sites.timeout_seconds = {self.sites.timeout_seconds} is not less than "
                f"watchdog.slow_timeout_seconds = {limit}, after which the watchdog ends a run "
                f"that waits -> less than {limit}, or a larger watchdog.slow_timeout_seconds"
            )
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.train.steps is not None and self.schedule.warmup_steps > self.train.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is more than train.steps = "
                f"{self.train.steps} -> schedule.warmup_steps={self.train.steps} or less"
            )
        return self

    @property
    def epoch_settings(self) -> dict[str, float]:
        """Settings in epochs, by key, which `bigtrain.run.length` converts to steps before the run
        starts."""
        settings = {
            "train.epochs": self.train.epochs,
            "checkpoint.every_epochs": self.checkpoint.every_epochs,
            "evaluation.every_epochs": self.evaluation.every_epochs,
        }
        return {key: epochs for key, epochs in settings.items() if epochs is not None}

    @model_validator(mode="after")
    def _epochs_need_unweighted_sources(self) -> Self:
        weighted_keys = [
            f"data.sources.{number}"
            for number, source in enumerate(self.data.sources)
            if source.weight is not None
        ]
        if weighted_keys and self.epoch_settings:
            key, epochs = next(iter(self.epoch_settings.items()))
            steps_key = key.replace("epochs", "steps")
            raise ValueError(
                f"{key} = {epochs:g}: sources with weights end their epochs at different steps, so "
                f"the run's epoch is undefined -> {steps_key}=N; or {weighted_keys[0]}.epochs "
                "instead of weight, for every source"
            )
        return self
