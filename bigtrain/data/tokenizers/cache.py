"""Disk cache of tokenizers loaded by transformers, so that later loads do not need transformers.

Importing transformers and loading cost each process of a tokenize job 6.4 s of CPU time
(transformers 5.23, two cores), more than tokenizing 100 MB. The result depends only on the
directory's files and the libraries' versions, so the first load stores in
`bigtrain.system.user_cache` its changes to ``tokenizer.json``, and the files that it would save. If
it changed the vocabulary or the merges, nothing is cached, and every load uses transformers.
"""

from __future__ import annotations

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
import xxhash

from bigtrain.system.hub_cache import cached_hub_file
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.storage.stores import WEIGHT_SUFFIXES
from bigtrain.system.user_cache import cache_get, cache_put, key_of, package_fingerprints, source_of

KIND = "tokenizers"
HUB_TIMEOUT_S = 10.0
BACKEND_FILE = "tokenizer.json"
LIBRARIES = (
    *("transformers", "tokenizers", "huggingface_hub"),
    # The class that loads a tokenizer depends on the libraries that are installed.
    *("mistral_common", "sentencepiece", "tiktoken", "protobuf"),
)
SUBFOLDER = "additional_chat_templates"
"""The only folder in a tokenizer's directory that transformers reads."""
MAX_FILE_BYTES = 1 << 28
"""Maximum size of a file that is read to detect changes."""
MAX_SAVED_BYTES = 1 << 20


