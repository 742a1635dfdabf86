"""Fingerprint of the base model of an adapter checkpoint: checksums of the base's files.

Such a checkpoint contains the trained parameters, without the base's weights. Its `state.json`
lists the base's configuration and weight files under `base`; resume and export read the base
again, and refuse a different one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigtrain.errors import CheckpointError
from bigtrain.models.weights.checksums import FileSum, Sums, files_read_with, sum_of

BASE = "base"
_CONFIG = "config.json"


def fingerprint(weights: Sums) -> dict[str, dict[str, object]]:
    """Return the entry `base` of `state.json`. `weights`: checksums of the base's weight files by
    absolute path.

    Reads the `config.json` next to them. Raises ModelError if it cannot.
    """
    first = Path(next(iter(weights)))
    entries = {Path(name).name: known for name, known in weights.items()}
    entries[_CONFIG] = sum_of(first.with_name(_CONFIG))
    return {n: {"bytes": s.num_bytes, "xxh3": s.xxh3} for n, s in sorted(entries.items())}


def refuse_other_base(document: dict[str, Any], weights: Sums, directory: Path) -> None:
    """Compare the base named in a checkpoint's `state.json` (`document`) with the one read now.

    `weights`: as for `fingerprint`. `directory`: the checkpoint, for errors. Every rank may call
    it. Raises CheckpointError with all files that differ.
    """
    listed, current = document.get(BASE, {}), fingerprint(weights)
    different = [
        f"  {name}: {_text(listed.get(name))} there, {_text(current.get(name))} now"
        for name in sorted(listed.keys() | current.keys())
        # Tokenizer files only if they were listed: older releases did not list them.
        if (name in listed or name == _CONFIG or name.endswith(".safetensors"))
        and listed.get(name) != current.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{directory} has adapters of a base other than the current model.path -> restore its "
            "files, or set model.path to the directory that has them:\n" + "\n".join(different)
        )


def _text(entry: dict[str, object] | None) -> str:
    return "absent" if entry is None else f"{entry['bytes']} bytes, checksum {entry['xxh3']}"


def base_sums(files: tuple[Path, ...]) -> Sums:
    """Return checksums of the base's weight files, and of the files next to them that affect its
    numbers, by absolute path; read all of them on this rank.

    Raises ModelError if one cannot be read.
    """
    sums: dict[str, FileSum] = {
        str(path.absolute()): sum_of(path) for path in files_read_with(files)
    }
    return sums
