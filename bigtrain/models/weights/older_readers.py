"""Fields that transformers 4, vLLM, SGLang and llama.cpp read and transformers 5 no longer writes.

Without `rope_theta` and `rope_scaling` these readers silently compute with defaults. A key is
written only if transformers 5 reads the same parameters from the older form, so that both forms in
a file agree.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from bigtrain.models.left_overs import drop_quantization
from bigtrain.models.weights.import_hf import quiet_transformers

ROPE = "rope_parameters"
_BASE_KEYS = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_LOCAL_BASE_KEYS = ("rope_local_base_freq", "local_rope_theta")
_PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct")
_SCALING = "rope_scaling"
LEGACY_ROPE_KEYS = (*_BASE_KEYS, *_LOCAL_BASE_KEYS, *_PARTIAL_KEYS, _SCALING)
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
RENAMED_FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("qwen3_moe", "qwen3_omni_moe_talker_text", "qwen3_vl_moe_text"), ("num_experts",)
    ),
    "xlm": ("bos_index", "eos_index", "pad_index"),
    "mllama_vision_model": ("num_attention_heads",),
    "vipllava": ("vision_feature_layers",),
}
"""By model type, the names in transformers 4.57 of fields that transformers 5 writes only under
another name: aliases in `attribute_map` (tests/parity/test_older_readers.py compares all
classes)."""

_LAYER_TYPE_FIELDS = {
    "granitemoehybrid": "layer_types",
    "zamba": "layers_block_type",
    "zamba2": "layers_block_type",
}
"""Fields with the types of layers, by model type."""
_LAYER_TYPES = {"linear_attention": "mamba", "full_attention": "attention"}
"""Names in transformers 4.57 of types of layers in `_LAYER_TYPE_FIELDS`, by the name in 5, which
reads both."""

_SCALING_FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("phi3", "phi4_multimodal"), ("type", "short_factor", "long_factor")),
    **dict.fromkeys(("chameleon", "fuyu", "olmo", "olmo2"), ("type", "factor")),
}
"""All fields of ``rope_scaling`` by model type, where the class in transformers 4.57 refuses any
other number of fields."""

NOT_IN_4 = frozenset({
    "bigbird_pegasus", "cpmant", "dbrx", "fuyu", "gemma3n_text", "got_ocr2", "recurrent_gemma",
    "reformer",
})  # fmt: skip
"""Model types for which transformers 4.57 refuses every configuration that 5 reads, or computes
other logits with the same configuration and weights."""

_TOKENIZER_CONFIG = "tokenizer_config.json"
_SHARED_FIELDS = {field.name for field in dataclasses.fields(PreTrainedConfig)}
_SHARED_KEYS = _SHARED_FIELDS | PreTrainedConfig().to_dict().keys()
_TOKENIZER_CLASS_OF_5, _TOKENIZER_CLASS_OF_4 = "TokenizersBackend", "PreTrainedTokenizerFast"


def complete_config(values: dict[str, Any], config: PreTrainedConfig) -> list[str]:
    """Add to the JSON `values` of a new configuration the fields that older readers need: fields of
    the class, whose default may differ in an older version, and keys for dtype and rotary
    embeddings. Return a note for every part without an older form."""
    all_values = config.to_dict()
    class_fields = {field.name for field in dataclasses.fields(type(config))} - _SHARED_FIELDS
    for name in sorted(class_fields | {"tie_word_embeddings", "bos_token_id", "eos_token_id"}):
        if name in all_values and not name.startswith("_"):
            values.setdefault(name, all_values[name])
    if "dtype" in values:
        values.setdefault("torch_dtype", values["dtype"])
    add_older_names(values)
    _, notes = add_legacy_keys(values)
    if values.get("model_type") in NOT_IN_4:
        notes.append(
            f"transformers 4.57 refuses a {values['model_type']} that transformers 5 wrote, or "
            "computes other logits: load the model with transformers 5"
        )
    if values.get("model_type") in ("zamba", "zamba2"):
        # The class of transformers 4.57 computes these fields from other fields
        # (models/zamba/configuration_zamba.py and models/zamba2/configuration_zamba2.py).
        attention_size = 2 * values["hidden_size"]
        head_size = attention_size // values["num_attention_heads"]
        computed_fields = {"attention_hidden_size": attention_size, "attention_head_dim": head_size}
        for name, computed in computed_fields.items():
            if values.get(name, computed) != computed:
                notes.append(
                    f"{name} = {values[name]}: transformers 4.57 computes {computed} and does not "
                    "read the file's: load the model with transformers 5"
                )
    return notes


def add_older_names(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Change the JSON `values` of a configuration and its nested configurations for transformers
    4.57: add fields under their older names, rewrite layer types to their older names and infinite
    numbers to Python's JSON, and delete fields of the base class from a part without a type. Return
    the names of the fields that were added or rewritten. `prefix`: of the returned names."""
    changed: list[str] = []
    model_type = str(values.get("model_type"))
    if model_type in CONFIG_MAPPING:
        aliases = CONFIG_MAPPING[model_type].attribute_map
        for name in RENAMED_FIELDS.get(model_type, ()):
            if aliases[name] in values and name not in values:
                values[name] = values[aliases[name]]
                changed.append(prefix + name)
    layers_field = _LAYER_TYPE_FIELDS.get(model_type)
    for name, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            if not value["model_type"]:  # 4.57's classes for untyped parts refuse shared fields
                for shared_key in _SHARED_KEYS & value.keys():
                    del value[shared_key]
            changed += add_older_names(value, f"{prefix}{name}.")
            continue
        older_value = _with_floats(value)
        if name == layers_field and isinstance(value, list):
            older_value = [_LAYER_TYPES.get(layer_type, layer_type) for layer_type in value]
        if older_value != value:
            values[name] = older_value
            changed.append(prefix + name)
    return changed


