"""Launch of a scoring pass: model and data of a run, one output, no optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bigtrain.data.loading.stored_scores import PART_TOKENS, identity_of, request_of
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import SPLITS, Split
from bigtrain.data.shards.scores import (
    REQUEST_NAME,
    ScoreKind,
    Scores,
    differences,
    find_scores,
    open_request,
    scores_directory,
)
from bigtrain.engine.startup.mesh import open_mesh, warm_up
from bigtrain.errors import DataError
from bigtrain.run.checkpointing.initialize import verify_weights, weights_source
from bigtrain.run.preflight import Inputs
from bigtrain.run.scoring import ScoredSplits, model_identity, score_dataset
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.segment_start import build
from bigtrain.run.session import open_session
from bigtrain.settings.resolve import ResolvedRun
from bigtrain.system.world import World


@dataclass(frozen=True)
class PassOptions:
    """Options of a pass; see `bigtrain.data.shards.scores.ScoreRequest`."""

    output: Path
    kind: ScoreKind = "documents"
    top_k: int = 0
    part_tokens: int = PART_TOKENS
    splits: Sequence[Split] = SPLITS


def score_inputs(
    run: ResolvedRun, inputs: Inputs, world: World, options: PassOptions
) -> list[Scores]:
    """Write the scores of all datasets of `inputs`, and return them in the order of the mixture and
    the held-out sets. Collective over all ranks of `world`. The model is only built if scores are
    missing. Raises DataError on every rank if the output has other scores of this data."""
    source = weights_source(run.config)
    weights = source.find(run.config, inputs)
    with open_session(run, world) as context:
        sums = None if weights is None else verify_weights(context, weights)
        model = model_identity(context, inputs, sums)
        # Datasets with equal data are scored once.
        datasets: dict[str, TokenDataset] = {}
        for dataset in (*inputs.datasets, *inputs.held_out_sets):
            datasets.setdefault(identity_of(dataset).hash, dataset)
        scored_splits = [
            ScoredSplits(
                dataset,
                [split for split in options.splits if dataset.table.num_tokens(split)],
                request_of(
                    context.config,
                    model,
                    dataset,
                    score_kind=options.kind,
                    top_k=options.top_k,
                    part_tokens=options.part_tokens,
                ),
            )
            for dataset in datasets.values()
        ]
        incomplete = context.long_work.on_main_rank(
            lambda: _incomplete_datasets(scored_splits, options.output)
        )
        if incomplete:
            context.heartbeat.set_activity("building the model", slow=True)
            mesh = open_mesh(
                run.topology, world.rank, run.config.watchdog.collective_timeout_seconds
            )
            warm_up(mesh, context.device)
            engine = build(context, inputs, source, mesh)
            segment = SegmentContext(**vars(context), inputs=inputs, engine=engine)
            source.fill(segment, weights, sums)
            for scored in (scored_splits[number] for number in incomplete):
                score_dataset(context, engine, scored, options.output)
                dataset = scored.dataset
                num_documents = sum(map(dataset.table.num_documents, scored.splits))
                directory = scores_directory(options.output, scored.request.data)
                context.log.info(
                    f"{dataset.path}: {num_documents:,} documents scored, in {directory}"
                )
            engine.close()
        scores_by_rank = context.long_work.on_every_rank(
            lambda: [find_scores(options.output, scored.request.data) for scored in scored_splits]
        )
        return scores_by_rank[world.rank]


def _incomplete_datasets(scored_splits: Sequence[ScoredSplits], output: Path) -> list[int]:
    """Return the indices of the datasets without complete scores. Raises DataError for scores that
    another request made."""
    incomplete = []
    for number, scored in enumerate(scored_splits):
        directory = scores_directory(output, scored.request.data)
        path = directory / REQUEST_NAME
        if path.exists() and (changes := differences(open_request(path), scored.request)):
            raise DataError(
                f"{directory} has other scores: {'; '.join(changes)} -> another --output, or "
                "remove it"
            )
        try:
            scores = find_scores(output, scored.request.data)
            if set(scored.splits) - scores.record.splits.keys():
                incomplete.append(number)
        except DataError:
            incomplete.append(number)
    return incomplete
