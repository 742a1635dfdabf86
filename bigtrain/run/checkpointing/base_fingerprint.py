"""Which base model a checkpoint of adapters belongs to: checksums of the base's files.

Such a checkpoint holds the trained parameters and none of the base's weights. Its `state.json`
lists the base's configuration and weight files under `base`; resume and export read the base
again, and refuse another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigtrain.errors import CheckpointError
from bigtrain.models.weights.checksums import FileSum, Sums, files_read_with, sum_of

BASE = "base"
_CONFIG = "config.json"


def fingerprint(weights: Sums) -> dict[str, dict[str, object]]:
    """The entry `base` of `state.json`. `weights`: checksums of the base's weight files by
    absolute path.

    Reads the `config.json` beside them. Raises ModelError if it cannot.
    """
    first = Path(next(iter(weights)))
    found = {Path(name).name: known for name, known in weights.items()}
    found[_CONFIG] = sum_of(first.with_name(_CONFIG))
    return {n: {"bytes": s.num_bytes, "xxh3": s.xxh3} for n, s in sorted(found.items())}


def refuse_other_base(document: dict[str, Any], weights: Sums, directory: Path) -> None:
    """Compare the base named in a checkpoint's `state.json` (`document`) with the one read now.

    `weights`: as for `fingerprint`. `directory`: the checkpoint, for errors. Every rank may call
    it. Raises CheckpointError with all files that differ.
    """
    listed, found = document.get(BASE, {}), fingerprint(weights)
    different = [
        f"  {name}: {_text(listed.get(name))} there, {_text(found.get(name))} now"
        for name in sorted(listed.keys() | found.keys())
        # Tokenizer files only where they were listed: releases before did not.
        if (name in listed or name == _CONFIG or name.endswith(".safetensors"))
        and listed.get(name) != found.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{directory} holds adapters of another base than model.path names now -> restore its "
            "files, or name the directory that has them:\n" + "\n".join(different)
        )


def _text(entry: dict[str, object] | None) -> str:
    return "absent" if entry is None else f"{entry['bytes']} bytes, checksum {entry['xxh3']}"


def base_sums(files: tuple[Path, ...]) -> Sums:
    """Checksums of the base's weight files, and of those beside them that decide its numbers, by
    absolute path; reads all of them on this rank.

    Raises ModelError where one cannot be read.
    """
    sums: dict[str, FileSum] = {
        str(path.absolute()): sum_of(path) for path in files_read_with(files)
    }
    return sums
