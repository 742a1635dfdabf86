"""Whether a tokenizer's files are those a dataset was made with, without loading it."""

from __future__ import annotations

from pathlib import Path

import xxhash

SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
MAX_FILE_BYTES = 1 << 28


def fingerprint(name: str) -> str | None:
    """XXH3-64 of the files in directory `name`, or of that hub name in the local cache.

    None where there are none. Weights that lie beside them are left out.
    """
    directory = Path(name)
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
