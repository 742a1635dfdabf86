"""Build of a dataset from a request: started or resumed, by one or several processes.

The input is split into units; a worker (`worker_pool`) builds a unit (`unit_builder`) and records
it (`workspace`); the process that finds all records commits the dataset (`commit`). All processes
work alike with equal arguments, so any process may be killed and restarted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bigtrain.data.chat.encoder import ChatEncoder, ChatRules, TextEnds
from bigtrain.data.documents.discovery import find_sources
from bigtrain.data.documents.files import Source
from bigtrain.data.documents.formats import ROW_SUFFIXES
from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import Manifest
from bigtrain.data.tokenize_job.commit import (
    COMMIT_LEASE,
    Commit,
    EmptyDataset,
    begun_plan,
    roll_back,
)
from bigtrain.data.tokenize_job.existing_output import (
    finished_manifest,
    inputs_outside,
    is_free_or_unfinished,
)
from bigtrain.data.tokenize_job.fill_in_middle import fill_in_middle
from bigtrain.data.tokenize_job.progress import TokenizeProgress, announce
from bigtrain.data.tokenize_job.request import BuildRequest, Workers, divide
from bigtrain.data.tokenize_job.unit_builder import Job, SpelledTokens
from bigtrain.data.tokenize_job.worker_pool import Round, new_token, run_round
from bigtrain.data.tokenize_job.workspace import Unit, UnitRecord, Workspace, plan_key, plan_units
from bigtrain.data.tokenizers.encoders import EncoderError
from bigtrain.data.tokenizers.equivalence import EncoderQueue, choose_encoder
from bigtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bigtrain.errors import DataError
from bigtrain.system.files import make_parents
from bigtrain.system.machine import this_machine

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between checks whether other processes have finished their leased units."""


@dataclass(frozen=True)
class BuildResult:
    """Result of a build: manifest, whether the dataset existed, tokens built by this process."""

    manifest: Manifest
    already_finished: bool
    built_tokens: int = 0


def build_dataset(request: BuildRequest) -> BuildResult:
    """Tokenize `request.selection` into `request.output`. If the output is the finished dataset of
    equal inputs (equal paths and sizes, and equal times or else equal content), tokenizer and
    options, nothing is done; an unfinished dataset is resumed. Raises DataError for any problem:
    finished units are kept; if there are none, no files remain."""
    sources = inputs_outside(request.output, find_sources(request.selection))
    for source in sources:
        if request.options.chat and not source.format.has_rows:
            raise DataError(
                f"--input {source.path} is text, and --chat-key names a key of it -> conversations "
                f"are read from {', '.join(ROW_SUFFIXES)} and datasets"
            )
    if request.share.size != 1 and any(source.is_standard_input for source in sources):
        raise DataError("--input - is read by one command -> remove --rank and --world-size")
    workspace = Workspace(request.output, new_token())
    if workspace.is_finished() or not is_free_or_unfinished(workspace):
        return BuildResult(finished_manifest(request, sources, workspace), already_finished=True)
    announce(f"loading tokenizer {request.tokenizer}")
    tokenizer = load_tokenizer(request.tokenizer)
    tokenizer = tokenizer.with_end_of_document(request.options.end_of_document)
    build = _Build(request, sources, tokenizer, workspace)
    with _work_folder(workspace):
        manifest = build.run()
    return BuildResult(manifest, already_finished=False, built_tokens=build.built_tokens)


@contextmanager
def _work_folder(workspace: Workspace) -> Iterator[None]:
    """Create the work folder; after an exception remove it, unless it contains work."""
    created: list[Path] = []  # missing parents of the work folder, which comes last
    try:
        try:
            created = make_parents(workspace.directory)
        except OSError as error:
            raise DataError(f"{workspace.output} cannot be written: {error}") from error
        yield
    except BaseException as error:
        if isinstance(error, EmptyDataset) or not workspace.has_work():
            workspace.remove()
        elif isinstance(error, DataError):
            raise DataError(f"{error} (finished parts are kept for the next start)") from error
        for parent in reversed(created[:-1]):
            if parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
        raise


