"""Of which base a checkpoint of adapters is: checksums of the base's files.

Such a checkpoint holds what is trained, and nothing of the weights beside it. Its `state.json`
lists, as `base`, configuration and weights of the base by file name; resume and export read the
base again, and refuse another one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigtrain.errors import CheckpointError
from bigtrain.models.weights.checksums import FileSum, Sums, sum_of

BASE = "base"
_CONFIG = "config.json"


def fingerprint(weights: Sums) -> dict[str, dict[str, object]]:
    """For `state.json`, of checksums by absolute path of the base's files of weights.

    Reads the `config.json` beside them. Raises ModelError where it cannot.
    """
    first = Path(next(iter(weights)))
    found = {Path(name).name: known for name, known in weights.items()}
    found[_CONFIG] = sum_of(first.with_name(_CONFIG))
    return {n: {"bytes": s.num_bytes, "xxh3": s.xxh3} for n, s in sorted(found.items())}


def refuse_other_base(document: dict[str, Any], weights: Sums, directory: Path) -> None:
    """Compare the base of a checkpoint, whose `state.json` is `document`, with one that was read.

    `weights`: as of `fingerprint`. `directory`: of the checkpoint, for errors. Every rank may call
    it. Raises CheckpointError with all files that differ.
    """
    listed, found = document.get(BASE, {}), fingerprint(weights)
    different = [
        f"  {name}: {_text(listed.get(name))} there, {_text(found.get(name))} now"
        for name in sorted(listed.keys() | found.keys())
        if listed.get(name) != found.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{directory} holds adapters of another base than model.path names now -> restore its "
            "files, or name the directory that has them:\n" + "\n".join(different)
        )


def _text(entry: dict[str, object] | None) -> str:
    return "absent" if entry is None else f"{entry['bytes']} bytes, checksum {entry['xxh3']}"


def base_sums(files: tuple[Path, ...]) -> Sums:
    """Checksums of the base's files of weights by absolute path; reads all of them in one process.

    Raises ModelError where one cannot be read.
    """
    sums: dict[str, FileSum] = {str(path.absolute()): sum_of(path) for path in files}
    return sums
