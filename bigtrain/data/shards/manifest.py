"""`manifest.json`: contents of a token dataset, written last. Pure: no torch, no arrays.

::

    DIRECTORY/
      manifest.json                     the dataset exists once this does
      train-00000.bin  train-00000.idx  Megatron shards, `bigtrain.data.shards.format`
      train-00000.mask                  which tokens are targets, for chat data only
      train-00000.weights               weights of the tokens' losses, if some are not 0 or 1
      train-00000.labels                label of every document, a byte, for KTO and classification
      train-00000.blocks                checksums of blocks, `bigtrain.data.shards.block_checksums`
      held_out-00000.bin  ...
      tokenizer/                        the tokenizer of the data, loadable by AutoTokenizer
      errors.jsonl                      documents that were skipped, if any
      .units/                           finished units of a dataset that is not complete yet
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from bigtrain.errors import DataError
from bigtrain.objectives.rows import RowFormat, Rows
from bigtrain.objectives.section import ROWS, documents_per_row
from bigtrain.system.files import require_regular, write_whole

MANIFEST_NAME = "manifest.json"
TOKENIZER_DIRECTORY = "tokenizer"
ERRORS_NAME = "errors.jsonl"
WORK_DIRECTORY = ".units"
FORMAT: Literal["bigtrain-tokens"] = "bigtrain-tokens"
VERSION: Literal[2] = 2

DEFAULT_SHARD_BYTES = 1 << 28
DEFAULT_MAX_DOCUMENT_BYTES = 1 << 26

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = get_args(Split)
LABELED = tuple(rows.name for rows in ROWS.values() if rows.is_labeled)
"""Rows with a label, a byte of a `.labels` for each document."""
MAX_LABELS = 256
LONG_PROMPT = "prompt with more than --max-prompt-tokens"
"""Reason that is counted for a dropped row."""
Quotes = Literal["quote", "letter"]
"""Meaning of a quote at the beginning of a field of csv and tsv."""
BeginningOfText = Literal["auto", "always", "never"]
Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


CHECKSUM_FIELDS = {
    "bin": "xxh3",
    "idx": "index_xxh3",
    "mask": "mask_xxh3",
    "blocks": "blocks_xxh3",
    "labels": "labels_xxh3",
    "weights": "weights_xxh3",
}
"""Files of a shard by suffix, and the field of `ShardRecord` with the XXH3-64 of each."""
REBUILD = "remove the dataset and tokenize again"
RESTORE = f"restore the file, or {REBUILD}"
_SHARD_FILE = re.compile(r"(train|held_out)[-_]\d{5,}\.\w+")


def corrupt(path: Path, problem: str, fix: str = REBUILD) -> DataError:
    """Return the error for a corrupt file of a dataset."""
    return DataError(f"{path} is corrupt: {problem} -> {fix}")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise DataError with `path` for an OSError of the block. For a missing file the error names a
    file of the same directory with a similar name, which a user may have renamed."""
    try:
        yield
    except OSError as error:
        fix = RESTORE
        if isinstance(error, PermissionError):
            fix = "let this user read it: chmod, or a directory that the user may enter"
        elif isinstance(error, FileNotFoundError) and path.parent.is_dir():
            # Similar names, but not the files of other shards, whose names differ in a digit.
            file_names = [n for n in os.listdir(path.parent) if not _SHARD_FILE.fullmatch(n)]
            names = [name for name in file_names if path.name in name or path.suffix in name]
            if close := get_close_matches(path.name, names, n=1):
                fix = f"rename {close[0]} back, {fix.removeprefix('restore the file, ')}"
        raise DataError(f"{path} cannot be read: {error.strerror or error} -> {fix}") from error


Times = tuple[int | None, int | None]
"""Times of a file's last modification and last change (mtime and ctime), in ns."""


def same_times(recorded: Times, listed: Times) -> bool:
    """Return whether a file `listed` with these times was not modified since the `recorded` times.
    A `recorded` change newer than the listed change is accepted too: if two processes list a file
    before and after a change of mode, both accept what the second has confirmed."""
    recorded_modified, recorded_changed = recorded
    listed_modified, listed_changed = listed
    if recorded_modified != listed_modified:
        return False
    return recorded_changed is None or listed_changed is None or recorded_changed >= listed_changed


