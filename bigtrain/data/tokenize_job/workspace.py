"""Units of work of a tokenization, and the work folder of an unfinished dataset.

A unit is the part of the inputs that becomes one shard: a part of a file (`PartRecord`), a file
that cannot be split, or several small files. The plan depends only on the inputs, the tokenizer and
the options, not on the workers. A unit's key covers the options and the ranges of the inputs;
checksums of the content are in the unit's record (`bigtrain.data.tokenize_job.existing_output`). So
units of an earlier plan are reused if key and content are equal. The folder::

    OUTPUT/.units/
      KEY.TOKEN.train.bin  .idx ...  shards of a unit, written by process TOKEN
      KEY.TOKEN.errors               its bad documents
      KEY.json                       its record: the unit is done once this names those files
      KEY.claim                      the lease on it, `bigtrain.system.leases`
      rejected-ENGINE                a wrong encoder; its units are rebuilt
      filter.json                    the text filter of the job, if it has one
      assembly.json                  `bigtrain.data.tokenize_job.commit` is in progress
      (a file without a name)        decompressed input of a unit
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from bigtrain.data.documents.files import Source
from bigtrain.data.documents.reader import ReadOptions, SourcePart, unsplit
from bigtrain.data.shards.manifest import (
    COMPACT,
    MANIFEST_NAME,
    WORK_DIRECTORY,
    Checksum,
    Count,
    Record,
    ShardRecord,
    Split,
    TextFilterRecord,
    Times,
    same_times,
)
from bigtrain.errors import DataError
from bigtrain.system.files import write_whole
from bigtrain.system.leases import Leases

JOURNAL_NAME = "assembly.json"
FILTER_NAME = "filter.json"
RECORD_OR_LEASE = re.compile(r"[0-9a-f]{32}\.(json|claim)|assembly\.(json|claim)")


@pydantic_dataclass(config=COMPACT, frozen=True, slots=True, kw_only=True)
class PartDone:
    """Result of reading a part: its content, and the number of lines that started in it. `xxh3` and
    `layout_xxh3` as in `PartReader`; `times` of the source when it was listed."""

    xxh3: Checksum
    layout_xxh3: Checksum
    num_lines: Count
    times: Times = Field(strict=False)


class UnitRecord(Record):
    """`KEY.json`. Record of a unit. `documents`: usable ones; `token` names the process that
    wrote the files. For conversations: `unrendered` parts by kind, and the texts of the control
    tokens that end answers and that answers contain. `fill_in_middle`: documents rearranged, by
    mode; `filtered`: dropped by the text filter, by reason; `spelled_tokens`: control tokens that
    texts spell, by name; `unread_keys`: rows that have each key that is not read."""

    key: str
    token: str
    engine: str
    engine_reason: str
    documents: Count
    bad_documents: Count
    parts: tuple[PartDone, ...] = Field(strict=False)
    splits: dict[Split, ShardRecord]
    unrendered: dict[str, Count] = Field(default_factory=dict)
    answer_ends: tuple[str, ...] = Field(default=(), strict=False)
    inside_answers: tuple[str, ...] = Field(default=(), strict=False)
    fill_in_middle: dict[str, Count] = Field(default_factory=dict)
    filtered: dict[str, Count] = Field(default_factory=dict)
    spelled_tokens: dict[str, Count] = Field(default_factory=dict)
    unread_keys: dict[str, Count] = Field(default_factory=dict)

    def is_current(self, unit: Unit) -> bool:
        """Return whether the inputs of `unit` are unchanged by their times."""
        parts = zip(self.parts, unit.parts, strict=True)
        return all(same_times(done.times, part.source.record.times) for done, part in parts)

    @property
    def files(self) -> list[str]:
        """Names of the unit's files in the work folder."""
        names = [f"{s.name}.{suffix}" for s in self.splits.values() for suffix in s.checksums]
        return [*names, errors_name(self.key, self.token)] if self.bad_documents else names


def errors_name(key: str, token: str) -> str:
    """Return the file name of a unit's bad documents."""
    return f"{key}.{token}.errors"


