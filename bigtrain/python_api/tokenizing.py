"""Tokenizers and token shards from text: `bigtrain tokenizer` and `bigtrain tokenize`."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from bigtrain.data.tokenize_job.options import (
    ReadingOptions,
    TokenizeOptions,
    TrainTokenizerOptions,
)
from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.documents.formats import DocumentReader
    from bigtrain.data.documents.reader import BadDocument, ReadOptions
    from bigtrain.data.shards.dataset import TokenDataset
    from bigtrain.data.shards.manifest import FillInMiddleRecord, OptionsRecord
    from bigtrain.data.tokenize_job.job import BuildResult

Parameters = ParamSpec("Parameters")
Record = TypeVar("Record")
Result = TypeVar("Result")
OTHER_FIRST_ROWS = 64
"""Local files, in addition to the first file, whose first row is read; evenly spaced."""


def _with_fields_of(
    record: Callable[Parameters, Record],
) -> Callable[[Callable[[Record], Result]], Callable[Parameters, Result]]:
    """Return a decorator for functions of a record: the decorated function takes the record's
    fields as parameters, also for type checkers."""

    def decorate(function: Callable[[Record], Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            return function(record(*args, **kwargs))

        result = inspect.signature(function).return_annotation
        call.__signature__ = inspect.signature(record).replace(  # type: ignore[attr-defined]
            return_annotation=result
        )
        return call

    return decorate


@_with_fields_of(TokenizeOptions)
def tokenize(options: TokenizeOptions) -> TokenDataset:
    """Turn text into token shards in the directory `output`, and open them.

    Does nothing if `output` is the finished dataset of this input, and continues an unfinished one.
    Raises DataError; then only finished work is kept.
    """
    from bigtrain.data.shards.dataset import open_dataset

    build_tokens(options)
    return open_dataset(Path(options.output), check="sizes")


def build_tokens(options: TokenizeOptions) -> BuildResult:
    """Build token shards for `bigtrain tokenize` and `tokenize`; return the result."""
    from bigtrain.data.chat.named_templates import find_chat_template
    from bigtrain.data.tokenize_job.job import build_dataset
    from bigtrain.data.tokenize_job.progress import announce
    from bigtrain.data.tokenize_job.request import BuildRequest, find_worker_rank

    template = None
    if options.chat_template is not None:
        template = find_chat_template(options.chat_template)
    announce("finding the inputs")
    reading = read_options(options)
    return build_dataset(
        BuildRequest(
            reading.selection,
            _record_of(reading, options),
            str(options.tokenizer),
            Path(options.output),
            chat_template=template,
            encoder=options.encoder,
            workers=options.workers,
            share=find_worker_rank(os.environ, options.rank, options.world_size),
        )
    )


def _record_of(reading: ReadOptions, options: TokenizeOptions) -> OptionsRecord:
    """Return the record of a dataset's options. Raise DataError for incompatible options."""
    from bigtrain.data.documents.text_filter import load_filter
    from bigtrain.data.shards.manifest import (
        DEFAULT_SHARD_BYTES,
        OptionsRecord,
        TextFilterRecord,
    )
    from bigtrain.objectives.section import ROWS

    # The format of rows, which decides the options that have an effect.
    format_name: str = options.format
    names, roles = dict(options.keys or {}), options.roles or {}
    if options.chat_key is not None:
        if options.text_keys:
            raise DataError(f"--text-key and --chat-key {options.chat_key} exclude each other")
        if format_name not in ("auto", "messages"):
            raise DataError(
                f"--chat-key is of --format messages, and --format is {format_name} -> --key"
            )
        format_name, names = "messages", {"messages": options.chat_key, **names}
    if format_name == "auto":
        say = options.say or _to_stderr
        format_name = "text" if options.text_keys else detected_format(reading, say)
    rows = row_format(format_name, names, roles)
    document_keys = reading.text_keys if rows is None else rows.keys[:1]
    if ignored := set(document_keys) & set(reading.ignored_keys):
        raise DataError(f"--ignore-key {min(ignored)}: it is the key of the document -> remove it")
    # Options that would have no effect on this format are refused.
    if rows is None:
        refuse_for_text(reading, options)
    elif rows.name == "tokens":
        refuse_for_tokens(options)
    elif rows.name in ROWS and options.learn == "last":
        raise DataError(
            f"--learn last: {ROWS[rows.name].learned} --format {rows.name} are learned completely "
            "-> remove it"
        )
    # Options of the same name are recorded as given, except those that were resolved.
    given_names = OptionsRecord.model_fields.keys() & {
        field.name for field in fields(TokenizeOptions)
    }
    resolved: dict[str, object] = {
        "labels": _labels(options, format_name),
        "text_keys": reading.text_keys if rows is None else rows.keys,
        "shard_bytes": options.shard_bytes or DEFAULT_SHARD_BYTES,
        "max_document_bytes": reading.max_document_bytes,
        "chat": rows is not None,
        "chat_format": "messages" if rows is None else rows.name,
        "learned": options.learn,
        "roles": () if rows is None else rows.roles,
        "ignored_keys": reading.ignored_keys,
        "fill_in_middle": _fill_in_middle(options, is_text=rows is None),
        "text_filter": None,
    }
    if options.text_filter is not None:
        loaded = load_filter(options.text_filter)
        resolved["text_filter"] = TextFilterRecord(name=loaded.name, source_xxh3=loaded.source_xxh3)
    return OptionsRecord(**({name: getattr(options, name) for name in given_names} | resolved))


