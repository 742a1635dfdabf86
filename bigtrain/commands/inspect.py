"""`bigtrain inspect`: show the contents of token shards."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from bigtrain.errors import DataError
from bigtrain.system.arguments import Argument, File, Positive
from bigtrain.system.next_commands import next_lines, shards_line

if TYPE_CHECKING:
    from bigtrain.data.shards.inspection import Inspected

MAX_SHOWN = 20
"""Number of shards and inputs in human-readable output; --json has all of them."""


@dataclass(frozen=True, kw_only=True)
class InspectArguments:
    """Command line of `bigtrain inspect`."""

    shards: Annotated[Path, "SHARDS", Argument("shards")]
    """directory of a dataset, or prefix of one .bin/.idx pair, also Megatron's or NeoX's"""
    document: Annotated[tuple[int, ...], "N", Argument(nargs="+")] = ()
    """also show these documents, counted from 0 in shard order"""
    split: Literal["train", "held_out"] | None = None
    """of --document (default: train)"""
    max_tokens: Positive = 512
    """maximum tokens of a document (default: 512)"""
    tokenizer: Path | None = None
    """directory to decode with (default: the dataset's own)"""
    mask: bool = False
    """show the learned tokens of the documents: in color on a terminal, else between ⟦ and ⟧, with
    weights of the loss and marks of control tokens; without --document for document 0"""
    html: File | None = None
    """write the documents of --mask as a page with learned tokens marked"""
    json: bool = False
    """one JSON object instead of text"""


def run(args: InspectArguments) -> int:
    """Print the description. Raises DataError; reads only."""
    from bigtrain.data.shards.inspection import describe, inspect_shards
    from bigtrain.data.shards.mask_display import as_html, for_terminal, legend
    from bigtrain.python_api.shards import documents_of

    # The documents to show; a mask is of document 0 by default.
    inspected = inspect_shards(args.shards)
    mask = args.mask or args.html is not None
    numbers = args.document or ([0] if mask else [])
    documents = documents_of(
        inspected,
        numbers,
        args.split,
        max_tokens=args.max_tokens,
        tokenizer=args.tokenizer,
        mask=mask,
    )
    tree = describe(inspected)
    # Write them as a page, and print everything as JSON or as text.
    if args.html is not None:
        page = as_html(str(inspected.path), documents)
        try:
            args.html.write_text(page, encoding="utf-8")
        except OSError as error:
            remedy = "choose a file in a writable folder"
            raise DataError(
                f"--html {args.html} cannot be written: {error.strerror} -> {remedy}"
            ) from error
    if args.json:
        if mask:  # spans of text with their masks
            documents = [
                {**document, "runs": [asdict(span) for span in document["runs"]]}
                for document in documents
            ]
        tree["documents"] = documents
        print(json.dumps(tree, ensure_ascii=False))
        return 0
    print("\n".join(_description_lines(inspected, tree)))
    if inspected.manifest is not None and not documents:
        print(next_lines(shards_line(inspected.path)))
    for document in documents:
        row = f" ({document['row']})" if "row" in document else ""
        print(
            f"\n--- document {document['index']}{row} of {document['split']} "
            f"({document['shard']} {document['index_in_shard']}), {document['num_tokens']:,} tokens"
            + (f", the first {args.max_tokens:,}:" if document["cut"] else ":")
        )
        if "runs" in document:
            runs = document["runs"]
            colors = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            print(f"{legend(runs, colors=colors)}\n{for_terminal(runs, colors=colors)}")
        else:
            print(document["tokens"] if document["text"] is None else document["text"])
    return 0


def _description_lines(inspected: Inspected, tree: dict[str, Any]) -> list[str]:
    """Return the description as human-readable lines."""
    manifest = inspected.manifest
    if manifest is None:
        lines = [f"{inspected.path}: {tree['token_dtype']} tokens, a shard without a manifest"]
        lines.append("  checksums: none, so corruption cannot be detected")
    else:
        from bigtrain.data.shards.block_checksums import NOT_VERIFIED
        from bigtrain.data.shards.inspection import summary

        # The manifest of a dataset.
        lines = [summary(inspected.path, manifest)]
        record = manifest.tokenizer
        lines.append(
            f"  tokenizer: {record.hash[:16]}, end of document {record.end_of_document_id}"
        )
        options = ", ".join(f"{key} {value}" for key, value in tree["options"].items())
        lines.append(f"  options:  {options}")
        verified = "of blocks of 16 KiB, verified on reading"
        lines.append(f"  checksums: {verified if manifest.has_blocks else NOT_VERIFIED}")
        lines.append(f"  inputs:   {len(manifest.sources):,}")
        lines += [f"    {source.path}" for source in manifest.sources[:MAX_SHOWN]]
        lines += _omission_lines(len(manifest.sources))
    # Splits, each with its first shards.
    for split, part in tree["splits"].items():
        lines.append(f"{split}: {part['documents']:,} documents, {part['tokens']:,} tokens")
        for shard in part["shards"][:MAX_SHOWN]:
            num_sequences = shard.get("sequences", shard["documents"])
            sequences_text = ""
            if num_sequences != shard["documents"]:
                sequences_text = f"{num_sequences:,} sequences, "
            lines.append(
                f"  {shard['name']}  {shard['documents']:,} documents, {sequences_text}"
                f"{shard['tokens']:,} tokens, {shard['bytes']:,} bytes"
            )
        lines += _omission_lines(len(part["shards"]))
        if part["lengths"]:
            lines += _length_lines(part["lengths"], part["documents"], max(1, part["tokens"]))
    return lines


def _omission_lines(count: int) -> list[str]:
    return [f"    and {count - MAX_SHOWN:,} more (--json lists all)"] if count > MAX_SHOWN else []


def _length_lines(lengths: dict[str, Any], documents: int, tokens: int) -> list[str]:
    """Return lines on the lengths of a split's documents: statistics, then a row per bucket."""
    quantiles = ", ".join(
        f"{float(fraction):.0%} {num_tokens:,}"
        for fraction, num_tokens in lengths["quantiles"].items()
    )
    lines = [
        f"  tokens per document: mean {lengths['mean']:,.1f}, least {lengths['min']:,}, "
        f"{quantiles}, most {lengths['max']:,}"
    ]
    for bucket in lengths["buckets"]:
        low, high = bucket["low"], bucket["high"]
        name = f"{low:,}" if low == high or not high else f"{low:,} to {high:,}"
        share = bucket["documents"] / documents
        lines.append(
            f"  {name:>26} {bucket['documents']:>15,} {share:7.2%} of documents "
            f"{bucket['tokens'] / tokens:7.2%} of tokens {'#' * round(40 * share)}".rstrip()
        )
    return lines