@dataclass(frozen=True)
class Workspace:
    """Work folder of dataset `output`, as process `token` uses it."""

    output: Path
    token: str

    @property
    def directory(self) -> Path:
        return self.output / WORK_DIRECTORY

    @property
    def leases(self) -> Leases:
        """Leases; a new object for each use: a lease names the process that acquires it."""
        return Leases(self.directory, self.token, self._clean)

    def draft(self, name: str) -> Path:
        """Return this process's temporary name for file `name` of this folder or the dataset."""
        return self.directory / f"{name}.{self.token}.partial"

    def is_finished(self) -> bool:
        """Return whether the dataset is complete, so that this folder is or will be removed."""
        return (self.output / MANIFEST_NAME).exists()

    def write_record(self, record: UnitRecord) -> None:
        """Write the record, which makes the unit done."""
        content = record.model_dump_json().encode("utf-8")
        write_whole(self._record_path(record.key), content, self.draft(record.key))

    def records(self, units: Sequence[Unit], moved: bool = False) -> dict[str, UnitRecord]:
        """Return records of the units that are done, by key: inputs unchanged, encoder trusted,
        files complete (not checked if a commit has `moved` them)."""
        trusted = self._trusted(units, moved)
        return {unit.key: record for unit, record in trusted if record.is_current(unit)}

    def unconfirmed(self, units: Sequence[Unit]) -> dict[str, UnitRecord]:
        """Return the records that `records` omits only because times of inputs changed."""
        trusted = self._trusted(units)
        return {unit.key: record for unit, record in trusted if not record.is_current(unit)}

    def is_done(self, unit: Unit) -> bool:
        """Return whether `unit` has a record of the current inputs, with any encoder and files."""
        record = self._read_record(unit.key)
        return record is not None and record.is_current(unit)

    def drop(self, key: str) -> None:
        self._record_path(key).unlink(missing_ok=True)

    def drop_invalid(self, units: Sequence[Unit]) -> None:
        """Drop the records of `units` that cannot be reused."""
        recorded = [unit for unit in units if self._record_path(unit.key).exists()]
        trusted = {unit.key for unit, _ in self._trusted(recorded)}
        for unit in recorded:
            if unit.key not in trusted:
                self.drop(unit.key)

    def rejected(self) -> dict[str, str]:
        """Return why encoders are wrong, by engine."""
        reasons = {}
        for path in sorted(self.directory.glob("rejected-*.json")):
            note = json.loads(path.read_bytes())
            reasons[note["engine"]] = note["reason"]
        return reasons

    def reject(self, engine: str, reason: str) -> None:
        """Record for every process that `engine` is wrong; the first reason is kept."""
        if engine not in self.rejected():
            name = f"rejected-{engine.replace(' ', '-').replace('/', '-')}.json"
            note = json.dumps({"engine": engine, "reason": reason})
            write_whole(self.directory / name, note.encode("utf-8"), self.draft(name))

    def require_same_filter(self, current: TextFilterRecord | None) -> None:
        """Raise DataError if finished units were filtered otherwise; record the `current` filter.
        Call it before the first unit."""
        path = self.directory / FILTER_NAME
        try:
            recorded = TextFilterRecord.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            recorded = None
        if recorded == current:
            return
        if recorded is not None or self.has_work():
            filter_text = "no filter" if recorded is None else f"--filter {recorded.name}"
            if recorded is not None and current is not None and recorded.name == current.name:
                filter_text += " as it was before its file changed"
            raise DataError(
                f"{self.output} is unfinished, and was started with {filter_text} -> start it with "
                "that, or remove the directory to start over"
            )
        assert current is not None  # it differs from no filter
        write_whole(path, current.model_dump_json().encode("utf-8"), self.draft(FILTER_NAME))

    def remove(self) -> None:
        """Remove the folder atomically, and leftovers of earlier removals."""
        removed_folder = self.output / f"{WORK_DIRECTORY}.{self.token}.partial"
        with suppress(FileNotFoundError):
            self.directory.rename(removed_folder)
        for folder in self.output.glob(f"{WORK_DIRECTORY}.*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def has_work(self) -> bool:
        """Return whether the folder has a record or lease of a unit, or of a commit."""
        names = (path.name for path in self.directory.glob("*.*"))
        return any(RECORD_OR_LEASE.fullmatch(name) for name in names)

    def _clean(self, key: str, token: str) -> None:
        """Remove the files of an unfinished unit of process `token`, which has ended."""
        if not self._record_path(key).exists():
            for path in list(self.directory.glob(f"{key}.{token}.*")):
                path.unlink(missing_ok=True)

    def _trusted(
        self, units: Sequence[Unit], moved: bool = False
    ) -> Iterator[tuple[Unit, UnitRecord]]:
        """Yield the finished `units` with their records, without units of a rejected engine. Their
        files must exist, unless they were moved to the dataset (`moved`)."""
        rejected = self.rejected()
        for unit in units:
            record = self._read_record(unit.key)
            if record and record.engine not in rejected and (moved or self._has_files(record)):
                yield unit, record

    def _record_path(self, key: str) -> Path:
        return self.directory / f"{key}.json"

    def _read_record(self, key: str) -> UnitRecord | None:
        try:
            return UnitRecord.model_validate_json(self._record_path(key).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def _has_files(self, record: UnitRecord) -> bool:
        try:
            are_complete = [
                (self.directory / f"{shard.name}.bin").stat().st_size == shard.bytes
                for shard in record.splits.values()
            ]
        except FileNotFoundError:
            return False
        return all(are_complete) and all((self.directory / name).exists() for name in record.files)


UNIT_FORMAT = 3
"""Part of every key: increase it when the same input gives different bytes."""


@dataclass(frozen=True)
class Unit:
    """Consecutive parts of sources that become one shard."""

    key: str
    parts: tuple[SourcePart, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def plan_units(
    sources: Sequence[Source],
    options: ReadOptions,
    shard_bytes: int,
    identity: Sequence[object],
    *,
    as_one_unit: bool = False,
) -> list[Unit]:
    """Return the units of `sources`, in the order of the input, of at most about `shard_bytes`
    each, or one unit if `as_one_unit`. `identity`: further inputs to a unit's bytes, tokenizer and
    options, as JSON values. Reads footers of parquet and arrow files larger than `shard_bytes`;
    raises DataError for corrupt ones."""
    common = [
        UNIT_FORMAT,
        *identity,
        options.text_keys,
        options.max_document_bytes,
        options.selection.dataset_config,
        options.selection.dataset_split,
    ]
    groups: Iterable[list[SourcePart]] = [[unsplit(source) for source in sources]]
    if not as_one_unit:
        groups = _groups(sources, options, shard_bytes)
    units = []
    for parts in groups:
        described = [
            [part.source.format_name, *part.source.record.identity, part.begin, part.end]
            for part in parts
        ]
        key = xxhash.xxh3_128_hexdigest(json.dumps([common, described]).encode())
        units.append(Unit(key, tuple(parts)))
    return units


def plan_key(units: Sequence[Unit]) -> str:
    """Return a key of the plan: equal for equal units, their order and times of inputs."""
    described = [[unit.key, [part.source.record.times for part in unit.parts]] for unit in units]
    return xxhash.xxh3_128_hexdigest(json.dumps(described).encode())


def _groups(
    sources: Sequence[Source], options: ReadOptions, shard_bytes: int
) -> Iterator[list[SourcePart]]:
    """Return groups of parts: large sources are split, small sources grouped. The end of a group of
    small files depends only on nearby files: on the hash of a path, once the group has half its
    size. So a file that is fixed, added or removed changes its group and few groups after it."""
    group: list[SourcePart] = []
    group_bytes = 0
    for source in sources:
        num_bytes = source.record.bytes
        if num_bytes is None or group_bytes + num_bytes > shard_bytes:
            if group:
                yield group
                group, group_bytes = [], 0
            if num_bytes is None or num_bytes > shard_bytes:
                # A decompressed file cannot be read in parts by several workers.
                is_split = not source.needs_decompression
                parts = source.format.split(source, options, shard_bytes) if is_split else ()
                yield from ([part] for part in parts or [unsplit(source)])
                continue
        group.append(unsplit(source))
        group_bytes += num_bytes
        # The end is drawn by the path, in the mean once in a quarter of a shard's bytes.
        probability = min(1.0, num_bytes / (shard_bytes / 4))
        draw = xxhash.xxh3_64_intdigest(source.path.encode()) / 2**64
        if group_bytes > shard_bytes / 2 and draw < probability:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group