def _labels(options: TokenizeOptions, format_name: str) -> tuple[str, ...]:
    """Return the names of the labels. Raise DataError if `format_name` has no labels, or for a
    wrong number of names."""
    from bigtrain.data.shards.manifest import MAX_LABELS
    from bigtrain.objectives.section import ROWS

    labels = tuple(options.labels or ())
    rows = ROWS.get(format_name)
    if rows is None or not rows.has_classes:
        if labels:
            raise DataError("--labels are of --format classification -> name it, or remove them")
        return ()
    if not 2 <= len(labels) <= MAX_LABELS or len(set(labels)) != len(labels) or "" in labels:
        raise DataError(
            f"--labels: {len(labels)} names, {len(set(labels))} of them different; --format "
            f"classification needs 2 to {MAX_LABELS} different ones -> --labels negative positive"
        )
    return labels


def _fill_in_middle(options: TokenizeOptions, *, is_text: bool) -> FillInMiddleRecord | None:
    """Return the record of fill-in-the-middle; None without it. Raise DataError for options that
    have no effect."""
    from bigtrain.data.shards.manifest import FillInMiddleRecord

    rate, tokens = options.fim_rate, options.fim_tokens
    spm_rate, seed = options.fim_spm_rate, options.fim_seed
    if not rate:
        fim_options = {"--fim-spm-rate": spm_rate, "--fim-seed": seed, "--fim-tokens": tokens}
        for option, value in fim_options.items():
            if value is not None:
                raise DataError(f"{option} is for fill-in-the-middle -> --fim-rate F, or remove it")
        return None
    if not is_text:
        raise DataError("--fim-rate is for documents of plain text -> remove it")
    if tokens is not None and len(tokens) != 3:
        raise DataError(f"--fim-tokens has {len(tokens)} names -> PREFIX SUFFIX MIDDLE")
    return FillInMiddleRecord(
        rate=rate,
        spm_rate=0.5 if spm_rate is None else spm_rate,
        seed=seed or 0,
        tokens=None if tokens is None else (tokens[0], tokens[1], tokens[2]),
    )


