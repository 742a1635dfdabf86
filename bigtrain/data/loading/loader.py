"""Batches of one data-parallel rank, from the sample order to tensors on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from bigtrain.data.loading.collator import BatchOptions, BatchReader, Collator, StoredRows, new_rows
from bigtrain.data.loading.dataset_checks import open_answers
from bigtrain.data.loading.held_out import measured_split, tokens_per_byte
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.mixture import MixedSamples, MixtureOrder, labels_of
from bigtrain.data.samples.packing_plan import PackedDocuments, balanced, packed_documents
from bigtrain.data.samples.phases import JoinedWindows, Phase, first_phase, identify_sources
from bigtrain.data.samples.sample_stream import PositionedSamples, StreamOrder, StreamPosition
from bigtrain.data.samples.shuffle import SampleOrder
from bigtrain.data.samples.source import SourceDataset, StreamDataset, with_source
from bigtrain.data.samples.token_stream import Indices, PackedWindows, Samples, split_stream
from bigtrain.data.shards.dataset import TokenDataset, open_sources
from bigtrain.data.shards.manifest import Split
from bigtrain.errors import DataError
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig

if TYPE_CHECKING:
    from bigtrain.data.loading.teacher import TeacherRows

HELD_OUT_ORDER_SEED = 0
"""Independent of the run's seed: two runs on the same data are measured on the same samples."""

STEPS_AT_ONCE, TOKENS_AT_ONCE = 64, 1 << 19
"""Maximum steps and tokens of one request. Passing a request between threads costs as much as
reading dozens of samples, so a thread reads several steps at once if they are small."""


