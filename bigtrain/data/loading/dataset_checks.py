"""Checks that the datasets fit the run, before training starts. No torch.

Each function returns problems instead of raising, so that all problems are reported at once.
"""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bigtrain.data.samples.packing_plan import plan_of
from bigtrain.data.samples.source import StreamDataset, with_source
from bigtrain.data.samples.token_stream import StreamSamples, count_windows, split_stream
from bigtrain.data.shards.dataset import Level, TokenDataset, open_dataset
from bigtrain.data.shards.manifest import TOKENIZER_DIRECTORY, Split
from bigtrain.data.shards.shard_table import ShardTable
from bigtrain.data.tokenizers.cache import foreign_file
from bigtrain.data.tokenizers.model_tokens import (
    check_model_tokens,
    check_vocabulary,
    known_vocab_size,
)
from bigtrain.errors import DataError, Problem, TooFewAnswersError
from bigtrain.objectives.section import ROWS
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import GIVEN
from bigtrain.system.files import has_checkpoints

_HELD_OUT_REMEDY = "tokenize again with a larger --held-out, or without it"


def is_short_held_out(problem: Problem) -> bool:
    """Return whether `problem`, of a dataset, is a held-out split that is too small to measure."""
    return problem.remedy == _HELD_OUT_REMEDY


def open_checked(
    config: RunConfig, check: Level = "sizes", program_source: object = None
) -> tuple[tuple[TokenDataset, ...], list[Problem]]:
    """Open the datasets of the mixture, in its order; return a problem for each dataset that cannot
    be opened. `check`: see `open_dataset`. `program_source`: samples of the calling program. Raises
    ExtensionError and DataError for samples that cannot be read."""
    problems: list[Problem] = []
    datasets: list[TokenDataset] = []
    for number, source in enumerate(config.data.mixture):
        try:
            datasets.append(open_dataset(source.path, check))
        except DataError as error:
            problems.append(_problem(config, number, str(error)))
    if problems:
        return (), problems
    return tuple(with_source(config, dataset, program_source) for dataset in datasets), []


def check_shards(config: RunConfig, check: Level = "sizes") -> list[Problem]:
    """Open the datasets of the mixture and return the problems of the run: what
    `open_checked`, `check_datasets`, and for the first dataset `check_model_tokens` find, each only
    if nothing was found before. Raises ExtensionError and DataError as `open_checked`."""
    datasets, problems = open_checked(config, check)
    problems = problems or check_datasets(config, datasets).problems
    if problems:
        return problems
    first, resumes = datasets[0], has_checkpoints(config.output.directory)
    return check_model_tokens(config, first.tokenizer_path, str(first.path), resumes=resumes)


def _problem(config: RunConfig, number: int, rule: str, fix: str = "") -> Problem:
    """Return a problem of source `number` of the mixture."""
    return Problem(config.data.key_of(number), config.data.mixture[number].path, rule, fix)


def _unlike_first(
    config: RunConfig, values: Mapping[int, object], rule: Callable[[int, int], str], fix: str
) -> list[Problem]:
    """Return a problem for each source whose value differs from the value of the first source that
    has one. `values`: by source number, ascending; `rule`: returns the rule for the numbers of a
    source and of the first source."""
    first = next(iter(values), 0)
    return [
        _problem(config, number, rule(number, first), fix)
        for number, value in values.items()
        if value != values[first]
    ]


