"""`bigtrain manifest`: make a dataset of Megatron's `.bin/.idx` files where they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.system.arguments import Argument
from bigtrain.system.next_commands import next_lines, shards_line


@dataclass(frozen=True, kw_only=True)
class ManifestArguments:
    """Command line of `bigtrain manifest`."""

    shards: Annotated[tuple[Path, ...], "PREFIX", Argument("shards", nargs="+")]
    """.bin/.idx pairs to train on, in one directory, with or without .bin (data/*.bin)"""
    tokenizer: Annotated[str, "NAME"]
    """directory or Hub name of the tokenizer that made them"""
    held_out: Annotated[tuple[Path, ...], "PREFIX", Argument(nargs="+")] = ()
    """pairs of the same directory that are held out for evaluation (default: none)"""
    end_of_document: Annotated[str | None, "TOKEN"] = None
    """token that ends documents (default: the tokenizer's end-of-sequence token)"""
    without_end_of_document: bool = False
    """documents end without such a token (preprocess_data.py without --append-eod)"""


def run(args: ManifestArguments) -> int:
    """Write the manifest. Raises DataError."""
    from bigtrain.data.shards.inspection import summary
    from bigtrain.python_api.shards import make_manifest, read_documents

    dataset = make_manifest(
        args.shards,
        args.tokenizer,
        held_out=args.held_out,
        end_of_document=args.end_of_document,
        without_end_of_document=args.without_end_of_document,
    )
    print(summary(dataset.path, dataset.manifest))
    [first] = read_documents(dataset.path, [0], max_tokens=32)
    print(f"document 0 begins: {first['text']!r}")
    print(next_lines(shards_line(dataset.path, args.tokenizer)))
    return 0
