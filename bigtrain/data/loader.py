"""Batches of one data-parallel rank, from the sample order to tensors on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event, Lock, local
from typing import Protocol

from bigtrain.config import RunConfig
from bigtrain.data.batches import IGNORED_LABEL, BatchOptions, BatchReader, MicroBatch
from bigtrain.data.manifest import Split
from bigtrain.data.mixture import MixedSamples, MixtureOrder, integer_weights
from bigtrain.data.packing import PackedWindows, split_stream
from bigtrain.data.samples import Indices, Samples
from bigtrain.data.sampling import SampleOrder
from bigtrain.data.shards import TokenDataset, open_dataset
from bigtrain.errors import DataError
from bigtrain.topology import BatchPlan

__all__ = [
    "IGNORED_LABEL",
    "HeldOutBatches",
    "MicroBatch",
    "TrainingBatches",
    "open_held_out",
    "open_training_data",
]

HELD_OUT_ORDER_SEED = 0
"""Not the run's seed: two runs on the same data are measured on the same samples."""


class Order(Protocol):
    """Which samples of the dataset the samples of a run are: `SampleOrder`, or `MixtureOrder`."""

    def windows(self, first_sample: int, count: int) -> Indices:
        """Those of samples `first_sample` to `first_sample + count` of the run, int64 [count]."""


class TrainingBatches:
    """The micro-batches of one data-parallel rank, by the number of samples consumed.

    Which sample is which row: `bigtrain.topology.BatchPlan`. `workers` threads read the batches of
    the steps that follow, one step each, while this one is computed; however many there are, the
    batches are the same. `close` ends them.
    """

    def __init__(
        self,
        dataset: Samples,
        plan: BatchPlan,
        data_rank: int,
        order: Order,
        options: BatchOptions,
        *,
        workers: int = 1,
    ) -> None:
        assert 0 <= data_rank < plan.data_size
        assert dataset.sequence_length == plan.sequence_length
        assert workers >= 1
        self.dataset = dataset
        self.plan = plan
        self.data_rank = data_rank
        self.order = order
        self.options = options
        self.workers = workers
        self._order_lock = Lock()
        self._closed = Event()
        self._of_thread = local()
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="batches")
        self._ahead: deque[tuple[int, Future[list[MicroBatch]]]] = deque()

    def step(self, first_sample: int) -> list[MicroBatch]:
        """The `plan.accumulation` micro-batches of the step that begins with `first_sample`.

        Every data-parallel rank calls it with the same argument. Raises DataError where a shard
        turns out to be damaged.
        """
        if not self._ahead or self._ahead[0][0] != first_sample:
            for _, future in self._ahead:
                future.cancel()
            self._ahead.clear()
            self._read_ahead(first_sample)
        _, wanted = self._ahead.popleft()
        following = first_sample + self.plan.global_samples
        if self._ahead:
            following = self._ahead[-1][0] + self.plan.global_samples
        while len(self._ahead) < self.workers:
            self._read_ahead(following)
            following += self.plan.global_samples
        return wanted.result()

    def close(self) -> None:
        """End the reading threads; `step` must not be called any more. May be called again."""
        self._closed.set()
        self._ahead.clear()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read_ahead(self, first_sample: int) -> None:
        self._ahead.append((first_sample, self._threads.submit(self._read, first_sample)))

    def _read(self, first_sample: int) -> list[MicroBatch]:
        plan = self.plan
        with self._order_lock:  # so that no block of it is computed twice
            samples = self.order.windows(first_sample, plan.global_samples)
        divided = samples.reshape(plan.accumulation, plan.data_size, plan.micro_samples)
        mine = divided[:, self.data_rank].reshape(-1)
        try:
            reader: BatchReader = self._of_thread.reader
        except AttributeError:
            reader = self._of_thread.reader = BatchReader(self.dataset, self.options)
        whole = reader.read(mine, len(mine), self._closed.is_set)
        return whole.split(plan.micro_samples)


