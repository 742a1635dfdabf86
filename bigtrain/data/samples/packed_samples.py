"""Samples of complete documents, by a packing plan. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from bigtrain.data.samples.packing_plan import PackingPlan, open_plan
from bigtrain.data.samples.rows import Indices, TokenRows
from bigtrain.data.samples.token_stream import TokenStream, split_stream
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.manifest import Split
from bigtrain.errors import DataError
from bigtrain.settings.run_config import RunConfig


class PackedDocuments:
    """Samples of `plan`, whose documents are in `stream`.

    A row contains its documents one after another and then padding, token 0 without loss, which is
    marked as a separate document.
    """

    masks_loss = True

    def __init__(self, stream: TokenStream, plan: PackingPlan) -> None:
        self.stream = stream
        self.plan = plan
        self.sequence_length = plan.sequence_length
        self.token_dtype = stream.token_dtype
        self.vocab_size = stream.vocab_size
        self.num_samples = plan.num_packs

    def fill(self, samples: Indices, rows: Indices, out: TokenRows) -> None:
        if not len(samples):
            return
        width = self.sequence_length + 1
        starts, lengths, counts = self._pieces(samples)
        ends = np.cumsum(lengths)
        used = np.diff(ends[np.cumsum(counts) - 1], prepend=0)
        if used.max() > width:
            raise self._corrupt()
        offsets = ends - lengths - np.repeat(np.cumsum(used) - used, counts)
        places = np.repeat(rows, counts) * width + offsets
        self.stream.read(starts, lengths, out.tokens.reshape(-1), places)
        assert out.loss_mask is not None
        if self.stream.is_masked:
            self.stream.read_mask(starts, lengths, out.loss_mask.reshape(-1), places)
        for row, end in zip(rows.tolist(), used.tolist(), strict=True):
            if end < width:
                out.tokens[row, end:] = 0
                out.loss_mask[row, end:] = False
        if out.begins is not None:
            out.begins.append(places)
            out.begins.append((rows * width + used)[used < width])

    def describe(self, sample: int) -> str:
        starts, lengths, _ = self._pieces(np.array([sample]))
        pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
        return " and ".join(self.stream.describe(start, length) for start, length in pieces)

    def _pieces(self, samples: Indices) -> tuple[Indices, Indices, Indices]:
        """Return first tokens and lengths of the samples' pieces, and the number of each
        sample's."""
        assert 0 <= samples.min() <= samples.max() < self.num_samples
        plan = self.plan
        high = plan.row_ends[samples]
        low = np.where(samples > 0, plan.row_ends[samples - 1], 0)
        counts = high - low
        if counts.min() < 1 or low.min() < 0 or high.max() > len(plan.starts):
            raise self._corrupt()
        pieces = np.repeat(high - np.cumsum(counts), counts) + np.arange(counts.sum())
        starts, lengths = plan.starts[pieces], plan.lengths[pieces].astype(np.int64)
        if (
            lengths.min() < 1
            or starts.min() < 0
            or (starts + lengths).max() > self.stream.num_tokens
        ):
            raise self._corrupt()
        return starts, lengths, counts

    def _corrupt(self) -> DataError:
        return DataError(f"the packing plan {self.plan.path} is corrupt -> remove it")


@dataclass(frozen=True)
class PackingReport:
    """Packing result of one split of one dataset, human-readable and for
    ``environment.json``."""

    path: str
    split: Split
    plan: PackingPlan

    def __str__(self) -> str:
        return f"packing of {self.path}, {self.split}: {self.plan.describe()}"

    def to_json(self) -> dict[str, Any]:
        counts = self.plan.counts
        tokens = max(1, counts.tokens)
        return {
            "path": self.path,
            "split": self.split,
            "samples": self.plan.num_packs,
            "padding_fraction": self.plan.padding_fraction,
            "truncated_fraction": counts.truncated_tokens / tokens,
            "dropped_fraction": counts.dropped_tokens / tokens,
            **asdict(counts),
        }


def packing_reports(
    config: RunConfig, datasets: Sequence[TokenDataset]
) -> tuple[PackingReport, ...]:
    """Return reports on `datasets`, those of the mixture in its order, if the run packs; else
    none."""
    if config.data.packing != "best_fit":
        return ()
    reports = []
    splits: Sequence[Split] = ("train", "held_out")
    for source, dataset in zip(config.data.mixture, datasets, strict=True):
        for split in splits:
            if dataset.table.num_tokens(split):
                plan = plan_of(config, dataset, split)
                reports.append(PackingReport(source.path, split, plan))
    return tuple(reports)


def plan_of(config: RunConfig, dataset: TokenDataset, split: Split) -> PackingPlan:
    """Return the packing plan by which a run reads `split`."""
    return open_plan(dataset, split, config.batch.sequence_length, config.data.long_documents)


def packed_documents(config: RunConfig, dataset: TokenDataset, split: Split) -> PackedDocuments:
    """Return the samples of `split` in a run that packs. Raise DataError if there are none."""
    plan = plan_of(config, dataset, split)
    if not plan.num_packs:
        raise DataError(f"no document has a target: {plan.describe()} -> tokenize more text")
    return PackedDocuments(split_stream(dataset, split), plan)
