"""Units of work of a tokenization: the parts of the inputs that become one shard, and their keys.

A unit is a part of a file (`PartRecord`), a file that cannot be split (compressed, csv, text), or
several small files together. The plan depends only on the inputs, the tokenizer and the options,
not on the workers. A unit's key covers the options and the ranges of its inputs; checksums of their
content are in its record (`bigtrain.data.tokenize_job.existing_output`). So units of an earlier
plan are reused if key and content are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import xxhash

from bigtrain.data.documents.reader import Part, ReadOptions, whole
from bigtrain.data.documents.table_rows import (
    count_record_batches,
    count_row_groups,
    open_hf_dataset,
)
from bigtrain.data.sources.discovery import Source

UNIT_FORMAT = 3
"""Part of every key: increase it when the same input gives different bytes."""


@dataclass(frozen=True)
class Unit:
    """Consecutive parts of sources that become one shard."""

    key: str
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def plan_units(
    sources: Sequence[Source], options: ReadOptions, shard_bytes: int, identity: Sequence[object]
) -> list[Unit]:
    """Return the units of `sources`, in the order of the input, of at most about `shard_bytes`
    each.

    `identity`: the other inputs to a unit's bytes, tokenizer and options, as JSON values. Reads
    footers of parquet and arrow files larger than `shard_bytes`; raises DataError for corrupt ones.
    """
    common = [
        UNIT_FORMAT,
        *identity,
        options.text_keys,
        options.max_document_bytes,
        options.selection.dataset_config,
        options.selection.dataset_split,
    ]
    groups = _groups(sources, options, shard_bytes)
    return [Unit(_key(common, parts), tuple(parts)) for parts in groups]


def plan_key(units: Sequence[Unit]) -> str:
    """Return a key of the plan: equal if the units, their order and the times of their inputs
    are."""
    described = [[unit.key, [part.source.record.times for part in unit.parts]] for unit in units]
    return xxhash.xxh3_128_hexdigest(json.dumps(described).encode())


def _key(common: Sequence[object], parts: Sequence[Part]) -> str:
    described = [
        [part.source.kind, *part.source.record.place, part.begin, part.end] for part in parts
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps([common, described]).encode())


def _groups(
    sources: Sequence[Source], options: ReadOptions, shard_bytes: int
) -> Iterator[list[Part]]:
    """Return groups of parts: large sources are split, small ones grouped.

    The end of a group of small files depends only on nearby files: on the hash of a
    path, once the group has half its size. So a file that is fixed, added or removed changes
    its own group and few after it, not all that follow.
    """
    group: list[Part] = []
    size = 0
    for source in sources:
        num_bytes = source.record.bytes
        if num_bytes is None or size + num_bytes > shard_bytes:
            if group:
                yield group
                group, size = [], 0
            if num_bytes is None or num_bytes > shard_bytes:
                yield from ([part] for part in _cut(source, options, shard_bytes))
                continue
        group.append(whole(source))
        size += num_bytes
        chance = min(1.0, num_bytes / (shard_bytes / 4))
        draw = xxhash.xxh3_64_intdigest(source.path.encode()) / 2**64
        if size > shard_bytes / 2 and draw < chance:
            yield group
            group, size = [], 0
    if group:
        yield group


def _cut(source: Source, options: ReadOptions, shard_bytes: int) -> list[Part]:
    """Return `source` in parts of about `shard_bytes`, if it can be split."""
    num_bytes = source.record.bytes
    if source.needs_decompression or (num_bytes is None and source.kind != "hub_dataset"):
        return [whole(source)]
    if source.kind == "jsonl" and not source.compressed:
        return _even(source, num_bytes or 0, shard_bytes)
    if source.kind == "parquet":
        return _cut_row_groups(source, shard_bytes)
    if source.kind == "arrow":
        batches = count_record_batches(source)
        return [whole(source)] if not batches else _even(source, batches, shard_bytes)
    if source.kind == "saved_dataset":
        return _even(source, len(open_hf_dataset(source, options.selection)), shard_bytes)
    if source.kind == "hub_dataset":
        return _even(source, open_hf_dataset(source, options.selection).num_shards, None)
    return [whole(source)]


def _even(source: Source, count: int, shard_bytes: int | None) -> list[Part]:
    """Return ranges of `count` items of equal size; without `shard_bytes` one item each."""
    num_bytes = source.record.bytes or 0
    wanted = count if shard_bytes is None else -(-num_bytes // shard_bytes)
    num_parts = max(1, min(count, wanted))
    cuts = [count * i // num_parts for i in range(num_parts + 1)]
    at = [num_bytes * cut // max(1, count) for cut in cuts]
    return [Part(source, cuts[i], cuts[i + 1], at[i + 1] - at[i]) for i in range(num_parts)]


def _cut_row_groups(source: Source, shard_bytes: int) -> list[Part]:
    """Return parts of parquet row groups, assuming that bytes are spread evenly over rows."""
    rows = count_row_groups(source)
    ends = list(accumulate(rows))
    num_bytes = source.record.bytes or 0
    at = [num_bytes * end // max(1, ends[-1]) for end in ends]
    parts: list[Part] = []
    begin = done = 0
    for group in range(len(rows)):
        if group == len(rows) - 1 or at[group + 1] - done > shard_bytes:
            parts.append(Part(source, begin, group + 1, at[group] - done))
            begin, done = group + 1, at[group]
    return parts or [whole(source)]
