"""Opening of the teacher of a distillation that is computed in the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bigtrain.engine.build import build_engine
from bigtrain.engine.checkpoint.snapshot import read_weights
from bigtrain.engine.live_teacher import LiveTeacher
from bigtrain.errors import ModelError
from bigtrain.models.layers.token_loss import TopTokens
from bigtrain.models.weights.checksums import read_sums
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.run.checkpointing.initialize import verify_weights
from bigtrain.run.preflight import TeacherInputs
from bigtrain.run.run_directory import TEACHER_MODEL
from bigtrain.run.segment_context import SegmentContext


@contextmanager
def open_teacher(context: SegmentContext, teacher: TeacherInputs) -> Iterator[LiveTeacher]:
    """Build the teacher of `context.engine` and read its weights; closed as by
    `bigtrain.run.segment_start.closed_at_end`. Collective. Raises ModelError on every
    rank for weights that cannot be read, or that differ from the weights with which the run
    began."""
    config, name = teacher.run.config, context.config.objective.teacher_model
    assert config.model.path is not None
    weights = find_weights(
        config.model.path, teacher.hf_config, "objective.teacher_model", seed=config.seed
    )
    # Compare by file names without directories: a copy elsewhere is an equal model.
    verified = verify_weights(context, weights)
    sums = {Path(path).name: checksum for path, checksum in verified.items()}
    recorded = read_sums(context.directory / TEACHER_MODEL)
    if recorded and recorded != sums:
        changed_files = sorted({file for file, _ in recorded.items() ^ sums.items()})
        raise ModelError(
            f"objective.teacher_model = {name!r}: is another model than the one with which the run "
            f"began: {', '.join(changed_files)} -> restore its files, or start a new run"
        )
    engine = build_engine(
        config,
        teacher.run.engine,
        teacher.run.plan,
        teacher.hf_config,
        context.device,
        context.engine.mesh,
        teacher.model_plan,
    )
    read_weights(engine, weights)
    objective = context.config.objective
    top = TopTokens(objective.teacher_top_k, teacher.num_ids, objective.temperature)
    live = LiveTeacher(engine, top, sums)
    context.engine.teach = live
    yield live
    live.close()
