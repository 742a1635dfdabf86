"""The safetensors files that hold a model's weights, and the kinds of files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import PreTrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)

REWRITE = (
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained({source!r}, dtype='auto').save_pretrained('converted')\""
)


def weight_files(source: str, hf_config: PreTrainedConfig) -> list[Path]:
    """Return the files with weights, in the order transformers looks for them. Raises
    ValueError."""
    named = getattr(hf_config, "transformers_weights", None)
    names = (named,) if named else (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    path = next(filter(None, (find_file(source, name) for name in names)), None)
    if path is None:
        refuse_pickles(source)
        raise ValueError(f"holds none of {', '.join(names)}")
    if not path.name.endswith(".index.json"):
        _refuse_pickle(source, path)
        _refuse_second_set(path)
        return [path]
    shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
    paths = []
    for name in shards:
        shard = find_file(source, name)
        if shard is None:
            raise ValueError(f"{path}: names the file {name}, which is missing")
        paths.append(shard)
    for path in paths:
        _refuse_pickle(source, path)
    return paths


def _refuse_second_set(path: Path) -> None:
    """Raises ValueError for weights next to an index of other files, which transformers would
    ignore."""
    index = path.with_name(SAFE_WEIGHTS_INDEX_NAME)
    if path.name != SAFE_WEIGHTS_NAME or not index.is_file():
        return
    others = sorted(set(json.loads(index.read_text())["weight_map"].values()) - {path.name})
    if others:
        raise ValueError(
            f"{path} holds all weights, and {index} names {len(others)} other files for them, "
            f"{others[0]} first -> remove {path.name}, or the index and its files"
        )


def refuse_pickles(directory: str) -> None:
    """Raises ValueError for a directory with weights that only a pickle gives."""
    files = {path.name for path in Path(directory).glob("*")}
    if not files & {SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME}:
        for name in files & {WEIGHTS_NAME, WEIGHTS_INDEX_NAME}:
            _refuse_pickle(directory, Path(directory, name))


def _refuse_pickle(source: str, path: Path | None) -> None:
    """Raises ValueError for weights that only a pickle gives, which may run code as it is read."""
    if path is not None and path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is a pickle, which can run code when it is read -> convert it, if you trust "
            f"where it comes from: {REWRITE.format(source=source)}"
        )


def find_file(source: str, name: str) -> Path | None:
    """Return the file `name` of a directory, or of a model on the hub or in its cache; None without
    it."""
    if Path(source).is_dir():
        path = Path(source, name)
        return path if path.is_file() else None
    found = cached_file(source, name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
