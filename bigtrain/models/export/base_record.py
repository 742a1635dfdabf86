"""Record of a base model's directory except for trained values, since the base may be moved or
changed. An export writes the recorded files and tensors back unchanged.

Format of the directory: `files/`, the copied files; `tensors.json`, with `stored` (name: dtype),
`sources` (parameter: name of the equal stored tensor), `copies` (name: name of the repeated tensor)
and `omitted` (files that were not copied: reason); `unused.safetensors`, tensors that transformers
does not load.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from bigtrain.errors import ModelError
from bigtrain.models.configuration import (
    MTP_MARK,
    QUANTIZATION_KEYS,
    scores_samples,
)
from bigtrain.models.file_names import GENERATION_CONFIG
from bigtrain.models.left_overs import drop_quantization, left_over_reason
from bigtrain.models.weights.checksums import CHECKSUMS
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import LazyTensor
from bigtrain.models.weights.older_readers import (
    LEGACY_ROPE_KEYS,
    ROPE,
    add_legacy_keys,
    add_older_names,
    write_json,
)
from bigtrain.models.weights.weight_files import stored_tensors
from bigtrain.system.storage.local_path import local_path
from bigtrain.system.storage.stores import WEIGHT_SUFFIXES

BASE = "base"
"""Folder of a run directory with the record of its base."""

_FILES, _TENSORS, _UNUSED = "files", "tensors.json", "unused.safetensors"
_WEIGHTS = (
    *WEIGHT_SUFFIXES, ".onnx_data", ".ot", ".npz", ".ckpt", ".tflite", ".mlmodel", ".pt2", ".pte",
    ".distcp", ".nemo",
)  # fmt: skip
_MAX_FILE_BYTES = 256 << 20
_CARD, _BASE_CARD = "README.md", "BASE_README.md"
# Keys of a configuration that depend on the program that wrote or loaded it, not on the model.
_WRITER_KEYS = {
    "transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype", "architectures",
    *QUANTIZATION_KEYS, "_attn_implementation", "auto_map", MTP_MARK,
}  # fmt: skip


def record_base(source: str, weights: Weights, directory: Path) -> None:
    """Write the record of the model `source` (directory, address or hub name) into `directory`,
    unless `directory` contains a record. `weights`: the weights in `source`. Called by one process.
    Raises OSError."""
    if (directory / _TENSORS).is_file():
        return
    shutil.rmtree(directory, ignore_errors=True)
    (directory / _FILES).mkdir(parents=True)
    # Copy the small files.
    omitted: dict[str, str] = {}
    root = Path(local_path(source))
    if not root.is_dir():
        # `source` is a name on the hub. Where the hub is unreachable, the snapshot in the cache,
        # of which `weights` read files, may lack some of the small files.
        revision = weights.files[0].parent.name
        try:
            patterns = [f"*{ending}" for ending in _WEIGHTS]
            snapshot = snapshot_download(source, revision=revision, ignore_patterns=patterns)
            root = Path(snapshot)
        except Exception:  # offline, gated or unreachable: the client's errors differ by version
            root = weights.files[0].parent
    for path in sorted(root.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(root).as_posix()
        reason = _omission_reason(name, path, weights)
        if reason is None:  # not omitted
            target = directory / _FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        elif reason:
            omitted[name] = reason
    # Copy the tensors that transformers does not load, and list the tensors that it loads.
    unused = {name: tensor.read() for name, tensor in weights.unused().items()}
    if unused:
        save_file(unused, directory / _UNUSED, metadata={"format": "pt"})
    # A parameter made of several stored tensors has no single name in the base.
    sources = {name: names[0] for name, names in weights.sources().items() if len(names) == 1}
    tree = {
        "stored": {n: str(t.dtype).removeprefix("torch.") for n, t in weights.stored.items()},
        "sources": sources,
        "copies": dict(weights.copies),
        "omitted": omitted,
    }
    # This file is written last, since a directory without the file is not a record.
    (directory / _TENSORS).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def _omission_reason(name: str, path: Path, weights: Weights) -> str | None:
    """Return why file `name` of a base is not copied: empty for a reason that is not reported, None
    if the file is copied."""
    parts = name.split("/")
    if any(part.startswith(".") and part != ".gitattributes" for part in parts):
        return ""  # files of version control or a cache
    if name == CHECKSUMS:
        return ""  # an export writes a new list
    if path.is_dir():
        return "a link to a directory"
    if not path.is_file():
        return "a link to nothing" if path.is_symlink() else "no regular file"
    if path.name.endswith(_WEIGHTS):
        is_read = any(path.samefile(file) for file in weights.files)
        return "" if is_read else "weights in another file or format, not read"
    if (reason := left_over_reason(name)) is not None:
        return reason
    if path.stat().st_size > _MAX_FILE_BYTES:
        return f"larger than {_MAX_FILE_BYTES >> 20} MiB"
    return None


@dataclass(frozen=True)
class BaseRecord:
    """The record in `directory`, written by `record_base`."""

    directory: Path

    @staticmethod
    def find(directory: Path) -> BaseRecord | None:
        """Return the record in a run's `directory`, or None."""
        record = directory / BASE
        return BaseRecord(record) if (record / _TENSORS).is_file() else None

    @cached_property
    def _tree(self) -> dict[str, Any]:
        path = self.directory / _TENSORS
        try:
            tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error} -> restore it") from error
        return tree

    @property
    def files(self) -> Path:
        """Directory with the copied files of the base."""
        return self.directory / _FILES

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the tensors in the base's files, by name in the files."""
        return {name: getattr(torch, dtype) for name, dtype in self._tree["stored"].items()}

    @property
    def lowest_precision(self) -> str:
        """Name of the coarsest floating-point dtype that the base's tensors are stored in."""
        stored_dtypes = set(self._tree["stored"].values())
        return next(
            (dtype for dtype in ("bfloat16", "float16") if dtype in stored_dtypes), "float32"
        )

    def like_base(
        self,
        stored: Mapping[str, torch.Tensor],
        parameters: Mapping[str, torch.Tensor],
        *,
        keep_dtypes: bool,
        frozen: Collection[str] = (),
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Return `stored` tensors under the names of the base's files, with the base's copies and
        unused tensors, and notes on names that only the base or only the export has.

        `stored`: tensors by the names that transformers stores. `parameters`: the same tensors by
        the model's names. `keep_dtypes`: convert tensors to their dtypes in the base; otherwise
        convert only parameters named in `frozen`.
        """
        # Give the tensors the names and, where asked, the dtypes of the base's files.
        sources: dict[str, str] = self._tree["sources"]
        names_by_id = {id(tensor): sources[n] for n, tensor in parameters.items() if n in sources}
        frozen_names = {sources.get(name, name) for name in frozen}
        result: dict[str, torch.Tensor] = {}
        new_names, rounded_names = [], []
        for name, tensor in stored.items():
            base_name = name
            if name not in self._tree["stored"]:
                base_name = names_by_id.get(id(tensor), name)
            dtype = self.dtypes.get(base_name)
            if dtype is None:
                new_names.append(base_name)
            elif (keep_dtypes or base_name in frozen_names) and tensor.is_floating_point():
                if dtype == torch.float64:
                    rounded_names.append(base_name)
                tensor = tensor.to(dtype)
            result[base_name] = tensor
        # The base may contain a tensor under two names, and tensors that the model does not use.
        for copy_name, original_name in self._tree["copies"].items():
            if original_name in result:
                result.setdefault(copy_name, result[original_name])
            elif copy_name in result:
                result[original_name] = result[copy_name]
        unused = self.unused()
        result |= unused
        # Note what differs from the base.
        notes = []
        if unused:
            notes.append(
                f"tensors that transformers does not load are copied from the base, not trained: "
                f"{shortened(unused)}"
            )
        if rounded_names:
            notes.append(
                f"tensors of float64 hold numbers of float32, in which they were trained: "
                f"{shortened(rounded_names)}"
            )
        if new_names:
            notes.append(f"tensors that the base does not have: {shortened(new_names)}")
        if missing := self._tree["stored"].keys() - result.keys():
            notes.append(f"tensors of the base that have no counterpart: {shortened(missing)}")
        return result, notes

    def unused(self) -> dict[str, LazyTensor]:
        """Return the base's tensors that transformers does not load, as lazy tensors by name."""
        path = self.directory / _UNUSED
        return stored_tensors(path) if path.is_file() else {}

    def write_files(
        self, output: Path, hf_config: PreTrainedConfig, dtype: str | None
    ) -> list[str]:
        """Write the copied files of the base into the directory `output` of an export; the
        configuration is changed where the trained model's configuration (`hf_config`) differs.
        Return a note for every change. `dtype`: dtype of all tensors; None for the base's dtypes.
        Raises OSError."""
        notes = [f"{name}: not copied: {reason}" for name, reason in self._tree["omitted"].items()]
        if not (self.files / GENERATION_CONFIG).is_file():
            (output / GENERATION_CONFIG).unlink(missing_ok=True)  # made by `save_pretrained`
        for path in sorted(path for path in self.files.rglob("*") if path.is_file()):
            name = path.relative_to(self.files).as_posix()
            target = output / (_BASE_CARD if name == _CARD else name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            if name == _CARD:
                notes.append(f"{_CARD}: describes this model; the base's is {_BASE_CARD}")
        # The configuration, changed where the trained model's configuration differs.
        config_path = output / CONFIG_NAME
        raw = json.loads(config_path.read_text(encoding="utf-8"))
        base_config = AutoConfig.from_pretrained(self.files, trust_remote_code=False)
        changes = _apply_changes(raw, _json_values(base_config), _json_values(hf_config), "")
        if scores_samples(hf_config) and raw.get("architectures") != hf_config.architectures:
            changes.append(f"architectures = {hf_config.architectures}")
            raw["architectures"] = hf_config.architectures
        if removed := drop_quantization(raw):
            changes.append(f"{', '.join(removed)} removed: the tensors are not quantized")
        key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
        if dtype is not None and raw.get(key) != dtype:
            changes.append(f"{key} = {dtype!r} (base: {raw.get(key)!r})")
            raw[key] = dtype
        if dtype is not None:
            changes += _set_nested_dtypes(raw, dtype, "")
        added, missing = add_legacy_keys(raw)
        added += add_older_names(raw)
        if added:
            changes.append(f"added for readers of transformers 4: {', '.join(added)}")
        if changes:
            write_json(config_path, raw)
        notes += [f"{CONFIG_NAME}: {note}" for note in (*changes, *missing)]
        for path in sorted(output.glob("*.json")):
            notes += _drop_code_references(path, output)
        return notes


def _json_values(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys and values of `config` as a JSON file would have them."""
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return values


def _apply_changes(
    raw: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], prefix: str
) -> list[str]:
    """Set the keys in `raw`, the JSON of a configuration, that differ between configurations
    `before` and `after`; return a note for every key. `prefix`: of the keys in notes."""
    notes = []
    for key, value in after.items():
        value_before = before.get(key)
        if value == value_before or key in _WRITER_KEYS:
            continue
        if isinstance(value, dict) and isinstance(value_before, dict) and "model_type" in value:
            if not isinstance(raw.get(key), dict):
                raw[key] = dict(value_before)
            notes += _apply_changes(raw[key], value_before, value, f"{prefix}{key}.")
            continue
        if key == ROPE:  # legacy keys must agree with it; `add_legacy_keys` writes new ones
            for legacy_key in LEGACY_ROPE_KEYS:
                raw.pop(legacy_key, None)
        raw[key] = value
        notes.append(f"{prefix}{key} = {json.dumps(value)} (base: {json.dumps(value_before)})")
    return notes


def _set_nested_dtypes(values: dict[str, Any], dtype: str, prefix: str) -> list[str]:
    """Set the dtypes in configurations nested in the JSON `values`; return a note for every
    change. `prefix`: of the keys in notes."""
    notes = []
    for name, nested in values.items():
        if not isinstance(nested, dict) or "model_type" not in nested:
            continue
        for key in ("dtype", "torch_dtype"):
            if nested.get(key) not in (None, dtype):
                notes.append(f"{prefix}{name}.{key} = {dtype!r} (base: {nested[key]!r})")
                nested[key] = dtype
        notes += _set_nested_dtypes(nested, dtype, f"{prefix}{name}.")
    return notes


def _drop_code_references(path: Path, output: Path) -> list[str]:
    """Remove the `auto_map` entries of JSON file `path` whose code is not in the directory
    `output`; return a note if there are any."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return []
    if not isinstance(values, dict) or not isinstance(values.get("auto_map"), dict):
        return []
    missing = set()
    for name, reference in values["auto_map"].items():
        classes = reference if isinstance(reference, list) else [reference]
        # "REPOSITORY--FILE.CLASS" is code of another repository.
        modules = [str(c).split(".")[0] for c in classes if c and "--" not in str(c)]
        if not all((output / f"{module}.py").is_file() for module in modules):
            missing.add(name)
    if not missing:
        return []
    values["auto_map"] = {n: c for n, c in values["auto_map"].items() if n not in missing}
    if not values["auto_map"]:
        del values["auto_map"]
    write_json(path, values)
    return [f"{path.name}: auto_map without its code removed: {', '.join(sorted(missing))}"]


def shortened(names: Iterable[str]) -> str:
    """Return the first three of `names`, and the number of further names."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
