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
"""Files, in addition to the first one, whose first row is read: local ones, evenly spaced."""


def _with_fields_of(
    record: Callable[Parameters, Record],
) -> Callable[[Callable[[Record], Result]], Callable[Parameters, Result]]:
    """Give a function of a record the record's fields as parameters, also for type checkers."""

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
    """Return the record of a dataset's options. Raise DataError for incompatible ones."""
    from bigtrain.data.documents.text_filter import load_filter
    from bigtrain.data.shards.manifest import (
        DEFAULT_SHARD_BYTES,
        OptionsRecord,
        TextFilterRecord,
    )
    from bigtrain.objectives.section import ROWS

    # The format of rows, which decides the options that have an effect.
    name: str = options.format
    keys, roles = dict(options.keys or {}), options.roles or {}
    if options.chat_key is not None:
        if options.text_keys:
            raise DataError(f"--text-key and --chat-key {options.chat_key} exclude each other")
        if name not in ("auto", "messages"):
            raise DataError(f"--chat-key is of --format messages, and --format is {name} -> --key")
        name, keys = "messages", {"messages": options.chat_key, **keys}
    if name == "auto":
        say = options.say or _to_stderr
        name = "text" if options.text_keys else detected_format(reading, say)
    rows = row_format(name, keys, roles)
    first = reading.text_keys if rows is None else rows.keys[:1]
    if ignored := set(first) & set(reading.ignored_keys):
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
    # Recorded as they are given, or as they were resolved.
    names = OptionsRecord.model_fields.keys() & {field.name for field in fields(TokenizeOptions)}
    resolved: dict[str, object] = {
        "labels": _labels(options, format_name=name),
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
    return OptionsRecord(**({name: getattr(options, name) for name in names} | resolved))


def _labels(options: TokenizeOptions, format_name: str) -> tuple[str, ...]:
    """Return the names of the labels. Raise DataError if the format `format_name` has no labels, or
    needs other ones."""
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
    fim_options = {"--fim-spm-rate": spm_rate, "--fim-seed": seed, "--fim-tokens": tokens}
    name = next((option for option, value in fim_options.items() if value is not None), None)
    if not rate:
        if name is not None:
            raise DataError(f"{name} is for fill-in-the-middle -> --fim-rate F, or remove it")
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
    # A tokenizer learns from the text of a row whatever its other keys are.
    reading = replace(reading, ignored_keys=tuple(KeyRules("text", reading.text_keys).refused))
    bad: list[BadDocument] = []
    rejects = RejectedDocuments(
        options.max_bad_fraction > 0, lambda document: bad.append(document) if not bad else None
    )
    reader = DocumentReader(find_sources(reading.selection), reading, rejects)
    tokenizer = trained(_with_progress(reader), options.vocab_size)
    if bad:
        require_few(rejects.count, reader.num_documents, options.max_bad_fraction, str(bad[0]))
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

    inputs = options.inputs
    names = (inputs,) if isinstance(inputs, str | Path) else inputs
    selection = Selection(
        inputs=tuple(map(str, names)),
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
    """Format of conversations, its keys in a row, and its role names, as ``NAME=ROLE``."""

    name: Any  # of OptionsRecord.chat_format
    keys: tuple[str, ...]
    roles: tuple[str, ...]


def detected_format(reading: ReadOptions, say: Callable[[str], None]) -> str:
    """Return the format of the first row's keys; `say` gets a line on it. Text if
    they match none. Raises DataError if the first rows of the files have several formats."""
    from bigtrain.data.documents.chat_formats import ONE_FORMAT, also_preferences, nearest
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import keys_in

    formats: dict[str, str] = {}  # by format, the first file that has it
    sources = find_sources(reading.selection)
    local_sources = [source for source in sources[1:] if source.address is None]
    step = max(1, -(-len(local_sources) // OTHER_FIRST_ROWS))
    for source in sources[:1] + local_sources[::step]:
        keys = keys_in(source, reading)
        if keys or not source.format.has_rows or not formats:
            match = nearest(keys)
            if choices := also_preferences(keys):
                raise DataError(
                    f"{source.path}: the first row has the keys of several formats -> the one that "
                    f"is meant: {', or '.join(choices)}"
                )
            formats.setdefault("text" if match is None else match.name, source.path)
    if len(formats) > 1:
        listing = "; ".join(f"{name}: {path}" for name, path in formats.items())
        raise DataError(
            f"the first rows of the inputs have several formats ({listing}) -> {ONE_FORMAT}"
        )
    name = next(iter(formats), "text")
    if name != "text":
        say(f"the keys of the first row match --format {name}")
    return name


def row_format(name: str, names: Mapping[str, str], roles: Mapping[str, str]) -> RowFormat | None:
    """Return the format `name` of conversations, whose keys (of a row, and of a turn) have other
    `names` in the data, and roles other names; None for text. Raise DataError for unknown
    keys of `name`."""
    from bigtrain.data.documents.chat_formats import FORMATS

    if name == "text":
        if names:
            raise DataError("--key names keys of conversations -> --text-key for text")
        return None
    if name not in FORMATS:
        raise DataError(f"--format {name}: unknown -> auto, text, {', '.join(FORMATS)}")
    row_keys, turns = FORMATS[name].keys, FORMATS[name].turn_keys
    all_keys = (*row_keys, *turns)
    wrong = next((key for key in names if key not in all_keys), None)
    if wrong is not None:
        raise DataError(f"--key {wrong}: --format {name} has no such key -> {', '.join(all_keys)}")
    keys = tuple(names.get(key, key) for key in all_keys)
    # Defaults of the format are not recorded: earlier versions had no keys of turns, and for
    # messages the key `tools` was implied.
    if keys[len(row_keys) :] == turns:
        keys = keys[: len(row_keys)]
    if name == "messages" and keys[1:] == row_keys[1:]:
        keys = keys[:1]
    if roles and not FORMATS[name].has_roles:
        raise DataError(f"--role: rows of --format {name} have no roles -> remove it")
    return RowFormat(name, keys, tuple(f"{name}={role}" for name, role in sorted(roles.items())))


def refuse_for_text(reading: ReadOptions, options: TokenizeOptions) -> None:
    """Raise DataError for options of conversations if the input has none or is unreadable."""
    from bigtrain.data.documents.chat_formats import remedy_for
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import keys_in

    chat_options = {
        "--chat-template": options.chat_template,
        "--learn": options.learn == "last",
        "--role": options.roles,
        "--max-prompt-tokens": options.max_prompt_tokens,
    }
    chat_option = next((option for option, value in chat_options.items() if value), None)
    if chat_option is None:
        return
    keys = keys_in(find_sources(reading.selection)[0], reading, strict=True)
    description = "no row with keys is read"
    if keys:
        description = f"the first row has the keys {', '.join(sorted(keys)[:20])}"
    fix = remedy_for(keys) or " -> name their key, --chat-key KEY, or remove it"
    raise DataError(f"{chat_option} is for conversations, and {description}{fix}")


def refuse_for_tokens(options: TokenizeOptions) -> None:
    """Raise DataError for options on texts, if the rows are already tokenized."""
    text_options = {
        "--learn last": options.learn == "last",
        "--chat-template": options.chat_template,
        "--max-unrendered": options.max_unrendered,
        "--parse-special-tokens": options.parse_special_tokens,
        "--beginning-of-text": options.beginning_of_text != "auto",
        "--end-of-document": options.end_of_document,
        "--filter": options.text_filter,
    }
    name = next((option for option, value in text_options.items() if value), None)
    if name is not None:
        raise DataError(
            f"{name} is for text, and rows of --format tokens are taken as they are -> remove it"
        )