class TrainingBatches:
    """Micro-batches of a data-parallel rank, by the number of samples consumed. Assignment of
    samples to rows: `bigtrain.settings.batch_plan.BatchPlan`. `workers` threads read and check the
    rows of the next steps; the batches do not depend on the number of threads. `close` ends the
    threads. balances: the packed documents of a step are divided by their attention. stream: the
    samples, if these are a stream with a state."""

    def __init__(
        self,
        dataset: Samples,
        plan: BatchPlan,
        data_rank: int,
        order: SampleOrder | MixtureOrder | StreamOrder,
        options: BatchOptions,
        *,
        workers: int = 1,
        balances: bool = False,
    ) -> None:
        assert 0 <= data_rank < plan.data_size
        # The dataset's row is a sample: `rows_per_sample` rows of T + 1 tokens (T inputs, and the
        # last label), of which `dataset.sequence_length` does not count the last token.
        assert dataset.sequence_length == plan.rows_per_sample * (plan.sequence_length + 1) - 1
        assert workers >= 1
        self.dataset = dataset
        self.plan = plan
        self.data_rank = data_rank
        self.order = order
        self.options = options
        self.scores: Scores | None = None
        self.teacher: TeacherRows | None = None
        self._labels = labels_of(dataset)
        self._balances = balances and plan.data_size > 1
        self._order_lock = Lock()
        self._closed = Event()
        self._step_rows = plan.accumulation * plan.micro_batch_size
        self.stream = dataset if isinstance(dataset, PositionedSamples) else None
        tokens = self._step_rows * dataset.sequence_length
        # A slow stream delays one step only.
        max_steps = STEPS_AT_ONCE if self.stream is None else 1
        self._steps_at_once = min(max_steps, max(1, TOKENS_AT_ONCE // tokens))
        self._collator = Collator(options.pin)
        readers = [BatchReader(dataset, options) for _ in range(workers)]
        self._workers = [_Worker(partial(self._read, reader)) for reader in readers]
        self._next_worker = cycle(self._workers)
        # First sample of the next step and its rows, if the current request has them.
        self._ready: tuple[int, StoredRows] | None = None
        # Buffer of the current request, which `_ready` is a part of.
        self._returned_rows: StoredRows | None = None
        # Requests that workers read ahead, in order; and free buffers.
        self._ahead: deque[tuple[_Request, _Worker]] = deque()
        self._spare: list[StoredRows] = []

    def step(self, first_sample: int) -> list[MicroBatch]:
        """Return the `plan.accumulation` micro-batches of the step that begins with `first_sample`,
        which is equal on all data-parallel ranks. Raises DataError if a shard is corrupt, also a
        shard of a prefetched step."""
        assert not self._closed.is_set()
        # Take the rows of the step from the last request, or wait for the next request.
        if self._ready is None or self._ready[0] != first_sample:
            rows = self._wait(first_sample)
        else:
            rows = self._ready[1]
        step_batch = self._collator.collate(rows.part(0, self._step_rows))
        remaining_rows = rows.part(self._step_rows, len(rows.tokens))
        next_sample = first_sample + self.plan.global_batch_size
        self._ready = (next_sample, remaining_rows) if len(remaining_rows.tokens) else None
        micro_batches = step_batch.split(self.plan.micro_batch_size)
        if self.scores is None and self._labels is None and self.teacher is None:
            return [_as_model_input(micro_batch, self.plan) for micro_batch in micro_batches]
        # Scores, labels and teacher are stored by sample number.
        with self._order_lock:
            samples = self._rank_samples(first_sample, 1)
        batches = []
        by_batch = samples.reshape(len(micro_batches), -1)
        for micro_batch, numbers in zip(micro_batches, by_batch, strict=True):
            batch = _as_model_input(micro_batch, self.plan, numbers, self.scores, self._labels)
            if self.teacher is not None:
                values, ids = map(torch.from_numpy, self.teacher.rows(numbers))
                batch = replace(batch, tokens=None, teacher_values=values, teacher_ids=ids)
            batches.append(batch)
        return batches

    def _rank_samples(self, first_sample: int, num_steps: int) -> Indices:
        """Return the samples that this rank reads in steps from `first_sample` on."""
        plan = self.plan
        samples = self.order.windows(first_sample, num_steps * plan.global_batch_size)
        steps = samples.reshape(num_steps, plan.global_batch_size)
        site_samples = steps[:, plan.site_begin : plan.site_begin + plan.site_batch_size]
        if self._balances:
            # Every step is divided by the attention of its samples, which each source computes.
            assert isinstance(self.dataset, MixedSamples)
            flat_work = np.empty(site_samples.size)
            for number, indices, packed_samples in self.dataset.by_source(site_samples.reshape(-1)):
                packed = self.dataset.sources[number]
                assert isinstance(packed, PackedDocuments)
                flat_work[indices] = packed.attention_work(packed_samples)
            work = flat_work.reshape(site_samples.shape)
            site_samples = balanced(site_samples, work, plan.data_size, plan.micro_batch_size)
        # The samples of a step are in the order micro-step, rank, row.
        by_rank = site_samples.reshape(-1, plan.data_size, plan.micro_batch_size)
        return by_rank[:, self.data_rank].reshape(-1)

    def restart(self, position: StreamPosition | None) -> None:
        """Continue a stream at `position`, for a `step` that does not follow the last step."""
        if self.stream is not None:
            self._drop_ahead()
            self._ready = None
            self.stream.restart(position)

    def _drop_ahead(self) -> None:
        """Wait for what is being read, and discard it."""
        for request, worker in self._ahead:
            worker.results.get()
            self._spare.append(request.rows)
        self._ahead.clear()

    def _wait(self, first_sample: int) -> StoredRows:
        """Return the rows of the request that begins with `first_sample`; prefetch more rows."""
        if self._returned_rows is not None:  # free again: tensors do not share its memory
            self._spare.append(self._returned_rows)
            self._returned_rows = None
        if not self._ahead or self._ahead[0][0].first_sample != first_sample:
            self._drop_ahead()
            self._read_ahead(first_sample, num_steps=1)  # one step, since the caller waits
        # Keep every thread busy while the caller waits for the oldest request.
        request, worker = self._ahead.popleft()
        latest = self._ahead[-1][0] if self._ahead else request
        while len(self._ahead) < len(self._workers):
            next_sample = latest.first_sample + latest.num_steps * self.plan.global_batch_size
            latest = self._read_ahead(next_sample, self._steps_at_once)
        error = worker.results.get()
        self._returned_rows = request.rows
        if error is not None:
            raise error
        return request.rows.part(0, request.num_steps * self._step_rows)

    def close(self) -> None:
        """End the reading threads; `step` must not be called any more. May be called again."""
        self._closed.set()
        for worker in self._workers:
            worker.requests.put(None)
            worker.thread.join()

    def _read_ahead(self, first_sample: int, num_steps: int) -> _Request:
        """Give the next worker a request, and list it."""
        worker = next(self._next_worker)
        rows = (
            self._spare.pop()
            if self._spare
            else new_rows(self.dataset, self.options, self._steps_at_once * self._step_rows)
        )
        request = _Request(first_sample, num_steps, rows)
        worker.requests.put(request)
        self._ahead.append((request, worker))
        return request

    def _read(self, reader: BatchReader, request: _Request) -> None:
        with self._order_lock:  # so that no block of the order is computed twice
            samples = self._rank_samples(request.first_sample, request.num_steps)
        reader.read_rows(samples, request.rows.part(0, len(samples)), self._closed.is_set)


Scores = npt.NDArray[np.float32]
"""Log-probabilities of the targets under the reference model, [samples, rows of a sample]."""


def _as_model_input(
    batch: MicroBatch,
    plan: BatchPlan,
    samples: Indices | None = None,
    scores: Scores | None = None,
    labels: npt.NDArray[np.uint8] | None = None,
) -> MicroBatch:
    """Return `batch` in rows of the sequence length, of `samples` and then padding. scores, labels:
    by sample number, if the objective reads them."""
    if plan.rows_per_sample == 2:
        batch = batch.of_pairs()
    num_rows = len(batch.input_ids)
    if samples is not None and scores is not None:
        row_scores = np.zeros((num_rows // scores.shape[1], scores.shape[1]), np.float32)
        row_scores[: len(samples)] = scores[samples]
        batch = replace(batch, reference=torch.from_numpy(row_scores.reshape(-1)))
    # Samples of one row have classes; rated answers, with a mismatched row each, have ratings.
    if samples is not None and labels is not None and plan.rows_per_sample == 1:
        classes = np.zeros(num_rows, np.int64)
        classes[: len(samples)] = labels[samples]
        batch = replace(batch, classes=torch.from_numpy(classes))
    elif samples is not None and labels is not None:
        is_desirable = np.zeros((num_rows // 2, 2), np.bool_)
        is_desirable[: len(samples)] = labels[samples, None]
        batch = replace(batch, desirable=torch.from_numpy(is_desirable.reshape(-1)))
    return batch


@dataclass(frozen=True)
class _Request:
    """Request of `num_steps` steps from `first_sample` on, to be read into the first of `rows`."""

    first_sample: int
    num_steps: int
    rows: StoredRows


class _Worker:
    """Thread that serves requests in order; the result is None, or the exception raised."""

    def __init__(self, read: Callable[[_Request], None]) -> None:
        self.requests: SimpleQueue[_Request | None] = SimpleQueue()
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._read = read
        # A failing run may exit without `close`: a daemon thread does not keep the process alive.
        self.thread = Thread(target=self._work, name="batches", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (request := self.requests.get()) is not None:
            try:
                self._read(request)
                self.results.put(None)
            except BaseException as error:
                self.results.put(error)


@dataclass(frozen=True)
class HeldOutBatches:
    """Held-out samples, equal at every evaluation, divided over the data-parallel ranks: the first
    `samples` of a fixed permutation (all samples if there are fewer). Every rank gets an equal
    number of micro-batches, so that collectives in the forward pass match; rows beyond the last
    sample have only labels -100."""

    dataset: Samples
    plan: BatchPlan
    data_rank: int
    samples: int
    options: BatchOptions
    scores: Scores | None = None

    @property
    def num_samples(self) -> int:
        return min(self.samples, self.dataset.num_samples)

    def __len__(self) -> int:
        return -(-self.num_samples // (self.plan.micro_batch_size * self.plan.data_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        plan = self.plan
        order = SampleOrder(self.dataset.num_samples, HELD_OUT_ORDER_SEED)
        reader = BatchReader(self.dataset, self.options)
        labels = labels_of(self.dataset)
        for batch_number in range(len(self)):
            first = (batch_number * plan.data_size + self.data_rank) * plan.micro_batch_size
            num_samples = max(0, min(plan.micro_batch_size, self.num_samples - first))
            sample_numbers = order.windows(first, num_samples)
            batch = reader.read(sample_numbers, plan.micro_batch_size)
            yield _as_model_input(batch, plan, sample_numbers, self.scores, labels)


@dataclass(frozen=True)
class HeldOutSource:
    """Held-out batches of a source, with the source's name and weight in the mixture.
    tokens_per_byte: tokens per UTF-8 byte of text; None if not all tokens have a loss, or
    unknown."""

    name: str
    weight: int
    batches: HeldOutBatches
    tokens_per_byte: float | None = None


def _opened(
    config: RunConfig, datasets: Sequence[TokenDataset] | None, phase: Phase | None
) -> tuple[Sequence[TokenDataset], Phase]:
    """Return the datasets of the mixture and the phase, both made if they are None."""
    if datasets is None:
        datasets = [with_source(config, dataset) for dataset in open_sources(config.data)]
    return datasets, phase or first_phase(config, identify_sources(config, datasets))


def open_training_data(
    config: RunConfig,
    plan: BatchPlan,
    data_rank: int,
    phase: Phase | None = None,
    position: StreamPosition | None = None,
    *,
    datasets: Sequence[TokenDataset] | None = None,
    device_pin: bool = False,
) -> TrainingBatches:
    """Open the training batches of rank `data_rank`, from the dataset or mixture of `config.data`.
    `phase`, `position`: where the run and its stream continue; by default the start. `datasets`:
    the mixture's datasets in its order, if they are open already. No collective. Raises DataError
    if a dataset is missing, corrupt or too short."""
    datasets, phase = _opened(config, datasets, phase)
    assert phase.sequence_length == plan.sequence_length
    options = _options(config, datasets, device_pin)
    # A stream of the user is read in its sequence, a mixture in the order of the phase.
    if isinstance(datasets[0], StreamDataset):
        stream = PositionedSamples(datasets[0].train, plan.global_batch_size, position)
        return TrainingBatches(stream, plan, data_rank, StreamOrder(), options)
    sources: list[Samples] = []
    for source, dataset in zip(phase.read_sources, datasets, strict=True):
        samples = _samples(config, dataset, "train", plan.sequence_length, phase.chunk_length)
        if phase.num_joined(source):
            assert source.rest is not None
            assert isinstance(samples, PackedWindows)
            samples = JoinedWindows(samples, source.rest, config.seed, source.number)
        sources.append(samples)
    mixed = MixedSamples(sources)
    batches = TrainingBatches(
        mixed,
        plan,
        data_rank,
        phase.order(config.seed),
        options,
        workers=config.data.workers,
        balances=config.data.balance_attention
        and config.data.packing == "best_fit"
        and all(isinstance(samples, PackedDocuments) for samples in sources),
    )
    if config.objective.teacher is not None:
        from bigtrain.data.loading.stored_scores import teacher_of
        from bigtrain.data.loading.teacher import TeacherRows

        batches.teacher = TeacherRows(mixed, [teacher_of(config, dataset) for dataset in datasets])
    return batches


def open_held_out(
    config: RunConfig,
    plan: BatchPlan,
    data_rank: int,
    phase: Phase | None = None,
    *,
    datasets: Sequence[TokenDataset] | None = None,
    device_pin: bool = False,
) -> list[HeldOutSource]:
    """Open the held-out batches of rank `data_rank` for every source that has held-out documents.
    Arguments as in `open_training_data`. Raises DataError if a source has held-out documents, but
    too few for a sample. No collective."""
    datasets, phase = _opened(config, datasets, phase)
    options = _options(config, datasets, device_pin)
    return [
        HeldOutSource(
            name,
            source.weight,
            HeldOutBatches(
                _samples(config, dataset, "held_out", plan.sequence_length),
                plan,
                data_rank,
                config.evaluation.samples,
                options,
            ),
            tokens_per_byte(dataset, "held_out"),
        )
        for name, source, dataset in zip(
            config.data.names, phase.read_sources, datasets, strict=True
        )
        if dataset.table.num_tokens("held_out")
    ]


def open_held_out_sets(
    config: RunConfig,
    plan: BatchPlan,
    data_rank: int,
    datasets: Sequence[TokenDataset],
    *,
    weight: int,
    device_pin: bool = False,
) -> list[HeldOutSource]:
    """Return the batches of rank `data_rank` for `datasets`, the sets of ``evaluation.held_out``.
    `weight`: weight of a set in the mean over all sets. No collective."""
    options = _options(config, datasets, device_pin) if datasets else BatchOptions()
    sources = []
    for held_out_set, dataset in zip(config.evaluation.held_out, datasets, strict=True):
        split = measured_split(dataset)
        samples = _samples(config, dataset, split, plan.sequence_length)
        batches = HeldOutBatches(samples, plan, data_rank, config.evaluation.samples, options)
        sources.append(
            HeldOutSource(held_out_set.name, weight, batches, tokens_per_byte(dataset, split))
        )
    return sources


def _samples(
    config: RunConfig,
    dataset: TokenDataset,
    split: Split,
    sequence_length: int,
    chunk_length: int | None = None,
) -> Samples:
    """Return the samples of a split as the run reads them. Raise DataError that names the split."""
    try:
        if split == "train" and isinstance(dataset, SourceDataset):
            return dataset.train
        if config.objective.kind.rows:
            answers = open_answers(config, dataset, split)
            assert answers is not None
            return answers
        if config.data.has_complete_documents:
            return packed_documents(config, dataset, split)
        return PackedWindows(split_stream(dataset, split), sequence_length, chunk_length)
    except DataError as error:
        split_name = {"train": "training", "held_out": "held-out"}[split]
        raise DataError(f"the {split_name} split of {dataset.path}: {error}") from error


def _options(config: RunConfig, datasets: Sequence[TokenDataset], pin: bool) -> BatchOptions:
    # Preflight has checked that all datasets have an identical tokenizer.
    end = datasets[0].table.tokenizer.end_of_document_id
    return BatchOptions(
        end_of_document_id=end if config.data.mask_end_of_document else None,
        isolate=config.data.isolates,
        pin=pin,
    )
