"""Dataset of the documents of a dataset whose perplexity is between two limits. numpy only."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.samples.documents import document_lengths
from bigtrain.data.samples.token_stream import TokenStream, split_stream
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.format import TokenShard
from bigtrain.data.shards.manifest import (
    LABELED,
    TOKENIZER_DIRECTORY,
    PerplexityFilterRecord,
    ShardRecord,
    Split,
    write_manifest,
)
from bigtrain.data.shards.scores import Scores
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.errors import DataError
from bigtrain.objectives.section import documents_per_row
from bigtrain.system.files import new_directory

Selected = npt.NDArray[np.bool_]
_CHUNK_DOCUMENTS = 1 << 14


def kept_documents(
    scores: Scores, dataset: TokenDataset, lowest: float, highest: float
) -> dict[Split, Selected]:
    """Return which documents of every split have a perplexity from `lowest` to `highest`, bool
    [documents]. Documents without targets are excluded. A pair is included if both documents
    are within the limits."""
    selections: dict[Split, Selected] = {}
    documents_of_row = documents_per_row(dataset.table.rows)
    for split, values in scores.perplexities.items():
        is_in_limits = (values >= lowest) & (values <= highest)
        selections[split] = np.repeat(
            is_in_limits.reshape(-1, documents_of_row).all(1), documents_of_row
        )
    return selections


def write_kept(
    dataset: TokenDataset,
    selections: Mapping[Split, Selected],
    output: Path,
    record: PerplexityFilterRecord,
) -> dict[Split, tuple[ShardRecord, ...]]:
    """Write the documents of `dataset` that `selections` marks as a dataset to the new directory
    `output`; return its shards. Their UTF-8 bytes are not known, and recorded as 0. Raises
    DataError if no training document is kept, or if a shard is corrupt; OutputError if `output`
    exists."""
    if not selections["train"].any():
        raise DataError(
            f"no training document of {dataset.path} has a perplexity from {record.lowest:g} to "
            f"{record.highest:g} -> other limits"
        )
    splits: dict[Split, tuple[ShardRecord, ...]] = {}
    with new_directory(output) as draft:
        # A shard becomes a shard with its selected documents; without any, no shard is written.
        for split, is_selected in selections.items():
            stream = split_stream(dataset, split)  # which verifies the blocks that it reads
            records: list[ShardRecord] = []
            num_documents = num_tokens = 0
            for shard in dataset.shards(split):
                in_shard = is_selected[num_documents : num_documents + shard.num_documents]
                if in_shard.any():
                    path = draft / f"{split}-{len(records):05d}"
                    shard_record = _write_shard(
                        dataset, stream, shard, begin=num_tokens, is_selected=in_shard, path=path
                    )
                    records.append(shard_record)
                num_documents += shard.num_documents
                num_tokens += shard.num_tokens
            splits[split] = tuple(records)
        if dataset.tokenizer_path.is_dir():
            shutil.copytree(dataset.tokenizer_path, draft / TOKENIZER_DIRECTORY)
        manifest = dataset.manifest.model_copy(
            update={"splits": splits, "perplexity_filter": record}
        )
        write_manifest(draft, manifest)
    return splits


def _write_shard(
    dataset: TokenDataset,
    stream: TokenStream,
    shard: TokenShard,
    *,
    begin: int,
    is_selected: Selected,
    path: Path,
) -> ShardRecord:
    """Write the selected documents of `shard`, which is at token `begin` of `stream`, as the shard
    `path`."""
    table = dataset.table
    lengths = document_lengths([shard], may_be_empty=True)
    begins = begin + np.cumsum(lengths) - lengths
    labeled = table.rows in LABELED
    dtype: Any = table.token_dtype
    with ShardWriter(
        path.parent, path.name, dtype, masked=table.is_masked, labeled=labeled
    ) as writer:
        # Many documents at a time, which bounds the memory.
        for first in range(0, len(is_selected), _CHUNK_DOCUMENTS):
            documents = np.flatnonzero(is_selected[first : first + _CHUNK_DOCUMENTS]) + first
            sizes = lengths[documents]
            offsets = np.cumsum(sizes) - sizes
            tokens = np.empty(int(sizes.sum()), shard.dtype)
            stream.read(begins[documents], sizes, tokens, offsets)
            mask = weights = None
            if table.is_masked:
                mask = np.empty(len(tokens), np.bool_)
                stream.read_mask(begins[documents], sizes, mask, offsets)
            if shard.weights_path is not None:
                weights = np.ones(len(tokens), np.float32)
                stream.read_weights(begins[documents], sizes, weights, offsets)
            labels = shard.labels[documents] if labeled else None
            writer.add(tokens, sizes, 0, mask=mask, labels=labels, weights=weights)
        return writer.close()
