"""Objective of a run as its settings define it: the unit of the mean, and rows of a sample. Pure.

For a class of the user this imports it."""

from __future__ import annotations

import inspect
import json
from typing import Any, Literal, cast, get_args

from bigtrain.errors import ConfigError, Problem
from bigtrain.settings.extensions import call_problem, import_named, location
from bigtrain.settings.run_config import (
    AdaptersSection,
    CheckpointSection,
    EvaluationSection,
    GuardSection,
    ModelSection,
    MoeSection,
    ObjectiveSection,
    OptimizerSection,
    RunConfig,
)
from bigtrain.settings.sections.extensions import is_imported

Unit = Literal["tokens", "rows", "pairs"]
"""Units over which the loss of a step is the mean: target tokens of the global batch, rows (samples
of one document, or packed) with a target, or pairs of rows."""


def unit_of(section: ObjectiveSection) -> Unit:
    """Return the unit of the mean loss. Raises ConfigError if a class of the user cannot be
    imported."""
    if is_imported(section.type):
        unit: Unit = getattr(import_named("objective.type", section.type), "unit", "tokens")
        return unit
    units: dict[str, Unit] = {"preference": "pairs", "reward": "pairs"}
    units |= {"kto": "rows", "classification": "rows"}
    return units.get(section.type, "tokens")


AnswerRows = Literal["preference", "kto", "classification"]


def rows_of_answers(section: ObjectiveSection) -> AnswerRows | None:
    """Return the rows of the data that an objective reads (``rows`` in their manifest); None for
    rows of the next token."""
    if section.type in ("kto", "classification"):
        return cast(AnswerRows, section.type)
    return "preference" if unit_of(section) == "pairs" else None


def rows_per_sample(section: ObjectiveSection) -> int:
    """Return the rows of a sample: 2 for a pair, and for an answer with a mismatched one."""
    return 2 if rows_of_answers(section) in ("preference", "kto") else 1


def trained_rows_per_sample(section: ObjectiveSection) -> int:
    """Return the rows of a sample in a forward pass with gradients."""
    return 2 if unit_of(section) == "pairs" else 1


def num_reference_rows(config: RunConfig) -> int:
    """Return the rows of a sample in forward passes without gradients: passes of the reference,
    unless its scores are stored; KTO adds the mismatched answer, by the model and by the
    reference."""
    section, is_stored = config.objective, reads_scores(config)
    if section.type == "kto":
        return 1 if is_stored else 3
    needs_pass = compares_with_reference(section) and not is_stored
    return trained_rows_per_sample(section) if needs_pass else 0


def reads_scores(config: RunConfig) -> bool:
    """Return whether a run reads stored log-probabilities of the data under a reference model. With
    adapters the reference is the model without them; in pipeline stages no reference pass fits
    between the micro-batches."""
    section = config.objective
    computes = config.adapters is not None and config.parallel.pipeline == 1
    return section.needs_reference and (not computes or section.reference is not None)


def check_objective(section: ObjectiveSection) -> list[Problem]:
    """Return the problems of an objective of the user: import, constructor, `loss`, unit."""
    if not is_imported(section.type):
        return []
    key, name = "objective.type", section.type
    try:
        objective_class: Any = import_named(key, name)
    except ConfigError as error:
        return list(error.problems)
    defined_at = location(objective_class) or name
    if not inspect.isclass(objective_class):
        remedy = "name the class, whose constructor gets objective.settings"
        return [Problem(key, name, f"is not a class ({defined_at})", remedy)]
    loss = getattr(objective_class, "loss", None)
    if not callable(loss):
        return [Problem(key, name, f"has no loss ({defined_at})", "def loss(self, batch): ...")]
    problems = [
        call_problem("objective.settings", section.settings, objective_class, [], section.settings),
        call_problem(key, name, loss, ["self", "batch"], {}, label="loss"),
    ]
    unit = getattr(objective_class, "unit", "tokens")
    if unit not in get_args(Unit):
        rule = f"unit = {unit!r} is not one of {', '.join(get_args(Unit))} ({defined_at})"
        problems.append(Problem(key, name, rule, "the unit of the mean: unit = 'rows'"))
    return [problem for problem in problems if problem is not None]


def compares_with_reference(section: ObjectiveSection) -> bool:
    """Return whether the loss is a function of log-probabilities under a reference model. Raises
    ConfigError if a class of the user cannot be imported."""
    if is_imported(section.type):
        return bool(getattr(import_named("objective.type", section.type), "reference", False))
    return section.needs_reference


