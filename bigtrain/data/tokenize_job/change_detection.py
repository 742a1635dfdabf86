"""Detection of changes to inputs since they were tokenized.

Like in git: if size and times are the same, the content counts as unchanged. If times differ (after
a copy, a checkout or `touch`), the input is hashed and compared with the hash computed while
tokenizing: that requires reading a file of lines or text, or the documents of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigtrain.data.documents.bad_documents import Rejects
from bigtrain.data.documents.open_reader import part_reader
from bigtrain.data.documents.parts import Part, ReadOptions
from bigtrain.data.shards.manifest import SourceRecord, same_times
from bigtrain.data.sources.discovery import Source
from bigtrain.data.tokenize_job.units import Unit
from bigtrain.data.tokenize_job.workspace import Workspace
from bigtrain.errors import DataError


def confirm_unit(unit: Unit, workspace: Workspace, options: ReadOptions) -> bool:
    """Return whether the touched inputs of `unit` still have the content it was built from; update
    its record.

    If not, the record is removed. Call it while holding the unit's lease.
    """
    record = workspace.unconfirmed([unit]).get(unit.key)
    if record is None:
        return False
    parts = []
    for part, read in zip(unit.parts, record.parts, strict=True):
        times = part.source.record.times
        if same_times(read.times, times):
            parts.append(read)
            continue
        if not _holds(part, read.xxh3, read.layout_xxh3, options):
            workspace.drop(unit.key)
            return False
        parts.append(replace(read, times=times))
    workspace.write_record(record.model_copy(update={"parts": tuple(parts)}))
    return True


def untouched(known: Sequence[SourceRecord], sources: Sequence[Source]) -> bool:
    """Return whether `sources` match the `known` ones by identity, size and times."""
    current = [source.record for source in sources]
    if [record.place for record in known] != [record.place for record in current]:
        return False
    return all(same_times(old.times, new.times) for old, new in zip(known, current, strict=True))


def confirm_sources(
    known: Sequence[SourceRecord], sources: Sequence[Source], options: ReadOptions
) -> tuple[SourceRecord, ...] | None:
    """Return `known` with the times of `sources` if all contents are unchanged; else None."""
    if [record.place for record in known] != [source.record.place for source in sources]:
        return None
    confirmed = []
    for record, source in zip(known, sources, strict=True):
        if same_times(record.times, source.record.times):
            confirmed.append(record)
            continue
        if not record.parts or not all(
            _holds(Part(source, read.begin, read.end), read.xxh3, read.layout_xxh3, options)
            for read in record.parts
        ):
            return None
        confirmed.append(replace(source.record, parts=record.parts))
    return tuple(confirmed)


def _holds(part: Part, xxh3: str, layout_xxh3: str | None, options: ReadOptions) -> bool:
    """Compare checksums; `layout_xxh3` may be missing if all parts of a file are compared, not for
    tables."""
    if part.source.read_once or (layout_xxh3 is None and part.source.is_hashed_by_documents):
        return False
    reader = part_reader(part, options, Rejects(True, lambda bad: None))
    try:
        reader.skim()
    except DataError:
        return False  # the next reader reports the error
    return reader.checksum() == xxh3 and layout_xxh3 in (None, reader.layout())
