"""Building of one unit: read its documents, encode them, write its shards, and its record last.

Processes and leases are in `bigtrain.data.tokenize_job.worker_pool`: the result depends only on the
unit and the job.
"""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.chat.encoder import ChatEncoder, EncodedChats
from bigtrain.data.chat.preferences import encode_rows, without_long_prompts
from bigtrain.data.documents.formats import document_batches, part_reader
from bigtrain.data.documents.reader import BadDocument, ReadOptions, RejectedDocuments
from bigtrain.data.shards.format import Mask, Tokens, Weights
from bigtrain.data.shards.manifest import LABELED, LONG_PROMPT, SPLITS, Split
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.data.tokenize_job.fill_in_middle import FillInMiddle, Transformed
from bigtrain.data.tokenize_job.workspace import PartDone, Unit, UnitRecord, Workspace, errors_name
from bigtrain.data.tokenizers.encoders import Encoder
from bigtrain.data.tokenizers.equivalence import Checks, CheckSampler
from bigtrain.objectives.rows import Rows
from bigtrain.objectives.section import documents_per_row
from bigtrain.system.files import sync_to_disk

MAX_ENCODING_THREADS = 4
"""Maximum threads per process: Python reads and parses only as fast as three or four encode."""
PENDING_PER_THREAD = 4
"""Batches of a megabyte that are encoded while the disk or a comparison is waited for."""


@dataclass
class SpelledTokens:
    """Counter of the special tokens' texts in documents, where they are encoded as letters. Can be
    pickled."""

    tokenizer_json: str = field(repr=False)

    def __post_init__(self) -> None:
        added = json.loads(self.tokenizer_json).get("added_tokens") or []
        names = {token["content"].encode("utf-8") for token in added if token["special"]}
        # One pattern for each prefix of names, which is searched by the prefix: 20 times faster.
        names_by_prefix: dict[bytes, list[bytes]] = {}
        for name in sorted(names - {b""}, key=len, reverse=True):
            names_by_prefix.setdefault(name[:2], []).append(name)
        self._patterns = [
            re.compile(b"|".join(map(re.escape, group))) for group in names_by_prefix.values()
        ]

    def count(self, contents: Sequence[bytes]) -> Counter[str]:
        """Return how often documents, given as UTF-8, have the text of every special token."""
        joined = b"\0".join(contents)
        counts: Counter[str] = Counter()
        for pattern in self._patterns:
            counts.update(match.decode("utf-8") for match in pattern.findall(joined))
        return counts


