"""Inspection of a dataset, or of a shard from Megatron or GPT-NeoX: read-only, without torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bigtrain.data.shards.dataset import open_dataset
from bigtrain.data.shards.format import CHUNK_ITEMS, Tokens, TokenShard
from bigtrain.data.shards.manifest import LONG_PROMPT, TOKENIZER_DIRECTORY, Manifest
from bigtrain.errors import DataError
from bigtrain.objectives.rows import AnswerRows
from bigtrain.objectives.section import ROWS

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
KINDS = {
    "content": "contents of messages that the chat template does not write",
    "tool_calls": "tool calls that the chat template does not write",
    "tools": "tool definitions that the chat template does not write",
    "reasoning": "reasoning that the chat template does not write",
    "stripped_reasoning": "reasoning of earlier turns, which the chat template drops by design",
    "unmarked_answers": "parts of answers that are outside of the chat template's {% generation %} "
    "blocks: read, not learned",
    "padding": "tokens of padding, attention_mask 0",
    "message_keys": "keys of messages, such as name, that the chat template does not read",
}
"""Kinds of parts of conversations. Keys of messages are counted by key, ``message_keys.name``; in
older manifests together."""
SHOWN_NAMES, SHOWN_KEYS = 5, 20
LONE = "all"
"""Split of a shard without a dataset."""


@dataclass(frozen=True)
class Inspected:
    """Shards by split, in stream order; `manifest` is None for a single shard."""

    path: Path
    manifest: Manifest | None
    splits: dict[str, tuple[TokenShard, ...]]

    def lengths(self, split: str) -> LengthHistogram | None:
        """Return the lengths of the documents of `split`; None if it has none."""
        shards = [shard for shard in self.splits[split] if shard.num_documents]
        # Other tools may write documents of several sequences; bigtrain does not.
        return length_histogram(shards, self.manifest is not None) if shards else None

    def document(self, split: str, index: int) -> tuple[TokenShard, int, Tokens]:
        """Return the shard of document `index` of `split`, its index in the shard, and its
        tokens."""
        ends = list(accumulate(shard.num_documents for shard in self.splits[split]))
        if not 0 <= index < (ends[-1] if ends else 0):
            available = f"documents 0 to {ends[-1] - 1}" if ends and ends[-1] else "no document"
            raise DataError(f"--document {index}: {self.path} has {available} in {split}")
        shard_number = bisect_right(ends, index)
        shard = self.splits[split][shard_number]
        index_in_shard = index - (ends[shard_number - 1] if shard_number else 0)
        return shard, index_in_shard, shard.document(index_in_shard)


def inspect_shards(path: Path) -> Inspected:
    """Return the dataset in directory `path`, or the shard of a prefix, `.bin` or `.idx`. Raises
    DataError if it is neither, or if sizes show corruption."""
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if not path.is_dir() and prefix.with_name(prefix.name + ".idx").is_file():
        masked = prefix.with_name(prefix.name + ".mask").is_file()
        return Inspected(prefix, None, {LONE: (TokenShard(prefix, masked=masked),)})
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
        dumped = manifest.model_dump(mode="json")
        tree |= {key: dumped[key] for key in dumped if key not in ("format", "version", "splits")}
    tree["splits"] = {split: _describe_split(inspected, split) for split in inspected.splits}
    return tree


def _describe_split(inspected: Inspected, split: str) -> dict[str, Any]:
    """Return sizes, shards and lengths of documents of a split."""
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
    # Statistics of the lengths, if there are documents.
    statistics: dict[str, Any] | None = None
    if lengths is not None:
        statistics = {
            "min": int(lengths.lengths[0]),
            "mean": lengths.num_tokens / lengths.num_documents,
            "max": int(lengths.lengths[-1]),
            "quantiles": {str(fraction): lengths.quantile(fraction) for fraction in QUANTILES},
            "buckets": [
                {"low": low, "high": high, "documents": documents, "tokens": tokens}
                for low, high, documents, tokens in lengths.buckets()
            ],
        }
    return {
        "documents": sum(shard.num_documents for shard in shards),
        "tokens": sum(shard.num_tokens for shard in shards),
        "shards": listed,
        "lengths": statistics,
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
        """Return the text including special tokens. Raise DataError for an unknown token."""
        unknown_tokens = [token for token in tokens if self._backend.id_to_token(token) is None]
        if unknown_tokens:
            raise DataError(
                f"token {unknown_tokens[0]} is not in {self.path} -> use the tokenizer of these "
                "shards"
            )
        return str(self._backend.decode(list(tokens), skip_special_tokens=False))

    @cached_property
    def control_tokens(self) -> dict[int, str]:
        """Texts of the special tokens, by id."""
        added = self._backend.get_added_tokens_decoder().items()
        return {number: token.content for number, token in added if token.special}


def decoder_of(inspected: Inspected, tokenizer: Path | None) -> Decoder | None:
    """Return the decoder of directory `tokenizer`, by default of the dataset's tokenizer; None if
    there is no tokenizer."""
    if tokenizer is not None:
        if not (tokenizer / "tokenizer.json").is_file():
            raise DataError(f"--tokenizer {tokenizer}: it has no tokenizer.json")
        return Decoder(tokenizer)
    directory = inspected.path / TOKENIZER_DIRECTORY
    return Decoder(directory) if (directory / "tokenizer.json").is_file() else None


def _describe_texts(manifest: Manifest) -> str:
    """Describe how documents without a chat template begin and end."""
    # Rows of token ids are read with the options of chats.
    if manifest.options.chat and manifest.options.chat_format == "tokens":
        return "rows of tokens as they were, with nothing added"
    tokenizer = manifest.tokenizer
    begin = ", ".join(map(str, tokenizer.beginning_ids))
    return (
        (f"begin with token {begin}" if begin else "begin with no special token")
        + f" (--beginning-of-text {manifest.options.beginning_of_text}), "
        f"end with token {tokenizer.end_of_document_id}"
    )


def _describe_rows(manifest: Manifest, rows: AnswerRows) -> str:
    """Describe rows of answers, or with labels."""
    num_documents = sum(map(manifest.num_documents, manifest.splits))
    all_shards = [shard for shards in manifest.splits.values() for shard in shards]
    num_ones, labels = sum(shard.desirable or 0 for shard in all_shards), manifest.options.labels
    text = rows.summary.format(
        rows=num_documents // len(rows.documents),
        ones=num_ones,
        zeros=num_documents - num_ones,
        num_labels=len(labels),
        labels=", ".join(labels),
    )
    return f"{rows.name}: {text}"


def row_of(inspected: Inspected, index: int, shard: TokenShard, index_in_shard: int) -> str | None:
    """Describe document `index` of a split as part of a row; None if it is a document by itself.
    index_in_shard: of the document in `shard`."""
    manifest = inspected.manifest
    rows = None if manifest is None else ROWS.get(manifest.rows)
    if manifest is None or rows is None:
        return None
    row, number_in_row = divmod(index, len(rows.documents))
    label_names = rows.label_names or manifest.options.labels
    label = label_names[shard.labels[index_in_shard]] if rows.is_labeled else ""
    return rows.document.format(row=row, name=rows.documents[number_in_row], label=label)


def _describe_spelled(counts: Mapping[str, int]) -> str:
    """Describe control tokens that texts spell."""
    frequent = sorted(counts, key=lambda name: (-counts[name], name))
    listed = ", ".join(f"{name} ({counts[name]:,})" for name in frequent[:SHOWN_NAMES])
    if len(frequent) > SHOWN_NAMES:
        listed += f", and {len(frequent) - SHOWN_NAMES} more"
    return (
        f"texts spell control tokens, which were encoded as letters: {listed} -> to "
        "encode them as control tokens: --parse-special-tokens"
    )


def summary(output: Path, manifest: Manifest, *, with_unread: bool = True) -> str:
    """Return a few human-readable lines on the dataset; with_unread: also on keys of rows that are
    not read, which the log of a new dataset names."""
    # Tokens, and for each split its size.
    lines = [
        f"{output}: {manifest.token_dtype} tokens of {manifest.tokenizer.name} "
        f"({manifest.tokenizer.vocab_size} ids)"
    ]
    is_masked = manifest.is_masked
    for split, shards in manifest.splits.items():
        text_bytes = sum(shard.text_bytes for shard in shards)
        targets = sum(shard.target_tokens or 0 for shard in shards)
        tokens = manifest.num_tokens(split)
        has_weights = any(shard.weights_xxh3 for shard in shards)
        size = "unknown bytes of text"
        if text_bytes:
            size = f"{text_bytes:,} bytes of text ({text_bytes / max(1, tokens):.2f} per token)"
        lines.append(
            f"  {split + ':':9} {manifest.num_documents(split):,} documents, {tokens:,} tokens, "
            f"{size}, "
            f"{len(shards)} shard{'s' if len(shards) != 1 else ''}"
            + (f", {targets / max(1, tokens):.1%} of the tokens to learn" if is_masked else "")
            + (", by weights" if has_weights else "")
        )
    # How documents were made from the input.
    if (rows := ROWS.get(manifest.rows)) is not None:
        lines.append(f"  rows:     {_describe_rows(manifest, rows)}")
    lines.append(f"  texts:    {_describe_texts(manifest)}")
    lines.append(f"  encoder:  {manifest.tokenizer.engine}")
    if manifest.spelled_tokens:
        lines.append(f"  letters:  {_describe_spelled(manifest.spelled_tokens)}")
    if manifest.options.fill_in_middle is not None:
        counts = (manifest.fill_in_middle or {}).items()
        modes = ", ".join(f"{count:,} {mode}" for mode, count in counts)
        ids = ", ".join(map(str, manifest.tokenizer.fill_in_middle_ids or ()))
        lines.append(f"  middle:   fill-in-the-middle of {modes or 'no'} documents, tokens {ids}")
    # Documents that are missing, by reason.
    if manifest.options.text_filter is not None:
        reasons = {**(manifest.filtered or {})}
        reasons.pop(LONG_PROMPT, None)  # has its line below
        reasons_text = "; ".join(f"{count:,} {reason}" for reason, count in reasons.items())
        lines.append(
            f"  filter:   {manifest.options.text_filter.name} dropped {sum(reasons.values()):,} "
            f"documents" + (f": {reasons_text}" if reasons_text else "")
        )
    if manifest.options.max_samples is not None:
        lines.append(f"  samples:  the first {manifest.options.max_samples:,} of the inputs")
    if manifest.options.max_prompt_tokens is not None:
        dropped = (manifest.filtered or {}).get(LONG_PROMPT, 0)
        lines.append(
            f"  prompts:  {dropped:,} rows dropped, whose prompt has more than "
            f"{manifest.options.max_prompt_tokens:,} tokens"
        )
    limits = manifest.perplexity_filter
    if limits is not None:
        interval = f"{limits.lowest:g} to {limits.highest:g}"
        lines.append(f"  filter:   documents of perplexity {interval} under {limits.model}")
    lines += _held_out_share(manifest)
    if manifest.skipped_documents:
        count = f"{manifest.skipped_documents:,}"
        lines.append(f"  skipped:  {count} unreadable documents, listed in errors.jsonl")
    if manifest.unread_keys and with_unread:
        counted = ", ".join(f"{key} ({count:,})" for key, count in manifest.unread_keys.items())
        lines.append(f"  unread:   keys of rows that are not read: {counted}")
    lines += _dropped_parts(manifest.unrendered or {})
    return "\n".join(lines)


def _dropped_parts(counts: Mapping[str, int]) -> list[str]:
    """Return the lines of the parts of conversations that are not learned, or not read."""
    message_keys: list[str] = []
    lines = []
    for part_kind, count in counts.items():
        name, _, key = part_kind.partition(".")
        if key:
            message_keys.append(f"{key} ({count:,})")
        else:
            lines.append(f"  dropped:  {KINDS.get(name, name)}: {count:,}")
    if message_keys:
        listed_keys = ", ".join(message_keys[:SHOWN_KEYS])
        if len(message_keys) > SHOWN_KEYS:
            listed_keys += f", and {len(message_keys) - SHOWN_KEYS} others"
        rule = "keys of messages that the chat template does not read"
        lines.append(f"  dropped:  {rule}: {listed_keys}")
    return lines


_NEAR_SHARE = 0.1
"""Largest difference of the held-out share, relative to the share that was asked for, which needs
no line."""


def _held_out_share(manifest: Manifest) -> list[str]:
    """Return a line if the share of held-out documents is not the share that was asked for."""
    share = manifest.options.held_out
    num_held_out = manifest.num_documents("held_out")
    if not share:
        return []
    if not num_held_out:
        return ["  held_out: no document was selected; this may happen with few documents"]
    actual_share = num_held_out / (num_held_out + manifest.num_documents("train"))
    if abs(actual_share - share) <= _NEAR_SHARE * share:
        return []
    return [
        f"  share:    {actual_share:.2%} of the documents are held out, not {share:.2%}: each is "
        "selected by its text, equal texts together"
    ]


LONG_TOKENS = 1 << 20
"""Lengths below this are counted in an array, the few above it one by one."""
MANY_SEQUENCES_CHUNK = 1 << 17
"""Documents read at once if each may have many sequences."""


@dataclass(frozen=True)
class LengthHistogram:
    """Histogram of document lengths in tokens: ascending `lengths`, `counts`, int64 [K]."""

    lengths: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]

    @property
    def num_documents(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        return int((self.lengths * self.counts).sum())

    def quantile(self, fraction: float) -> int:
        """Return the least length that at least `fraction` of the documents do not exceed."""
        ends = np.cumsum(self.counts)
        # Less 1e-6: a product such as 0.05 * 60 may be rounded to just above an integer.
        index = np.searchsorted(ends, max(1.0, fraction * ends[-1] - 1e-6))
        return int(self.lengths[index])

    def buckets(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (lowest, highest length, documents, tokens) between powers of two; 0 separately."""
        # Lengths from 2^(e - 1) to 2^e - 1 have the exponent e, and length 0 has 0.
        exponents = np.frexp(self.lengths.astype(np.float64))[1]
        for exponent in range(int(exponents[0]), int(exponents[-1]) + 1):
            is_in_bucket = exponents == exponent
            counts = self.counts[is_in_bucket]
            low, high = (1 << exponent) >> 1, (1 << exponent) - 1
            yield low, high, int(counts.sum()), int((self.lengths[is_in_bucket] * counts).sum())