def check_reference(config: RunConfig) -> list[Problem]:
    """Return the problems of an objective with a reference: a class of the user without adapters or
    in pipeline stages, and adapters that change the model also when they are off."""
    section, adapters = config.objective, config.adapters
    if not compares_with_reference(section):
        return []
    if is_imported(section.type) and (adapters is None or config.parallel.pipeline != 1):
        rule = "reference = True asks for log-probabilities without adapters, and the run has none"
        remedy = "adapters: {type: lora}"
        if adapters is not None:
            rule = (
                "reference = True asks for passes without adapters, which pipeline stages do not "
                "make"
            )
            remedy = "parallel.pipeline=1"
        return [Problem("objective.type", section.type, rule, remedy)]
    key = "loss" if section.reads_pairs else "type"
    rule = (
        "changes the model also with its adapters off, by which "
        f"objective.{key} = {getattr(section, key)!r} gets its reference"
    )
    changes: dict[str, Any] = {} if adapters is None else {"dora": adapters.dora}
    if adapters is not None:
        changes["modules_to_save"] = list(adapters.modules_to_save)
    return [
        Problem(f"adapters.{name}", value, rule, "omit it")
        for name, value in changes.items()
        if value
    ]


def check_scores(config: RunConfig) -> list[Problem]:
    """Return the problems of settings that a model with a score head has no use for: it predicts no
    tokens."""
    if not config.objective.scores_samples:
        return []
    rule = f"objective.type = {config.objective.type} trains a model that predicts no tokens"
    evaluation = config.evaluation
    return [
        Problem(key, value, rule, remedy)
        for key, value, remedy in (
            ("evaluation.prompts", list(evaluation.prompts), "omit it"),
            ("evaluation.tasks", list(evaluation.tasks), "omit it"),
            ("model.vocabulary", config.model.vocabulary, "grow the base first: bigtrain grow"),
            ("model.type", config.model.type, "a model class of transformers"),
        )
        if value
    ]


def check_distillation(config: RunConfig) -> list[Problem]:
    """Return the problem of a teacher that has scored complete documents, with a student that does
    not read such, or of a teacher in the run where one cannot be."""
    if config.objective.teacher_model is not None:
        return _check_teacher_model(config)
    samples = config.data.samples
    if config.objective.type == "distillation" and samples is not None:
        rule = "the teacher's log-probabilities are of documents of shards"
        fix = "data.samples=null, with documents written by bigtrain tokenize"
        return [Problem("data.samples", samples.type, rule, fix)]
    if config.objective.type != "distillation" or config.data.packing == "best_fit":
        return []
    rule = "the teacher read each document separately, and so must the student"
    return [Problem("data.packing", config.data.packing, rule, "data.packing=best_fit")]


def _check_teacher_model(config: RunConfig) -> list[Problem]:
    score = "objective.teacher, scores of the data that `bigtrain score --kind top-k` has stored"
    problems = []
    if config.parallel.pipeline != 1:
        rule = "a teacher in the run is not divided into pipeline stages"
        fix = f"parallel.pipeline=1, or {score}"
        problems.append(Problem("parallel.pipeline", config.parallel.pipeline, rule, fix))
    if config.sites is not None:
        rule = "a teacher in the run is divided over the ranks of one site"
        problems.append(Problem("sites", "set", rule, f"sites=null, or {score}"))
    return problems


def teacher_run(config: RunConfig) -> RunConfig:
    """Return a run of the frozen base ``objective.teacher_model`` on the ranks, data and precision
    of `config`: one with adapters, since only these leave a base without masters and optimizer
    states. They are never used."""
    model = config.model
    section = ModelSection(
        path=config.objective.teacher_model,
        attention=model.attention,
        loss=model.loss if model.loss != "liger" else "auto",
        loss_chunk_tokens=model.loss_chunk_tokens,
        kernels=model.kernels,
    )
    return config.model_copy(
        update={
            "model": section,
            "adapters": AdaptersSection(rank=1),
            "objective": ObjectiveSection(),
            "optimizer": OptimizerSection(lr=config.optimizer.lr),
            "moe": MoeSection(),
            "precision": config.precision.model_copy(update={"float8": "none"}),
            "tokenizer": None,
            "checkpoint": CheckpointSection(),
            "evaluation": EvaluationSection(),
            "guard": GuardSection(),
        }
    )


def of_teacher(config: RunConfig, problem: Problem) -> Problem:
    """Return a problem of the teacher's run as one of the setting that names the teacher."""
    rule = f"{problem.rule} ({problem.key} of the teacher's run)"
    return Problem("objective.teacher_model", config.objective.teacher_model, rule, problem.remedy)


def check_pairs(config: RunConfig) -> list[Problem]:
    """Return the problems of settings of the data that have no meaning for answers, which have
    separate rows."""
    rows = rows_of_answers(config.objective)
    if rows is None:
        return []
    answers: dict[AnswerRows, str] = {
        "preference": "each answer of a pair",
        "kto": "each answer",
        "classification": "each sample",
    }
    data, rule = config.data, f"{answers[rows]} is a row of its own, padded at the end"
    return [
        Problem(f"data.{name}", value, rule, f"data.{name}={json.dumps(unset)}")
        for name, value, unset in (
            ("packing", data.packing, "concatenate"),
            ("document_boundaries", data.document_boundaries, "ignore"),
            ("chunk_length", data.chunk_length, None),
            ("mask_end_of_document", data.mask_end_of_document, False),
            ("samples", data.samples and data.samples.type, None),
        )
        if value != unset
    ]
