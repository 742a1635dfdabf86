"""What token shards hold, and whether they are what was written: `inspect`, `verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.shards.inspection import Inspected


def describe_shards(path: str | Path) -> dict[str, Any]:
    """What `bigtrain inspect --json` says of shards: tokenizer, options, and by split the
    documents, tokens, files and lengths.

    path: directory of a dataset, or prefix of one .bin/.idx pair, also Megatron's. Raises
    DataError.
    """
    from bigtrain.data.shards.inspection import describe, inspect_shards

    return describe(inspect_shards(Path(path)))


def read_documents(
    path: str | Path,
    numbers: Sequence[int],
    *,
    split: str | None = None,
    max_tokens: int = 512,
    tokenizer: str | Path | None = None,
) -> list[dict[str, Any]]:
    """Documents of shards: tokens, and their text where there is a tokenizer.

    path: as of `describe_shards`. numbers: of documents, from 0 in the order of the shards. split:
    of a dataset (default: train). max_tokens: of a document, the first ones. tokenizer: directory
    to decode with (default: the dataset's own). Raises DataError.
    """
    from bigtrain.data.shards.inspection import inspect_shards

    return documents_of(inspect_shards(Path(path)), numbers, split, max_tokens, tokenizer)


def documents_of(
    inspected: Inspected,
    numbers: Sequence[int],
    split: str | None,
    max_tokens: int,
    tokenizer: str | Path | None,
    mask: bool = False,
) -> list[dict[str, Any]]:
    """As `read_documents`, of shards that are open; with `mask` also the `runs` of learned and
    other tokens."""
    from bigtrain.data.shards.inspection import LONE, decoder_of
    from bigtrain.data.shards.learned_text import runs_of

    if inspected.manifest is None and split:
        raise DataError(f"--split {split}: a lone shard has no splits -> leave it out")
    name = LONE if inspected.manifest is None else split or "train"
    if numbers and name not in inspected.splits:
        raise DataError(f"--split {name}: {inspected.path} has no such split")
    decoder = decoder_of(inspected, None if tokenizer is None else Path(tokenizer))
    documents = []
    for index in numbers:
        shard, within, tokens = inspected.document(name, index)
        shown = tokens[:max_tokens].tolist()
        documents.append(
            {
                "split": name,
                "index": index,
                "shard": shard.bin_path.stem,
                "index_in_shard": within,
                "num_tokens": len(tokens),
                "cut": len(tokens) > len(shown),
                "tokens": shown,
                "text": None if decoder is None else decoder.decode(shown),
            }
        )
        if mask:
            if decoder is None:
                raise DataError("--mask shows text -> --tokenizer DIRECTORY to decode with")
            found = shard.document_mask(within)[:max_tokens]
            documents[-1]["runs"] = runs_of(shown, found, decoder.decode)
    return documents


def verify_shards(*datasets: str | Path) -> None:
    """Read token shards again and compare every checksum.

    Raises DataError that names every corrupt file of all `datasets`, directories that `tokenize`
    wrote.
    """
    from bigtrain.data.shards.verification import corrupt_files

    corrupt = [problem for path in datasets for problem in corrupt_files(path)]
    if corrupt:
        raise DataError("\n".join(corrupt))
