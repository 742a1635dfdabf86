"""Disk cache of tokenizers that transformers has loaded, so that later loads need no transformers.

Importing transformers and loading cost each process of a tokenize job 6.4 s of CPU time
(transformers 5.23, two cores), more than tokenizing 100 MB. The result is a function of the
directory's files and of the libraries' versions, so the first load stores in
`bigtrain.system.user_cache` what it changed in ``tokenizer.json``, and the files it would save. If
it changed the vocabulary or the merges, nothing is cached, and every load uses transformers.

Checks whether a tokenizer's files are those a dataset was made with, without loading it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import xxhash

from bigtrain.system.storage.copies import WEIGHT_SUFFIXES, local_path
from bigtrain.system.user_cache import cache_get, cache_put, key_of, package_fingerprints, source_of

KIND = "tokenizers"
BACKEND_FILE = "tokenizer.json"
LIBRARIES = (
    *("transformers", "tokenizers", "huggingface_hub"),
    # What is installed of these decides which class loads a tokenizer.
    *("mistral_common", "sentencepiece", "tiktoken", "protobuf"),
)
SUBFOLDER = "additional_chat_templates"
"""The only folder in a tokenizer's directory that transformers looks into."""
MAX_FILE_BYTES = 1 << 28
"""Of one file that is read to tell whether it changed."""
MAX_SAVED_BYTES = 1 << 20


@dataclass(frozen=True)
class CachedTokenizer:
    """What ``AutoTokenizer`` made of a directory: `content` is its ``tokenizer.json``.

    `changes` are the parts that loading changed, `files` what `save_pretrained` writes besides.
    `remark`: what loading had to say, for the log.
    """

    hash: str
    vocab_size: int
    end_of_document_id: int
    decodes_plainly: bool
    changes: dict[str, Any]
    files: dict[str, str]
    content: bytes
    remark: str = ""

    @cached_property
    def backend_json(self) -> str:
        """Of the loaded tokenizer, for `tokenizers`."""
        return _with_changes(self.content, self.changes)

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.backend_json)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens included; as transformers' where it `decodes_plainly`."""
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        for name, text in {**self.files, BACKEND_FILE: self.backend_json}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")


def fingerprint(directory: Path, name: str) -> str | None:
    """Return the cache key of loading `directory` by `name`; None if its files cannot be read.

    Covers its files except weights, the name (transformers knows some models by it), the versions
    of the libraries and the modules that load tokenizers.
    """
    try:
        parts: list[str | bytes] = [name, package_fingerprints(*LIBRARIES), _own_source()]
        for path in _files(directory):
            if path.stat().st_size > MAX_FILE_BYTES:
                return None
            parts += [path.relative_to(directory).as_posix(), path.read_bytes()]
    except (OSError, LookupError):
        return None
    return key_of(parts)


def _own_source() -> bytes:
    return source_of(*map(str, sorted(Path(__file__).parent.glob("*.py"))))


def get_cached_tokenizer(directory: Path, key: str) -> CachedTokenizer | None:
    """Return the cached tokenizer for `key`, the fingerprint of `directory`; None if there is
    none."""
    fact = cache_get(KIND, key)
    if fact is None:
        return None
    with suppress(OSError, TypeError):  # an entry that someone edited is none
        return CachedTokenizer(content=(directory / BACKEND_FILE).read_bytes(), **fact)
    return None


def put_cached_tokenizer(
    directory: Path, key: str, huggingface: Any, facts: dict[str, Any], decodes_plainly: bool
) -> CachedTokenizer | None:
    """Cache what transformers loaded from `directory`.

    None if it has no ``tokenizer.json``, or transformers changed vocabulary or merges. `facts`:
    `hash`, `vocab_size` and `end_of_document_id`.
    """
    try:
        content = (directory / BACKEND_FILE).read_bytes()
        changes = _changes(content, json.loads(huggingface.backend_tokenizer.to_str()))
        files = _saved_files(huggingface)
    except Exception:  # whatever a foreign tokenizer raises: it is not cached then
        return None
    if changes is None or files is None:
        return None
    fact = {**facts, "decodes_plainly": decodes_plainly, "changes": changes, "files": files}
    cache_put(KIND, key, fact)
    return CachedTokenizer(content=content, **fact)


def _files(directory: Path) -> Iterator[Path]:
    for folder in (directory, directory / SUBFOLDER):
        if folder.is_dir():
            for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
                if entry.is_file() and not entry.name.endswith(WEIGHT_SUFFIXES):
                    yield Path(entry.path)


def _changes(content: bytes, loaded: dict[str, Any]) -> dict[str, Any] | None:
    """What differs in `loaded` from the tokenizer in `content`: parts, and settings of the model.

    None where the vocabulary or the merges differ. Compared as `tokenizers` itself reads and
    writes both.
    """
    plain = _normal(content.decode("utf-8"))
    changes = _differences(loaded, plain)
    if "model" in changes:
        changes["model"] = _differences(loaded["model"], plain["model"])
        if changes["model"].keys() & {"vocab", "merges"}:
            return None
    return changes if _normal(_with_changes(content, changes)) == loaded else None


def _differences(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in new.items() if value != old.get(key)}


def _normal(text: str) -> dict[str, Any]:
    from tokenizers import Tokenizer

    tree: dict[str, Any] = json.loads(Tokenizer.from_str(text).to_str())
    return tree


def _with_changes(content: bytes, changes: dict[str, Any]) -> str:
    if not changes:
        return content.decode("utf-8")

    def changed(tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, **changes, "model": {**tree["model"], **changes.get("model", {})}}

    try:
        return orjson.dumps(changed(orjson.loads(content))).decode("utf-8")
    except (orjson.JSONDecodeError, TypeError):  # halves of surrogate pairs, very large numbers
        return json.dumps(changed(json.loads(content)))


def _saved_files(huggingface: Any) -> dict[str, str] | None:
    """What `save_pretrained` writes beside `BACKEND_FILE`; None where that is not small text."""
    with tempfile.TemporaryDirectory() as temporary:
        huggingface.save_pretrained(temporary)
        paths = [path for path in Path(temporary).rglob("*") if path.is_file()]
        names = {path.relative_to(temporary).as_posix(): path for path in paths}
        if names.pop(BACKEND_FILE, None) is None:
            return None
        if sum(path.stat().st_size for path in names.values()) > MAX_SAVED_BYTES:
            return None
        return {name: path.read_bytes().decode("utf-8") for name, path in names.items()}


SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


def files_fingerprint(name: str) -> str | None:
    """XXH3-64 of the files in directory `name`, or of that hub name in the local cache, or at an
    address.

    None if there are none. Weights in the same directory are skipped.
    """
    directory = Path(local_path(name, weights=False))
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
    """Return what in `folder` of a dataset must not be copied, and why; None if all may be.

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
