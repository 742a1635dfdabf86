"""Batches of one data-parallel rank, from windows of tokens to tensors on the host.

Shapes: B = samples of a micro-batch, T = sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from bigtrain.config import RunConfig
from bigtrain.data.manifest import Split
from bigtrain.data.mixture import MixedWindows, MixtureOrder, Windows, integer_weights
from bigtrain.data.packing import PackedWindows, split_stream
from bigtrain.data.sampling import Indices, SampleOrder
from bigtrain.data.shards import TokenDataset, open_dataset
from bigtrain.errors import DataError
from bigtrain.topology import BatchPlan

IGNORED_LABEL = -100
"""The label without loss, `ignore_index` of torch's cross-entropy and of transformers."""

HELD_OUT_ORDER_SEED = 0
"""Not the run's seed: two runs on the same data are measured on the same samples."""


class Order(Protocol):
    """Which windows the samples of a run are: `SampleOrder`, or `MixtureOrder`."""

    def windows(self, first_sample: int, count: int) -> Indices:
        """Windows of samples `first_sample` to `first_sample + count`, int64 [count]."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one data-parallel rank, on the host.

    `input_ids` int64 [B, T]; `labels` int64 [B, T], already shifted: ``labels[b, t]`` is the token
    to predict from ``input_ids[b, : t + 1]``, or -100 where there is no loss. `position_ids` int64
    [B, T], where documents are isolated: 0 at the first token of each document and of each row;
    the label that would cross a boundary has no loss.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None


class TrainingBatches:
    """The micro-batches of one data-parallel rank, by the number of samples consumed.

    Which sample is which row: `bigtrain.topology.BatchPlan`. The batches of the following step are
    read in a thread while this one is computed; `close` ends it.

    `isolate` keeps documents apart, as `MicroBatch` says. `end_of_document_id` is given where the
    token after an end-of-document token gets no loss (Megatron's ``eod_mask_loss``). `device_pin`
    returns page-locked tensors (CUDA only).
    """

    def __init__(
        self,
        dataset: Windows,
        plan: BatchPlan,
        data_rank: int,
        order: Order,
        *,
        end_of_document_id: int | None,
        isolate: bool = False,
        device_pin: bool = False,
    ) -> None:
        assert 0 <= data_rank < plan.data_size
        assert dataset.sequence_length == plan.sequence_length
        self.dataset = dataset
        self.plan = plan
        self.data_rank = data_rank
        self.order = order
        self.end_of_document_id = end_of_document_id
        self.isolate = isolate
        self.device_pin = device_pin
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[list[MicroBatch]]] | None = None

    def step(self, first_sample: int) -> list[MicroBatch]:
        """The `plan.accumulation` micro-batches of the step that begins with `first_sample`.

        Every data-parallel rank calls it with the same argument. Raises DataError where a shard
        turns out to be damaged.
        """
        future: Future[list[MicroBatch]] | None = None
        if self._ahead is not None:
            first_ahead, future_ahead = self._ahead
            future = future_ahead if first_ahead == first_sample else None
        if future is None:
            future = self._thread.submit(self._read, first_sample)
        following = first_sample + self.plan.global_samples
        self._ahead = (following, self._thread.submit(self._read, following))
        return future.result()

    def close(self) -> None:
        """End the reading thread; `step` must not be called any more."""
        self._ahead = None
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, first_sample: int) -> list[MicroBatch]:
        plan = self.plan
        windows = self.order.windows(first_sample, plan.global_samples)
        mine = windows.reshape(plan.accumulation, plan.data_size, plan.micro_samples)[
            :, self.data_rank
        ]
        return [
            _read_micro_batch(
                self.dataset,
                rows,
                plan.micro_samples,
                self.end_of_document_id,
                self.isolate,
                self.device_pin,
            )
            for rows in mine
        ]


class HeldOutBatches:
    """The same held-out samples at every evaluation, divided over the data-parallel ranks.

    They are the first `samples` windows of a fixed permutation (all of them where there are
    fewer). Every rank gets `num_batches` micro-batches, so that collectives in the forward pass
    match; rows beyond the last sample have no labels but -100.
    """

    def __init__(
        self,
        dataset: Windows,
        plan: BatchPlan,
        data_rank: int,
        samples: int,
        *,
        end_of_document_id: int | None,
        isolate: bool = False,
        device_pin: bool = False,
    ) -> None:
        assert 0 <= data_rank < plan.data_size
        assert samples >= 1
        self.dataset = dataset
        self.plan = plan
        self.data_rank = data_rank
        self.num_samples = min(samples, dataset.num_windows)
        self.num_batches = -(-self.num_samples // (plan.micro_samples * plan.data_size))
        self.end_of_document_id = end_of_document_id
        self.isolate = isolate
        self.device_pin = device_pin

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        plan = self.plan
        order = SampleOrder(self.dataset.num_windows, HELD_OUT_ORDER_SEED)
        for number in range(self.num_batches):
            first = (number * plan.data_size + self.data_rank) * plan.micro_samples
            count = max(0, min(plan.micro_samples, self.num_samples - first))
            yield _read_micro_batch(
                self.dataset,
                order.windows(first, count),
                plan.micro_samples,
                self.end_of_document_id,
                self.isolate,
                self.device_pin,
            )


def open_training_data(
    config: RunConfig, plan: BatchPlan, data_rank: int, *, device_pin: bool = False
) -> TrainingBatches:
    """The training batches of rank `data_rank`, from the dataset or mixture of `config.data`.

    No collective. Raises DataError where a dataset is missing, damaged or too short.
    """
    datasets = _open_sources(config)
    sources = [_windows(dataset, "train", plan.sequence_length) for dataset in datasets]
    sizes = [source.num_windows for source in sources]
    return TrainingBatches(
        MixedWindows(sources),
        plan,
        data_rank,
        MixtureOrder(sizes, integer_weights(config.data.mixture, sizes), config.seed),
        end_of_document_id=_masked_end(config, datasets),
        isolate=config.data.document_boundaries == "isolate",
        device_pin=device_pin,
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
        MixedWindows(sources),
        plan,
        data_rank,
        config.evaluation.samples,
        end_of_document_id=_masked_end(config, datasets),
        isolate=config.data.document_boundaries == "isolate",
        device_pin=device_pin,
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


def _masked_end(config: RunConfig, datasets: Sequence[TokenDataset]) -> int | None:
    # Preflight has found all datasets to have the same tokenizer.
    first = datasets[0].manifest.tokenizer
    return first.end_of_document_id if config.data.mask_end_of_document else None


def _read_micro_batch(
    dataset: Windows,
    windows: npt.NDArray[np.int64],
    rows: int,
    end_of_document_id: int | None,
    isolate: bool,
    pin: bool,
) -> MicroBatch:
    """Micro-batch of `rows` rows; those beyond `windows` are padding, token 0 without loss."""
    tokens = np.empty((rows, dataset.sequence_length + 1), dtype=np.int64)
    tokens[len(windows) :] = 0
    for row, window in enumerate(windows):
        dataset.read_into(int(window), tokens[row])
    input_ids = tokens[:, :-1].copy()  # not ascontiguousarray: one row is contiguous as it is,
    labels = tokens[:, 1:].copy()  # and masking labels would write into the inputs
    positions: npt.NDArray[np.int64] | None = None
    if isolate:
        positions = np.tile(np.arange(tokens.shape[1], dtype=np.int64), (rows, 1))
        for row, window in enumerate(windows):
            dataset.positions_into(int(window), positions[row])
    labels[len(windows) :] = IGNORED_LABEL
    if end_of_document_id is not None:
        labels[input_ids == end_of_document_id] = IGNORED_LABEL
    parts = [torch.from_numpy(input_ids), torch.from_numpy(labels)]
    if positions is not None:
        labels[positions[:, 1:] == 0] = IGNORED_LABEL
        parts.append(torch.from_numpy(positions[:, :-1].copy()))
    return MicroBatch(*(part.pin_memory() for part in parts) if pin else parts)
