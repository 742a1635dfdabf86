"""`manifest.json`: what a token dataset consists of, written last. Pure: no torch, no arrays.

::

    DIRECTORY/
      manifest.json                     the dataset exists once this does
      train-00000.bin  train-00000.idx  Megatron shards, `bigtrain.data.shards`
      train-00000.mask                  which tokens are targets, of chat data alone
      held_out-00000.bin  ...
      tokenizer/                        what made the tokens, loadable by AutoTokenizer
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bigtrain.errors import DataError

MANIFEST_NAME = "manifest.json"
TOKENIZER_DIRECTORY = "tokenizer"
FORMAT: Literal["bigtrain-tokens"] = "bigtrain-tokens"
VERSION: Literal[1] = 1

Split = Literal["train", "held_out"]
Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Record(BaseModel):
    """Base of every part: frozen, exact types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TokenizerRecord(Record):
    """Which tokenizer made the tokens."""

    name: str = Field(description="directory or hub name as it was given")
    hash: str = Field(description="`bigtrain.data.tokenization.tokenizer_hash`")
    vocab_size: Annotated[int, Field(ge=1)] = Field(
        description="token ids are below this; added tokens are counted"
    )
    end_of_document_id: Count
    engine: str = Field(description="library and version that encoded")
    engine_reason: str = Field(
        default="", description="why not the fastest encoder; empty where it was the fastest"
    )

    @model_validator(mode="after")
    def _id_in_vocabulary(self) -> Self:
        if self.end_of_document_id >= self.vocab_size:
            raise ValueError("end_of_document_id is not below vocab_size")
        return self


class SourceRecord(Record):
    """One input: a file with its size, or a dataset with its revision."""

    path: str = Field(description="path of the file, or name of the dataset")
    bytes: Count | None = None
    modified_ns: int | None = None
    revision: str | None = Field(default=None, description="of a dataset: commit or fingerprint")


class OptionsRecord(Record):
    """What else decides the contents of the shards."""

    text_key: str
    held_out: Annotated[float, Field(ge=0, le=1)]
    shard_tokens: Annotated[int, Field(ge=1)]
    skip_bad: bool
    parse_special_tokens: bool = False


class ShardRecord(Record):
    """One `.bin` and `.idx` pair, and the `.mask` where not every token is a target."""

    name: str = Field(description="file name without .bin", pattern=r"^[A-Za-z0-9_][\w.-]*$")
    documents: Count
    tokens: Count
    bytes: Count = Field(description="size of the .bin")
    text_bytes: Count = Field(description="UTF-8 bytes of the documents")
    xxh3: Checksum = Field(description="XXH3-64 of the .bin")
    index_xxh3: Checksum = Field(description="XXH3-64 of the .idx")
    mask_xxh3: Checksum | None = Field(default=None, description="XXH3-64 of the .mask")
    target_tokens: Count | None = Field(
        default=None, description="tokens with a loss, where there is a .mask"
    )

    @model_validator(mode="after")
    def _mask_is_whole(self) -> Self:
        if (self.mask_xxh3 is None) != (self.target_tokens is None):
            raise ValueError("of mask_xxh3 and target_tokens only one is given")
        if self.target_tokens is not None and self.target_tokens > self.tokens:
            raise ValueError(f"{self.target_tokens} of {self.tokens} tokens are targets")
        return self


class Manifest(Record):
    """The whole of `manifest.json`."""

    format: Literal["bigtrain-tokens"] = FORMAT
    version: Literal[1] = VERSION
    tokenizer: TokenizerRecord
    token_dtype: Literal["uint16", "int32"]
    sources: tuple[SourceRecord, ...] = Field(strict=False)
    options: OptionsRecord
    skipped_documents: Count = 0
    splits: dict[Split, tuple[ShardRecord, ...]]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "train" not in self.splits:
            raise ValueError("there is no split train")
        every = [shard for shards in self.splits.values() for shard in shards]
        names = [shard.name for shard in every]
        if len(set(names)) != len(names):
            raise ValueError("a shard is listed twice")
        if len({shard.mask_xxh3 is None for shard in every}) > 1:
            raise ValueError("some shards have a mask and others none")
        size = 2 if self.token_dtype == "uint16" else 4
        for shard in every:
            if shard.bytes != shard.tokens * size:
                raise ValueError(
                    f"shard {shard.name}: {shard.tokens} tokens of {size} bytes are not "
                    f"{shard.bytes} bytes"
                )
        return self

    @property
    def is_masked(self) -> bool:
        """Whether a mask says which tokens are targets; without one all of them are."""
        return any(s.mask_xxh3 is not None for shards in self.splits.values() for s in shards)

    def shards(self, split: Split) -> Sequence[ShardRecord]:
        """The shards of `split`, in stream order; none where the dataset has no such split."""
        return self.splits.get(split, ())

    def num_tokens(self, split: Split) -> int:
        return sum(shard.tokens for shard in self.shards(split))

    def num_documents(self, split: Split) -> int:
        return sum(shard.documents for shard in self.shards(split))


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` under a temporary name and rename it into place."""
    temporary = directory / f"{MANIFEST_NAME}.partial"
    with temporary.open("w", encoding="utf-8") as file:
        # What is not there has no key: a dataset without masks says nothing of them.
        tree = manifest.model_dump(mode="json", exclude_none=True)
        file.write(json.dumps(tree, indent=1, ensure_ascii=False))
        file.write("\n")
    temporary.rename(directory / MANIFEST_NAME)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the dataset in `directory`.

    Raises DataError where the directory or the manifest is missing, or where the manifest is
    damaged or of another format version. Does not look at the shards.
    """
    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "does not exist"
        raise DataError(f"{directory} {what} -> make it with `bigtrain tokenize --output`")
    path = directory / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{directory} is not a finished token dataset: it has no {MANIFEST_NAME} -> make it "
            "with `bigtrain tokenize --output`"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        # Before the validation, so that another format version is not reported as damage.
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not JSON: {error}") from error
    if isinstance(tree, dict) and tree.get("format") == FORMAT and tree.get("version") != VERSION:
        raise DataError(
            f"{path} has format version {tree.get('version')!r}; this bigtrain reads {VERSION} -> "
            "tokenize again or use the bigtrain that wrote it"
        )
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise DataError(f"{path} is damaged: {where + ': ' if where else ''}{message}") from error
