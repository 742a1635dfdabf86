"""Fields that transformers 4, vLLM, SGLang and llama.cpp read and transformers 5 no longer writes.

Without `rope_theta` and `rope_scaling` these readers silently compute with defaults. A key is
written only where transformers 5 itself reads the older form as the same parameters, so that both
forms in one file agree.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from bigtrain.models.weights.import_hf import quiet_transformers

ROPE = "rope_parameters"
_BASE_KEYS = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_LOCAL_BASE_KEYS = ("rope_local_base_freq", "local_rope_theta")
_PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
_SCALING = "rope_scaling"
LEGACY_ROPE_KEYS = (*_BASE_KEYS, *_LOCAL_BASE_KEYS, *_PARTIAL_KEYS, _SCALING)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_CLASS_OF_5, _CLASS_OF_4 = "TokenizersBackend", "PreTrainedTokenizerFast"


def complete_config(values: dict[str, Any], config: PreTrainedConfig) -> list[str]:
    """Add to the JSON `values` of a new configuration what older readers need. Every field of the
    configuration's own class, whose default may be another one there, and the keys for dtype and
    rotary embeddings. Returns a note for each part that has no older form."""
    full = config.to_dict()
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = {field.name for field in dataclasses.fields(type(config))} - shared
    for name in sorted(own | {"tie_word_embeddings", "bos_token_id", "eos_token_id"}):
        if name in full and not name.startswith("_"):
            values.setdefault(name, full[name])
    if "dtype" in values:
        values.setdefault("torch_dtype", values["dtype"])
    return add_legacy_keys(values)[1]


def add_legacy_keys(values: dict[str, Any], prefix: str = "") -> tuple[list[str], list[str]]:
    """Add the rotary keys of transformers 4 to the JSON `values` of a configuration, and to the
    configurations nested in it. Keys that exist stay. Returns the names of the added keys, and a
    note for each part that has no older form."""
    added: list[str] = []
    notes: list[str] = []
    for name, nested in values.items():
        if isinstance(nested, dict) and "model_type" in nested:
            more, of_nested = add_legacy_keys(nested, f"{prefix}{name}.")
            added += more
            notes += of_nested
    rope = values.get(ROPE)
    if not isinstance(rope, dict) or not rope:
        return added, notes
    if any(key in values for key in (*_BASE_KEYS, _SCALING)):
        return added, notes
    legacy = legacy_rope(values)
    if legacy is None:
        notes.append(
            f"{prefix}{ROPE} has no form that transformers 4 reads: load the model with "
            "transformers 5"
        )
        return added, notes
    values.update(legacy)
    return [*added, *(prefix + name for name in legacy)], notes


def legacy_rope(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the rotary keys of transformers 4 for a configuration's JSON `values` with
    `rope_parameters`; None if there are none that transformers 5 reads as the same parameters."""
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[str(model_type)]
    target = _rope_of(config_class, values)
    if target is None:
        return None
    plain = {k: v for k, v in values.items() if k != ROPE and k not in LEGACY_ROPE_KEYS}
    nested = _GLOBAL in target
    main = target[_GLOBAL] if nested else target
    if not isinstance(main, dict) or "rope_theta" not in main:
        return None
    legacy: dict[str, Any] = {}
    main_type = _GLOBAL if nested else None
    wanted: list[tuple[tuple[str, ...], dict[str, Any], str | None, str]] = [
        (_BASE_KEYS, main, main_type, "rope_theta")
    ]
    if nested and isinstance(target.get(_LOCAL), dict):
        wanted.append((_LOCAL_BASE_KEYS, target[_LOCAL], _LOCAL, "rope_theta"))
    if "partial_rotary_factor" in main:
        wanted.append((_PARTIAL_KEYS, main, main_type, "partial_rotary_factor"))
    scaling = {k: v for k, v in main.items() if k not in ("rope_theta", "partial_rotary_factor")}
    legacy[_SCALING] = scaling if set(scaling) - {"rope_type"} else None
    for keys, parameters, layer_type, field in wanted:
        key = _effective_key(config_class, plain | legacy, keys, layer_type, field)
        if key is not None:
            legacy[key] = parameters[field]
        elif keys is _BASE_KEYS:  # the others may be constants of the architecture
            return None
    alone = _rope_of(config_class, plain | copy.deepcopy(legacy))
    both = _rope_of(config_class, {**plain, ROPE: copy.deepcopy(values[ROPE]), **legacy})
    return legacy if alone == target == both else None


def _effective_key(
    config_class: type[PreTrainedConfig],
    plain: Mapping[str, Any],
    keys: Iterable[str],
    layer_type: str | None,
    field: str,
) -> str | None:
    """Return the first of `keys` that sets `field` of the class's rotary parameters."""
    unlikely = 0.375 if field == "partial_rotary_factor" else 123457.0
    for key in keys:
        rope = _rope_of(config_class, {**plain, key: unlikely})
        rope = rope.get(layer_type) if rope is not None and layer_type else rope
        if isinstance(rope, dict) and rope.get(field) == unlikely:
            return key
    return None


def _rope_of(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> Any:
    """Rotary parameters of a configuration made of `values`; None if the class refuses them."""
    with suppress(Exception), warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        made = config_class.from_dict(_with_floats(dict(values)))
        return made.to_dict().get(ROPE)
    return None


def _with_floats(value: Any) -> Any:
    """Return a JSON value with ``{"__float__": "Infinity"}`` of transformers 5, unread by
    `from_dict`, as floats."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    return [_with_floats(item) for item in value] if isinstance(value, list) else value


def rewrite_config(path: Path) -> list[str]:
    """Complete the configuration file that transformers 5 wrote for a new model (no base), which
    may be the language model's part of the run's. Returns notes as `complete_config`. Raises
    OSError."""
    values = json.loads(path.read_text(encoding="utf-8"))
    notes = complete_config(values, AutoConfig.from_pretrained(path, trust_remote_code=False))
    write_json(path, values)
    return [f"{CONFIG_NAME}: {note}" for note in notes]


def rewrite_tokenizer_config(directory: Path) -> None:
    """Name tokenizer class and additional special tokens as transformers 4 and 5 both read them.
    Raises OSError."""
    path = directory / _TOKENIZER_CONFIG
    if not path.is_file():
        return
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("tokenizer_class") == _CLASS_OF_5:
        values["tokenizer_class"] = _CLASS_OF_4
    if isinstance(values.get("extra_special_tokens"), list):  # transformers 4 takes an object only
        tokens = values.pop("extra_special_tokens")
        values.setdefault("additional_special_tokens", tokens)
    # transformers 4 adds token_type_ids by default, which few causal language models take.
    values.setdefault("model_input_names", ["input_ids", "attention_mask"])
    for key in ("backend", "is_local", "local_files_only"):  # how it was loaded here
        values.pop(key, None)
    write_json(path, values)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` as Hugging Face configuration files are written. Raises OSError."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
