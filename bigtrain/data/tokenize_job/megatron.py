"""Manifest for `.bin/.idx` pairs that Megatron or GPT-NeoX wrote, next to them and without a copy.

Every token is read once: for the checksums, and to see that the tokenizer has each id. What the
files do not contain is asked for or refused: which tokenizer made the tokens, which files are held
out, and how documents end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import xxhash

from bigtrain.data.shards.block_checksums import SUFFIX, BlockHasher, blocks_content
from bigtrain.data.shards.format import TokenShard
from bigtrain.data.shards.manifest import (
    MANIFEST_NAME,
    TOKENIZER_DIRECTORY,
    Manifest,
    OptionsRecord,
    ShardRecord,
    SourceRecord,
    Split,
    TokenizerRecord,
    reading,
    write_manifest,
)
from bigtrain.data.tokenizers.cache import files_fingerprint
from bigtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from bigtrain.errors import DataError
from bigtrain.system.files import file_checksum, sync_tree, write_whole

ENGINE = "not bigtrain's: .bin/.idx of Megatron or GPT-NeoX"
READ_BYTES = 1 << 23
TokenDtype = Literal["uint16", "int32"]
TOKEN_DTYPES: tuple[TokenDtype, ...] = get_args(TokenDtype)
"""Types of a manifest's tokens; Megatron writes no other for a vocabulary of up to 2^31 ids."""


@dataclass(frozen=True)
class _Scan:
    """A shard as it was read. `first_ids` and `last_ids`: tokens at which documents that are not
    empty begin and end, with how often."""

    record: ShardRecord
    first_ids: Counter[int]
    last_ids: Counter[int]


def write_megatron_manifest(
    shards: Mapping[Split, Sequence[Path]],
    tokenizer: Tokenizer,
    *,
    documents_end: bool = True,
) -> Manifest:
    """Write `manifest.json`, `tokenizer/` and a `.blocks` for each pair into the directory of the
    pairs, which is a dataset then.

    shards: by split, paths of pairs with or without ``.bin`` or ``.idx``, all in one directory.
    tokenizer: made the tokens. documents_end: every document ends with the tokenizer's end
    of documents (``preprocess_data.py --append-eod``); false: none does. Raises DataError if a file
    is missing or inconsistent, a token is not in the vocabulary, documents end otherwise, or the
    directory is a dataset already.
    """
    prefixes = {split: [_prefix(path) for path in paths] for split, paths in shards.items()}
    directory = _common_directory([prefix for paths in prefixes.values() for prefix in paths])
    if (directory / MANIFEST_NAME).exists():
        raise DataError(
            f"{directory / MANIFEST_NAME} exists: the directory is a dataset already -> `bigtrain "
            f"inspect {directory}` shows it; remove the file to write another one"
        )
    kept_tokenizer = directory / TOKENIZER_DIRECTORY
    if kept_tokenizer.exists() and load_tokenizer(str(kept_tokenizer)).hash != tokenizer.hash:
        raise DataError(
            f"{kept_tokenizer} is another tokenizer than {tokenizer.name}, and a dataset keeps its "
            f"own there -> --tokenizer {kept_tokenizer}, or rename that directory"
        )
    # All pairs are read and checked before the first file is written.
    opened = {split: [TokenShard(prefix) for prefix in paths] for split, paths in prefixes.items()}
    all_shards = [shard for shards_of_split in opened.values() for shard in shards_of_split]
    dtype = _common_dtype(all_shards)
    blocks: dict[str, bytes] = {}  # contents of the `.blocks`, by shard
    scans = {
        split: [_scan(shard, tokenizer, blocks) for shard in shards_of_split]
        for split, shards_of_split in opened.items()
    }
    all_scans = [scan for scans_of_split in scans.values() for scan in scans_of_split]
    _check_document_ends(all_scans, tokenizer, documents_end)
    manifest = Manifest(
        tokenizer=TokenizerRecord(
            name=tokenizer.name,
            hash=tokenizer.hash,
            vocab_size=tokenizer.vocab_size,
            end_of_document_id=tokenizer.end_of_document_id,
            engine=ENGINE,
            files_xxh3=files_fingerprint(tokenizer.load_path),
            beginning_ids=_beginning(all_scans, tokenizer),
        ),
        token_dtype=dtype,
        sources=tuple(
            SourceRecord(path=str(shard.bin_path), bytes=shard.num_bytes) for shard in all_shards
        ),
        options=OptionsRecord(),
        splits={
            split: tuple(scan.record for scan in scans_of_split)
            for split, scans_of_split in scans.items()
        },
    )
    _write(directory, manifest, tokenizer, blocks)
    return manifest


def _write(
    directory: Path, manifest: Manifest, tokenizer: Tokenizer, blocks: Mapping[str, bytes]
) -> None:
    """Write the files of the dataset; the manifest comes last, since without it there is none."""
    try:
        for name, content in blocks.items():
            write_whole(directory / f"{name}.{SUFFIX}", content)
        if not (directory / TOKENIZER_DIRECTORY).exists():
            draft = directory / f".{TOKENIZER_DIRECTORY}.{os.getpid()}"
            draft.mkdir()
            tokenizer.save(draft)
            sync_tree(draft)
            draft.rename(directory / TOKENIZER_DIRECTORY)
        write_manifest(directory, manifest)
    except OSError as error:
        raise DataError(
            f"{directory} cannot be written: {error.strerror or error} -> the manifest is next to "
            "the pairs: give the directory write permission and space, or link the pairs into "
            "another one"
        ) from error


