"""Commit of finished units as a dataset: shards get their final names, the manifest is written
last.

Before the first file is renamed, a journal (`assembly.json`) lists all renames. So the next process
can finish the commit of a killed process, or roll it back if the plan has changed in the
meantime.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bigtrain.data.chat.marked_strings import is_counted_only
from bigtrain.data.documents.files import Source
from bigtrain.data.documents.key_rules import KeyRules, describe_unread
from bigtrain.data.documents.reader import BadDocument, require_few
from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import (
    ERRORS_NAME,
    MANIFEST_NAME,
    SPLITS,
    TOKENIZER_DIRECTORY,
    Manifest,
    OptionsRecord,
    PartRecord,
    ShardRecord,
    SourceRecord,
    Split,
    TokenizerRecord,
    write_manifest,
)
from bigtrain.data.tokenize_job.workspace import (
    JOURNAL_NAME,
    Unit,
    UnitRecord,
    Workspace,
    errors_name,
    plan_key,
)
from bigtrain.data.tokenizers.cache import files_fingerprint
from bigtrain.data.tokenizers.chat_template import ChatTemplate
from bigtrain.data.tokenizers.tokenizer import Tokenizer
from bigtrain.errors import DataError
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import documents_per_row
from bigtrain.system.files import sync_to_disk, sync_tree, whole_file, write_whole

logger = logging.getLogger(__name__)

COMMIT_LEASE = "assembly"


@dataclass(frozen=True)
class Commit:
    """Commit of a plan whose units are all done."""

    workspace: Workspace
    sources: Sequence[Source]
    units: Sequence[Unit]
    tokenizer: Tokenizer
    options: OptionsRecord
    key_rules: KeyRules
    chat_template: ChatTemplate | None = None
    beginning_ids: tuple[int, ...] = ()
    rows: Rows | None = None
    fill_in_middle_ids: tuple[int, int, int] | None = None

    def run(self, records: dict[str, UnitRecord]) -> Manifest:
        """Create the dataset from the units' `records`. Raise DataError if they have too little
        data. Call it while holding the lease `COMMIT_LEASE`."""
        unit_records = [records[unit.key] for unit in self.units]
        self._write_errors(unit_records)
        # Refuse data of which the chat template drops more parts than allowed.
        unrendered = _total(record.unrendered for record in unit_records)
        dropped = {
            part_kind: n for part_kind, n in unrendered.items() if not is_counted_only(part_kind)
        }
        if sum(dropped.values()) > self.options.max_unrendered:
            dropped_text = ", ".join(f"{n:,} of {part_kind}" for part_kind, n in dropped.items())
            raise DataError(
                f"the chat template drops {sum(dropped.values()):,} parts of the conversations "
                f"({dropped_text}), more than --max-unrendered {self.options.max_unrendered} "
                "allows -> use a template that renders them: --chat-template FILE; or allow more"
            )
        manifest = self._manifest(unit_records)
        if manifest.unread_keys:
            logger.warning("%s", describe_unread(manifest.unread_keys, self.key_rules))
        # Move the shards. The journal comes first, so that a killed commit can be finished.
        moves = []
        for split in SPLITS:
            records_of_split = _with_documents(unit_records, split)
            final_shards = manifest.splits.get(split, ())
            for record, final in zip(records_of_split, final_shards, strict=True):
                name = record.splits[split].name
                moves += [
                    (f"{name}.{suffix}", f"{final.name}.{suffix}") for suffix in final.checksums
                ]
        directory, output = self.workspace.directory, self.workspace.output
        journal = json.dumps({"plan": plan_key(self.units), "moves": moves})
        write_whole(directory / JOURNAL_NAME, journal.encode(), self.workspace.draft(JOURNAL_NAME))
        for source, target in moves:
            try:
                (directory / source).rename(output / target)
            except FileNotFoundError:
                if not (output / target).exists():  # otherwise a killed commit has moved it
                    raise
        # The tokenizer, unless a process that was killed afterwards has moved it.
        tokenizer_directory = output / TOKENIZER_DIRECTORY
        if not tokenizer_directory.exists():
            draft = self.workspace.draft(TOKENIZER_DIRECTORY)
            self.tokenizer.save(draft)
            if self.chat_template is not None:
                self.chat_template.save(draft)
            sync_tree(draft)
            draft.rename(tokenizer_directory)
        # The manifest makes it a dataset.
        sync_to_disk(output)
        write_manifest(output, manifest, self.workspace.draft(MANIFEST_NAME))
        self.workspace.remove()
        return manifest

    def _manifest(self, unit_records: Sequence[UnitRecord]) -> Manifest:
        """Return the manifest. Raise DataError if answers end in tokens that are also inside of
        answers, or if there is no training token."""
        splits: dict[Split, tuple[ShardRecord, ...]] = {}
        for split in SPLITS:
            shards = [record.splits[split] for record in _with_documents(unit_records, split)]
            if shards or split == "train":
                splits[split] = tuple(
                    shard.model_copy(update={"name": f"{split}-{number:05d}"})
                    for number, shard in enumerate(shards)
                )
        tokenizer = self.tokenizer
        # Tokens that end answers: generation stops at them, so no answer may contain one.
        answer_ends = {name for record in unit_records for name in record.answer_ends}
        inner_controls = {name for record in unit_records for name in record.inside_answers}
        generation_ends = self.tokenizer.generation_ends()
        if ambiguous := sorted((answer_ends & inner_controls) - {*generation_ends.values()}):
            raise DataError(
                f"the chat template ends some answers in {ambiguous[0]}, which it writes inside of "
                "others, so generation cannot stop there -> learn only the last answer: --learn "
                "last; or use a template that ends every answer in eos_token: --chat-template FILE"
            )
        manifest = Manifest(
            tokenizer=TokenizerRecord(
                name=tokenizer.name,
                hash=tokenizer.hash,
                vocab_size=tokenizer.vocab_size,
                end_of_document_id=tokenizer.end_of_document_id,
                engine=", ".join(sorted({record.engine for record in unit_records})),
                engine_reason="; ".join(
                    sorted({record.engine_reason for record in unit_records} - {""})
                ),
                files_xxh3=files_fingerprint(tokenizer.load_path),
                chat_template=None if self.chat_template is None else self.chat_template.hash,
                beginning_ids=self.beginning_ids,
                answer_end_ids=tuple(sorted(self.tokenizer.ids_of(answer_ends))) or None,
                fill_in_middle_ids=self.fill_in_middle_ids,
            ),
            token_dtype=token_dtype(tokenizer.vocab_size),
            rows=self.rows,
            sources=self._read_sources(unit_records),
            options=self.options,
            skipped_documents=sum(record.bad_documents for record in unit_records),
            unrendered=_total(record.unrendered for record in unit_records) or None,
            filtered=_total(record.filtered for record in unit_records) or None,
            spelled_tokens=_total(record.spelled_tokens for record in unit_records) or None,
            unread_keys=_total(record.unread_keys for record in unit_records) or None,
            fill_in_middle=_total(record.fill_in_middle for record in unit_records) or None,
            splits=splits,
        )
        if not manifest.num_tokens("train"):
            # After an `EmptyDataset` no file remains; the list of bad documents is kept.
            error_class = DataError if manifest.skipped_documents else EmptyDataset
            raise error_class(
                f"the input has no training tokens: {manifest.num_documents('train')} "
                f"training documents, {manifest.num_documents('held_out')} held-out documents with "
                f"{manifest.num_tokens('held_out')} tokens, {manifest.skipped_documents} skipped, "
                f"{sum((manifest.filtered or {}).values())} dropped by the filter "
                "-> files with text, or another --text-key, --held-out or filter"
            )
        return manifest

    def _read_sources(self, unit_records: Sequence[UnitRecord]) -> tuple[SourceRecord, ...]:
        """Return the sources with their parts, as the units have read them."""
        parts: dict[str, list[PartRecord]] = {source.path: [] for source in self.sources}
        for unit, record in zip(self.units, unit_records, strict=True):
            for part, done in zip(unit.parts, record.parts, strict=True):
                layout = done.layout_xxh3 if part.source.is_hashed_by_documents else None
                parts[part.source.path].append(
                    PartRecord(begin=part.begin, end=part.end, xxh3=done.xxh3, layout_xxh3=layout)
                )
        return tuple(replace(s.record, parts=tuple(parts[s.path])) for s in self.sources)

    def _write_errors(self, unit_records: Sequence[UnitRecord]) -> None:
        """List every bad document; raise DataError if there are more than allowed."""
        bad = sum(record.bad_documents for record in unit_records)
        target = self.workspace.output / ERRORS_NAME
        if not bad:
            target.unlink(missing_ok=True)
            return
        first: BadDocument | None = None
        with whole_file(target, self.workspace.draft(ERRORS_NAME)) as file:
            for document in self._bad_documents(unit_records):
                first = first or document
                entry = {
                    "file": document.path,
                    "line": document.line,
                    "row": document.row,
                    "reason": document.reason,
                }
                present_fields = {key: value for key, value in entry.items() if value is not None}
                file.write(json.dumps(present_fields, ensure_ascii=False).encode("utf-8") + b"\n")
        good = sum(record.documents for record in unit_records) // documents_per_row(self.rows)
        require_few(bad, good, self.options.max_bad_fraction, f"{first}; all are in {target}")

    def _bad_documents(self, unit_records: Sequence[UnitRecord]) -> Iterator[BadDocument]:
        """Yield bad documents in input order, with lines counted from the start of the file."""
        num_lines_before = 0
        previous_path = ""
        for unit, record in zip(self.units, unit_records, strict=True):
            lines_before_part = []
            for part, done in zip(unit.parts, record.parts, strict=True):
                if part.source.path != previous_path:
                    previous_path, num_lines_before = part.source.path, 0
                lines_before_part.append(num_lines_before)
                num_lines_before += done.num_lines
            if not record.bad_documents:
                continue
            errors_path = self.workspace.directory / errors_name(record.key, record.token)
            with errors_path.open(encoding="utf-8") as file:
                # Bad documents are detected by reading or later, by encoding: sort by part, line
                # and row. An entry is [part, path, line, row, reason].
                entries = sorted(map(json.loads, file), key=lambda e: (e[0], e[2] or 0, e[3] or 0))
                for part_number, path, line, row, reason in entries:
                    if line is not None:
                        line += lines_before_part[part_number]
                    yield BadDocument(path, reason, line, row)


def _total(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Return the sum of the counts over the units, by name."""
    total: Counter[str] = Counter()
    for unit_counts in counts:
        total.update(unit_counts)
    return dict(sorted(total.items()))


class EmptyDataset(DataError):
    """Input without any data."""


def begun_plan(workspace: Workspace) -> str | None:
    """Return the `plan_key` of the commit in progress; None if there is none."""
    try:
        return str(_journal(workspace)["plan"])
    except FileNotFoundError:
        return None


def roll_back(workspace: Workspace) -> None:
    """Move the files of an unfinished commit back to the names in their units' records."""
    for source, target in _journal(workspace)["moves"]:
        if (workspace.output / target).exists():
            (workspace.output / target).rename(workspace.directory / source)
    shutil.rmtree(workspace.output / TOKENIZER_DIRECTORY, ignore_errors=True)
    sync_to_disk(workspace.directory)
    (workspace.directory / JOURNAL_NAME).unlink()


def _journal(workspace: Workspace) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((workspace.directory / JOURNAL_NAME).read_bytes())
    return tree


def _with_documents(records: Sequence[UnitRecord], split: Split) -> list[UnitRecord]:
    """Return the records of the units with documents in `split`."""
    return [
        record for record in records if split in record.splits and record.splits[split].documents
    ]
