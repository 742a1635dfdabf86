"""Log-probabilities of the documents of a dataset under a model, as `bigtrain score` stores them.

::

    OUTPUT/
      data-0123456789abcdef/         one directory for each dataset, named by its checksums
        request.json                 what is computed: model, data, kind
        train-00000.sums.npy         float64 [documents]: of a document's targets, summed
        train-00000.targets.npy      int64 [documents]: targets of a document
        train-00000.mismatched.npy   float64 [documents], of rated answers (KTO): of the targets of
                                     the mismatched answer
        train-00000.tokens.npy       float32 [tokens], for --kind tokens; 0 without a target
        train-00000.top_ids.npy      int32 [tokens, k], for --kind top-k
        train-00000.top_values.npy   float32 [tokens, k], in falling order; 0 without a target
        train-00000.json             record of the part, written after its arrays
        scores.json                  complete record, written last

The value at a token is its log-probability given the tokens before it in its document. Parts are
consecutive documents. A pass that is killed continues with the part after the last complete part,
and writes identical bytes. numpy only.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import Field, ValidationError

from bigtrain.data.shards.manifest import Checksum, Count, Record, Split
from bigtrain.data.shards.shard_table import ShardTable
from bigtrain.errors import DataError
from bigtrain.system.files import file_checksum, write_whole

SCORES_NAME = "scores.json"
REQUEST_NAME = "request.json"
MISMATCHED = "mismatched"
_DOCUMENT_ARRAYS = ("sums", "targets", MISMATCHED)
ScoreKind = Literal["documents", "tokens", "top-k"]
LongPieces = Literal["cut", "truncate"]
Arrays = Mapping[str, npt.NDArray[Any]]
Contents = TypeVar("Contents", bound=Record)


class Identity(Record):
    """Model or dataset of scores: its name as given, and a checksum of the files."""

    name: str
    hash: Checksum


class ScoreRequest(Record):
    """Scores to compute: model, data and settings. A pass continues only if all fields are
    equal."""

    format: Literal["bigtrain-scores"] = "bigtrain-scores"
    version: Literal[1] = 1
    model: Identity
    data: Identity
    kind: ScoreKind
    top_k: Count = 0
    """for top-k: the most probable tokens that are stored"""
    sequence_length: Annotated[int, Field(ge=1)]
    long_documents: LongPieces
    """cut: a longer document is scored in pieces of sequence_length, each without the pieces before
    it; truncate: only its first piece is scored"""
    dtype: str
    """of the computation"""
    part_tokens: Annotated[int, Field(ge=1)]
    """tokens of a part, but for documents that are longer"""


class ScorePartRecord(Record):
    """Part of a split: consecutive documents, and the XXH3-64 of every array's file."""

    name: str
    first_document: Count
    documents: Count
    tokens: Count
    arrays: dict[str, Checksum]


class ScoresRecord(Record):
    """Contents of `scores.json`. longest: tokens of the longest document."""

    request: ScoreRequest
    longest: dict[Split, Count]
    splits: dict[Split, tuple[ScorePartRecord, ...]]


def data_identity(name: str, table: ShardTable) -> Identity:
    """Return the identity of a dataset: tokens, documents and targets, split by split."""
    digest = xxhash.xxh3_64()
    for split, shards in sorted(table.splits.items()):
        masks = shards.hexadecimal("mask_xxh3") if table.is_masked else [""] * len(shards)
        sums = shards.hexadecimal("xxh3"), shards.hexadecimal("index_xxh3"), masks
        for shard_sums in zip(*sums, strict=True):
            digest.update(":".join([split, *shard_sums]).encode())
    return Identity(name=name, hash=digest.hexdigest())


def scores_directory(output: Path, data: Identity) -> Path:
    """Return the directory of the scores of a dataset in the output of a pass."""
    return output / f"data-{data.hash}"