@dataclass
class _Build:
    """Work of a process from a plan to the dataset."""

    request: BuildRequest
    sources: Sequence[Source]
    tokenizer: Tokenizer
    workspace: Workspace

    def __post_init__(self) -> None:
        request, options, tokenizer = self.request, self.request.options, self.tokenizer
        self.reading = request.reading()
        self.template = request.find_template(tokenizer)
        self.beginning_ids = tokenizer.beginning(options.beginning_of_text)
        self.fim = fill_in_middle(options.fill_in_middle, tokenizer)
        # Everything that changes the bytes of a unit belongs to the identity: the options, but not
        # the limits of a job, and the tokens instead of their names in the options.
        identity = [
            tokenizer.hash,
            None if self.template is None else self.template.hash,
            [self.beginning_ids, tokenizer.end_of_document_id],
            None if self.fim is None else self.fim.ids,
            options.max_unrendered > 0,
            options.model_dump(
                mode="json",
                exclude={
                    **dict.fromkeys(("shard_bytes", "max_bad_fraction", "max_unrendered"), True),
                    **dict.fromkeys(("beginning_of_text", "end_of_document"), True),
                    "fill_in_middle": {"tokens"},
                },
            ),
        ]
        # Only a process that reads all inputs in their order finds the first `max_samples`.
        as_one_unit = options.max_samples is not None
        self.units = plan_units(
            self.sources, self.reading, options.shard_bytes, identity, as_one_unit=as_one_unit
        )
        self.plan = plan_key(self.units)
        self.encoders: EncoderQueue | None = None
        self.built_tokens = 0

    def run(self) -> Manifest:
        """Work until the dataset is finished, by this process or another."""
        try:
            return self._run()
        except (OSError, DataError) as error:
            # Another process may have finished the dataset and removed the work folder in the
            # meantime.
            if self.workspace.is_finished():
                return finished_manifest(self.request, self.sources, self.workspace)
            if not self.workspace.directory.exists():
                raise DataError(
                    f"{self.workspace.directory} was deleted during the job, by another process "
                    "or by hand -> start again"
                ) from error
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.workspace.output} cannot be written: {error}") from error

    def _run(self) -> Manifest:
        """Build missing units, then commit them or wait for the commit of another process."""
        self.workspace.require_same_filter(self.request.options.text_filter)
        # Roll back an interrupted commit of another plan; wait for a commit that is in progress.
        while begun_plan(self.workspace) not in (None, self.plan):
            with self.workspace.leases.take(COMMIT_LEASE) as has_lease:
                if has_lease and begun_plan(self.workspace) not in (None, self.plan):
                    roll_back(self.workspace)
                    break  # nothing to wait for
            time.sleep(POLL_S)
        # Build the units without a record, round by round.
        records = self._records()
        missing_units = [unit for unit in self.units if unit.key not in records]
        if num_touched := len(self.workspace.unconfirmed(missing_units)):
            logger.warning(
                "the times of input files changed: %d finished parts are compared with their "
                "current content",
                num_touched,
            )
        done_bytes = sum(unit.num_bytes for unit in self.units if unit.key in records)
        sizes = [source.record.bytes for source in self.sources]
        # A bar of 0 bytes has no end: a source of unknown size makes the total unknown.
        total_bytes = 0 if None in sizes else sum(size or 0 for size in sizes)
        num_processes = self._workers(missing_units).num_processes
        with TokenizeProgress(total_bytes, done_bytes, num_processes) as progress:
            while len(records) < len(self.units):
                if self.workspace.is_finished():
                    return finished_manifest(self.request, self.sources, self.workspace)
                self._build_round(records, progress)
                records = self._records()
            self.built_tokens = progress.counts().num_tokens
        # One process commits, and every waiting process finds the dataset.
        while not self.workspace.is_finished():
            with self.workspace.leases.take(COMMIT_LEASE) as has_lease:
                if has_lease:
                    return Commit(
                        workspace=self.workspace,
                        sources=self.sources,
                        units=self.units,
                        tokenizer=self.tokenizer,
                        options=self.request.options,
                        key_rules=self.reading.key_rules,
                        chat_template=self.template,
                        beginning_ids=self.beginning_ids,
                        rows=self.request.rows,
                        fill_in_middle_ids=None if self.fim is None else self.fim.ids,
                    ).run(records)
            time.sleep(POLL_S)
        return finished_manifest(self.request, self.sources, self.workspace)

    def _workers(self, units: Sequence[Unit]) -> Workers:
        """Return the workers for `units`, divided among a known number of commands."""
        if any(source.is_standard_input for source in self.sources):
            # Another process would not have this standard input.
            return Workers(1, this_machine(os.environ).num_cores, started=False)
        num_commands = self.request.share.size or 1
        num_units = -(-len(units) // num_commands)
        num_bytes = sum(unit.num_bytes for unit in units) // num_commands
        return divide(self.request.workers, num_units, num_bytes, this_machine(os.environ))

    def _records(self) -> dict[str, UnitRecord]:
        """Return the records of finished units, by key, also while a commit moves their files."""
        return self.workspace.records(self.units, moved=begun_plan(self.workspace) == self.plan)

    def _build_round(self, records: dict[str, UnitRecord], progress: TokenizeProgress) -> None:
        """Run one round of workers over unfinished units; pause if other processes build them."""
        missing_units = tuple(unit for unit in self.units if unit.key not in records)
        leases = self.workspace.leases
        if all(leases.is_live(unit.key) for unit in missing_units):
            progress.wait_for_others(len(missing_units))
            time.sleep(POLL_S)
            return
        self.workspace.drop_invalid(missing_units)  # records that cannot be used again
        # Workers get encoders, and for conversations an encoder with the chat template.
        progress.show_step("comparing fast encoders with the reference")
        encoders = self._trusted_encoders()
        chat = None
        if self.request.options.chat:
            chat = ChatEncoder(
                encoder=encoders.current,
                reference=encoders.reference,
                template=self.template,
                trusted=self.request.options.parse_special_tokens,
                plain_ends=TextEnds(
                    prefix=self.beginning_ids,
                    end_id=self.tokenizer.end_of_document_id,
                    end_text=self.tokenizer.end_text,
                ),
                vocab_size=self.tokenizer.vocab_size,
                rules=ChatRules(
                    eos=tuple(self.tokenizer.generation_ends().values()),
                    allow_unrendered=self.request.options.max_unrendered > 0,
                ),
            )
            if chat.answer_ends is not None and chat.answer_ends.by_next_role:
                logger.warning(
                    "the chat template ends answers by the token of the next role (%s): that token "
                    "is learned, and is appended to the last answer of each conversation",
                    chat.answer_ends.usual,
                )
        options = self.request.options
        # Plain text that spells special tokens is encoded as letters, and counted.
        counts_spelled = not (options.chat or options.parse_special_tokens)
        job = Job(
            encoder=encoders.current,
            reference=encoders.reference,
            encoder_reason=encoders.reason,
            dtype=token_dtype(self.tokenizer.vocab_size),
            held_out=options.held_out,
            reading=self.reading,
            allow_bad=options.max_bad_fraction > 0,
            chat=chat,
            rows=self.request.rows,
            labels=options.labels,
            fim=self.fim,
            spelled=SpelledTokens(encoders.reference.tokenizer_json) if counts_spelled else None,
            max_prompt_tokens=options.max_prompt_tokens,
            max_samples=options.max_samples,
        )
        work = Round(missing_units, self.request.share, job, self.workspace)
        workers = self._workers(missing_units)
        progress.show_step(f"starting {workers.num_processes} workers")
        try:
            run_round(work, workers, progress.update)
        except EncoderError as error:
            # Earlier output of this encoder may be wrong as well: the next round rebuilds all units
            # that the encoder has built, with the next encoder.
            self.workspace.reject(encoders.current.engine(), str(error))
        finally:
            progress.end_round()

    def _trusted_encoders(self) -> EncoderQueue:
        """Return the encoders, advanced past the encoders that any process has rejected."""
        if self.encoders is None:
            reference = self.tokenizer.encoder(
                self.request.options.parse_special_tokens, beginning_ids=self.beginning_ids
            )
            if self.request.options.chat:  # special tokens and ends are the template's
                reference = self.tokenizer.encoder(parse_special_tokens=True, ends=False)
            self.encoders = choose_encoder(
                reference,
                self.request.encoder,
                read_once=any(source.read_once for source in self.sources),
            )
        rejected = self.workspace.rejected()
        while (engine := self.encoders.current.engine()) in rejected:
            self.encoders.reject(rejected[engine])
        return self.encoders