@dataclass(frozen=True)
class Job:
    """Inputs of building in addition to the unit; sent to each worker once. `encoder_reason`: why
    the encoder is not a faster encoder. `allow_bad`: list bad documents instead of stopping.
    `num_threads`: threads that encode during reading and writing; 1 thread does everything. `chat`:
    encoder of conversations; `rows`: kind of rows with more than a conversation; `labels`: names of
    labels; `fim`: transformation of documents of plain text; `spelled`: counter of control
    tokens that plain text spells, None if it is encoded as control tokens; `max_prompt_tokens`:
    rows with more tokens before the first target are dropped; `max_samples`: number of documents,
    or rows, that are encoded."""

    encoder: Encoder
    reference: Encoder
    encoder_reason: str
    dtype: Literal["uint16", "int32"]
    held_out: float
    reading: ReadOptions
    allow_bad: bool
    num_threads: int = 2
    chat: ChatEncoder | None = None
    rows: Rows | None = None
    labels: tuple[str, ...] = ()
    fim: FillInMiddle | None = None
    spelled: SpelledTokens | None = None
    max_prompt_tokens: int | None = None
    max_samples: int | None = None

    def run(self, contents: list[bytes], checks: Checks) -> Batch:
        """Encode `contents`. Raise EncoderError if the encoder is wrong or fails."""
        if self.chat is not None:
            return self._run_chat(self.chat, contents, checks)
        held_out = self._held_out(contents)
        if self.fim is None:
            encoded = self.encoder.encode_utf8(contents)
            checks.run(self.encoder, self.reference, contents, encoded)
            transformed = Transformed(encoded)
        else:
            transformed = self.fim.encode(contents, held_out, self.encoder, self.reference, checks)
        return Batch(
            transformed.encoded.tokens.astype(self.dtype),
            transformed.encoded.lengths,
            held_out,
            np.fromiter(map(len, contents), np.int64, len(contents)),
            modes=transformed.modes,
            spelled={} if self.spelled is None else self.spelled.count(contents),
        )

    def _run_chat(self, chat: ChatEncoder, contents: list[bytes], checks: Checks) -> Batch:
        """Encode conversations, or other rows. Raise as `run`."""
        # Each row without a problem becomes one document, or two documents of a pair.
        rows = encode_rows(chat, contents, checks, self.rows, self.labels)
        if self.max_prompt_tokens is not None:
            rows = without_long_prompts(rows, documents_per_row(self.rows), self.max_prompt_tokens)
        encoded = rows.chats
        is_kept_row = np.ones(len(contents), bool)
        is_kept_row[[number for number, _ in encoded.problems]] = False
        is_kept_row[list(rows.dropped)] = False
        is_kept = np.repeat(is_kept_row, documents_per_row(self.rows))
        return Batch(
            tokens=encoded.tokens.astype(self.dtype),
            lengths=encoded.lengths[is_kept],
            held_out=np.repeat(self._held_out(contents), documents_per_row(self.rows))[is_kept],
            text_bytes=encoded.text_bytes[is_kept],
            mask=encoded.mask,
            num_read=len(contents),
            problems=encoded.problems,
            chats=encoded,
            labels=None if rows.labels is None else rows.labels[is_kept],
            weights=encoded.weights,
            spelled=encoded.spelled,
            num_dropped=len(rows.dropped),
        )

    def _held_out(self, contents: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Return which documents, or rows, belong to the held-out split, bool [contents]."""
        if not self.held_out:
            return np.zeros(len(contents), bool)
        return np.fromiter((is_held_out(c, self.held_out) for c in contents), bool, len(contents))


@dataclass(frozen=True)
class Batch:
    """Encoded documents. By token: `tokens`, `mask` (targets) and `weights` of the losses. By
    document: `lengths`, `held_out`, `text_bytes` (UTF-8) and `labels`. For conversations also:
    `num_read`, their number; `problems`, number and reason of conversations that are no documents;
    `chats`, which counts what the chat template drops; `num_dropped`, rows with a long prompt. For
    plain text: `modes`, documents rearranged by fill-in-the-middle; `spelled`, control tokens that
    the text spells."""

    tokens: Tokens
    lengths: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.bool_]
    text_bytes: npt.NDArray[np.int64]
    mask: Mask | None = None
    num_read: int = 0
    problems: Sequence[tuple[int, str]] = ()
    chats: EncodedChats | None = None
    labels: npt.NDArray[np.uint8] | None = None
    modes: Counter[str] = field(default_factory=Counter)
    weights: Weights | None = None
    spelled: Mapping[str, int] = field(default_factory=dict)
    num_dropped: int = 0


@dataclass
class Counts:
    """Progress counts of a process; `path` is its current input."""

    num_bytes: int = 0
    num_tokens: int = 0
    bad_documents: int = 0
    path: str = ""
    part_done: int = 0
    part_bytes: int = 0


def is_held_out(content: bytes, fraction: float) -> bool:
    """Return whether the document with UTF-8 `content` belongs to the held-out split. Depends only
    on the document, so the split is stable when data is appended, and a duplicate is in the split
    of the original."""
    return xxhash.xxh3_64_intdigest(content) < int(fraction * 2**64)


def build_unit(
    unit: Unit, job: Job, workspace: Workspace, counts: Counts, report: Callable[[], None]
) -> UnitRecord:
    """Write the shards and the record of `unit` into `workspace`. `counts` is updated and `report`
    called after each batch. Raises DataError for input that cannot be used and EncoderError for a
    wrong encoder; then no file remains."""
    # Read, encode and write batches; an error removes the files.
    reader = _UnitReader(unit, job, counts, workspace)
    split_names = SPLITS if job.held_out else SPLITS[:1]
    with ExitStack() as cleanup:
        writers = {
            split: cleanup.enter_context(
                ShardWriter(
                    workspace.directory,
                    f"{unit.key}.{workspace.token}.{split}",
                    job.dtype,
                    masked=job.chat is not None,
                    labeled=job.rows in LABELED,
                )
            )
            for split in split_names
        }
        cleanup.enter_context(reader)
        for batch in _encoded(reader.batches(), job):
            reader.reject(batch)
            reader.add_counts(batch)
            _write(batch, writers)
            counts.num_tokens += len(batch.tokens)
            report()
        shards = {split: writer.close() for split, writer in writers.items()}
    # Make the files durable, then list them in the record.
    record = UnitRecord(
        key=unit.key,
        token=workspace.token,
        engine=job.encoder.engine(),
        engine_reason=job.encoder_reason,
        documents=sum(shard.documents for shard in shards.values()),
        bad_documents=reader.rejects.count,
        parts=tuple(reader.finished_parts),
        splits=shards,
        unrendered=dict(reader.unrendered),
        answer_ends=tuple(sorted(reader.answer_ends)),
        inside_answers=tuple(sorted(reader.inside_answers)),
        fill_in_middle=dict(reader.modes),
        filtered=dict(reader.rejects.filtered),
        spelled_tokens=dict(reader.spelled),
        unread_keys=reader.unread_keys(),
    )
    for name in record.files:
        sync_to_disk(workspace.directory / name)
    sync_to_disk(workspace.directory)
    workspace.write_record(record)
    return record


class _UnitReader:
    """Reader of the parts of a unit, one after another, that lists its bad documents."""

    def __init__(self, unit: Unit, job: Job, counts: Counts, workspace: Workspace) -> None:
        self.unit = unit
        self.job = job
        self.counts = counts
        self.finished_parts: list[PartDone] = []
        self._part_of_bad: int | None = None  # None: the part that is being read
        self.rejects = RejectedDocuments(job.allow_bad, self._store_bad)
        self._errors_path: Path = workspace.directory / errors_name(unit.key, workspace.token)
        self._errors: IO[str] | None = None
        # Part, and line or row, of conversations that were read but not encoded yet, in order.
        self._positions: deque[tuple[int, int]] = deque()
        self.unrendered: Counter[str] = Counter()
        self.answer_ends: set[str] = set()
        self.inside_answers: set[str] = set()
        self.modes: Counter[str] = Counter()
        self.spelled: Counter[str] = Counter()

    def unread_keys(self) -> dict[str, int]:
        """Return the rows that have each key that is not read; a filter reads all."""
        if self.job.reading.text_filter is not None:
            return {}
        return self.rejects.keys.unread(self.job.reading.key_rules)

    def add_counts(self, batch: Batch) -> None:
        """Add the counts of rearranged documents, spelled control tokens and dropped parts, and the
        control tokens in and after answers."""
        self.modes.update(batch.modes)
        self.spelled.update(batch.spelled)
        if batch.num_dropped:
            self.rejects.filtered[LONG_PROMPT] += batch.num_dropped
        if batch.chats is not None:
            self.unrendered.update(batch.chats.unrendered)
            self.answer_ends |= batch.chats.ends
            self.inside_answers |= batch.chats.inner_controls

    def reject(self, batch: Batch) -> None:
        """Reject the next conversations that failed in encoding. Raises as `RejectedDocuments`."""
        positions = [self._positions.popleft() for _ in range(batch.num_read)]
        for number, reason in batch.problems:
            part_number, line_or_row = positions[number]
            part = self.unit.parts[part_number]
            reader = part_reader(part, self.job.reading, self.rejects)
            self._part_of_bad = part_number
            reader.reject_at(line_or_row, reason)
            self._part_of_bad = None

    def batches(self) -> Iterator[tuple[list[bytes], Checks]]:
        """Yield documents, and the numbers of documents to compare with the reference encoder."""
        # The reference itself needs no comparison.
        sampler = None if self.job.encoder is self.job.reference else CheckSampler()
        for contents in document_batches(self._blocks()):
            yield contents, sampler.choose(contents) if sampler else Checks()

    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the documents of the parts; list each finished part."""
        counts = self.counts
        bytes_before = counts.num_bytes
        num_missing = self.job.max_samples
        for part in self.unit.parts:
            reader = part_reader(part, self.job.reading, self.rejects)
            counts.path, counts.part_bytes = part.source.path, part.num_bytes
            for documents in reader.blocks():
                counts.part_done = min(reader.bytes_done, part.num_bytes)
                counts.num_bytes = bytes_before + counts.part_done
                positions = reader.places
                if num_missing is not None:
                    # The remaining documents are read, too: checksums are of the full inputs.
                    documents, positions = documents[:num_missing], positions[:num_missing]
                    num_missing -= len(documents)
                    if not documents:
                        continue
                if self.job.chat is not None:
                    part_number = len(self.finished_parts)
                    self._positions.extend((part_number, position) for position in positions)
                yield documents
            bytes_before += part.num_bytes
            counts.num_bytes, counts.part_done = bytes_before, part.num_bytes
            self.finished_parts.append(
                PartDone(
                    xxh3=reader.checksum(),
                    layout_xxh3=reader.layout(),
                    num_lines=reader.num_lines,
                    times=part.source.record.times,
                )
            )

    def _store_bad(self, bad: BadDocument) -> None:
        """Store a bad document; its line counts from the start of the part (`commit` converts
        it)."""
        if self._errors is None:
            self._errors = self._errors_path.open("w", encoding="utf-8")
        part = len(self.finished_parts) if self._part_of_bad is None else self._part_of_bad
        entry = [part, bad.path, bad.line, bad.row, bad.reason]
        self._errors.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.counts.bad_documents += 1

    def __enter__(self) -> _UnitReader:
        return self

    def __exit__(self, error_type: object, error: object, traceback: object) -> None:
        if self._errors is not None:
            self._errors.close()
            if error is not None:
                self._errors_path.unlink(missing_ok=True)


def _encoded(batches: Iterator[tuple[list[bytes], Checks]], job: Job) -> Iterator[Batch]:
    """Yield encoded batches, in order; at most `PENDING_PER_THREAD` times threads are pending."""
    if job.num_threads == 1:
        for contents, checks in batches:
            yield job.run(contents, checks)
        return
    # Load the encoders once, not in every thread.
    for encoder in (job.encoder, job.reference):
        encoder.encode_utf8([])
    num_threads = MAX_ENCODING_THREADS
    if not job.encoder.uses_all_cores:
        num_threads = min(job.num_threads, num_threads)
    pending: deque[Future[Batch]] = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for contents, checks in batches:
                pending.append(pool.submit(job.run, contents, checks))
                # Yield what is done; wait for the first batch only if too many are pending.
                max_pending = PENDING_PER_THREAD * num_threads
                while pending and (len(pending) >= max_pending or pending[0].done()):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _write(batch: Batch, writers: dict[Split, ShardWriter]) -> None:
    """Add every document of a batch to the shard writer for its split."""
    if not batch.held_out.any():  # as most batches: nothing is copied
        writers["train"].add(
            batch.tokens,
            batch.lengths,
            int(batch.text_bytes.sum()),
            mask=batch.mask,
            labels=batch.labels,
            weights=batch.weights,
        )
        return
    for split, writer in writers.items():
        is_document = batch.held_out == (split == "held_out")  # of this split
        is_token = np.repeat(is_document, batch.lengths)
        writer.add(
            batch.tokens[is_token],
            batch.lengths[is_document],
            int(batch.text_bytes[is_document].sum()),
            mask=None if batch.mask is None else batch.mask[is_token],
            labels=None if batch.labels is None else batch.labels[is_document],
            weights=None if batch.weights is None else batch.weights[is_token],
        )