def add_legacy_keys(values: dict[str, Any], prefix: str = "") -> tuple[list[str], list[str]]:
    """Add the rotary keys of transformers 4 to the JSON `values` of a configuration and its nested
    configurations; a part with such keys stays as it is. Return the names of the added keys, and a
    note for every part without an older form. `prefix`: of returned names and of names in notes."""
    added: list[str] = []
    notes: list[str] = []
    for name, nested in values.items():
        if isinstance(nested, dict) and "model_type" in nested:
            nested_added, nested_notes = add_legacy_keys(nested, f"{prefix}{name}.")
            added += nested_added
            notes += nested_notes
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
    `rope_parameters`; None if transformers 5 would not read the keys as these parameters."""
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[str(model_type)]
    target = _read_rope(config_class, values)
    if target is None:
        return None
    without_rope = {k: v for k, v in values.items() if k != ROPE and k not in LEGACY_ROPE_KEYS}
    # Some models have different parameters for layers with local attention.
    has_layer_types = _GLOBAL in target
    main_type = _GLOBAL if has_layer_types else None
    main = target[_GLOBAL] if has_layer_types else target
    if not isinstance(main, dict) or "rope_theta" not in main:
        return None
    # The rotary parameters that are keys of their own in transformers 4.
    rope_fields = [_RopeField("rope_theta", main["rope_theta"], main_type, _BASE_KEYS)]
    if has_layer_types and isinstance(target.get(_LOCAL), dict):
        local_base = target[_LOCAL].get("rope_theta")
        rope_fields.append(_RopeField("rope_theta", local_base, _LOCAL, _LOCAL_BASE_KEYS))
    if "partial_rotary_factor" in main:
        factor = main["partial_rotary_factor"]
        rope_fields.append(_RopeField("partial_rotary_factor", factor, main_type, _PARTIAL_KEYS))
    # All further parameters are fields of the scaling.
    scaling = {k: v for k, v in main.items() if k not in ("rope_theta", "partial_rotary_factor")}
    legacy: dict[str, Any] = {_SCALING: scaling if set(scaling) - {"rope_type"} else None}
    accepted_fields = _SCALING_FIELDS.get(str(model_type))
    if legacy[_SCALING] is not None and accepted_fields is not None:
        typed_scaling = {"type": scaling["rope_type"], **scaling}
        if not set(accepted_fields) <= typed_scaling.keys():
            return None
        legacy[_SCALING] = {name: typed_scaling[name] for name in accepted_fields}
    for rope_field in rope_fields:
        # A class may accept the key only with the scaling, or the scaling only with a later key.
        key = _key_that_sets(config_class, without_rope | legacy, rope_field)
        key = key or _key_that_sets(config_class, without_rope, rope_field)
        if key is not None:
            legacy[key] = rope_field.value
        elif rope_field.keys is _BASE_KEYS:  # further fields may be constants of the architecture
            return None
    # transformers 5 has to read the legacy keys, with and without the new form, as the target.
    with_both = {**without_rope, ROPE: copy.deepcopy(values[ROPE]), **legacy}
    read_from_legacy = _read_rope(config_class, without_rope | copy.deepcopy(legacy))
    read_from_both = _read_rope(config_class, with_both)
    return legacy if read_from_legacy == target == read_from_both else None


class _RopeField(NamedTuple):
    """Field `name` of the rotary parameters of layers of `layer_type` (None: all layers), with
    `value`. keys: possible keys of the configuration in transformers 4."""

    name: str
    value: Any
    layer_type: str | None
    keys: tuple[str, ...]


def _key_that_sets(
    config_class: type[PreTrainedConfig], values: Mapping[str, Any], field: _RopeField
) -> str | None:
    """Return the first of ``field.keys`` that sets `field` in a configuration of the class with
    `values`; None if none does."""
    probe = 0.375 if field.name == "partial_rotary_factor" else 123457.0  # an unlikely value
    for key in field.keys:
        rope = _read_rope(config_class, {**values, key: probe})
        if rope is not None and field.layer_type is not None:
            rope = rope.get(field.layer_type)
        if isinstance(rope, dict) and rope.get(field.name) == probe:
            return key
    return None


def _read_rope(config_class: type[PreTrainedConfig], values: Mapping[str, Any]) -> Any:
    """Return the rotary parameters that `config_class` reads from `values`; None if the class
    refuses `values`."""
    with suppress(Exception), warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        config = config_class.from_dict(_with_floats(dict(values)))
        rope = config.to_dict().get(ROPE)
        if isinstance(rope, dict) and "rope_type" in rope:
            rope.pop("type", None)  # the older name of `rope_type`
        return rope
    return None


def _with_floats(value: Any) -> Any:
    """Return JSON `value` with floats for objects ``{"__float__": "Infinity"}``, which transformers
    5 writes and `from_dict` does not convert."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    return value


