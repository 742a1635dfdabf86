"""Inspection of a dataset, or of a single shard from Megatron or GPT-NeoX: read-only, no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.format import Shard, Tokens
from bigtrain.data.shards.manifest import TOKENIZER_DIRECTORY, Manifest
from bigtrain.data.shards.statistics import LengthHistogram, length_histogram
from bigtrain.errors import DataError

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
KINDS = {
    "content": "contents of messages that the chat template does not write",
    "tool_calls": "tool calls that the chat template does not write",
    "tools": "tool definitions that the chat template does not write",
    "reasoning": "reasoning that the chat template does not write",
    "stripped_reasoning": "reasoning of earlier turns, which the chat template drops by design",
    "message_keys": "keys of messages, such as name, that the chat template does not read",
}
LONE = "all"
"""Split of a shard without a dataset."""


@dataclass(frozen=True)
class Inspected:
    """Shards by split, in stream order; `manifest` is None for a single shard."""

    path: Path
    manifest: Manifest | None
    splits: dict[str, tuple[Shard, ...]]

    def lengths(self, split: str) -> LengthHistogram | None:
        """Return the lengths of the documents of `split`; None if it has none."""
        shards = [shard for shard in self.splits[split] if shard.num_documents]
        # Other tools may write documents of several sequences; bigtrain does not.
        return length_histogram(shards, self.manifest is not None) if shards else None

    def document(self, split: str, index: int) -> tuple[Shard, int, Tokens]:
        """Return (shard, index in it, tokens) of document `index` of `split`."""
        ends = list(accumulate(shard.num_documents for shard in self.splits[split]))
        if not 0 <= index < (ends[-1] if ends else 0):
            what = f"documents 0 to {ends[-1] - 1}" if ends and ends[-1] else "no document"
            raise DataError(f"--document {index}: {self.path} has {what} in {split}")
        number = bisect_right(ends, index)
        shard = self.splits[split][number]
        within = index - (ends[number - 1] if number else 0)
        return shard, within, shard.document(within)


def inspect_shards(path: Path) -> Inspected:
    """Return the dataset in directory `path`, or the shard of a prefix, `.bin` or `.idx`.

    Raises DataError if it is neither, or if sizes show corruption.
    """
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if not path.is_dir() and prefix.with_name(prefix.name + ".idx").is_file():
        masked = prefix.with_name(prefix.name + ".mask").is_file()
        return Inspected(prefix, None, {LONE: (Shard(prefix, masked=masked),)})
    if not path.exists():
        raise DataError(
            f"{path}: neither a dataset directory nor a shard ({prefix.name}.idx is missing) -> "
            "make one with `bigtrain tokenize --output`"
        )
    dataset = open_dataset(path, check="sizes")
    splits = {str(split): tuple(shards) for split, shards in dataset.splits.items()}
    return Inspected(path, dataset.manifest, splits)


def describe(inspected: Inspected) -> dict[str, Any]:
    """Return the output of `bigtrain inspect --json` without documents. Reads the indexes."""
    manifest = inspected.manifest
    tree: dict[str, Any] = {
        "path": str(inspected.path),
        "token_dtype": next(s.dtype.name for part in inspected.splits.values() for s in part),
        "tokenizer": None,
    }
    if manifest is not None:
        full = manifest.model_dump(mode="json")
        tree |= {key: full[key] for key in full if key not in ("format", "version", "splits")}
    tree["splits"] = {split: _describe_split(inspected, split) for split in inspected.splits}
    return tree


def _describe_split(inspected: Inspected, split: str) -> dict[str, Any]:
    shards, manifest = inspected.splits[split], inspected.manifest
    lengths = inspected.lengths(split)
    if manifest is not None:
        records = manifest.splits[split]  # type: ignore[index]
        listed = [record.model_dump(mode="json") for record in records]
    else:
        listed = [
            {
                "name": shard.bin_path.stem,
                "documents": shard.num_documents,
                "sequences": shard.num_sequences,
                "tokens": shard.num_tokens,
                "bytes": shard.num_bytes,
            }
            for shard in shards
        ]
    return {
        "documents": sum(shard.num_documents for shard in shards),
        "tokens": sum(shard.num_tokens for shard in shards),
        "shards": listed,
        "lengths": None if lengths is None else _describe_lengths(lengths),
    }


def _describe_lengths(lengths: LengthHistogram) -> dict[str, Any]:
    return {
        "min": int(lengths.lengths[0]),
        "mean": lengths.num_tokens / lengths.num_documents,
        "max": int(lengths.lengths[-1]),
        "quantiles": {str(fraction): lengths.quantile(fraction) for fraction in QUANTILES},
        "buckets": [
            {"low": low, "high": high, "documents": documents, "tokens": tokens}
            for low, high, documents, tokens in lengths.buckets()
        ],
    }


class Decoder:
    """Decoder of tokens, by a directory's ``tokenizer.json`` only, without transformers."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "tokenizer.json"

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library has no narrower class
            raise DataError(f"{self.path} cannot be read: {error}") from error

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text including special tokens. Raise DataError for a token unknown to the
        tokenizer."""
        unknown = [token for token in tokens if self._backend.id_to_token(token) is None]
        if unknown:
            raise DataError(
                f"token {unknown[0]} is not in {self.path} -> use the tokenizer of these shards"
            )
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))


def decoder_of(inspected: Inspected, tokenizer: Path | None) -> Decoder | None:
    """Return the decoder of directory `tokenizer`, else of the dataset's own; None if there is
    none."""
    if tokenizer is not None:
        if not (tokenizer / "tokenizer.json").is_file():
            raise DataError(f"--tokenizer {tokenizer}: it has no tokenizer.json")
        return Decoder(tokenizer)
    own = inspected.path / TOKENIZER_DIRECTORY
    return Decoder(own) if (own / "tokenizer.json").is_file() else None


def _ends(manifest: Manifest) -> str:
    """Describe how plain-text documents begin and end."""
    tokenizer = manifest.tokenizer
    begin = ", ".join(map(str, tokenizer.beginning_ids or ()))
    return (
        (f"begin with token {begin}" if begin else "begin with no special token")
        + f" (--beginning-of-text {manifest.options.beginning_of_text or 'not set'}), "
        f"end with token {tokenizer.end_of_document_id}"
    )


def summary(output: Path, manifest: Manifest) -> str:
    """Return a few human-readable lines on the dataset."""
    lines = [
        f"{output}: {manifest.token_dtype} tokens of {manifest.tokenizer.name} "
        f"({manifest.tokenizer.vocab_size} ids)"
    ]
    masked = manifest.is_masked
    for split, shards in manifest.splits.items():
        text_bytes = sum(shard.text_bytes for shard in shards)
        targets = sum(shard.target_tokens or 0 for shard in shards)
        tokens = manifest.num_tokens(split)
        lines.append(
            f"  {split + ':':9} {manifest.num_documents(split):,} documents, {tokens:,} tokens, "
            f"{text_bytes:,} bytes of text ({text_bytes / max(1, tokens):.2f} per token), "
            f"{len(shards)} shard{'s' if len(shards) != 1 else ''}"
            + (f", {targets / max(1, tokens):.1%} of the tokens to learn" if masked else "")
        )
    engine, reason = manifest.tokenizer.engine, manifest.tokenizer.engine_reason
    lines.append(f"  texts:    {_ends(manifest)}")
    lines.append(f"  encoder:  {engine}" + (f" ({reason})" if reason else ""))
    if manifest.options.held_out and not manifest.num_documents("held_out"):
        lines.append("  held_out: no document was selected; this may happen with few documents")
    if manifest.skipped_documents:
        count = f"{manifest.skipped_documents:,}"
        lines.append(f"  skipped:  {count} unreadable documents, listed in errors.jsonl")
    lines += [
        f"  dropped:  {KINDS.get(kind, kind)}: {count:,}"
        for kind, count in (manifest.unrendered or {}).items()
    ]
    return "\n".join(lines)
