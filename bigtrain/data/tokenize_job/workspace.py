"""Work folder of an unfinished dataset: finished units, leases, and rejected encoders.

::

    OUTPUT/.units/
      KEY.TOKEN.train.bin  .idx ...  shards of a unit, written by process TOKEN
      KEY.TOKEN.errors               its bad documents
      KEY.json                       its record: the unit is done once this names those files
      KEY.claim                      the lease on it, `bigtrain.system.leases`
      rejected-ENGINE                a wrong encoder; its units are rebuilt
      assembly.json                  `bigtrain.data.tokenize_job.commit` is in progress
      (a file without a name)        decompressed input of a unit (`sources.decompression`)
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from bigtrain.data.shards.manifest import (
    COMPACT,
    MANIFEST_NAME,
    WORK_DIRECTORY,
    Checksum,
    Count,
    Record,
    ShardRecord,
    Split,
    Times,
    same_times,
)
from bigtrain.data.tokenize_job.units import Unit
from bigtrain.system.files import write_whole
from bigtrain.system.leases import Leases

JOURNAL_NAME = "assembly.json"
RECORD_OR_LEASE = re.compile(r"[0-9a-f]{32}\.(json|claim)|assembly\.(json|claim)")


@pydantic_dataclass(config=COMPACT, frozen=True, slots=True, kw_only=True)
class PartDone:
    """Result of reading a part: its content, and the number of lines that started in it.

    `xxh3` and `layout_xxh3` as in `PartReader`; `times` of the source when it was listed.
    """

    xxh3: Checksum
    layout_xxh3: Checksum
    num_lines: Count
    times: Times = Field(strict=False)


class UnitRecord(Record):
    """`KEY.json`. Record of a unit. `documents` are the good ones, `token` names the process that
    wrote the files.

    For conversations: `unrendered` parts by kind, and the texts of the control tokens that end
    answers and of others inside of them.
    """

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

    def is_current(self, unit: Unit) -> bool:
        """Return whether the inputs of `unit` are unchanged by their times."""
        read = zip(self.parts, unit.parts, strict=True)
        return all(same_times(done.times, part.source.record.times) for done, part in read)

    @property
    def files(self) -> list[str]:
        names = [f"{s.name}.{suffix}" for s in self.splits.values() for suffix in s.checksums]
        return [*names, *([self.errors_name] if self.bad_documents else [])]

    @property
    def errors_name(self) -> str:
        return errors_name(self.key, self.token)


def shard_name(key: str, token: str, split: Split) -> str:
    """Return the file name without suffix of a unit's shard."""
    return f"{key}.{token}.{split}"


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
        """Return this process's temporary name for a file `name` of this folder or of the
        dataset."""
        return self.directory / f"{name}.{self.token}.partial"

    def is_finished(self) -> bool:
        """Return whether the dataset is complete, so that this folder is or will be removed."""
        return (self.output / MANIFEST_NAME).exists()

    def is_recorded(self, key: str) -> bool:
        return self._record_path(key).exists()

    def write_record(self, record: UnitRecord) -> None:
        """Write the record, which makes the unit done."""
        content = record.model_dump_json().encode("utf-8")
        write_whole(self._record_path(record.key), content, self.draft(record.key))

    def records(self, units: Sequence[Unit], moved: bool = False) -> dict[str, UnitRecord]:
        """Return records of the units that are done, by key: inputs unchanged, encoder trusted,
        files complete (not checked if a commit has `moved` them)."""
        return {u.key: r for u, r in self._trusted(units, moved) if r.is_current(u)}

    def unconfirmed(self, units: Sequence[Unit]) -> dict[str, UnitRecord]:
        """Return records that `records` would return if the times of their inputs had not
        changed."""
        return {u.key: r for u, r in self._trusted(units) if not r.is_current(u)}

    def is_done(self, unit: Unit) -> bool:
        """Return whether `unit` has a record of its current inputs, regardless of its other
        contents."""
        record = self._read_record(unit.key)
        return record is not None and record.is_current(unit)

    def drop(self, key: str) -> None:
        self._record_path(key).unlink(missing_ok=True)

    def drop_invalid(self, units: Sequence[Unit]) -> None:
        """Drop records of those `units` that cannot be reused."""
        recorded = [unit for unit in units if self.is_recorded(unit.key)]
        trusted = {unit.key for unit, _ in self._trusted(recorded)}
        for unit in recorded:
            if unit.key not in trusted:
                self.drop(unit.key)

    def rejected(self) -> dict[str, str]:
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

    def remove(self) -> None:
        """Remove the folder atomically, and leftovers of earlier removals."""
        gone = self.output / f"{WORK_DIRECTORY}.{self.token}.partial"
        with suppress(FileNotFoundError):
            self.directory.rename(gone)
        for folder in self.output.glob(f"{WORK_DIRECTORY}.*.partial"):
            shutil.rmtree(folder, ignore_errors=True)

    def has_work(self) -> bool:
        names = (path.name for path in self.directory.glob("*.*"))
        return any(RECORD_OR_LEASE.fullmatch(name) for name in names)

    def _clean(self, key: str, token: str) -> None:
        """Remove the files of an unfinished unit of process `token`, which has ended."""
        if not self.is_recorded(key):
            for path in list(self.directory.glob(f"{key}.{token}.*")):
                path.unlink(missing_ok=True)

    def _trusted(
        self, units: Sequence[Unit], moved: bool = False
    ) -> Iterator[tuple[Unit, UnitRecord]]:
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
            sizes = [
                (self.directory / f"{shard.name}.bin").stat().st_size == shard.bytes
                for shard in record.splits.values()
            ]
        except FileNotFoundError:
            return False
        return all(sizes) and all((self.directory / name).exists() for name in record.files)
