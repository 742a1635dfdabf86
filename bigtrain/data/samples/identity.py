"""Identity of a dataset independent of its path: hashes of its manifest. Reads no shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from bigtrain.data.samples.packed_samples import plan_of
from bigtrain.data.shards.dataset import TokenDataset
from bigtrain.data.shards.shard_table import ShardTable
from bigtrain.settings.run_config import DataSection, RunConfig


@dataclass(frozen=True)
class SourceIdentity:
    """Identity of a dataset: `hash` of its tokenizer and of its training tokens in order, and their
    number.

    For packed documents `num_tokens` is that of a stream with the same number of samples. `path` is
    for messages.
    """

    path: str
    hash: str
    num_tokens: int


def identify_sources(
    config: RunConfig, datasets: Sequence[TokenDataset]
) -> tuple[SourceIdentity, ...]:
    """Return the identities of `datasets`, those of the mixture in its order.

    Packed documents are a different dataset at every sequence length: the part that was read in
    samples of one length does not determine the part in samples of another.
    """
    identities = []
    for source, dataset in zip(config.data.mixture, datasets, strict=True):
        digest = xxhash.xxh3_64(dataset.table.tokenizer.hash.encode())
        _add_tokens(digest, dataset.table)
        num_tokens = dataset.table.num_tokens("train")
        if config.data.packing == "best_fit":
            length = config.batch.sequence_length
            digest.update(f"best_fit:{length}:{config.data.long_documents}".encode())
            plan = plan_of(config, dataset, "train")
            num_tokens = plan.num_packs * length + 1
        identities.append(SourceIdentity(source.path, digest.hexdigest(), num_tokens))
    return tuple(identities)


def data_hash(data: DataSection, datasets: Sequence[TokenDataset]) -> str:
    """Return the identity of all training data, the mixture's datasets in its order. A mixture's
    includes its weights; a mixture of one source has the identity of that source."""
    digest = xxhash.xxh3_64(datasets[0].table.tokenizer.hash.encode())
    for source, dataset in zip(data.mixture, datasets, strict=True):
        if len(datasets) > 1:
            digest.update(f"source:{source.weight!r}:{source.epochs!r}".encode())
        _add_tokens(digest, dataset.table)
    return digest.hexdigest()


def _add_tokens(digest: xxhash.xxh3_64, table: ShardTable) -> None:
    shards = table.splits["train"]
    masks = shards.hexadecimal("mask_xxh3") if table.is_masked else [""] * len(shards)
    tokens, sums = shards.rows["tokens"].tolist(), shards.hexadecimal("xxh3")
    for row in zip(tokens, sums, masks, strict=True):
        digest.update("{}:{}{}".format(*row).encode())