@dataclass(frozen=True)
class CachedTokenizer:
    """Result of ``AutoTokenizer`` for a directory: `content` is its ``tokenizer.json``. `changes`:
    parts changed by loading; `files`: further files written by `save_pretrained`. `remark`: note of
    the load, for the log."""

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
        """``tokenizer.json`` of the loaded tokenizer, for `tokenizers`."""
        return _with_changes(self.content, self.changes)

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.backend_json)

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids` with special tokens; as transformers if `decodes_plainly`."""
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def save(self, directory: Path) -> None:
        for name, text in {**self.files, BACKEND_FILE: self.backend_json}.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")


def fingerprint(directory: Path, name: str) -> str | None:
    """Return the cache key of loading `directory` by `name`; None if its files cannot be read.
    Covers its files except weights, the name (transformers recognises some models by it), the
    versions of the libraries and the modules that load tokenizers."""
    try:
        parts: list[str | bytes] = [name, package_fingerprints(*LIBRARIES)]
        parts.append(source_of(*map(str, sorted(Path(__file__).parent.glob("*.py")))))
        folders = [folder for folder in (directory, directory / SUBFOLDER) if folder.is_dir()]
        paths = [path for folder in folders for path in sorted(folder.iterdir())]
        for path in paths:
            if not path.is_file() or path.name.endswith(WEIGHT_SUFFIXES):
                continue
            if path.stat().st_size > MAX_FILE_BYTES:
                return None
            parts += [path.relative_to(directory).as_posix(), path.read_bytes()]
    except (OSError, LookupError):
        return None
    return key_of(parts)


def get_cached_tokenizer(directory: Path, key: str) -> CachedTokenizer | None:
    """Return the cached tokenizer for `key`, the fingerprint of `directory`; None if not cached."""
    stored = cache_get(KIND, key)
    if stored is None:
        return None
    with suppress(OSError, TypeError):  # an edited entry
        return CachedTokenizer(content=(directory / BACKEND_FILE).read_bytes(), **stored)
    return None


def put_cached_tokenizer(
    directory: Path, key: str, huggingface: Any, facts: dict[str, Any], decodes_plainly: bool
) -> CachedTokenizer | None:
    """Cache the tokenizer that transformers loaded from `directory`. None if it has no
    ``tokenizer.json``, or transformers changed vocabulary or merges. `facts`: `hash`, `vocab_size`
    and `end_of_document_id`."""
    try:
        content = (directory / BACKEND_FILE).read_bytes()
        changes = _changes(content, json.loads(huggingface.backend_tokenizer.to_str()))
        # The files that `save_pretrained` writes next to `BACKEND_FILE`, if they are small text.
        with tempfile.TemporaryDirectory() as temporary:
            huggingface.save_pretrained(temporary)
            paths = {
                path.relative_to(temporary).as_posix(): path
                for path in Path(temporary).rglob("*")
                if path.is_file()
            }
            if paths.pop(BACKEND_FILE, None) is None:
                return None
            if sum(path.stat().st_size for path in paths.values()) > MAX_SAVED_BYTES:
                return None
            files = {name: path.read_bytes().decode("utf-8") for name, path in paths.items()}
    except Exception:  # a foreign tokenizer may raise anything; then it is not cached
        return None
    if changes is None:
        return None
    stored = {**facts, "decodes_plainly": decodes_plainly, "changes": changes, "files": files}
    cache_put(KIND, key, stored)
    return CachedTokenizer(content=content, **stored)


def _changes(content: bytes, loaded: dict[str, Any]) -> dict[str, Any] | None:
    """Return the parts and model settings of `loaded` that differ from the tokenizer in `content`.
    None if the vocabulary or the merges differ. Both are compared in the canonical form of
    `tokenizers`."""
    plain = _canonical(content.decode("utf-8"))
    changes = _differences(loaded, plain)
    if "model" in changes:
        changes["model"] = _differences(loaded["model"], plain["model"])
        if changes["model"].keys() & {"vocab", "merges"}:
            return None
    return changes if _canonical(_with_changes(content, changes)) == loaded else None


def _differences(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `new` that `old` does not have."""
    return {key: value for key, value in new.items() if value != old.get(key)}


def _canonical(text: str) -> dict[str, Any]:
    """Return a ``tokenizer.json`` as `tokenizers` writes it."""
    from tokenizers import Tokenizer

    tree: dict[str, Any] = json.loads(Tokenizer.from_str(text).to_str())
    return tree


def _with_changes(content: bytes, changes: dict[str, Any]) -> str:
    """Return the ``tokenizer.json`` `content` with `changes` in its parts, and in its model."""
    if not changes:
        return content.decode("utf-8")

    def changed(tree: dict[str, Any]) -> dict[str, Any]:
        return {**tree, **changes, "model": {**tree["model"], **changes.get("model", {})}}

    try:
        return orjson.dumps(changed(orjson.loads(content))).decode("utf-8")
    except (orjson.JSONDecodeError, TypeError):  # halves of surrogate pairs, very large numbers
        return json.dumps(changed(json.loads(content)))


SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")


def files_fingerprint(name: str) -> str | None:
    """Return the XXH3-64 of the tokenizer files in directory `name`, at an address, or of a Hub
    name in the local cache; None if there are none. Weights are skipped."""
    directory = Path(local_path(name, weights=False))
    if not directory.is_dir():
        cached = cached_hub_file(name, "tokenizer_config.json")
        if cached is None:
            return None
        directory = cached.parent
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
    """Return the first file in `folder` of a dataset that must not be copied, and why; None if
    none. A dataset may be untrusted: its links must not copy a file of this machine into a run
    directory, which may be shared. Links may point into the dataset, and, in a snapshot of the
    Hugging Face cache, to the blobs of the repository."""
    root = os.path.realpath(dataset)
    parents = Path(root).parents
    blobs = [str(parent.with_name("blobs")) for parent in parents if parent.name == "snapshots"]
    allowed_prefixes = tuple(parent + os.sep for parent in (root, *blobs[:1]))  # nearest snapshot
    for path in sorted([dataset / folder, *(dataset / folder).rglob("*")]):
        real = os.path.realpath(path)
        if not real.startswith(allowed_prefixes):
            return f"{path} is a link to {real}, outside of the dataset"
        if os.path.lexists(path) and not (os.path.isfile(real) or os.path.isdir(real)):
            return f"{path} is not a file"
    return None