def rewrite_config(path: Path) -> list[str]:
    """Complete the configuration file that transformers 5 wrote for a new model (no base), which
    may contain only the language model's part. Return notes as `complete_config`. Raises
    OSError."""
    values = json.loads(path.read_text(encoding="utf-8"))
    notes = complete_config(values, AutoConfig.from_pretrained(path, trust_remote_code=False))
    if removed := drop_quantization(values):
        notes.append(f"{', '.join(removed)} removed: the tensors are not quantized")
    write_json(path, values)
    return [f"{CONFIG_NAME}: {note}" for note in notes]


def rewrite_tokenizer_config(directory: Path, *, is_base: bool = False) -> list[str]:
    """Write tokenizer class and additional special tokens in the form that both transformers 4 and
    5 read; return the names of the changed fields. `is_base`: the file is from a base, and stays
    unless transformers 4 refuses the file. Raises OSError."""
    path = directory / _TOKENIZER_CONFIG
    if not path.is_file():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    values = dict(before)
    if values.get("tokenizer_class") == _TOKENIZER_CLASS_OF_5:
        values["tokenizer_class"] = _TOKENIZER_CLASS_OF_4
    if isinstance(values.get("extra_special_tokens"), list):  # transformers 4 takes an object only
        tokens = values.pop("extra_special_tokens")
        values.setdefault("additional_special_tokens", tokens)
    if is_base and values == before:  # transformers 4 accepts the file
        return []
    # transformers 4 adds token_type_ids by default, which few causal language models take.
    values.setdefault("model_input_names", ["input_ids", "attention_mask"])
    # transformers 5 saves how the run loaded the tokenizer.
    for key in ("backend", "is_local", "local_files_only"):
        values.pop(key, None)
    write_json(path, values)
    return sorted(k for k in before.keys() | values.keys() if before.get(k) != values.get(k))


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write `values` in the layout of Hugging Face's configuration files. Raises OSError."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
