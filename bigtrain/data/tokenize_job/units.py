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

import xxhash

from bigtrain.data.documents.files import Source
from bigtrain.data.documents.reader import Part, ReadOptions, whole

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
                # A decompressed file cannot be read in parts by several workers.
                is_split = not source.needs_decompression
                parts = source.format.split(source, options, shard_bytes) if is_split else ()
                yield from ([part] for part in parts or [whole(source)])
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
