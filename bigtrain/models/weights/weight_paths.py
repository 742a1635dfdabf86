"""Paths of the files with a model's weights. Imports no torch: `bigtrain check` uses it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

SAFE_WEIGHTS = "model.safetensors"
SAFE_INDEX = "model.safetensors.index.json"
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")

REWRITE = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained({source!r}, dtype='auto').save_pretrained('converted')\""
)


def weight_paths(
    source: str, listed: str | None, find_file: Callable[[str], Path | None]
) -> list[Path]:
    """Return the files with weights, in the order transformers looks for them.

    source: directory or Hub name. listed: ``transformers_weights`` of the model's config.json.
    find_file: returns a file of the model by its name, or None. Raises ValueError, also for a
    pickle.
    """
    names = (listed,) if listed else (SAFE_WEIGHTS, SAFE_INDEX)
    path = next(filter(None, map(find_file, names)), None)
    if path is None:
        refuse_pickles(source)
        fix = "a directory with weights, or a Hub name"
        raise ValueError(f"holds none of {', '.join(names)} -> {fix}")
    if not path.name.endswith(".index.json"):
        _refuse_pickle(source, path)
        # transformers would ignore an index of other files next to a file with all weights.
        index = path.with_name(SAFE_INDEX)
        if path.name == SAFE_WEIGHTS and index.is_file():
            indexed = set(json.loads(index.read_text())["weight_map"].values())
            if other_files := sorted(indexed - {path.name}):
                raise ValueError(
                    f"{path} holds all weights, and {index} names {len(other_files)} other files "
                    f"for them, {other_files[0]} first -> remove {path.name}, or the index and its "
                    "files"
                )
        return [path]
    paths = []
    for name in sorted(set(json.loads(path.read_text())["weight_map"].values())):
        shard = find_file(name)
        if shard is None:
            raise ValueError(f"{path}: names the file {name}, which is missing")
        paths.append(shard)
    for path in paths:
        _refuse_pickle(source, path)
    return paths


def refuse_pickles(directory: str) -> None:
    """Raise ValueError for a directory whose weights are only in a pickle."""
    files = {path.name for path in Path(directory).glob("*")}
    if not files & {SAFE_WEIGHTS, SAFE_INDEX}:
        for name in files & {*PICKLED_WEIGHTS}:
            _refuse_pickle(directory, Path(directory, name))


def _refuse_pickle(source: str, path: Path) -> None:
    """Raise ValueError for a pickle, which may run code when it is read."""
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is a pickle, which can run code when it is read -> convert it, if you trust "
            f"where it comes from: {REWRITE.format(source=source)}"
        )