class Record(BaseModel):
    """Base of records: frozen, exact types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


COMPACT = ConfigDict(extra="forbid", strict=True)
"""Options of dataclasses with up to hundreds of thousands of instances; a model takes 1 kB each."""


class TokenizerRecord(Record):
    """Tokenizer that made the tokens."""

    name: str
    """directory or Hub name as given"""
    hash: str
    """`bigtrain.data.tokenizers.tokenizer.tokenizer_hash`"""
    vocab_size: Annotated[int, Field(ge=1)]
    """token ids are below this, including added tokens"""
    end_of_document_id: Count
    engine: str
    """library and version of the encoder"""
    engine_reason: str = ""
    """reason if it was not the fastest encoder, else empty"""

    files_xxh3: Checksum | None = None
    """`bigtrain.data.tokenizers.cache.fingerprint` of the files"""

    chat_template: str | None = None
    """for conversations: `bigtrain.data.tokenizers.chat_template.ChatTemplate.hash`"""
    beginning_ids: tuple[Count, ...] = Field(default=(), strict=False)
    """tokens that every document of plain text begins with"""
    answer_end_ids: tuple[Count, ...] | None = Field(default=None, strict=False)
    """for conversations: tokens that end learned answers, and thus generation"""

    fill_in_middle_ids: tuple[Count, Count, Count] | None = Field(default=None, strict=False)
    """with fill-in-the-middle: tokens before prefix, suffix and middle"""

    @model_validator(mode="after")
    def _id_in_vocabulary(self) -> Self:
        if self.end_of_document_id >= self.vocab_size:
            raise ValueError("end_of_document_id is not below vocab_size")
        return self


@dataclass(config=COMPACT, frozen=True, slots=True, kw_only=True)
class PartRecord:
    """Part of a source that was read for one shard. `begin` and `end` are bytes of a file of lines,
    row groups of a parquet file, record batches of an arrow file, rows of a saved dataset, shards
    of a streamed dataset; no `end`: to the last."""

    begin: Count = 0
    end: Count | None = None
    xxh3: Checksum
    """XXH3-64 of the bytes from begin to end, as stored in the file; for parquet and arrow files
    that are not compressed, and datasets: of the documents' UTF-8"""
    layout_xxh3: Checksum | None = None
    """if xxh3 is of documents: XXH3-64 of the documents' starts and of the rejected rows"""


