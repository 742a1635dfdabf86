"""Sets for the evaluation loss, held-out documents of the data and additional sets: opened and
checked before training starts. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from bigtrain.data.loading.dataset_checks import count_samples, ignored_weights, open_answers
from bigtrain.data.shards.dataset import Level, TokenDataset, open_dataset
from bigtrain.data.shards.manifest import Split
from bigtrain.errors import DataError, Problem
from bigtrain.objectives.rows import Refusal
from bigtrain.objectives.section import ROWS
from bigtrain.settings.run_config import RunConfig


def open_held_out_datasets(
    config: RunConfig, datasets: Sequence[TokenDataset], check: Level = "sizes"
) -> tuple[tuple[TokenDataset, ...], list[Problem]]:
    """Return the sets of ``evaluation.held_out``, in its order, and a problem for each set that
    cannot be measured in this run: a set that cannot be opened, has a different tokenizer than the
    training data (`datasets`), is too short, or has conversations that would see each other."""
    held_out_sets, problems = [], []
    for number, held_out_set in enumerate(config.evaluation.held_out):
        key = f"evaluation.held_out.{number}.path"
        try:
            dataset = open_dataset(held_out_set.path, check)
            refusal = _unfit(config, dataset, datasets[0])
        except DataError as error:
            problems.append(Problem(key, held_out_set.path, str(error)))
            continue
        if refusal is not None:
            problems.append(Problem(key, held_out_set.path, *refusal))
        held_out_sets.append(dataset)
    return (() if problems else tuple(held_out_sets)), problems


def _unfit(config: RunConfig, dataset: TokenDataset, training: TokenDataset) -> Refusal | None:
    """Return why `dataset` cannot be measured, and the fix; None if it can."""
    # Token ids and losses must have the meaning that they have in the training data.
    tokenizer, expected = dataset.table.tokenizer, training.table.tokenizer
    if (tokenizer.hash, tokenizer.vocab_size) != (expected.hash, expected.vocab_size):
        return Refusal(
            f"was made with a different tokenizer ({tokenizer.name}, {tokenizer.vocab_size} "
            f"tokens) than the training data ({expected.name}, {expected.vocab_size} tokens)",
            "tokenize it with the tokenizer of the training data",
        )
    split = measured_split(dataset)
    ignored = ignored_weights(config) if dataset.table.is_weighted else None
    if ignored is not None:
        rule = f"has weights of losses, which {ignored.key}={ignored.value} ignores"
        return Refusal(rule, ignored.remedy)
    # Objectives of answers measure rows of their format, and next_token plain documents.
    if rows := config.objective.kind.rows:
        if dataset.table.rows != rows.name:
            return Refusal(rows.missing.rule.format(config.objective.type), "")
        if dataset.table.labels != training.table.labels:
            rule = "has other labels than the training data"
            return Refusal(rule, "tokenize it with the same --labels")
        try:
            open_answers(config, dataset, split)
        except DataError as error:
            return Refusal(str(error), "")
        return None
    if dataset.table.rows is not None:
        return ROWS[dataset.table.rows].for_next_token
    if dataset.table.is_masked and not config.data.is_each_document_separate:
        return Refusal("has conversations, which would see each other", "data.packing=best_fit")
    if not count_samples(config, dataset, split):
        return Refusal(
            f"has {dataset.table.num_tokens(split)} tokens to measure, too few for one sample of "
            f"{config.batch.sequence_length} + 1",
            "remove it, tokenize more text, or set a smaller batch.sequence_length",
        )
    return None


def evaluation_notes(
    config: RunConfig, datasets: Sequence[TokenDataset], sets: Sequence[TokenDataset]
) -> list[str]:
    """Return a line if evaluations are asked for between steps, and have nothing to measure."""
    section = config.evaluation
    intervals = {"every_steps": section.every_steps, "every_epochs": section.every_epochs}
    settings = [f"evaluation.{name} = {value}" for name, value in intervals.items() if value]
    has_data = bool(sets) or any(dataset.shards("held_out") for dataset in datasets)
    if not settings or has_data or section.prompts or section.tasks:
        return []
    return [
        f"{settings[0]} measures nothing: the data has no held-out documents -> `bigtrain tokenize "
        "--held-out 0.05`, or evaluation.held_out, prompts or tasks"
    ]


def check_best(
    config: RunConfig, datasets: Sequence[TokenDataset], sets: Sequence[TokenDataset]
) -> list[Problem]:
    """Check that ``evaluation.best`` has a metric, if settings depend on it: held-out documents,
    and for bits per byte their number of bytes."""
    section, stopping = config.evaluation.best, config.evaluation.early_stopping
    metric = config.best_held_out
    if metric is None or (config.checkpoint.keep_best == 0 and stopping is None):
        return []
    is_of_entropy = metric.name in ("perplexity", "bits_per_byte")
    if is_of_entropy and not config.objective.kind.is_next_token:
        rule = (
            f"is unknown for objective.type = {config.objective.type}, which is not a cross-entropy"
        )
        return [Problem("evaluation.best.metric", section.metric, rule, "held_out_loss")]
    # Held-out documents are in the sources of the mixture or in additional sets.
    by_name = dict(zip(config.data.names, datasets, strict=True))
    measured = {name: dataset for name, dataset in by_name.items() if dataset.shards("held_out")}
    names = [held_out_set.name for held_out_set in config.evaluation.held_out]
    measured |= dict(zip(names, sets, strict=True))
    if not measured or (metric.set_name is not None and metric.set_name not in measured):
        owner = "the data has" if metric.set_name is None else f"{metric.set_name} has"
        rule = f"{owner} no held-out documents to select the best checkpoint"
        fix = "make shards with `bigtrain tokenize --held-out`, or set "
        if config.checkpoint.keep_best:
            key, kept = "checkpoint.keep_best", config.checkpoint.keep_best
            return [Problem(key, kept, rule, f"{fix}{key}=0")]
        key = "evaluation.early_stopping"
        return [Problem(key, None, rule, f"{fix}{key}=null")]
    set_names = [metric.set_name] if metric.set_name else [*measured]
    names_without_bytes = [
        name
        for name in set_names
        if tokens_per_byte(measured[name], measured_split(measured[name])) is None
    ]
    if metric.name == "bits_per_byte" and names_without_bytes:
        name = names_without_bytes[0]
        rule = f"is unknown for {name}: only some tokens of a conversation have a loss"
        return [Problem("evaluation.best.metric", section.metric, rule, "held_out_loss")]
    return []


def measured_split(dataset: TokenDataset) -> Split:
    """Return the measured split of a set: its held-out documents, or all if it has none."""
    return "held_out" if dataset.table.num_tokens("held_out") else "train"


def tokens_per_byte(dataset: TokenDataset, split: Split) -> float | None:
    """Return tokens of `split` per UTF-8 byte of its documents; None if a mask excludes some tokens
    from the loss, or if unknown."""
    text_bytes = dataset.table.text_bytes.get(split, 0)
    if dataset.table.is_masked or not text_bytes:
        return None
    return dataset.table.num_tokens(split) / text_bytes