class HeldOutBatches:
    """The same held-out samples at every evaluation, divided over the data-parallel ranks.

    They are the first `samples` of a fixed permutation (all of them where there are fewer). Every
    rank gets `num_batches` micro-batches, so that collectives in the forward pass match; rows
    beyond the last sample have no labels but -100.
    """

    def __init__(
        self,
        dataset: Samples,
        plan: BatchPlan,
        data_rank: int,
        samples: int,
        options: BatchOptions,
    ) -> None:
        assert 0 <= data_rank < plan.data_size
        assert samples >= 1
        self.dataset = dataset
        self.plan = plan
        self.data_rank = data_rank
        self.num_samples = min(samples, dataset.num_samples)
        self.num_batches = -(-self.num_samples // (plan.micro_samples * plan.data_size))
        self.options = options

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        plan = self.plan
        order = SampleOrder(self.dataset.num_samples, HELD_OUT_ORDER_SEED)
        reader = BatchReader(self.dataset, self.options)
        for number in range(self.num_batches):
            first = (number * plan.data_size + self.data_rank) * plan.micro_samples
            count = max(0, min(plan.micro_samples, self.num_samples - first))
            yield reader.read(order.windows(first, count), plan.micro_samples)


def open_training_data(
    config: RunConfig, plan: BatchPlan, data_rank: int, *, device_pin: bool = False
) -> TrainingBatches:
    """The training batches of rank `data_rank`, from the dataset or mixture of `config.data`.

    No collective. Raises DataError where a dataset is missing, damaged or too short.
    """
    datasets = _open_sources(config)
    sources = [_windows(dataset, "train", plan.sequence_length) for dataset in datasets]
    sizes = [source.num_samples for source in sources]
    return TrainingBatches(
        MixedSamples(sources),
        plan,
        data_rank,
        MixtureOrder(sizes, integer_weights(config.data.mixture, sizes), config.seed),
        _options(config, datasets, device_pin),
        workers=config.data.workers,
    )


def open_held_out(
    config: RunConfig, plan: BatchPlan, data_rank: int, *, device_pin: bool = False
) -> HeldOutBatches | None:
    """The held-out batches of rank `data_rank`; None where no dataset has held-out documents.

    Those of a mixture are taken together, every held-out window as likely as every other.

    No collective. Raises DataError where a dataset has some, but too few for one sample.
    """
    datasets = _open_sources(config)
    sources = [
        _windows(dataset, "held_out", plan.sequence_length)
        for dataset in datasets
        if dataset.manifest.num_tokens("held_out")
    ]
    if not sources:
        return None
    return HeldOutBatches(
        MixedSamples(sources),
        plan,
        data_rank,
        config.evaluation.samples,
        _options(config, datasets, device_pin),
    )


def _open_sources(config: RunConfig) -> list[TokenDataset]:
    # Sizes alone, in the same time for any number of documents. What is read of an index or a
    # shard is checked when it is; `bigtrain tokenize` has checked the rest.
    return [open_dataset(source.path, check="sizes") for source in config.data.mixture]


def _windows(dataset: TokenDataset, split: Split, sequence_length: int) -> PackedWindows:
    try:
        return PackedWindows(split_stream(dataset, split), sequence_length)
    except DataError as error:
        name = {"train": "training", "held_out": "held-out"}[split]
        raise DataError(f"the {name} split of {dataset.path}: {error}") from error


def _options(config: RunConfig, datasets: Sequence[TokenDataset], pin: bool) -> BatchOptions:
    # Preflight has found all datasets to have the same tokenizer.
    end = datasets[0].manifest.tokenizer.end_of_document_id
    return BatchOptions(
        end_of_document_id=end if config.data.mask_end_of_document else None,
        isolate=config.data.document_boundaries == "isolate",
        pin=pin,
    )