class ScoreWriter:
    """Writer of the scores of a dataset. For a single process."""

    def __init__(self, directory: Path, request: ScoreRequest) -> None:
        """Begin, or continue an unfinished pass. Raises DataError if the directory has other
        scores, naming the differences; OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.request = directory, request
        path = directory / REQUEST_NAME
        if path.exists():
            stored_request = _parsed(ScoreRequest, path)
            if changes := differences(stored_request, request):
                raise DataError(
                    f"{directory} has other scores: {'; '.join(changes)} -> another --output, or "
                    "remove it"
                )
            return
        write_whole(path, _content(request))

    def finished(self, name: str) -> ScorePartRecord | None:
        """Return the record of a part if it is complete and its arrays are not corrupt."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            return None
        record = _parsed(ScorePartRecord, path)
        for array, xxh3 in record.arrays.items():
            file = self.directory / f"{record.name}.{array}.npy"
            if not file.exists() or file_checksum(file) != xxh3:
                return None
        return record

    def write(self, name: str, first_document: int, tokens: int, arrays: Arrays) -> ScorePartRecord:
        """Write a part and return its record. Raises OSError."""
        sums: dict[str, str] = {}
        for array, values in arrays.items():
            file = io.BytesIO()
            np.save(file, values, allow_pickle=False)
            content = file.getvalue()
            sums[array] = xxhash.xxh3_64_hexdigest(content)
            write_whole(self.directory / f"{name}.{array}.npy", content)
        documents = len(arrays["sums"])
        record = ScorePartRecord(
            name=name,
            first_document=first_document,
            documents=documents,
            tokens=tokens,
            arrays=sums,
        )
        write_whole(self.directory / f"{name}.json", _content(record))
        return record

    def close(
        self, splits: Mapping[Split, Sequence[ScorePartRecord]], longest: Mapping[Split, int]
    ) -> None:
        """Write `scores.json`, with which the scores are complete. Raises OSError."""
        parts = {split: tuple(records) for split, records in splits.items()}
        record = ScoresRecord(request=self.request, longest=dict(longest), splits=parts)
        write_whole(self.directory / SCORES_NAME, _content(record))


@dataclass(frozen=True)
class Scores:
    """Complete scores of a dataset."""

    directory: Path
    record: ScoresRecord

    @property
    def request(self) -> ScoreRequest:
        return self.record.request

    def sums(self, split: Split) -> npt.NDArray[np.float64]:
        """Return the log-probability of the targets of every document, float64 [documents]. Raises
        DataError for a corrupt file, and without this split."""
        return self._joined(split, "sums")

    def targets(self, split: Split) -> npt.NDArray[np.int64]:
        """Return the number of targets of every document, int64 [documents]. Raises as `sums`."""
        return self._joined(split, "targets")

    def mismatched_sums(self, split: Split) -> npt.NDArray[np.float64]:
        """Return the log-probability of the mismatched answer of every rated answer, float64
        [documents]. Raises as `sums`."""
        if not all(MISMATCHED in part.arrays for part in self.parts(split)):
            raise DataError(
                f"{self.directory} has no scores of mismatched answers -> score the data again"
            )
        return self._joined(split, MISMATCHED)

    def part(self, record: ScorePartRecord, array: str) -> npt.NDArray[Any]:
        """Return an array of a part, after comparing it with its checksum. Raises DataError."""
        path = self.directory / f"{record.name}.{array}.npy"
        try:
            content = path.read_bytes()
            values: npt.NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error} -> score the data again") from error
        if xxhash.xxh3_64_hexdigest(content) != record.arrays[array]:
            raise DataError(f"{path} is corrupt: another checksum than in {SCORES_NAME} -> restore")
        return values

    def mapped(self, record: ScorePartRecord, array: str) -> npt.NDArray[Any]:
        """Return an array of a part as a memory map, without comparing its checksum. Raises
        DataError for another shape than the record's."""
        path = self.directory / f"{record.name}.{array}.npy"
        try:
            values: npt.NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {error} -> score the data again") from error
        if len(values) != record.tokens:
            raise DataError(f"{path} has {len(values)} tokens of {record.tokens} -> restore it")
        return values

    def parts(self, split: Split) -> Sequence[ScorePartRecord]:
        """Return the parts of a split in order. Raises DataError without this split."""
        if split not in self.record.splits:
            raise DataError(f"{self.directory} has no scores of the split {split} -> score it")
        return self.record.splits[split]

    def _joined(self, split: Split, array: str) -> npt.NDArray[Any]:
        return np.concatenate([self.part(record, array) for record in self.parts(split)])

    @cached_property
    def perplexities(self) -> dict[Split, npt.NDArray[np.float64]]:
        """Return the perplexity of every document by split, float64 [documents]; NaN for a document
        without targets."""
        perplexities: dict[Split, npt.NDArray[np.float64]] = {}
        for split in self.record.splits:
            targets = self.targets(split)
            means = np.full(len(targets), np.nan)
            np.divide(-self.sums(split), targets, out=means, where=targets > 0)
            perplexities[split] = np.exp(means)
        return perplexities


