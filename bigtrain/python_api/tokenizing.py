"""Tokenizers and token shards from text: `bigtrain tokenizer` and `bigtrain tokenize`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast

from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.documents.formats import DocumentReader
    from bigtrain.data.documents.reader import BadDocument, ReadOptions
    from bigtrain.data.shards.dataset import TokenDataset
    from bigtrain.data.shards.manifest import FillInMiddleRecord, OptionsRecord, TextFilterRecord
    from bigtrain.data.tokenize_job.job import BuildResult

Inputs = str | Path | Sequence[str | Path]
Format = Literal[
    "auto",
    "text",
    "messages",
    "sharegpt",
    "alpaca",
    "prompt-completion",
    "tokens",
    "preference",
    "kto",
    "classification",
]
OTHER_FIRST_ROWS = 64
"""Files, in addition to the first one, whose first row is read: local ones, evenly spaced."""
Encoder = Literal["auto", "gigatoken", "fastokens", "reference"]


class ReadingOptions(TypedDict, total=False):
    """Options for reading text; `build_tokens` documents them."""

    text_keys: Sequence[str]
    suffixes: Sequence[str]
    exclude: Sequence[str]
    dataset_config: str | None
    dataset_split: str
    max_document_bytes: int | None
    read_as: str
    follow_links: bool
    ignored_keys: Sequence[str]
    quotes: Literal["quote", "letter"] | None


class TokenizeOptions(ReadingOptions, total=False):
    """Options of `tokenize`; omitted ones have the defaults listed at `build_tokens`."""

    format: Format
    keys: Mapping[str, str] | None
    roles: Mapping[str, str] | None
    learn: Literal["all", "last"]
    chat_template: str | Path | None
    held_out: float
    shard_bytes: int | None
    max_bad_fraction: float
    max_unrendered: int
    max_prompt_tokens: int | None
    workers: int | None
    rank: int | None
    world_size: int | None
    encoder: Encoder
    parse_special_tokens: bool
    text_filter: str | None
    labels: Sequence[str]
    fim_rate: float
    fim_spm_rate: float | None
    fim_seed: int | None
    fim_tokens: Sequence[str] | None
    beginning_of_text: Literal["auto", "always", "never"]
    end_of_document: str | None
    say: Callable[[str], None] | None


def tokenize(
    inputs: Inputs, tokenizer: str | Path, output: str | Path, **options: Unpack[TokenizeOptions]
) -> TokenDataset:
    """Turn text into token shards in the directory `output`, and open them.

    `inputs`: one or several of files, folders, globs, directories of ``Dataset.save_to_disk`` and
    Hub datasets. `tokenizer`: a directory or Hub name. `options`: those of ``bigtrain tokenize``,
    listed at `build_tokens`. Does nothing if `output` is the finished dataset of this
    input, and continues an unfinished one. Raises DataError; then only finished work is kept.
    """
    from bigtrain.data.shards.dataset import open_dataset

    build_tokens(inputs, tokenizer, output, **options)
    return open_dataset(output, check="sizes")


def build_tokens(
    inputs: Inputs, tokenizer: str | Path, output: str | Path, **options: Unpack[TokenizeOptions]
) -> BuildResult:
    """Build token shards for `bigtrain tokenize` and `tokenize`; return the result.

    text_keys: keys or columns that hold a document; those that a row has are joined (default:
        ``text``).
    format: format of a row; ``auto`` (default): detected by the keys of the first row, text if
        `text_keys` are given. keys: names in the data of the keys of `format`, such as
        ``{"instruction": "question"}``. roles: meaning of role names in the data, such as
        ``{"customer": "user"}``. learn: which answers of the assistant have loss, ``all`` (default)
        or the ``last``.
    chat_template: a Jinja file instead of the tokenizer's own template.
    held_out: share of the documents kept for evaluation, 0 (default) to below 1.
    shard_bytes: bytes of input per shard (default: 256 MiB).
    suffixes, exclude: files to select from folders, and those to skip. read_as: read every file as
        if it had this suffix, such as ``.jsonl.gz``. follow_links: read targets of a folder's links
        outside of it; otherwise such a link is an error.
    ignored_keys: keys of a row that are not to be read, although they are refused otherwise.
    quotes: whether a quote at the beginning of a field of csv or tsv is a ``quote`` (default) or
        a ``letter`` of the text; by default it is refused in tsv where it may be either.
    dataset_config, dataset_split: of a Hub dataset (default: ``train``).
    max_document_bytes: a larger document is bad (default: 64 MiB); max_bad_fraction: bad documents
        are skipped up to this share of all, 0 (default) makes the first one an error.
    max_unrendered: number of parts of conversations (content of a message, tool call, tool,
        reasoning) that the chat template may drop; 0 (default) makes the first one an error.
        Reasoning of earlier turns that it drops by design is counted and never an error.
    max_prompt_tokens: rows with more tokens before the first learned one are dropped and counted;
        of a pair, both answers (default: none).
    workers: processes (default: by cores, memory and input). rank, world_size: of this call among
        several with one `output` on different nodes.
    encoder, parse_special_tokens: as in the command's options.
    beginning_of_text: start of plain-text documents; ``auto`` (default): tokens that the
        tokenizer itself adds, ``always`` its beginning-of-text token, ``never`` nothing.
    text_filter: ``package.module:function``, called with the text and the row of each document:
        True keeps it, False or a reason drops and counts it.
    labels: names of the labels of ``classification``, by number.
    fim_rate: share of the training documents of plain text that are rearranged for
        fill-in-the-middle, 0 (default) to 1; fim_spm_rate: share of those with the suffix first
        (default: 0.5); fim_seed: of the draws (default: 0); fim_tokens: names of the three tokens
        before prefix, suffix and middle (default: those that the tokenizer has by known names).
    end_of_document: token that ends documents (default: the tokenizer's end-of-sequence token).
    say: gets a line on the detected format (default: print to standard error).
    """
    from bigtrain.data.tokenize_job.job import build_dataset
    from bigtrain.data.tokenize_job.progress import announce
    from bigtrain.data.tokenize_job.request import BuildRequest, find_worker_rank

    announce("finding the inputs")
    names = ReadingOptions.__annotations__
    reading_options = {name: value for name, value in options.items() if name in names}
    reading = read_options(inputs, **cast(ReadingOptions, reading_options))
    template = options.get("chat_template")
    return build_dataset(
        BuildRequest(
            reading.selection,
            _record_of(reading, options),
            str(tokenizer),
            Path(output),
            chat_template=None if template is None else Path(template),
            encoder=options.get("encoder", "auto"),
            workers=options.get("workers"),
            share=find_worker_rank(os.environ, options.get("rank"), options.get("world_size")),
        )
    )


def _record_of(reading: ReadOptions, options: TokenizeOptions) -> OptionsRecord:
    """Return the record of a dataset's options. Raise DataError for incompatible ones."""
    from bigtrain.data.shards.manifest import DEFAULT_SHARD_BYTES, OptionsRecord
    from bigtrain.objectives.section import ROWS

    # The format of rows, which decides the options that have an effect.
    name: str = options.get("format", "auto")
    roles, learn = options.get("roles") or {}, options.get("learn", "all")
    if name == "auto":
        say = options.get("say") or _to_stderr
        name = "text" if options.get("text_keys") else detected_format(reading, say)
    rows = row_format(name, options.get("keys") or {}, roles)
    first = reading.text_keys if rows is None else rows.keys[:1]
    if ignored := set(first) & set(reading.ignored_keys):
        raise DataError(f"--ignore-key {min(ignored)}: it is the key of the document -> remove it")
    # Options that would have no effect on this format are refused.
    if rows is None:
        template, max_prompt = options.get("chat_template"), options.get("max_prompt_tokens")
        refuse_for_text(reading, template, learn, roles, max_prompt)
    elif rows.name == "tokens":
        refuse_for_tokens(options)
    elif rows.name in ROWS and learn == "last":
        raise DataError(
            f"--learn last: {ROWS[rows.name].learned} --format {rows.name} are learned completely "
            "-> remove it"
        )
    return OptionsRecord(
        labels=_labels(options, name),
        text_keys=reading.text_keys if rows is None else rows.keys,
        held_out=options.get("held_out", 0.0),
        shard_bytes=options.get("shard_bytes") or DEFAULT_SHARD_BYTES,
        max_document_bytes=reading.max_document_bytes,
        max_bad_fraction=options.get("max_bad_fraction", 0.0),
        parse_special_tokens=options.get("parse_special_tokens", False),
        chat=rows is not None,
        chat_format="messages" if rows is None else rows.name,
        learned=learn,
        roles=() if rows is None else rows.roles,
        dataset_config=reading.selection.dataset_config,
        dataset_split=reading.selection.dataset_split,
        max_unrendered=options.get("max_unrendered", 0),
        max_prompt_tokens=options.get("max_prompt_tokens"),
        ignored_keys=reading.ignored_keys,
        quotes=reading.quotes,
        beginning_of_text=options.get("beginning_of_text", "auto"),
        end_of_document=options.get("end_of_document"),
        fill_in_middle=_fill_in_middle(options, is_text=rows is None),
        text_filter=_text_filter(options.get("text_filter")),
    )


def _labels(options: TokenizeOptions, name: str) -> tuple[str, ...]:
    """Return the names of the labels. Raise DataError if they do not fit the format of rows."""
    from bigtrain.data.shards.manifest import MAX_LABELS
    from bigtrain.objectives.section import ROWS

    labels = tuple(options.get("labels") or ())
    rows = ROWS.get(name)
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


def _text_filter(name: str | None) -> TextFilterRecord | None:
    """Return the record of a filter. Raise DataError if it cannot be called."""
    from bigtrain.data.documents.text_filter import load_filter
    from bigtrain.data.shards.manifest import TextFilterRecord

    if name is None:
        return None
    loaded = load_filter(name)
    return TextFilterRecord(name=loaded.name, source_xxh3=loaded.source_xxh3)


def _fill_in_middle(options: TokenizeOptions, *, is_text: bool) -> FillInMiddleRecord | None:
    """Return the record of fill-in-the-middle; None without it. Raise DataError for options that
    have no effect."""
    from bigtrain.data.shards.manifest import FillInMiddleRecord

    rate, tokens = options.get("fim_rate", 0.0), options.get("fim_tokens")
    spm_rate, seed = options.get("fim_spm_rate"), options.get("fim_seed")
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


def train_tokenizer(
    inputs: Inputs,
    vocab_size: int,
    output: str | Path,
    *,
    max_bad_fraction: float = 0.0,
    say: Callable[[str], None] | None = None,
    **options: Unpack[ReadingOptions],
) -> int:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens, write it into the directory
    `output`, and return its number of tokens.

    inputs: as in `tokenize`. max_bad_fraction: unreadable documents are skipped up to this share of
    all. say: gets a line with the summary. options: options for reading text, as the options of
    `tokenize` of these names: text_keys, suffixes, exclude, dataset_config, dataset_split,
    max_document_bytes, read_as, follow_links, ignored_keys, quotes. Raises DataError; then no files
    remain.
    """
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import DocumentReader
    from bigtrain.data.documents.key_rules import KeyRules
    from bigtrain.data.documents.reader import RejectedDocuments, require_few
    from bigtrain.data.tokenizers.training import train_tokenizer as trained
    from bigtrain.system.files import existing_above, new_directory, require_free

    target = Path(output)
    require_free(target)
    reading = replace(read_options(inputs, **options), scratch=existing_above(target))
    # A tokenizer learns from the text of a row whatever its other keys are.
    reading = replace(reading, ignored_keys=tuple(KeyRules("text", reading.text_keys).refused))
    bad: list[BadDocument] = []
    rejects = RejectedDocuments(
        max_bad_fraction > 0, lambda document: bad.append(document) if not bad else None
    )
    reader = DocumentReader(find_sources(reading.selection), reading, rejects)
    tokenizer = trained(_with_progress(reader), vocab_size)
    if bad:
        require_few(rejects.count, reader.num_documents, max_bad_fraction, str(bad[0]))
    with new_directory(target) as directory:
        tokenizer.save(directory)
    skipped = f", {rejects.count:,} unreadable documents skipped" if rejects.count else ""
    (say or _to_stderr)(
        f"{target}: byte-level BPE of {tokenizer.vocab_size} tokens from "
        f"{reader.bytes_done:,} bytes of input{skipped}"
    )
    return int(tokenizer.vocab_size)


def read_options(inputs: Inputs, **options: Unpack[ReadingOptions]) -> ReadOptions:
    """Return the options for reading text, which `build_tokens` documents."""
    from bigtrain.data.documents.files import Selection
    from bigtrain.data.documents.reader import ReadOptions
    from bigtrain.data.shards.manifest import DEFAULT_MAX_DOCUMENT_BYTES

    names = (inputs,) if isinstance(inputs, str | Path) else inputs
    selection = Selection(
        inputs=tuple(map(str, names)),
        suffixes=tuple(options.get("suffixes", ())),
        exclude=tuple(options.get("exclude", ())),
        dataset_config=options.get("dataset_config"),
        dataset_split=options.get("dataset_split", "train"),
        read_as=options.get("read_as", ""),
        follow_links=options.get("follow_links", False),
    )
    keys = tuple(dict.fromkeys(options.get("text_keys", ()))) or ("text",)
    max_bytes = options.get("max_document_bytes") or DEFAULT_MAX_DOCUMENT_BYTES
    return ReadOptions(
        selection,
        keys,
        max_bytes,
        ignored_keys=tuple(sorted(set(options.get("ignored_keys", ())))),
        quotes=options.get("quotes"),
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
    from bigtrain.data.documents.chat_formats import (
        FORMATS,
        ONE_FORMAT,
        also_preferences,
        nearest,
    )
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import keys_in
    from bigtrain.objectives.preference import PAIRS

    formats: dict[str, str] = {}  # by format, the first file that has it
    sources = find_sources(reading.selection)
    local_sources = [source for source in sources[1:] if source.address is None]
    step = max(1, -(-len(local_sources) // OTHER_FIRST_ROWS))
    for source in sources[:1] + local_sources[::step]:
        keys = keys_in(source, reading)
        if keys or not source.format.has_rows or not formats:
            match = nearest(keys)
            if ambiguous := also_preferences(keys):
                candidates = " and of ".join(ambiguous)
                if "prompt" not in keys:  # as in LLaMA-Factory
                    chat_format = next(name for name in ambiguous if name != PAIRS.name)
                    candidates += f" --key prompt={FORMATS[chat_format].keys[0]}"
                raise DataError(
                    f"{source.path}: the first row has the keys of --format {candidates} -> name "
                    "the one that is meant: --format"
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
    if roles and name in ("alpaca", "tokens"):
        raise DataError(f"--role: rows of --format {name} have no roles -> remove it")
    return RowFormat(name, keys, tuple(f"{name}={role}" for name, role in sorted(roles.items())))


def refuse_for_text(
    reading: ReadOptions,
    chat_template: object,
    learn: str,
    roles: Mapping[str, str],
    max_prompt_tokens: int | None = None,
) -> None:
    """Raise DataError for options of conversations if the input has none or is unreadable."""
    from bigtrain.data.documents.chat_formats import remedy_for
    from bigtrain.data.documents.discovery import find_sources
    from bigtrain.data.documents.formats import keys_in

    options = {
        "--chat-template": chat_template,
        "--learn": learn == "last",
        "--role": roles,
        "--max-prompt-tokens": max_prompt_tokens,
    }
    chat_option = next((option for option, value in options.items() if value), None)
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
        "--learn last": options.get("learn") == "last",
        "--chat-template": options.get("chat_template"),
        "--max-unrendered": options.get("max_unrendered"),
        "--parse-special-tokens": options.get("parse_special_tokens"),
        "--beginning-of-text": options.get("beginning_of_text", "auto") != "auto",
        "--end-of-document": options.get("end_of_document"),
        "--filter": options.get("text_filter"),
    }
    name = next((option for option, value in text_options.items() if value), None)
    if name is not None:
        raise DataError(
            f"{name} is for text, and rows of --format tokens are taken as they are -> remove it"
        )
