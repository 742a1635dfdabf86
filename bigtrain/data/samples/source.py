"""Samples from code of the user: a map-style source instead of the training documents of shards.

The source is any object with ``__len__`` and ``__getitem__``. bigtrain decides the order of its
items and where a resumed run continues, as for shards: a source has no state. Tokenizer, vocabulary
and held-out documents are those of the shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.samples.token_stream import Indices, TokenRows
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.format import IGNORED_LABEL
from bigtrain.data.shards.shard_table import ROW, ShardColumns
from bigtrain.errors import DataError, ExtensionError
from bigtrain.settings.extensions import describe, import_named, location
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import GIVEN

_PROBES = 16
_FIELDS = ("input_ids", "labels")


class SourceSamples:
    """Samples of a source, one item each, padded at the end; see `Samples`. Thread-safe if the
    source is."""

    masks_loss = True
    weighs_loss = False

    def __init__(self, source: Any, name: str, sequence_length: int, dataset: TokenDataset) -> None:
        """`name`: in errors. `dataset`: has the tokenizer."""
        self._source, self._name = source, name
        self.num_samples = self._length()
        self.sequence_length = sequence_length
        self.token_dtype = np.dtype(dataset.table.token_dtype)
        self.vocab_size = dataset.table.tokenizer.vocab_size

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        assert out.loss_mask is not None
        out.tokens[rows] = 0
        out.loss_mask[rows] = False
        for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
            tokens, targets = self.read(sample)
            out.tokens[row, : len(tokens)] = tokens
            out.loss_mask[row, : len(tokens)] = targets

    def describe(self, sample: int) -> str:
        return f"tokens of {self._name}, item {sample},"

    def read(self, sample: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return tokens of an item, int64 [n], and whether each is a target, bool [n]. Raises
        ExtensionError if the source fails, DataError if the item is not a sample."""
        try:
            item = self._source[sample]
        except Exception as error:
            raise ExtensionError(
                f"{self._name}: item {sample} raised {describe(error, type(self._source))} -> "
                "correct it"
            ) from error
        if not isinstance(item, Mapping):
            item = {"input_ids": item}
        if unknown := sorted(item.keys() - {*_FIELDS}, key=str):
            raise self._wrong(sample, f"has {unknown[0]!r}", "return input_ids, and labels")
        if "input_ids" not in item:
            raise self._wrong(sample, "has no input_ids", "return input_ids, and labels")
        tokens = self._integers(sample, "input_ids", item["input_ids"])
        longest = self.sequence_length + 1
        if not 2 <= len(tokens) <= longest:
            rule = f"has {len(tokens)} tokens; a sample has 2 to {longest}"
            raise self._wrong(sample, rule, "split it, or set another batch.sequence_length")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            rule = (
                f"has token {tokens.min()} or {tokens.max()}; the vocabulary is {self.vocab_size}"
            )
            raise self._wrong(sample, rule, "use the tokenizer of data.path")
        if item.get("labels") is None:
            return tokens, np.ones(len(tokens), np.bool_)
        labels = self._integers(sample, "labels", item["labels"])
        if len(labels) != len(tokens):
            rule = f"has {len(tokens)} input_ids and {len(labels)} labels"
            raise self._wrong(sample, rule, "one label for each token, not shifted")
        targets = labels != IGNORED_LABEL
        if (labels[targets] != tokens[targets]).any():
            index = int(np.flatnonzero(targets & (labels != tokens))[0])
            rule = f"labels[{index}] = {labels[index]} is not input_ids[{index}] = {tokens[index]}"
            raise self._wrong(sample, rule, f"the token itself, or {IGNORED_LABEL}; not shifted")
        return tokens, targets

    def identity(self, settings: Mapping[str, Any]) -> int:
        """Return a checksum of the name, settings, length and `_PROBES` items. Raises as `read`,
        and DataError if an item is another one when it is read again."""
        text = json.dumps([self._name, settings, self.num_samples, self.sequence_length])
        digest = xxhash.xxh3_64(text.encode())
        numbers = np.linspace(0, self.num_samples - 1, _PROBES).astype(int).tolist()
        for number in sorted({*numbers}):
            contents = [np.concatenate(self.read(number)).tobytes() for _ in range(2)]
            if contents[0] != contents[1]:
                rule = "is another one when it is read again, so that a run could not resume"
                raise self._wrong(number, rule, "let an item depend on its number only")
            digest.update(contents[0])
        return digest.intdigest()

    def _length(self) -> int:
        try:
            length = len(self._source)
        except Exception as error:
            raise ExtensionError(
                f"{self._name}: len() raised {describe(error, type(self._source))} -> correct it"
            ) from error
        if length < 1:
            raise DataError(f"{self._name} has no items ({location(type(self._source))})")
        return length

    def _integers(self, sample: int, field: str, value: Any) -> npt.NDArray[np.int64]:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise self._wrong(sample, f"{field}: {error}", "a list of integers") from error
        if array.ndim != 1 or array.dtype.kind not in "iu":
            rule = f"{field} is of type {array.dtype} and shape {list(array.shape)}"
            raise self._wrong(sample, rule, "a list of integers")
        return array.astype(np.int64)

    def _wrong(self, sample: int, rule: str, fix: str) -> DataError:
        defined_at = location(type(self._source))
        return DataError(f"{self._name}: item {sample} {rule} ({defined_at}) -> {fix}")


@dataclass(frozen=True)
class SourceDataset(TokenDataset):
    """Dataset whose training samples are those of a source; its table has as many tokens as give
    that number of samples."""

    train: SourceSamples


def with_source(config: RunConfig, dataset: TokenDataset, given: object = None) -> TokenDataset:
    """Return `dataset` with the samples of ``data.samples`` to train on, if that is set. `given`:
    the source of the calling program. Raises ExtensionError and DataError as `SourceSamples`."""
    section = config.data.samples
    if section is None:
        return dataset
    name = f"data.samples.type = {section.type!r}"
    if section.type == GIVEN:
        if given is None:
            raise DataError(f"{name} is an object of a program -> bigtrain.train_run(data=...)")
        source, name = given, f"data = {type(given).__name__}"
    else:
        kind = import_named("data.samples.type", section.type)
        try:
            source = kind(**section.settings)
        except Exception as error:
            raise ExtensionError(
                f"{name}: its constructor raised {describe(error, kind)} -> correct it, or "
                "data.samples.settings"
            ) from error
    length = config.batch.sequence_length
    samples = SourceSamples(source, name, length, dataset)
    row = np.zeros(1, ROW)
    row["tokens"] = samples.num_samples * length + 1
    row["xxh3"] = samples.identity(section.settings)
    table = dataset.table
    columns = ShardColumns(row, memoryview(b""), table.is_masked, table.has_blocks)
    table = replace(table, splits={**table.splits, "train": columns})
    return SourceDataset(dataset.path, table, dataset.splits, samples)
