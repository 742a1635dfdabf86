"""Batches of one data-parallel rank, from windows of tokens to tensors on the host.

Shapes: B = samples of a micro-batch, T = sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from bigtrain.config import RunConfig
from bigtrain.data.packing import PackedWindows, split_stream
from bigtrain.data.sampling import SampleOrder
from bigtrain.data.shards import open_dataset
from bigtrain.errors import DataError
from bigtrain.topology import BatchPlan

IGNORED_LABEL = -100
"""The label without loss, `ignore_index` of torch's cross-entropy and of transformers."""

HELD_OUT_ORDER_SEED = 0
"""Not the run's seed: two runs on the same data are measured on the same samples."""


class Windows(Protocol):
    """What the loader asks of a dataset; `bigtrain.data.packing.PackedWindows` is one."""

    num_windows: int
    sequence_length: int

    def read_into(self, window_index: int, out: npt.NDArray[np.int64]) -> None:
        """Fill `out`, int64 [sequence_length + 1]: inputs, and the last label."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one data-parallel rank, on the host.

    `input_ids` int64 [B, T]; `labels` int64 [B, T], already shifted: ``labels[b, t]`` is the token
    to predict from ``input_ids[b, : t + 1]``, or -100 where there is no loss.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


class TrainingBatches:
    """The micro-batches of one data-parallel rank, by the number of samples consumed.

    Which sample is which row: `bigtrain.topology.BatchPlan`. The batches of the following step are
    read in a thread while this one is computed; `close` ends it.

    `end_of_document_id` is given where the token after an end-of-document token gets no loss
    (Megatron's ``eod_mask_loss``). `device_pin` returns page-locked tensors (CUDA only).
    """

    def __init__(
        self,
        dataset: Windows,
        plan: BatchPlan,
        data_rank: int,
        seed: int,
        *,
        end_of_document_id: int | None,
        device_pin: bool = False,
    ) -> None:
        assert 0 <= data_rank < plan.data_size
        assert dataset.sequence_length == plan.sequence_length
        self.dataset = dataset
        self.plan = plan
        self.data_rank = data_rank
        self.order = SampleOrder(dataset.num_windows, seed)
        self.end_of_document_id = end_of_document_id
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
                self.dataset, rows, plan.micro_samples, self.end_of_document_id, self.device_pin
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
                self.device_pin,
            )


def open_training_data(
    config: RunConfig, plan: BatchPlan, data_rank: int, *, device_pin: bool = False
) -> TrainingBatches:
    """The training batches of rank `data_rank`, from `config.data`.

    No collective. Raises DataError where the dataset is missing, damaged or too short.
    """
    dataset = open_dataset(config.data.path)
    windows = PackedWindows(split_stream(dataset, "train"), plan.sequence_length)
    return TrainingBatches(
        windows,
        plan,
        data_rank,
        config.seed,
        end_of_document_id=(
            dataset.manifest.tokenizer.end_of_document_id
            if config.data.mask_end_of_document
            else None
        ),
        device_pin=device_pin,
    )


def open_held_out(
    config: RunConfig, plan: BatchPlan, data_rank: int, *, device_pin: bool = False
) -> HeldOutBatches | None:
    """The held-out batches of rank `data_rank`; None where the dataset has no held-out documents.

    No collective. Raises DataError where there are some, but too few for one sample.
    """
    dataset = open_dataset(config.data.path, check="sizes")
    stream = split_stream(dataset, "held_out")
    if not stream.num_tokens:
        return None
    try:
        windows = PackedWindows(stream, plan.sequence_length)
    except DataError as error:
        raise DataError(f"the held-out split of {dataset.path}: {error}") from error
    return HeldOutBatches(
        windows,
        plan,
        data_rank,
        config.evaluation.samples,
        end_of_document_id=(
            dataset.manifest.tokenizer.end_of_document_id
            if config.data.mask_end_of_document
            else None
        ),
        device_pin=device_pin,
    )


def _read_micro_batch(
    dataset: Windows,
    windows: npt.NDArray[np.int64],
    rows: int,
    end_of_document_id: int | None,
    pin: bool,
) -> MicroBatch:
    """Micro-batch of `rows` rows; those beyond `windows` are padding, token 0 without loss."""
    tokens = np.zeros((rows, dataset.sequence_length + 1), dtype=np.int64)
    for row, window in enumerate(windows):
        dataset.read_into(int(window), tokens[row])
    input_ids = tokens[:, :-1].copy()  # not ascontiguousarray: one row is contiguous as it is,
    labels = tokens[:, 1:].copy()  # and masking labels would write into the inputs
    labels[len(windows) :] = IGNORED_LABEL
    if end_of_document_id is not None:
        labels[input_ids == end_of_document_id] = IGNORED_LABEL
    batch = MicroBatch(torch.from_numpy(input_ids), torch.from_numpy(labels))
    if pin:
        batch = MicroBatch(batch.input_ids.pin_memory(), batch.labels.pin_memory())
    return batch
