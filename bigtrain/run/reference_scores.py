"""Scores of the reference model of a run that trains all weights: the model before its first step.

They are the log-probabilities of the targets of every row of the data, computed by the run itself
before it trains, and stored in the run directory, so that no second model takes memory. With
adapters the reference is the model without them, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bigtrain.data.loading.loader import EverySample, HeldOutSource, Scores, TrainingBatches
from bigtrain.engine.startup.mesh import Mesh
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.errors import CheckpointError
from bigtrain.run.context import RunContext
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.run_log import RunLog
from bigtrain.run.state import TrainState
from bigtrain.system.files import whole_file, writing

DIRECTORY = "reference"
"""Directory of the scores in a run directory: ``train.npy`` and one file for each held-out set,
float32 [samples, rows of a sample]."""


def needs_scores(context: RunContext) -> bool:
    """Return whether the run's objective reads stored scores."""
    return context.config.objective.needs_reference and context.config.adapters is None


def add_scores(
    context: RunContext,
    log: RunLog,
    engine: TrainEngine,
    mesh: Mesh,
    state: TrainState,
    batches: TrainingBatches,
    held_out: Sequence[HeldOutSource],
) -> Sequence[HeldOutSource]:
    """Let `batches` and `held_out` have scores: computed now at the start of the run, or read when
    it resumes. Return the held-out sets. Collective. Raises CheckpointError on every rank if a
    resumed run has no scores of its data."""
    if not needs_scores(context):
        return held_out
    directory = context.directory / DIRECTORY
    names = ["train", *(f"held_out_{number}" for number in range(len(held_out)))]
    every = [batches.every_sample(), *(one.batches.every_sample() for one in held_out)]
    found: list[Scores] = []
    if state.step == 0:
        found = [_score(context, engine, mesh, samples) for samples in every]
        context.long_work.on_main_rank(lambda: _write(directory, names, found))
        count = sum(map(len, found))
        log.info(f"reference: {count:,} samples scored with the initial weights, in {directory}")
    else:
        context.long_work.on_every_rank(
            lambda: found.extend(map(_read, (directory / f"{name}.npy" for name in names), every))
        )
    batches.scores = found[0]
    return [
        replace(one, batches=replace(one.batches, scores=scores))
        for one, scores in zip(held_out, found[1:], strict=True)
    ]


def _score(context: RunContext, engine: TrainEngine, mesh: Mesh, samples: EverySample) -> Scores:
    """Return the scores of all samples, on every rank."""
    rows = samples.plan.rows_per_sample
    scores = torch.zeros(samples.dataset.num_samples, rows, device=context.device)
    for numbers, batch in samples:
        context.heartbeat.set_phase("scoring the data with the reference model", slow=True)
        sums = engine.row_sums(batch).view(-1, rows)
        scores[torch.from_numpy(numbers)] = sums[: len(numbers)].to(context.device)
    dist.all_reduce(scores, group=mesh.replicas)
    return scores.cpu().numpy()


def _write(directory: Path, names: Sequence[str], scores: Sequence[Scores]) -> None:
    with writing(directory, OUTPUT_REMEDY):
        directory.mkdir(parents=True, exist_ok=True)
        for name, own in zip(names, scores, strict=True):
            path = directory / f"{name}.npy"
            with whole_file(path, path.with_suffix(".partial")) as file:
                np.save(file, own)


def _read(path: Path, samples: EverySample) -> Scores:
    expected = samples.dataset.num_samples, samples.plan.rows_per_sample
    try:
        scores: Scores = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}; the reference model of this run is gone with it -> "
            "restore it, or begin a new run in another output.directory"
        ) from error
    if scores.shape != expected:
        raise CheckpointError(
            f"{path} has scores of {len(scores)} samples, and the data has {expected[0]} now -> "
            "restore the data, or begin a new run"
        )
    return scores
