"""Next token, and the probabilities of a teacher for it (arXiv 1503.02531). Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from bigtrain.errors import Problem
from bigtrain.objectives.kind import ObjectiveFields, ObjectiveKind, RunSections
from bigtrain.settings.sections.base import PositiveInt


class DistillationFields(ObjectiveFields):
    """Fields of distillation."""

    teacher: Annotated[str, Field(min_length=1)] | None = None
    """distillation: directory of scores of the data under the teacher, made by `bigtrain score
    --kind top-k --output`"""
    teacher_model: Annotated[str, Field(min_length=1)] | None = None
    """distillation: Hugging Face model (directory or name on the hub) that computes the teacher's
    probabilities in the run instead, frozen and divided over the ranks like the student"""
    teacher_top_k: PositiveInt = 64
    """distillation with teacher_model: number of most probable tokens whose probabilities are
    compared one by one; the others are compared as one"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """distillation with teacher_model: temperature T of both models' probabilities in the
    divergence, which is multiplied by T^2 (arXiv 1503.02531)"""
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    """distillation: weight of the divergence from the teacher, in training only; that of the
    cross-entropy is 1 - alpha"""


class Distillation(ObjectiveKind[DistillationFields]):
    """Divergence from the most probable tokens of a teacher, and cross-entropy."""

    name = "distillation"
    summary = "the next token, and the probabilities of a teacher for it (arXiv 1503.02531)"
    fields = DistillationFields
    loss = "bigtrain.objectives.losses.next_token:NextTokenLoss"

    @property
    def teacher_weight(self) -> float:
        return self.section.alpha

    def unread(self) -> list[str]:
        section = self.section
        if (section.teacher is None) == (section.teacher_model is None):
            needed = "one of" if section.teacher is None else "only one of"
            raise ValueError(
                f"objective.type = 'distillation' needs {needed} objective.teacher, the directory "
                "of `bigtrain score --config TEACHER.yaml --kind top-k --output DIR`, and "
                "objective.teacher_model, a model that is computed in the run -> omit the other"
            )
        if section.teacher_model is not None:
            return []
        if section.temperature != 1:
            # Of the further tokens only the sum of the probabilities is stored.
            raise ValueError(
                f"objective.temperature = {section.temperature}: stored scores are probabilities "
                "at temperature 1 of the most probable tokens, from which those at another "
                "temperature do not follow -> 1, or objective.teacher_model"
            )
        return ["teacher_top_k"]

    def problems(self, run: RunSections) -> list[Problem]:
        """Return the problem of a teacher that has scored complete documents, with a student that
        does not read such, or of a teacher in the run where one cannot be."""
        if self.section.teacher_model is not None:
            return _live_teacher_problems(run)
        if run.data.samples is not None:
            rule = "the teacher's log-probabilities are of documents of shards"
            fix = "data.samples=null, with documents written by bigtrain tokenize"
            return [Problem("data.samples", run.data.samples.type, rule, fix)]
        if run.data.has_complete_documents:
            return []
        rule = "the teacher read each document separately, and so must the student"
        return [Problem("data.packing", run.data.packing, rule, "data.packing=best_fit")]


def _live_teacher_problems(run: RunSections) -> list[Problem]:
    """Return the problems of a teacher model in a run that cannot have one."""
    stored = "objective.teacher, scores of the data that `bigtrain score --kind top-k` has stored"
    problems = []
    if run.parallel.pipeline != 1:
        rule = "a teacher in the run is not divided into pipeline stages"
        fix = f"parallel.pipeline=1, or {stored}"
        problems.append(Problem("parallel.pipeline", run.parallel.pipeline, rule, fix))
    if run.sites is not None:
        rule = "a teacher in the run is divided over the ranks of one site"
        problems.append(Problem("sites", "set", rule, f"sites=null, or {stored}"))
    return problems
