"""Reading datasets of shards: `bigtrain inspect`, and `bigtrain verify` of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import DataError

if TYPE_CHECKING:
    from bigtrain.data.shards.dataset import TokenDataset
    from bigtrain.data.shards.inspection import Inspected
    from bigtrain.data.shards.manifest import Split


def describe_shards(path: str | Path) -> dict[str, Any]:
    """Return the output of `bigtrain inspect --json`: tokenizer, options, and by split the
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
    """Return documents of shards: tokens, and their text if there is a tokenizer.

    path: as in `describe_shards`. numbers: of documents, from 0 in shard order. split: of a dataset
    (default: train). max_tokens: limit on the first tokens of a document. tokenizer: directory to
    decode with (default: the dataset's own). Raises DataError.
    """
    from bigtrain.data.shards.inspection import inspect_shards

    inspected = inspect_shards(Path(path))
    return documents_of(inspected, numbers, split, max_tokens=max_tokens, tokenizer=tokenizer)


def documents_of(
    inspected: Inspected,
    numbers: Sequence[int],
    split: str | None,
    *,
    max_tokens: int,
    tokenizer: str | Path | None,
    mask: bool = False,
) -> list[dict[str, Any]]:
    """Return the documents of `read_documents`, from open shards; with `mask` also ``runs``: texts
    of consecutive tokens that are learned, or not."""
    from bigtrain.data.shards.inspection import LONE, decoder_of, row_of
    from bigtrain.data.shards.mask_display import runs_of

    if inspected.manifest is None and split:
        raise DataError(f"--split {split}: a single shard has no splits -> remove it")
    split = LONE if inspected.manifest is None else split or "train"
    if numbers and split not in inspected.splits:
        raise DataError(f"--split {split}: {inspected.path} has no such split")
    # Without a tokenizer, which a dataset may lack, documents have no text.
    decoder = decoder_of(inspected, None if tokenizer is None else Path(tokenizer))
    documents = []
    for index in numbers:
        shard, index_in_shard, tokens = inspected.document(split, index)
        shown_tokens = tokens[:max_tokens].tolist()
        documents.append(
            {
                "split": split,
                "index": index,
                "shard": shard.bin_path.stem,
                "index_in_shard": index_in_shard,
                "num_tokens": len(tokens),
                "cut": len(tokens) > len(shown_tokens),
                "tokens": shown_tokens,
                "text": None if decoder is None else decoder.decode(shown_tokens),
            }
        )
        if (row := row_of(inspected, index, shard, index_in_shard)) is not None:
            documents[-1]["row"] = row
        if mask:
            if decoder is None:
                raise DataError("--mask shows text -> --tokenizer DIRECTORY to decode with")
            learned = shard.document_mask(index_in_shard)[:max_tokens]
            weights = shard.document_weights(index_in_shard)[:max_tokens]
            documents[-1]["runs"] = runs_of(shown_tokens, learned, weights, decoder)
    return documents


def make_manifest(
    shards: Sequence[str | Path],
    tokenizer: str | Path,
    *,
    held_out: Sequence[str | Path] = (),
    end_of_document: str | None = None,
    without_end_of_document: bool = False,
) -> TokenDataset:
    """Write the manifest, the tokenizer and checksums into the directory of .bin/.idx pairs of
    Megatron or GPT-NeoX, which makes them a dataset without a copy. Return the dataset.

    shards, held_out: pairs of one directory, to train on and to evaluate with. tokenizer: directory
    or Hub name of the tokenizer that made them. end_of_document: token that ends documents
    (default: the tokenizer's end-of-sequence token); without_end_of_document: they end without one.
    Reads every token. Raises DataError.
    """
    from bigtrain.data.shards.dataset import open_dataset
    from bigtrain.data.tokenize_job.megatron import write_megatron_manifest
    from bigtrain.data.tokenizers.tokenizer import load_tokenizer

    if end_of_document is not None and without_end_of_document:
        raise DataError(
            f"--end-of-document {end_of_document} and --without-end-of-document contradict each "
            "other -> one of them"
        )
    splits: dict[Split, list[Path]] = {"train": [Path(shard) for shard in shards]}
    if held_out:
        splits["held_out"] = [Path(shard) for shard in held_out]
    loaded = load_tokenizer(str(tokenizer)).with_end_of_document(end_of_document)
    write_megatron_manifest(splits, loaded, documents_end=not without_end_of_document)
    return open_dataset(splits["train"][0].parent)


def verify_shards(*datasets: str | Path) -> None:
    """Read token shards again and compare every checksum.

    Raises DataError with every corrupt file of all `datasets`, directories that `tokenize`
    wrote.
    """
    from bigtrain.data.shards.verification import corrupt_files

    corrupt = [problem for path in datasets for problem in corrupt_files(path)]
    if corrupt:
        raise DataError("\n".join(corrupt))