def length_histogram(shards: Iterable[TokenShard], one_sequence: bool) -> LengthHistogram:
    """Return the lengths of the documents of `shards`, at least one document. Reads the indexes, in
    chunks. `one_sequence`: every document is one sequence or none, as bigtrain writes them; then
    only the lengths of sequences are read. Raises DataError if an index is corrupt."""
    counts = np.zeros(1, dtype=np.int64)
    long_counts: Counter[int] = Counter()
    chunks_of = _sequence_lengths if one_sequence else _document_lengths
    for shard in shards:
        for lengths in chunks_of(shard):
            if lengths.min() < 0:
                raise shard.corrupt("a document has negative length")
            is_long = lengths >= LONG_TOKENS
            if is_long.any():
                long_counts.update(lengths[is_long].tolist())
                lengths = lengths[~is_long]
            new_counts = np.bincount(lengths, minlength=len(counts))
            new_counts[: len(counts)] += counts
            counts = new_counts
        if one_sequence:  # a document without a sequence is empty
            counts[0] += max(0, shard.num_documents - shard.num_sequences)
    (short_lengths,) = np.nonzero(counts)
    long_lengths = np.array(sorted(long_counts), np.int64)
    counts_of_long = np.array([long_counts[length] for length in sorted(long_counts)], np.int64)
    return LengthHistogram(
        np.concatenate([short_lengths, long_lengths]),
        np.concatenate([counts[short_lengths], counts_of_long]),
    )


def _sequence_lengths(shard: TokenShard) -> Iterator[npt.NDArray[np.int64]]:
    for low in range(0, shard.num_sequences, CHUNK_ITEMS):
        yield shard.sequence_lengths[low : low + CHUNK_ITEMS].astype(np.int64)


def _document_lengths(shard: TokenShard) -> Iterator[npt.NDArray[np.int64]]:
    for low in range(0, shard.num_documents, MANY_SEQUENCES_CHUNK):
        starts = shard.document_starts[low : low + MANY_SEQUENCES_CHUNK + 1].astype(np.int64)
        first, last = int(starts[0]), int(starts[-1])
        if not 0 <= first <= last <= shard.num_sequences or (np.diff(starts) < 0).any():
            raise shard.corrupt(f"documents after {low} are out of order")
        ends = np.zeros(last - first + 1, dtype=np.int64)
        np.cumsum(shard.sequence_lengths[first:last], out=ends[1:])
        yield np.diff(ends[starts - first])
