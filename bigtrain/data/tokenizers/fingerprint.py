"""Checks whether a tokenizer's files are those a dataset was made with, without loading it."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from bigtrain.system.storage.copies import at_hand

SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
MAX_FILE_BYTES = 1 << 28


def fingerprint(name: str) -> str | None:
    """XXH3-64 of the files in directory `name`, or of that hub name in the local cache, or at an
    address.

    None where there are none. Weights that lie beside them are left out.
    """
    directory = Path(at_hand(name, weights=False))
    if not directory.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = try_to_load_from_cache(name, "tokenizer_config.json")
        except ValueError:  # not a possible name
            return None
        if not isinstance(cached, str):
            return None
        directory = Path(cached).parent
    digest = xxhash.xxh3_64()
    num_files = 0
    for file in sorted(directory.iterdir()):
        if file.suffix in SUFFIXES and file.is_file() and file.stat().st_size <= MAX_FILE_BYTES:
            content = file.read_bytes()
            digest.update(f"{file.name}\0{len(content)}\0".encode())
            digest.update(content)
            num_files += 1
    return digest.hexdigest() if num_files else None


def foreign_file(dataset: Path, folder: str) -> str | None:
    """What of `folder` of a dataset must not be copied, and why; None where all may be.

    A dataset may come from somebody else: a link in it must not bring a file of this machine into a
    run directory, from where it is handed on. Links may point into the dataset, and, in a snapshot
    of the Hugging Face cache, into the blobs that are the files of its repository.
    """
    root = os.path.realpath(dataset)
    allowed = [root]
    for parent in Path(root).parents:
        if parent.name == "snapshots":
            allowed.append(str(parent.with_name("blobs")))
            break
    for path in sorted([dataset / folder, *(dataset / folder).rglob("*")]):
        real = os.path.realpath(path)
        if not any(real.startswith(place + os.sep) for place in allowed):
            return f"{path} is a link to {real}, outside of the dataset"
        if os.path.lexists(path) and not (os.path.isfile(real) or os.path.isdir(real)):
            return f"{path} is not a file"
    return None
