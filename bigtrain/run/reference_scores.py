"""Scores of the reference model of a run, from which its objective gets log-probabilities.

The scores equal the scores of `bigtrain score` (`bigtrain.run.scoring`) for the model before the
first step: computed by the run itself before it trains, or by a pass beforehand that
``objective.reference`` names. Either way the run directory has them, so that a resume needs no
second model. With adapters the reference is the model without adapters, and nothing is stored
unless ``objective.reference`` is set. DoRA and ``adapters.modules_to_save`` change the model in a
way that cannot be turned off: the reference is the model before the first step.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bigtrain.data.loading.loader import Scores as RowScores
from bigtrain.data.loading.loader import TrainingBatches
from bigtrain.data.loading.stored_scores import (
    identity_of,
    measured_splits,
    reference_of,
    refuse_other_model,
    request_of,
    wanted_splits,
)
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import Split
from bigtrain.data.shards.scores import (
    REQUEST_NAME,
    Identity,
    Scores,
    copy_documents,
    differences,
    find_scores,
    open_request,
    scores_directory,
)
from bigtrain.errors import CheckpointError, DataError
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.reporting.progress import OUTPUT_REMEDY
from bigtrain.run.scoring import ScoredSplits, model_identity, score_dataset
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import TrainState
from bigtrain.system.files import writing

DIRECTORY = "reference"
"""Directory of the scores in a run directory."""


@dataclass(frozen=True)
class ReferenceScores:
    """Scores of a run's data."""

    context: SegmentContext

    def add(self, state: TrainState, batches: TrainingBatches, evaluator: Evaluator) -> None:
        """Give `batches` and `evaluator` the scores that the objective reads: computed or copied at
        the start of the run, and read from its directory when it resumes. Collective. Raises
        ConfigError on every rank if ``objective.reference`` has scores of another model,
        CheckpointError if a resumed run has no scores of the data."""
        datasets, held_out_sets = self.context.inputs.datasets, self.context.inputs.held_out_sets
        splits_by_dataset = wanted_splits(datasets, held_out_sets)
        objective, adapters = self.context.config.objective, self.context.config.adapters
        # Without its adapters the model is the reference at every step: scores can be computed.
        can_turn_off = adapters is not None and not adapters.changes_base
        has_reference_model = can_turn_off and objective.reference is None
        if state.step == 0 or has_reference_model:
            scores = self._make(splits_by_dataset)
        else:
            scores = self._read(splits_by_dataset)
        train_rows = [self._rows(scores, dataset, "train") for dataset in datasets]
        batches.scores = np.concatenate(train_rows)
        held_out_rows = [
            self._rows(scores, dataset, split)
            for dataset, split in measured_splits(datasets, held_out_sets)
        ]
        evaluator.held_out = [
            replace(held_out_set, batches=replace(held_out_set.batches, scores=rows))
            for held_out_set, rows in zip(evaluator.held_out, held_out_rows, strict=True)
        ]

    def _make(
        self, splits_by_dataset: Sequence[tuple[TokenDataset, list[Split]]]
    ) -> dict[str, Scores]:
        """Compute or copy the scores; return them by the hash of the data. Collective."""
        weight_sums = None if self.context.base is None else self.context.base.sums
        model = model_identity(self.context, self.context.inputs, weight_sums)
        name = self.context.config.objective.reference
        make_scores = self._compute if name is None else self._copy
        scores = {
            identity_of(dataset).hash: make_scores(dataset, splits, model)
            for dataset, splits in splits_by_dataset
        }
        output = self.context.directory / DIRECTORY
        made_of = "scored with the initial weights" if name is None else f"copied from {name}"
        self.context.log.info(f"reference: scores of {len(scores)} datasets {made_of}, in {output}")
        return scores

    def _copy(self, dataset: TokenDataset, splits: Sequence[Split], model: Identity) -> Scores:
        """Return the scores that ``objective.reference`` names, copied to the run directory."""
        config, output = self.context.config, self.context.directory / DIRECTORY
        data_identity = identity_of(dataset)

        def copy() -> None:
            scores = reference_of(config, dataset, splits)
            refuse_other_model(config, scores, model)
            directory = scores_directory(output, data_identity)
            with writing(directory, OUTPUT_REMEDY):
                shutil.rmtree(directory, ignore_errors=True)
                copy_documents(scores, splits, directory)

        work = self.context.long_work
        work.on_main_rank(copy)
        scores_by_rank = work.on_every_rank(lambda: find_scores(output, data_identity))
        return scores_by_rank[self.context.world.rank]

    def _compute(self, dataset: TokenDataset, splits: Sequence[Split], model: Identity) -> Scores:
        """Return scores under the initial weights, computed into the run directory."""
        context, output = self.context, self.context.directory / DIRECTORY
        request = request_of(context.config, model, dataset)
        directory = scores_directory(output, request.data)

        def remove_other_scores() -> None:
            """Remove scores of an earlier launch that began with another model."""
            path = directory / REQUEST_NAME
            if path.exists() and differences(open_request(path), request):
                shutil.rmtree(directory)

        context.long_work.on_main_rank(remove_other_scores)
        scored_splits = ScoredSplits(dataset, splits, request)
        adapters = context.config.adapters
        engine = context.engine
        # Adapters that change the base stay on: DoRA's magnitudes may come from another run
        # (checkpoint.initialize_from), and without DoRA's matrices they are no model of this run.
        changes_base = adapters is not None and adapters.changes_base
        with engine.evaluating() if changes_base else engine.reference():
            return score_dataset(context, engine, scored_splits, output)

    def _read(
        self, splits_by_dataset: Sequence[tuple[TokenDataset, list[Split]]]
    ) -> dict[str, Scores]:
        """Return the scores in the run directory by the hash of the data. Collective."""
        output: Path = self.context.directory / DIRECTORY

        def read() -> dict[str, Scores]:
            scores: dict[str, Scores] = {}
            for dataset, splits in splits_by_dataset:
                data = identity_of(dataset)
                scores[data.hash] = find_scores(output, data)
                for split in splits:
                    scores[data.hash].sums(split)  # raises DataError for a missing or corrupt file
            return scores

        work = self.context.long_work
        try:
            return work.on_every_rank(read)[self.context.world.rank]
        except DataError as error:
            raise CheckpointError(
                f"{error}; the reference model of this run is gone with it -> restore it, or begin "
                "a new run in another output.directory"
            ) from error

    def _rows(
        self, scores_by_hash: dict[str, Scores], dataset: TokenDataset, split: Split
    ) -> RowScores:
        """Return scores of the samples of a split: float32 [samples, rows of a sample]."""
        scores = scores_by_hash[identity_of(dataset).hash]
        sums = scores.sums(split).astype(np.float32)
        rows = self.context.config.objective.kind.rows
        if rows is not None and rows.has_mismatched:
            return np.stack([sums, scores.mismatched_sums(split).astype(np.float32)], 1)
        return sums.reshape(-1, self.context.plan.rows_per_sample)
