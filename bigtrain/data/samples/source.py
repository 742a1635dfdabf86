"""Samples from code of the user instead of the training documents of shards.

A map-style source is any object with ``__len__`` and ``__getitem__``. bigtrain decides the order of
its items and where a resumed run continues, as for shards: it has no state. A stream decides its
order, and has a state (`bigtrain.data.samples.sample_stream`). Tokenizer, vocabulary and held-out
documents come from the shards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xxhash

from bigtrain.data.samples.items import Item, ItemReader, put_item
from bigtrain.data.samples.sample_stream import NUM_SAMPLES, SampleStream, rewound_by
from bigtrain.data.samples.token_stream import Indices, TokenRows
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.shard_table import ROW, ShardColumns, ShardTable
from bigtrain.errors import DataError, ExtensionError
from bigtrain.settings.extensions import describe, import_named, is_stream, location
from bigtrain.settings.run_config import RunConfig
from bigtrain.settings.sections.extensions import GIVEN

_PROBES = 16


class SourceSamples:
    """Samples of a source, one item each, padded at the end; see `Samples`. Thread-safe if the
    source is."""

    masks_loss = True

    def __init__(self, source: Any, name: str, sequence_length: int, dataset: TokenDataset) -> None:
        """`name`: in errors. `dataset`: has the tokenizer."""
        self._source, self._name = source, name
        try:
            length = len(self._source)
        except Exception as error:
            raise ExtensionError(
                f"{self._name}: len() raised {describe(error, type(self._source))} -> correct it"
            ) from error
        if length < 1:
            raise DataError(f"{self._name} has no items ({location(type(self._source))})")
        self.num_samples = length
        self.sequence_length = sequence_length
        self.token_dtype = np.dtype(dataset.table.token_dtype)
        self.vocab_size = dataset.table.tokenizer.vocab_size
        self.items = ItemReader(name, type(source), sequence_length, self.vocab_size)
        self.weighs_loss = False

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        for sample, row in zip(samples.tolist(), rows.tolist(), strict=True):
            put_item(self.read(sample), row, out)

    def describe(self, sample: int) -> str:
        return f"tokens of {self._name}, item {sample},"

    def read(self, sample: int) -> Item:
        """Return an item as a sample. Raises ExtensionError if the source fails, DataError if the
        item is not a sample."""
        try:
            item = self._source[sample]
        except Exception as error:
            raise ExtensionError(
                f"{self._name}: item {sample} raised {describe(error, type(self._source))} -> "
                "correct it"
            ) from error
        return self.items.parse(sample, item)

    def identity(self, settings: Mapping[str, Any]) -> int:
        """Return a checksum of the name, settings, length and up to `_PROBES` items, which also
        decide whether losses have weights. Raises as `read`, and DataError if an item differs when
        it is read again."""
        text = json.dumps([self._name, settings, self.num_samples, self.sequence_length])
        digest = xxhash.xxh3_64(text.encode())
        numbers = np.linspace(0, self.num_samples - 1, _PROBES).astype(int).tolist()
        weighs = False
        for number in sorted({*numbers}):  # a source with fewer items has equal numbers
            item = self.read(number)
            content = _content(item)
            if _content(self.read(number)) != content:
                rule = "is another one when it is read again, so that a run could not resume"
                raise self.items.wrong(number, rule, "let an item depend on its number only")
            digest.update(content)
            weighs |= item.weights is not None
        self.weighs_loss = weighs
        self.items = replace(self.items, weighs=weighs)
        return digest.intdigest()


def _content(item: Item) -> bytes:
    """Return the bytes of an item for the checksum, with the targets as int64."""
    return np.concatenate([item.tokens, item.targets]).tobytes() + item.weight_bytes


@dataclass(frozen=True)
class SourceDataset(TokenDataset):
    """Dataset whose training samples come from a source; its table has as many tokens as give the
    number of its samples."""

    train: SourceSamples


@dataclass(frozen=True)
class StreamDataset(TokenDataset):
    """Dataset whose training samples come from a stream."""

    train: SampleStream


def with_source(
    config: RunConfig, dataset: TokenDataset, program_source: object = None
) -> TokenDataset:
    """Return `dataset` with the samples of ``data.samples`` to train on, if that is set.
    `program_source`: the source of the calling program. Raises ExtensionError and DataError as
    `SourceSamples` and `SampleStream`."""
    section = config.data.samples
    if section is None:
        return dataset
    # The class decides whether it is a stream or a map-style source.
    name = f"data.samples.type = {section.type!r}"
    if section.type == GIVEN:
        if program_source is None:
            raise DataError(f"{name} is an object of a program -> bigtrain.train_run(data=...)")
        source_class, name = type(program_source), f"data = {type(program_source).__name__}"
    else:
        source_class = import_named("data.samples.type", section.type)
    make_source = partial(_made, source_class, section.settings, name)
    length, table = config.batch.sequence_length, dataset.table
    if is_stream(source_class):
        items = ItemReader(name, source_class, length, table.tokenizer.vocab_size)
        make = make_source if program_source is None else rewound_by(program_source, items)
        stream = SampleStream(make, items, np.dtype(table.token_dtype))
        identity = stream.identity(section.settings)
        table = _with_train(table, NUM_SAMPLES * length + 1, identity, stream.items)
        return StreamDataset(dataset.path, table, dataset.splits, stream)
    source = make_source() if program_source is None else program_source
    samples = SourceSamples(source, name, length, dataset)
    identity = samples.identity(section.settings)
    table = _with_train(table, samples.num_samples * length + 1, identity, samples.items)
    return SourceDataset(dataset.path, table, dataset.splits, samples)


def _made(source_class: Any, settings: Mapping[str, Any], name: str) -> Any:
    """Return a new source of a class of the user."""
    try:
        return source_class(**settings)
    except Exception as error:
        raise ExtensionError(
            f"{name}: its constructor raised {describe(error, source_class)} -> correct it, or "
            "data.samples.settings"
        ) from error


def _with_train(table: ShardTable, num_tokens: int, checksum: int, items: ItemReader) -> ShardTable:
    """Return `table` with one training shard of `num_tokens` tokens."""
    row = np.zeros(1, ROW)
    row["tokens"], row["xxh3"] = num_tokens, checksum
    columns = ShardColumns(row, memoryview(b""), table.is_masked, table.has_blocks)
    is_weighted = table.is_weighted or bool(items.weighs)
    return replace(table, splits={**table.splits, "train": columns}, is_weighted=is_weighted)
