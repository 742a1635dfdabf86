"""The small files of a model's directory, and checksums of the files that an export wrote or a run
read.

An export lists its files in `checksums.json`, as ``{file name: {"bytes": size, "xxh3": XXH3-64}}``.
A run records the checksums of the base in `base_model.json`, by absolute path, for comparison at
later launches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import ModelError
from bigtrain.models.file_names import ADAPTER_CONFIG, GENERATION_CONFIG
from bigtrain.settings.sections.sites import ONE_SITE
from bigtrain.system.files import file_checksum, write_whole

TOKEN_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "tekken.json",
    "sentencepiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
"""Files of a model's directory that decide which tokens a text has."""
TOKENIZER_FILES = (*TOKEN_FILES, "chat_template.jinja", "chat_template.json")
"""Files of a model's directory that only its tokenizer reads."""


CHECKSUMS = "checksums.json"
MODEL_CARD = "README.md"
_DECIDING = ("config.json", "model.safetensors.index.json", *TOKEN_FILES)
BASE_MODEL = "base_model.json"


@dataclass(frozen=True)
class FileSum:
    """Size in bytes and XXH3-64 of a file, as 16 hexadecimal digits."""

    num_bytes: int
    xxh3: str


Sums = Mapping[str, FileSum]


def sum_of(path: Path) -> FileSum:
    """Return size and checksum of a file, which is read completely. Raises ModelError if it cannot
    be read."""
    try:
        return FileSum(path.stat().st_size, file_checksum(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def write_sums(path: Path, sums: Sums) -> None:
    """Write a list of checksums. Raises OSError."""
    tree = {name: {"bytes": s.num_bytes, "xxh3": s.xxh3} for name, s in sorted(sums.items())}
    write_whole(path, (json.dumps(tree, indent=2) + "\n").encode())


def read_sums(path: Path) -> Sums:
    """Read the list of `write_sums`; empty without a file. Raises ModelError if the file cannot be
    read."""
    try:
        tree = json.loads(path.read_bytes())
        return {name: FileSum(int(s["bytes"]), str(s["xxh3"])) for name, s in tree.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error} -> restore it, or remove it") from error


def differences(actual: Sums, listed: Sums, list_path: Path) -> list[str]:
    """Return how `actual` files differ from the files `listed` in `list_path`."""
    return [
        f"{name} has {file_sum.num_bytes} bytes and checksum {file_sum.xxh3}; {list_path} lists "
        f"{listed[name].num_bytes} and {listed[name].xxh3}"
        for name, file_sum in sorted(actual.items())
        if name in listed and file_sum != listed[name]
    ]


def corrupt_weights(directory: Path) -> tuple[int, list[str]]:
    """Return the number of files in `checksums.json` of a model's directory, and the corrupt files.
    Raises ModelError without a list."""
    listed = read_sums(directory / CHECKSUMS)
    if not listed:
        raise ModelError(
            f"{directory} has no {CHECKSUMS}, which `bigtrain export` writes -> nothing tells "
            "whether its files are corrupt"
        )
    sums = {name: sum_of(directory / name) for name in listed}
    return len(listed), differences(sums, listed, directory / CHECKSUMS)


def is_of_one_site(directory: Path) -> bool:
    """Return whether an export has weights of one site of a run of several sites, by its card."""
    card = directory / MODEL_CARD
    return card.is_file() and ONE_SITE in card.read_text(encoding="utf-8", errors="replace")


def write_checksums(directory: Path) -> None:
    """Write `checksums.json` of an export with all its files, also in subfolders, except for the
    README and the list. Reads every file."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    names = [file.relative_to(directory).as_posix() for file in files]
    sums = {name: sum_of(directory / name) for name in names if name not in (CHECKSUMS, MODEL_CARD)}
    write_sums(directory / CHECKSUMS, sums)


def files_read_with(weights: Iterable[Path]) -> list[Path]:
    """Return the weight files of a model's directory, and the small files next to them on which the
    model's results depend: configuration, index of the weights, tokenizer."""
    weights = list(weights)
    return [*weights, *_deciding_files(weights[0].parent)]


def _deciding_files(directory: Path) -> list[Path]:
    return [directory / name for name in _DECIDING if (directory / name).is_file()]


def changed_files(directory: Path, run: Path) -> list[str]:
    """Return `changes_of` the small files on which a model's results depend. Weights are compared
    where they are read. Raises ModelError if a list cannot be read."""
    files = [path.absolute() for path in _deciding_files(directory)]
    return changes_of({str(path): sum_of(path) for path in files}, directory, run)


def changes_of(sums: Sums, directory: Path, run: Path) -> list[str]:
    """Return how files of the model in `directory` differ from its `checksums.json`, and from the
    files that the first launch of the run in `run` read. `sums`: by absolute path. Raises
    ModelError if a list cannot be read."""
    by_name = {Path(path).name: checksum for path, checksum in sums.items()}
    export_list, launch_list = directory / CHECKSUMS, run / BASE_MODEL
    return [
        *differences(by_name, read_sums(export_list), export_list),
        *differences(sums, read_sums(launch_list), launch_list),
    ]


def unusable_files(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield each fault of the files in a base's `directory`, and how to correct it."""
    if (directory / ADAPTER_CONFIG).exists():
        yield (
            f"{ADAPTER_CONFIG} is in the same directory: transformers loads the adapter's own base "
            "with the adapter from such a directory, not these weights",
            f"move {ADAPTER_CONFIG} and the adapter's weights out of it; to train the merged "
            "model, merge them first (peft: merge_and_unload, save_pretrained)",
        )
    path = directory / GENERATION_CONFIG
    if path.is_file() and (fault := _generation_fault(path)) is not None:
        yield f"{GENERATION_CONFIG}: {fault}", f"correct {path}, or remove it"


def _generation_fault(path: Path) -> str | None:
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"cannot be read as JSON: {error}"
    if not isinstance(settings, dict):
        return "must be a JSON object"
    ends = settings.get("eos_token_id")
    if ends is None:
        return None
    listed = ends if isinstance(ends, list) else [ends]
    if any(isinstance(end_id, bool) or not isinstance(end_id, int) for end_id in listed):
        return f"eos_token_id = {ends!r} must be the id of a token, or a list of ids"
    return None
