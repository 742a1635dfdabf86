"""Scores of a run's data that its objective reads: required scores, and whether stored scores fit.

Imports no torch: `bigtrain check` and the checks before the rendezvous use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bigtrain.data.loading.held_out import measured_split
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import Split
from bigtrain.data.shards.scores import (
    Identity,
    ScoreKind,
    ScoreRequest,
    Scores,
    data_identity,
    differences,
    find_scores,
)
from bigtrain.errors import ConfigError, DataError, Problem
from bigtrain.settings.run_config import RunConfig

PART_TOKENS = 1 << 22
"""Tokens of a part: what a killed pass may lose, and what is in memory at a time, 12 bytes each
(8 more for each of the top k)."""
KEY = "objective.reference"


def request_of(
    config: RunConfig,
    model: Identity,
    dataset: TokenDataset,
    *,
    score_kind: ScoreKind = "documents",
    top_k: int = 0,
    part_tokens: int = PART_TOKENS,
) -> ScoreRequest:
    """Return the request for scores of `dataset` under the model of a run."""
    return ScoreRequest(
        model=model,
        data=identity_of(dataset),
        kind=score_kind,
        top_k=top_k,
        sequence_length=config.batch.sequence_length,
        long_documents="truncate" if config.data.long_documents == "truncate" else "cut",
        dtype=config.precision.dtype,
        part_tokens=part_tokens,
    )


def identity_of(dataset: TokenDataset) -> Identity:
    """Return the identity of a dataset, as its scores record it."""
    return data_identity(str(dataset.path), dataset.table)


def measured_splits(
    datasets: Sequence[TokenDataset], held_out_sets: Sequence[TokenDataset]
) -> list[tuple[TokenDataset, Split]]:
    """Return the split of every held-out set of a run, in the order of evaluation."""
    held_out_splits: list[tuple[TokenDataset, Split]] = [
        (dataset, "held_out") for dataset in datasets if dataset.table.num_tokens("held_out")
    ]
    return held_out_splits + [(dataset, measured_split(dataset)) for dataset in held_out_sets]


def wanted_splits(
    datasets: Sequence[TokenDataset], held_out_sets: Sequence[TokenDataset]
) -> list[tuple[TokenDataset, list[Split]]]:
    """Return each dataset that a run reads once, and its splits that are read."""
    training_splits: list[tuple[TokenDataset, Split]] = [(dataset, "train") for dataset in datasets]
    # Two paths with equal tokens are one dataset.
    splits_by_hash: dict[str, tuple[TokenDataset, list[Split]]] = {}
    for dataset, split in [*training_splits, *measured_splits(datasets, held_out_sets)]:
        _, dataset_splits = splits_by_hash.setdefault(identity_of(dataset).hash, (dataset, []))
        if split not in dataset_splits:
            dataset_splits.append(split)
    return list(splits_by_hash.values())


def check_reference_scores(
    config: RunConfig, datasets: Sequence[TokenDataset], held_out_sets: Sequence[TokenDataset]
) -> list[Problem]:
    """Return a problem for each dataset without fitting scores in ``objective.reference`` or
    ``objective.teacher``. The reference model is compared when the run begins, since that reads the
    weights."""
    objective = config.objective
    has_teacher = objective.teacher is not None
    reads_reference = objective.kind.reads_scores(config) and objective.reference is not None
    if not has_teacher and not reads_reference:
        return []
    problems: list[Problem] = []
    for dataset, splits in wanted_splits(datasets, held_out_sets):
        try:  # they raise ConfigError if no stored scores fit
            if has_teacher and "train" in splits:
                teacher_of(config, dataset)
            elif not has_teacher:
                reference_of(config, dataset, splits)
        except ConfigError as error:
            problems += error.problems
    if has_teacher and not problems:
        top_ks = [teacher_of(config, dataset).request.top_k for dataset in datasets]
        if len(set(top_ks)) > 1:
            rule = f"has {', '.join(map(str, top_ks))} tokens for the sources of data.sources"
            remedy = "score all with the same --top-k"
            problems.append(Problem("objective.teacher", config.objective.teacher, rule, remedy))
    return problems


def reference_of(config: RunConfig, dataset: TokenDataset, splits: Sequence[Split]) -> Scores:
    """Return the scores of `dataset` that ``objective.reference`` names. Raises ConfigError if a
    split has no scores, or if documents were divided at other positions."""
    assert config.objective.reference is not None
    return _fitting(config, KEY, config.objective.reference, dataset, splits)


def teacher_of(config: RunConfig, dataset: TokenDataset) -> Scores:
    """Return the scores of the training documents of `dataset` that ``objective.teacher`` names.
    Raises ConfigError as `reference_of`, and for scores without the most probable tokens."""
    key, name = "objective.teacher", config.objective.teacher
    assert name is not None
    scores = _fitting(config, key, name, dataset, ["train"])
    if scores.request.kind != "top-k":
        rule = f"has scores of kind {scores.request.kind}, without the most probable tokens"
        raise ConfigError(Problem(key, name, rule, "bigtrain score --kind top-k --top-k 64"))
    return scores


def _fitting(
    config: RunConfig, key: str, name: str, dataset: TokenDataset, splits: Sequence[Split]
) -> Scores:
    """Return the scores of `dataset` in the directory `name`, the value of setting `key`. Raise
    ConfigError as `reference_of`."""
    # The directory has scores of this dataset, for all splits that the run reads.
    rows = config.objective.kind.rows
    has_mismatched = rows is not None and rows.has_mismatched
    try:
        scores = find_scores(Path(name), identity_of(dataset))
        for split in splits:
            scores.parts(split)
            if has_mismatched:
                scores.mismatched_sums(split)
    except DataError as error:
        # The text of the error is its rule, an arrow and its fix.
        raise ConfigError(Problem(key, name, *str(error).split(" -> ", 1))) from error
    length = config.batch.sequence_length
    if has_mismatched and scores.request.sequence_length != length:
        scored = scores.request.sequence_length
        rule = f"has mismatched answers of sequence_length {scored}, and this run has {length}"
        raise ConfigError(Problem(key, name, rule, "score the data with the settings of this run"))
    # Only documents that are longer than a sample depend on how they were divided.
    longest = max(scores.record.longest[split] for split in splits)
    if longest <= min(length, scores.request.sequence_length) + 1:
        return scores
    run_request = request_of(config, scores.request.model, dataset)
    texts = differences(scores.request, run_request)  # "field: values"
    changes = [text for text in texts if text.startswith(("sequence_length:", "long_documents:"))]
    if not changes:
        return scores
    rule = f"its longest document has {longest} tokens, and was divided: {'; '.join(changes)}"
    remedy = "score the data with the settings of this run"
    raise ConfigError(Problem(key, name, rule, remedy))


def refuse_other_model(config: RunConfig, scores: Scores, model: Identity) -> None:
    """Raise ConfigError for scores of a model other than `model`, with which the run begins."""
    scored_model = scores.request.model
    if scored_model.hash != model.hash:
        rule = (
            f"has scores of the model {scored_model.name} ({scored_model.hash}), and this run "
            f"begins with {model.name} ({model.hash})"
        )
        remedy = "bigtrain score with this run's model"
        raise ConfigError(Problem(KEY, config.objective.reference, rule, remedy))
