"""What a dataset is, wherever it lies: hashes of what its manifest says. Reads no shard."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import xxhash

from bigtrain.config import DataSection
from bigtrain.data.manifest import Manifest, read_manifest


@dataclass(frozen=True)
class SourceIdentity:
    """A dataset: `hash` of its tokenizer and of its training tokens in order, and their number.

    `path` is for people.
    """

    path: str
    hash: str
    num_tokens: int


def identify_sources(data: DataSection) -> tuple[SourceIdentity, ...]:
    """The datasets of the mixture, in its order. Raises DataError where one has no manifest."""
    found = []
    for source in data.mixture:
        manifest = read_manifest(Path(source.path))
        digest = xxhash.xxh3_64(manifest.tokenizer.hash.encode())
        _add_tokens(digest, manifest)
        found.append(SourceIdentity(source.path, digest.hexdigest(), manifest.num_tokens("train")))
    return tuple(found)


def data_hash(data: DataSection) -> str:
    """Identity of all that is trained on. A mixture's is also that of its weights; a mixture of one
    source is that source."""
    manifests = [read_manifest(Path(source.path)) for source in data.mixture]
    digest = xxhash.xxh3_64(manifests[0].tokenizer.hash.encode())
    for source, manifest in zip(data.mixture, manifests, strict=True):
        if len(manifests) > 1:
            digest.update(f"source:{source.weight!r}:{source.epochs!r}".encode())
        _add_tokens(digest, manifest)
    return digest.hexdigest()


def _add_tokens(digest: xxhash.xxh3_64, manifest: Manifest) -> None:
    for shard in manifest.shards("train"):
        digest.update(f"{shard.tokens}:{shard.xxh3}".encode())