@_with_fields_of(TrainTokenizerOptions)
def train_tokenizer(options: TrainTokenizerOptions) -> int:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, write it into the directory
    `output`, and return its number of tokens.

    `options`: of reading text as for `tokenize`; `say` gets a line with the summary
    (default: print to standard error). Raises DataError; then no files remain.
    """
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import DocumentReader
    from bigtrain.data.documents.key_rules import KeyRules
    from bigtrain.data.documents.reader import RejectedDocuments, require_few
    from bigtrain.data.tokenizers.training import train_tokenizer as trained
    from bigtrain.system.files import new_directory, require_free

    target = Path(options.output)
    require_free(target)
    scratch = next(parent for parent in target.absolute().parents if parent.is_dir())
    reading = replace(read_options(options), scratch=scratch)
    # A tokenizer learns from the text of a row whatever the row's other keys are.
    reading = replace(reading, ignored_keys=tuple(KeyRules("text", reading.text_keys).refused))
    first_bad: list[BadDocument] = []  # at most one
    rejects = RejectedDocuments(
        options.max_bad_fraction > 0,
        lambda document: None if first_bad else first_bad.append(document),
    )
    reader = DocumentReader(find_sources(reading.selection), reading, rejects)
    tokenizer = trained(_with_progress(reader), options.vocab_size)
    if first_bad:
        bad_text = str(first_bad[0])
        require_few(rejects.count, reader.num_documents, options.max_bad_fraction, bad_text)
    with new_directory(target) as directory:
        tokenizer.save(directory)
    skipped = f", {rejects.count:,} unreadable documents skipped" if rejects.count else ""
    (options.say or _to_stderr)(
        f"{target}: byte-level BPE of {tokenizer.vocab_size} tokens from "
        f"{reader.bytes_done:,} bytes of input{skipped}"
    )
    return int(tokenizer.vocab_size)


def read_options(options: ReadingOptions) -> ReadOptions:
    """Return the selection of documents, and how they are read."""
    from bigtrain.data.documents.files import Selection
    from bigtrain.data.documents.reader import ReadOptions
    from bigtrain.data.shards.manifest import DEFAULT_MAX_DOCUMENT_BYTES

    inputs = (options.inputs,) if isinstance(options.inputs, str | Path) else options.inputs
    selection = Selection(
        inputs=tuple(map(str, inputs)),
        suffixes=tuple(options.suffixes),
        exclude=tuple(options.exclude),
        dataset_config=options.dataset_config,
        dataset_split=options.dataset_split,
        read_as=options.read_as or "",
        follow_links=options.follow_links,
    )
    keys = tuple(dict.fromkeys(options.text_keys)) or ("text",)
    max_bytes = options.max_document_bytes or DEFAULT_MAX_DOCUMENT_BYTES
    return ReadOptions(
        selection,
        keys,
        max_bytes,
        ignored_keys=tuple(sorted(set(options.ignored_keys))),
        quotes=options.quotes,
    )


def _with_progress(reader: DocumentReader) -> Iterator[list[str]]:
    """Yield the texts of `reader` in batches, with a progress bar of its bytes."""
    from tqdm import tqdm

    with tqdm(
        total=reader.total_bytes, unit="B", unit_scale=True, desc="read", disable=None
    ) as bar:
        for batch in reader.text_batches():
            yield batch
            bar.update(reader.bytes_done - bar.n)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class RowFormat:
    """Format of conversations, the names of its keys in the data, and role names, ``NAME=ROLE``."""

    name: Any  # of OptionsRecord.chat_format
    keys: tuple[str, ...]
    roles: tuple[str, ...]


def detected_format(reading: ReadOptions, say: Callable[[str], None]) -> str:
    """Return the format that the keys of the first row match, or "text"; `say` gets a line on it.
    Raises DataError if the first rows of the files have several formats."""
    from bigtrain.data.documents.chat_formats import ONE_FORMAT, also_preferences, nearest
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import keys_in

    first_files: dict[str, str] = {}  # by format, the first file that has it
    sources = find_sources(reading.selection)
    local_sources = [source for source in sources[1:] if source.address is None]
    step = max(1, -(-len(local_sources) // OTHER_FIRST_ROWS))
    for source in sources[:1] + local_sources[::step]:
        keys = keys_in(source, reading)
        # A file of rows without keys, as an empty file, counts only if no other file counted yet.
        if keys or not source.format.has_rows or not first_files:
            match = nearest(keys)
            if choices := also_preferences(keys):
                raise DataError(
                    f"{source.path}: the first row has the keys of several formats -> the one that "
                    f"is meant: {', or '.join(choices)}"
                )
            first_files.setdefault("text" if match is None else match.name, source.path)
    if len(first_files) > 1:
        listing = "; ".join(f"{name}: {path}" for name, path in first_files.items())
        raise DataError(
            f"the first rows of the inputs have several formats ({listing}) -> {ONE_FORMAT}"
        )
    name = next(iter(first_files), "text")
    if name != "text":
        say(f"the keys of the first row match --format {name}")
    return name


def row_format(name: str, names: Mapping[str, str], roles: Mapping[str, str]) -> RowFormat | None:
    """Return the format `name`; None for text. names: names in the data of the format's keys, of a
    row or of a turn; roles: of a role's name in the data, the role. Raise DataError for unknown
    keys."""
    from bigtrain.data.documents.chat_formats import FORMATS

    if name == "text":
        if names:
            raise DataError("--key names keys of conversations -> --text-key for text")
        return None
    if name not in FORMATS:
        raise DataError(f"--format {name}: unknown -> auto, text, {', '.join(FORMATS)}")
    row_keys, turn_keys = FORMATS[name].keys, FORMATS[name].turn_keys
    all_keys = (*row_keys, *turn_keys)
    for key in names:
        if key not in all_keys:
            rule = f"--format {name} has no such key"
            raise DataError(f"--key {key}: {rule} -> {', '.join(all_keys)}")
    keys = tuple(names.get(key, key) for key in all_keys)
    # Default names are not recorded, so that records equal those of earlier versions, which had no
    # keys of turns, and for messages implied the key `tools`.
    if keys[len(row_keys) :] == turn_keys:
        keys = keys[: len(row_keys)]
    if name == "messages" and keys[1:] == row_keys[1:]:
        keys = keys[:1]
    if roles and not FORMATS[name].has_roles:
        raise DataError(f"--role: rows of --format {name} have no roles -> remove it")
    return RowFormat(name, keys, tuple(f"{name}={role}" for name, role in sorted(roles.items())))


def refuse_for_text(reading: ReadOptions, options: TokenizeOptions) -> None:
    """Raise DataError for options that only conversations have, with how to read the first row."""
    from bigtrain.data.documents.chat_formats import remedy_for
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import keys_in

    chat_options = {
        "--chat-template": options.chat_template,
        "--learn": options.learn == "last",
        "--role": options.roles,
        "--max-prompt-tokens": options.max_prompt_tokens,
    }
    set_options = [option for option, value in chat_options.items() if value]
    if not set_options:
        return
    keys = keys_in(find_sources(reading.selection)[0], reading, strict=True)
    description = "no row with keys is read"
    if keys:
        description = f"the first row has the keys {', '.join(sorted(keys)[:20])}"
    fix = remedy_for(keys) or " -> name their key, --chat-key KEY, or remove it"
    raise DataError(f"{set_options[0]} is for conversations, and {description}{fix}")


def refuse_for_tokens(options: TokenizeOptions) -> None:
    """Raise DataError for options that only texts have, since rows of tokens have no text."""
    text_options = {
        "--learn last": options.learn == "last",
        "--chat-template": options.chat_template,
        "--max-unrendered": options.max_unrendered,
        "--parse-special-tokens": options.parse_special_tokens,
        "--beginning-of-text": options.beginning_of_text != "auto",
        "--end-of-document": options.end_of_document,
        "--filter": options.text_filter,
    }
    for option, value in text_options.items():
        if value:
            raise DataError(
                f"{option} is for text, and rows of --format tokens are taken as they are -> "
                "remove it"
            )