def _prefix(path: Path) -> Path:
    """Return the path of a pair without ``.bin`` or ``.idx``."""
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _common_directory(prefixes: Sequence[Path]) -> Path:
    """Return the directory of all pairs. Raise DataError for pairs of several directories, a pair
    that is given twice, and a name that a manifest cannot have."""
    directories = sorted({str(prefix.parent) for prefix in prefixes})
    if len(directories) > 1:
        raise DataError(
            f"the pairs are in {len(directories)} directories ({', '.join(directories[:3])}), and "
            "a manifest lists files next to it -> one command for each directory, and data.sources "
            "mixes them in the run"
        )
    names = Counter(prefix.name for prefix in prefixes)
    if repeated := [name for name, count in names.items() if count > 1]:
        raise DataError(f"{repeated[0]} is given {names[repeated[0]]} times -> each pair once")
    for name in names:
        if not name.replace("-", "").replace(".", "").replace("_", "").isalnum():
            raise DataError(
                f"{name}: the name of a shard has letters, digits, '_', '-' and '.' only -> rename "
                "its .bin and .idx"
            )
    return Path(directories[0])


def _common_dtype(shards: Sequence[TokenShard]) -> TokenDtype:
    """Return the type of the tokens of all pairs. Raise DataError where they differ, or for a type
    that a run does not read."""
    names = {shard.bin_path: shard.dtype.name for shard in shards}
    for path, name in names.items():
        if name not in TOKEN_DTYPES:
            raise DataError(
                f"{path} has tokens of {name}; a run reads {' and '.join(TOKEN_DTYPES)} -> "
                "tokenize the text again with `bigtrain tokenize`"
            )
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{path.name} {name}" for path, name in names.items())
        raise DataError(
            f"the pairs have tokens of different types ({listed}) -> a directory, and a command, "
            "for each type; data.sources mixes them in the run"
        )
    return "uint16" if "uint16" in names.values() else "int32"


def _scan(shard: TokenShard, tokenizer: Tokenizer, blocks: dict[str, bytes]) -> _Scan:
    """Read all of a pair, and add its checksums of blocks to `blocks`. Raise DataError for an index
    that does not cover the tokens, and for a token that the tokenizer does not have."""
    shard.check_index()
    digest, hasher = xxhash.xxh3_64(), BlockHasher()
    position = 0
    with reading(shard.bin_path), shard.bin_path.open("rb") as file:
        while content := file.read(READ_BYTES):
            digest.update(content)
            hasher.update(memoryview(content))
            tokens = np.frombuffer(content, shard.dtype)
            is_unknown = (tokens < 0) | (tokens >= tokenizer.vocab_size)
            if is_unknown.any():
                first = int(np.argmax(is_unknown))
                raise DataError(
                    f"{shard.bin_path}: token {position + first:,} is {int(tokens[first])}, and "
                    f"tokenizer {tokenizer.name} has {tokenizer.vocab_size:,} ids -> name the "
                    "tokenizer that made the files: --tokenizer"
                )
            position += len(tokens)
    name = shard.bin_path.stem
    blocks[name] = blocks_content(hasher.finish(), None)
    # First and last token of the documents that are not empty.
    begins = np.append(
        shard.sequence_pointers // shard.dtype.itemsize, np.int64(shard.num_tokens)
    ).astype(np.int64)
    bounds = begins[shard.document_starts]
    is_filled = bounds[1:] > bounds[:-1]
    first_positions, last_positions = bounds[:-1][is_filled], bounds[1:][is_filled] - 1
    record = ShardRecord(
        name=name,
        documents=shard.num_documents,
        tokens=shard.num_tokens,
        bytes=shard.num_bytes,
        text_bytes=0,  # unknown: the text is not here
        xxh3=digest.hexdigest(),
        index_xxh3=file_checksum(shard.index_path),
        blocks_xxh3=xxhash.xxh3_64_hexdigest(blocks[name]),
    )
    return _Scan(
        record,
        first_ids=_count(shard.tokens[first_positions]),
        last_ids=_count(shard.tokens[last_positions]),
    )


def _count(ids: npt.NDArray[np.integer]) -> Counter[int]:
    """Return how often each id occurs."""
    values, counts = np.unique(ids, return_counts=True)
    return Counter(dict(zip(values.tolist(), counts.tolist(), strict=True)))


def _check_document_ends(scans: Sequence[_Scan], tokenizer: Tokenizer, documents_end: bool) -> None:
    """Raise DataError if `documents_end` and a document does not end with the tokenizer's end of
    documents, or if not `documents_end` and every document does."""
    last_ids = sum((scan.last_ids for scan in scans), Counter[int]())
    num_documents = last_ids.total()
    num_ended = last_ids[tokenizer.end_of_document_id]
    end_text = tokenizer.end_text
    all_end = num_ended == num_documents
    if not documents_end:
        if all_end and num_documents:
            raise DataError(
                f"{num_ended:,} of {num_documents:,} documents end with {end_text} "
                f"({tokenizer.end_of_document_id}) -> omit --without-end-of-document"
            )
        return
    if all_end:
        return
    token_id, count = last_ids.most_common(1)[0]
    fix = "--without-end-of-document if they were made without --append-eod"
    if count == num_documents:
        fix = f"--end-of-document '{tokenizer.decode([token_id])}', with which all of them end"
    raise DataError(
        f"{num_documents - num_ended:,} of {num_documents:,} documents do not end with {end_text} "
        f"({tokenizer.end_of_document_id}), the end of documents of {tokenizer.name}; {count:,} "
        f"end with token {token_id} -> {fix}"
    )


def _beginning(scans: Sequence[_Scan], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token with which the tokenizer begins texts, if all documents begin with it."""
    beginning = tokenizer.added_beginning()
    first_ids = sum((scan.first_ids for scan in scans), Counter[int]())
    begins = len(beginning) == 1 and first_ids[beginning[0]] == first_ids.total()
    return beginning if begins else ()