@dataclass(config=COMPACT, frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """Input: a file with its size, or a dataset with its revision."""

    path: str
    """path of the file, or name of the dataset"""
    bytes: Count | None = None
    modified_ns: int | None = None
    changed_ns: int | None = None
    """when content, name, owner or mode last changed (ctime)"""
    revision: str | None = None
    """of a dataset: commit or files_fingerprint"""
    parts: tuple[PartRecord, ...] = Field(default=(), strict=False)

    @property
    def identity(self) -> tuple[str, int | None, str | None]:
        """Path, size and revision, known before reading: if one differs, it is another input."""
        return self.path, self.bytes, self.revision

    @property
    def times(self) -> Times:
        """Times; if these are equal too, the content counts as unchanged without being read."""
        return self.modified_ns, self.changed_ns


class FillInMiddleRecord(Record):
    """Fill-in-the-middle of the training documents
    (`bigtrain.data.tokenize_job.fill_in_middle`)."""

    rate: Annotated[float, Field(gt=0, le=1)]
    """share of the documents"""
    spm_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """share of those with the suffix first"""
    seed: Count = 0
    tokens: tuple[str, str, str] | None = Field(default=None, strict=False)
    """names of the tokens before prefix, suffix and middle; absent: the first known ones that the
    tokenizer has"""


class TextFilterRecord(Record):
    """Filter of documents (`bigtrain.data.documents.text_filter`)."""

    name: str
    """package.module:function"""
    source_xxh3: Checksum
    """XXH3-64 of the file that defines it"""


class PerplexityFilterRecord(Record):
    """Limits of the perplexity of documents that `bigtrain score --filter` kept, and the model."""

    lowest: float
    highest: float
    model: str
    """name as given, and checksum"""


class OptionsRecord(Record):
    """Other options that determine the contents of the shards."""

    text_keys: tuple[str, ...] = Field(default=("text",), strict=False, min_length=1)
    held_out: Annotated[float, Field(ge=0, le=1)] = 0.0
    shard_bytes: Annotated[int, Field(ge=1)] = DEFAULT_SHARD_BYTES
    max_document_bytes: Annotated[int, Field(ge=1)] = DEFAULT_MAX_DOCUMENT_BYTES
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    parse_special_tokens: bool = False
    chat: bool = False
    """documents are conversations or other rows of chat_format"""
    chat_format: RowFormat = "messages"
    """format of the rows under text_keys"""
    learned: Literal["all", "last"] = "all"
    """answers of a conversation that have loss"""
    roles: tuple[Annotated[str, Field(pattern="^[^=]+=.+$")], ...] = Field(default=(), strict=False)
    """NAME=ROLE: meaning of role names in the data"""
    dataset_config: str | None = None
    dataset_split: str = "train"
    beginning_of_text: BeginningOfText = "auto"
    """start of plain-text documents; auto: tokens that the tokenizer itself adds"""
    end_of_document: str | None = None
    """token that ends documents; absent: the end-of-sequence token"""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """rows with more tokens before the first learned one are dropped; absent: none"""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """the first documents, or rows, of the inputs that are tokenized; absent: all"""
    max_unrendered: Count = 0
    """parts of conversations that the chat template may drop"""
    fill_in_middle: FillInMiddleRecord | None = None
    text_filter: TextFilterRecord | None = None
    ignored_keys: tuple[str, ...] = Field(default=(), strict=False)
    """keys of rows that are not read, although other values of theirs are refused"""
    quotes: Quotes | None = None
    """meaning of a quote at the beginning of a field of csv and tsv; absent: it quotes, and is
    refused in tsv where it may be a letter"""
    labels: tuple[str, ...] = Field(default=(), strict=False, max_length=MAX_LABELS)
    """names of the labels of classification rows, by number"""


class ShardRecord(Record):
    """Shard: a `.bin`, `.idx` and `.blocks`, and a `.mask` if not all tokens are targets."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][\w.-]*$")
    """file name without .bin"""
    documents: Count
    tokens: Count
    bytes: Count
    """size of the .bin"""
    text_bytes: Count
    """UTF-8 bytes of the documents"""
    xxh3: Checksum
    """XXH3-64 of the .bin"""
    index_xxh3: Checksum
    """XXH3-64 of the .idx"""
    mask_xxh3: Checksum | None = None
    """XXH3-64 of the .mask"""
    target_tokens: Count | None = None
    """tokens with a loss, if there is a .mask"""
    blocks_xxh3: Checksum | None = None
    """XXH3-64 of the .blocks, absent in older datasets"""
    labels_xxh3: Checksum | None = None
    """XXH3-64 of the .labels"""
    desirable: Count | None = None
    """documents with label 1, if there is a .labels"""
    weights_xxh3: Checksum | None = None
    """XXH3-64 of the .weights, absent where all weights are 0 or 1"""

    @property
    def checksums(self) -> dict[str, str]:
        """Return the XXH3-64 of the shard's files, by suffix."""
        sums = {suffix: getattr(self, field) for suffix, field in CHECKSUM_FIELDS.items()}
        return {suffix: xxh3 for suffix, xxh3 in sums.items() if xxh3 is not None}

    @model_validator(mode="after")
    def _mask_is_complete(self) -> Self:
        if (self.mask_xxh3 is None) != (self.target_tokens is None):
            raise ValueError("mask_xxh3 and target_tokens must be given together")
        if self.target_tokens is not None and self.target_tokens > self.tokens:
            raise ValueError(f"{self.target_tokens} of {self.tokens} tokens are targets")
        if (self.labels_xxh3 is None) != (self.desirable is None):
            raise ValueError("labels_xxh3 and desirable must be given together")
        if self.weights_xxh3 is not None and self.mask_xxh3 is None:
            raise ValueError("weights_xxh3 must be given with mask_xxh3")
        return self


class Manifest(Record):
    """Contents of `manifest.json`."""

    format: Literal["bigtrain-tokens"] = FORMAT
    version: Literal[2] = VERSION
    tokenizer: TokenizerRecord
    token_dtype: Literal["uint16", "int32"]
    rows: Rows | None = None
    """preference: two consecutive documents for each row, chosen then rejected; kto and
    classification: a label for each document; absent: documents"""
    sources: tuple[SourceRecord, ...] = Field(strict=False)
    options: OptionsRecord
    skipped_documents: Count = 0
    filtered: dict[str, Count] | None = None
    """documents that the text filter dropped, and rows with a long prompt, by reason"""
    unread_keys: dict[str, Count] | None = None
    """rows that have each key that is not read"""
    perplexity_filter: PerplexityFilterRecord | None = None
    """limits, if these are documents of a dataset that `bigtrain score --filter` kept"""
    unrendered: dict[str, Count] | None = None
    """parts of conversations that the chat template dropped, by kind"""
    spelled_tokens: dict[str, Count] | None = None
    """control tokens that texts spell, encoded as letters: how often, by name"""
    fill_in_middle: dict[str, Count] | None = None
    """documents rearranged by fill-in-the-middle, by mode"""
    splits: dict[Split, tuple[ShardRecord, ...]]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "train" not in self.splits:
            raise ValueError("the split train is missing")
        all_shards = [shard for shards in self.splits.values() for shard in shards]
        names = [shard.name for shard in all_shards]
        if len(set(names)) != len(names):
            raise ValueError("a shard is listed twice")
        if len({shard.mask_xxh3 is None for shard in all_shards}) > 1:
            raise ValueError("some shards have a mask and others do not")
        if len({shard.blocks_xxh3 is None for shard in all_shards}) > 1:
            raise ValueError("some shards have block checksums and others do not")
        if any((shard.labels_xxh3 is None) == (self.rows in LABELED) for shard in all_shards):
            raise ValueError(f"shards have labels if and only if rows are {' or '.join(LABELED)}")
        if any(shard.documents % documents_per_row(self.rows) for shard in all_shards):
            raise ValueError("a shard of preference pairs has an odd number of documents")
        token_bytes = 2 if self.token_dtype == "uint16" else 4
        for shard in all_shards:
            if shard.bytes != shard.tokens * token_bytes:
                raise ValueError(
                    f"shard {shard.name}: {shard.tokens} tokens of {token_bytes} bytes are not "
                    f"{shard.bytes} bytes"
                )
        return self

    @property
    def is_masked(self) -> bool:
        """True if a mask marks the targets; without one all tokens are targets."""
        return any(s.mask_xxh3 is not None for shards in self.splits.values() for s in shards)

    @property
    def is_weighted(self) -> bool:
        """True if the losses of some tokens have weights other than 0 and 1."""
        return any(s.weights_xxh3 is not None for shards in self.splits.values() for s in shards)

    @property
    def has_blocks(self) -> bool:
        """True if the shards can be verified as they are read."""
        return all(s.blocks_xxh3 is not None for shards in self.splits.values() for s in shards)

    def shards(self, split: Split) -> Sequence[ShardRecord]:
        """Return the shards of `split`, in stream order; empty if the dataset has no such split."""
        return self.splits.get(split, ())

    def num_tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def num_documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.shards(split))