def open_scores(directory: str | Path) -> Scores:
    """Open the scores of a dataset: a directory ``data-...``, or an output with a single such
    directory. Raises DataError if there are no scores, or if they are not complete."""
    path = Path(directory)
    if not (path / REQUEST_NAME).exists():
        requests = sorted(path.glob(f"data-*/{REQUEST_NAME}"))
        if len(requests) != 1:
            names = ", ".join(request_path.parent.name for request_path in requests) or "none"
            raise DataError(
                f"{path} is not the directory of one dataset's scores (in it: {names}) -> "
                "bigtrain score --output"
            )
        path = requests[0].parent
    if not (path / SCORES_NAME).exists():
        raise DataError(f"the scores in {path} are not complete -> run `bigtrain score` again")
    return Scores(path, _parsed(ScoresRecord, path / SCORES_NAME))


def open_request(path: Path) -> ScoreRequest:
    """Read a `request.json`. Raises DataError if it is corrupt."""
    return _parsed(ScoreRequest, path)


def copy_documents(scores: Scores, splits: Sequence[Split], directory: Path) -> None:
    """Write the scores of documents, without the scores of tokens, to an absent `directory`. Raises
    DataError for corrupt scores, OSError."""
    request = scores.request.model_copy(update={"kind": "documents", "top_k": 0})
    writer = ScoreWriter(directory, request)
    copied: dict[Split, list[ScorePartRecord]] = {}
    for split in splits:
        copied[split] = [
            writer.write(
                part.name,
                part.first_document,
                part.tokens,
                {name: scores.part(part, name) for name in _DOCUMENT_ARRAYS if name in part.arrays},
            )
            for part in scores.parts(split)
        ]
    writer.close(copied, {split: scores.record.longest[split] for split in splits})


def find_scores(output: Path, data: Identity) -> Scores:
    """Open the scores of the dataset `data` in the output of a pass. Raises DataError if there are
    none, naming the datasets that have scores."""
    directory = scores_directory(output, data)
    if not (directory / REQUEST_NAME).exists():
        paths = output.glob(f"data-*/{REQUEST_NAME}")
        datasets = [_parsed(ScoreRequest, path).data for path in paths]
        names = ", ".join(f"{dataset.name} ({dataset.hash})" for dataset in datasets)
        names = names or "no dataset"
        raise DataError(
            f"{output} has scores of {names}, not of {data.name} ({data.hash}) -> score it: "
            "bigtrain score --config RUN.yaml --output DIR"
        )
    return open_scores(directory)


def differences(stored: ScoreRequest, current: ScoreRequest) -> list[str]:
    """Return the fields in which two requests differ, with both values."""
    changes = []
    for name, value in current:
        stored_value = getattr(stored, name)
        if _compared(stored_value) != _compared(value):
            changes.append(f"{name}: {_shown(stored_value)} there, {_shown(value)} now")
    return changes


def _compared(value: object) -> object:
    """Return what decides equality: for a model or dataset the checksum, not the name."""
    return value.hash if isinstance(value, Identity) else value


def _shown(value: object) -> str:
    return f"{value.name} ({value.hash})" if isinstance(value, Identity) else str(value)


def _content(record: Record) -> bytes:
    return (record.model_dump_json(indent=1) + "\n").encode()


def _parsed(record_class: type[Contents], path: Path) -> Contents:
    try:
        return record_class.model_validate_json(path.read_bytes(), strict=False)
    except (OSError, ValidationError, json.JSONDecodeError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read: {text} -> remove it and score again") from error
