"""Run of the teacher that a distillation computes next to the student. Pure."""

from __future__ import annotations

from bigtrain.errors import Problem
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


def teacher_run(config: RunConfig) -> RunConfig:
    """Return the run of the teacher, ``objective.teacher_model``, with ranks, data and precision of
    `config`. It has adapters, which are never used, since only a run with adapters freezes the
    model without masters and optimizer states."""
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