def write_manifest(directory: Path, manifest: Manifest, draft: Path | None = None) -> None:
    """Write `manifest.json`, which makes `directory` a dataset; `draft` as in `write_whole`."""
    # Absent items have no key: a dataset without masks does not mention them.
    content = manifest.model_dump_json(indent=1, exclude_none=True) + "\n"
    write_whole(directory / MANIFEST_NAME, content.encode("utf-8"), draft)


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of the dataset in `directory`. Raises DataError if the directory or the
    manifest is missing, or if the manifest is corrupt or of another format version. Does not check
    the shards."""
    if not directory.is_dir():
        problem = "is not a directory" if directory.exists() else "does not exist"
        datasets = [manifest.parent for manifest in directory.parent.glob(f"*/{MANIFEST_NAME}")]
        close = get_close_matches(directory.name, [path.name for path in datasets], n=1)
        suggestion = f"did you mean {directory.parent / close[0]}? Or " if close else ""
        fix = "make it with `bigtrain tokenize --output`"
        raise DataError(f"{directory} {problem} -> {suggestion}{fix}")
    path = directory / MANIFEST_NAME
    try:
        with reading(path):
            require_regular(path)
            content = path.read_bytes()
    except DataError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        fix = "make it with `bigtrain tokenize --output`"
        if (directory / WORK_DIRECTORY).is_dir():
            fix = "run the same `bigtrain tokenize` again to finish it"
        raise DataError(
            f"{directory} is not a finished token dataset: it has no {MANIFEST_NAME} -> {fix}"
        ) from None
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        raise _why_invalid(path, content, error) from error


def _why_invalid(path: Path, content: bytes, error: ValidationError) -> DataError:
    """Return the error for the content of a manifest that is not valid."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as not_json:
        return DataError(f"{path} is corrupt: not JSON: {not_json}")
    # Another format version is not corruption.
    if isinstance(tree, dict) and tree.get("format") == FORMAT and tree.get("version") != VERSION:
        return DataError(
            f"{path} has format version {tree.get('version')!r}; this bigtrain reads {VERSION} -> "
            "tokenize again or use the bigtrain that wrote it"
        )
    first = error.errors()[0]
    field_path = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    return DataError(f"{path} is corrupt: {field_path + ': ' if field_path else ''}{message}")