@dataclass
class Findings:
    """Problems of datasets, and notes on what is legal and rarely meant."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_datasets(
    config: RunConfig, datasets: Sequence[TokenDataset], model_vocab_size: int | None = None
) -> Findings:
    """Return what is found in `datasets`, the datasets of ``config.data.mixture``, for this run.
    `model_vocab_size`: rows of the model's embedding, before ``model.vocabulary`` grows it, if the
    caller knows them; by default `known_vocab_size`. Reads headers and sizes of the shards, and
    loads a tokenizer only if data.tokenizer names one."""
    tables = [dataset.table for dataset in datasets]
    try:
        problems = check_length(config, datasets)
    except DataError as error:  # from an index that packing reads
        return Findings([Problem("data.packing", config.data.packing, str(error))])
    problems += check_given_stream(config, datasets)
    problems += check_same_directory(config)
    problems += check_tokenizer_files(config)
    row_problems = check_rows(config, tables)
    answers = Findings(row_problems) if row_problems else check_answers(config, datasets)
    problems += answers.problems
    if config.data.packing == "none" and not problems:
        from bigtrain.data.samples.documents import shorter_rows

        for dataset in datasets:  # a note on each source whose samples are mostly padding
            longest = int(plan_of(config, dataset, "train").lengths.max(initial=1)) - 1
            if note := shorter_rows(longest, config.batch.sequence_length):
                answers.notes.append(f"{dataset.path}: {note}")
    problems += check_weights(config, tables)
    problems += check_conversations(config, tables) + check_same_tokenizer(config, tables)
    problems += check_same_beginnings(config, tables) + check_same_templates(config, tables)
    # The vocabulary is checked if the model's files are on this machine.
    if model_vocab_size is None:
        model_vocab_size = known_vocab_size(config.model)
    if model_vocab_size is not None:
        if config.model.vocabulary is not None:
            num_tokens = tables[0].tokenizer.vocab_size
            model_vocab_size = config.model.vocabulary.size(model_vocab_size, num_tokens)
        is_trained = config.model.path is not None
        problems += check_vocabulary(tables[0].tokenizer, model_vocab_size, trained=is_trained)
    # A tokenizer that is set must be the tokenizer of the shards.
    name, shard_tokenizer = config.data.tokenizer, tables[0].tokenizer
    if name is not None:
        from bigtrain.data.tokenizers.tokenizer import load_tokenizer

        try:
            tokenizer = load_tokenizer(name)
        except DataError as error:
            problems.append(Problem("data.tokenizer", name, str(error)))
            return Findings(problems, answers.notes)
        if tokenizer.hash != shard_tokenizer.hash:
            rule = (
                f"a different tokenizer than that of the shards ({shard_tokenizer.name}, "
                f"{shard_tokenizer.vocab_size} tokens; this one has {tokenizer.vocab_size})"
            )
            fix = "remove data.tokenizer, or tokenize again with it"
            problems.append(Problem("data.tokenizer", name, rule, fix))
    return Findings(problems, answers.notes)


def check_given_stream(config: RunConfig, datasets: Sequence[TokenDataset]) -> list[Problem]:
    """Check the settings of a stream of samples that the calling program passes; the settings of a
    class are checked with the name of the class."""
    samples = config.data.samples
    if samples is None or samples.type != GIVEN:
        return []
    first = datasets[0]
    if not isinstance(first, StreamDataset):
        return []
    from bigtrain.settings.sample_stream import check_stream

    return check_stream(config, first.train.items.source_class)


def check_same_tokenizer(config: RunConfig, tables: Sequence[ShardTable]) -> list[Problem]:
    """Check that one tokenizer made all sources: otherwise token ids have different meanings."""

    def rule(number: int, first: int) -> str:
        texts = [
            f"{t.name}, hash {t.hash}, {t.vocab_size} tokens, end of document "
            f"{t.end_of_document_id}"
            for t in (tables[number].tokenizer, tables[first].tokenizer)
        ]
        return (
            f"was made with a different tokenizer ({texts[0]}) than "
            f"{config.data.mixture[first].path} ({texts[1]})"
        )

    # Sources may end documents in several tokens, unless losses depend on document ends.
    compares_ends = config.data.mask_end_of_document
    identities = [
        (t.hash, t.vocab_size, t.end_of_document_id if compares_ends else None)
        for t in (table.tokenizer for table in tables)
    ]
    fix = "tokenize all sources of a mixture with the same tokenizer"
    return _unlike_first(config, dict(enumerate(identities)), rule, fix)


def check_same_beginnings(config: RunConfig, tables: Sequence[ShardTable]) -> list[Problem]:
    """Check that texts begin alike in every source: a prompt can begin in one way only.
    Conversations begin according to their template."""

    def rule(number: int, first: int) -> str:
        ids = (", ".join(map(str, beginnings[n])) for n in (number, first))
        texts = [f"with token {text}" if text else "with no special token" for text in ids]
        return f"its texts begin {texts[0]}, those of {config.data.mixture[first].path} {texts[1]}"

    beginnings = {n: t.tokenizer.beginning_ids for n, t in enumerate(tables) if not t.is_masked}
    return _unlike_first(
        config, beginnings, rule, "tokenize both with the same --beginning-of-text"
    )


def check_same_templates(config: RunConfig, tables: Sequence[ShardTable]) -> list[Problem]:
    """Check that one chat template rendered all conversations: an export can have only one."""
    templates = {n: t.tokenizer.chat_template for n, t in enumerate(tables)}
    return _unlike_first(
        config,
        {number: template for number, template in templates.items() if template is not None},
        lambda _, first: (
            "its conversations were rendered by a different chat template than those of "
            f"{config.data.mixture[first].path}, and the export can have only one"
        ),
        "tokenize both with the same --chat-template",
    )


def check_same_directory(config: RunConfig) -> list[Problem]:
    """Check that no two sources are the same by links or mounts: it would be read twice."""
    directories = [os.stat(source.path) for source in config.data.mixture]
    inodes = [(directory.st_dev, directory.st_ino) for directory in directories]
    first_numbers = [inodes.index(inode) for inode in inodes]
    return [
        _problem(
            config,
            number,
            f"is the same directory as {config.data.key_of(first)} = "
            f"{config.data.mixture[first].path}",
            "list it once, with the sum of both weights",
        )
        for number, first in enumerate(first_numbers)
        if first < number
    ]


def check_tokenizer_files(config: RunConfig) -> list[Problem]:
    """Check that the data's tokenizer, which a run copies, is there and consists of regular
    files."""
    problems = []
    for number, source in enumerate(config.data.mixture):
        if not Path(source.path, TOKENIZER_DIRECTORY).is_dir():
            rule = f"has no directory {TOKENIZER_DIRECTORY}, which is a part of the dataset"
            fix = "copy the complete dataset again, or make it with `bigtrain tokenize`"
            problems.append(_problem(config, number, rule, fix))
        elif reason := foreign_file(Path(source.path), TOKENIZER_DIRECTORY):
            fix = "check the origin of this dataset, and replace links by files"
            problems.append(_problem(config, number, reason, fix))
    return problems


def check_length(config: RunConfig, datasets: Sequence[TokenDataset]) -> list[Problem]:
    """Check that every source has a sample, and the mixture at least one global batch."""
    length = config.batch.sequence_length
    chunk_length = config.data.chunk_length or length
    num_tokens = [dataset.table.num_tokens("train") for dataset in datasets]
    num_samples = [count_samples(config, dataset, "train") for dataset in datasets]
    key, value = ("data.path", config.data.path) if config.data.path else ("data.sources", None)
    problems = []
    # A step takes a global batch of the mixture, and every source must contribute.
    if sum(num_samples) < config.batch.samples_per_step:
        problems.append(
            Problem(
                key,
                value,
                f"too short for one global batch: {sum(num_tokens)} training tokens are "
                f"{sum(num_samples)} samples of {length} tokens, one step takes "
                f"{config.batch.samples_per_step}",
                "tokenize more text, or set a smaller batch",
            )
        )
    for number, dataset in enumerate(datasets):
        if not num_samples[number] and len(datasets) > 1:
            problems.append(
                _problem(
                    config,
                    number,
                    f"has {num_tokens[number]} training tokens, too few for one sample of "
                    f"{chunk_length} + 1",
                    "remove it, tokenize more text, or set a smaller "
                    + ("batch.sequence_length" if chunk_length == length else "data.chunk_length"),
                )
            )
        # A held-out split must be long enough to be measured.
        held_out = dataset.table.num_tokens("held_out")
        if held_out and not count_samples(config, dataset, "held_out"):
            problems.append(
                _problem(
                    config,
                    number,
                    f"the held-out split has {held_out} tokens, too few for one sample of "
                    f"{length} + 1",
                    _HELD_OUT_REMEDY,
                )
            )
    return problems


def count_samples(config: RunConfig, dataset: TokenDataset, split: Split) -> int:
    """Return the number of samples of a split, counted as in `bigtrain.data.loading.loader`."""
    if config.objective.kind.rows:
        return dataset.table.num_answers(split)
    if config.data.has_complete_documents:
        return plan_of(config, dataset, split).num_packs
    length = config.batch.sequence_length
    chunk_length = config.data.chunk_length or length if split == "train" else length
    num_tokens = dataset.table.num_tokens(split)
    return count_windows(num_tokens, chunk_length) * (chunk_length // length)


def check_rows(config: RunConfig, tables: Sequence[ShardTable]) -> list[Problem]:
    """Check that the objective reads the rows of every source."""
    rows = config.objective.kind.rows
    problems = []
    for number, table in enumerate(tables):
        if rows is not None and table.rows != rows.name:
            rule = rows.missing.rule.format(config.objective.type)
            problems.append(_problem(config, number, rule, rows.missing.fix))
        if table.rows is not None and rows is None:
            problems.append(_problem(config, number, *ROWS[table.rows].for_next_token))
        if rows is not None and rows.has_classes and table.labels != tables[0].labels:
            rule = "has other labels than the first one ({}, not {})"
            rule = rule.format(", ".join(table.labels), ", ".join(tables[0].labels))
            remedy = "tokenize it with the same --labels"
            problems.append(_problem(config, number, rule, remedy))
    return problems


def check_weights(config: RunConfig, tables: Sequence[ShardTable]) -> list[Problem]:
    """Check that weights of tokens are not ignored."""
    if config.data.samples is None:
        refused = ignored_weights(config)
    else:
        refused = ignored_weights(config, "data.samples", "items without loss_weights")
    return [
        Problem(refused.key, refused.value, f"{refused.rule} ({source.path})", refused.remedy)
        for source, table in zip(config.data.mixture, tables, strict=True)
        if refused is not None and table.is_weighted
    ]


def ignored_weights(
    config: RunConfig, owner: str = "a dataset", remedy: str = "tokenize without loss_weights"
) -> Problem | None:
    """Return the setting that the run cannot combine with the weights of tokens that `owner` has.
    remedy: fix that gives data without weights."""
    if not config.objective.kind.is_next_token:
        rule = f"does not read the weights of losses of tokens that {owner} has"
        fix = f"objective.type=next_token, or {remedy}"
        return Problem("objective.type", config.objective.type, rule, fix)
    if config.model.loss == "liger":
        rule = f"has no weights of losses of tokens, which {owner} has"
        return Problem("model.loss", "liger", rule, "model.loss=chunked")
    if config.objective.mtp_weight:
        rule = f"trains layers whose losses have no weights of tokens, which {owner} has"
        fix = f"objective.mtp_weight=0, or {remedy}"
        return Problem("objective.mtp_weight", config.objective.mtp_weight, rule, fix)
    return None


def check_answers(config: RunConfig, datasets: Sequence[TokenDataset]) -> Findings:
    """Check that every answer fits a row, and note whether training answers are truncated or all
    are short. Reads the index of every shard."""
    findings = Findings()
    if not config.objective.kind.rows:
        return findings
    for number, dataset in enumerate(datasets):
        for split in dataset.table.splits:
            try:
                answers = open_answers(config, dataset, split)
            except TooFewAnswersError as error:
                # The text of an error is its rule, an arrow and its fix.
                rule, _, remedy = f"the {split.replace('_', '-')} split: {error}".partition(" -> ")
                fix = remedy if split == "train" else _HELD_OUT_REMEDY
                findings.problems.append(_problem(config, number, rule, fix))
                continue
            except DataError as error:
                findings.problems.append(_problem(config, number, f"{split}: {error}"))
                continue
            if split == "train" and answers and answers.length_note:
                findings.notes.append(f"{dataset.path}: {answers.length_note}")
    return findings


def open_answers(config: RunConfig, dataset: TokenDataset, split: Split) -> StreamSamples | None:
    """Return the pairs, rated answers or samples with labels of a split; None if it is empty.
    Raises DataError as their classes."""
    objective = config.objective.kind
    assert objective.rows is not None
    if not dataset.table.num_documents(split):
        return None
    samples: StreamSamples = pkgutil.resolve_name(objective.rows.samples)(
        split_stream(dataset, split),
        config.batch.sequence_length,
        truncates=config.data.long_documents == "truncate",
        **objective.sample_options,
    )
    return samples


def check_conversations(config: RunConfig, tables: Sequence[ShardTable]) -> list[Problem]:
    """Check that conversations are isolated: attention must not see another conversation."""
    if config.data.is_each_document_separate or config.objective.kind.rows:
        return []
    return [
        Problem(
            "data.packing",
            config.data.packing,
            f"conversations ({config.data.mixture[number].path}) would be split wherever a sample "
            "is full, and see each other",
            "set data.packing=best_fit (or at least data.document_boundaries=isolate)",
        )
        for number, table in enumerate(tables)
        if table.is_masked
    ]
