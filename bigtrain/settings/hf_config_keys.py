"""Checks of a Hugging Face model configuration, and the dimensions that rules need, without
transformers.

Pure: importing transformers takes seconds, `bigtrain check` a fraction of a second. The table next
to this module has the keys of every causal LM; ``tools/hf_config_keys.py`` writes it from
transformers. Whatever is refused here, the model's configuration class would refuse too. With
another release of transformers than the table's, unknown keys are left to that class.
"""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bigtrain.errors import Problem
from bigtrain.settings.degrees import largest_divisor
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.hub_cache import cached_hub_file, is_hub_name
from bigtrain.system.shipped_files import published_configuration
from bigtrain.system.storage.stores import is_address

_JSON_TYPES: dict[str, type] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": list,
    "object": dict,
    "null": type(None),
}
_DIMENSION_KEYS = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that architectures have for the number of experts of a layer."""
CHOSEN_EXPERTS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
)
"""Names that architectures have for the number of experts that a token is routed to."""
_MTP_LAYERS = "num_mtp_layers"
HEAD_PROJECTIONS = frozenset(("q_proj", "query_key_value", "q_b_proj", "kv_b_proj"))
"""Projections whose outputs, for all query heads, tensor parallelism divides; q_b_proj and
kv_b_proj belong to attention with low-rank queries and key-values."""
KEY_HEAD_PROJECTIONS = frozenset(("k_proj",))
_POSITIVE_KEYS = (*_DIMENSION_KEYS, "vocab_size", "hidden_size", "intermediate_size")
TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys with the ids of tokens that begin and end texts, and pad them."""
MAX_PADDING_ROWS = 1024
"""Rows of an embedding beyond the tokenizer's vocabulary: it is padded to multiples of at most
this for speed and tensor parallelism; more indicates a different tokenizer."""
_LAYER_DROP = re.compile(r"layer_?drop(?!out)", re.IGNORECASE)  # not layer_dropout, a dropout rate
_NO_OVERRIDES: Mapping[str, Any] = {}
_NAME_A_MODEL = "name a directory of a Hugging Face model, or a model of the hub"
_MERGE = "the model with its adapters merged in: `bigtrain export --merge` of the adapters' run"


@dataclass(frozen=True)
class ModelDimensions:
    """Dimensions of a model, known before it is built; None if unknown.

    cut_heads, cut_key_heads: query and key-value heads, if tensor-parallel ranks divide them.
    has_tensor_plan: transformers has a tensor-parallel plan for its layers.
    num_experts: routed experts of a layer. num_mtp_layers: layers for multi-token prediction that
    transformers builds for the architecture. unused_positions: rows of max_position_embeddings
    before the position of the first token.
    """

    num_attention_heads: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    cut_heads: int | None = None
    cut_key_heads: int | None = None
    has_tensor_plan: bool | None = None
    num_experts: int | None = None
    num_mtp_layers: int | None = None
    unused_positions: int | None = None

    @property
    def num_positions(self) -> int | None:
        """Tokens of the longest sample; None if unknown."""
        num_rows = self.max_position_embeddings
        return None if num_rows is None else num_rows - (self.unused_positions or 0)


@functools.cache
def key_table() -> Mapping[str, Any]:
    """Return the table: ``transformers_version`` and ``model_types``.

    Each type has ``module``, ``keys`` (with JSON types, joined by ``|``; empty: any),
    ``aliases``, ``defaults`` (null: the class computes the value), ``cut`` (dimensions that
    tensor-parallel ranks shard; null: transformers has no plan), and ``positions_after`` (the
    default padding id, if position numbers begin after the padding id)."""
    path = Path(__file__).with_name("hf_config_keys.json")
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def inspect_configuration(section: ModelSection) -> tuple[ModelDimensions, list[Problem]]:
    """Return the dimensions of the run's model, and every problem of its model section.

    A hub name, which may have to be downloaded, is only known if its configuration ships with the
    recipes or is in the Hub's cache.
    """
    problems: list[Problem] = []
    configuration: Mapping[str, Any]
    model_types = key_table()["model_types"]

    # Read the configuration, and check that transformers has a causal LM of the type, unless
    # model.type names a class of the user, which defines the type.
    if isinstance(section.config, dict):
        label, configuration = "model.config", section.config
        model_type = configuration.get("model_type")
        if not section.type and model_type not in model_types and _table_matches_installed():
            close = difflib.get_close_matches(str(model_type), model_types, n=3)
            remedy = f"did you mean {' or '.join(close)}?" if close else ""
            rule = "unknown type of causal LM in transformers"
            problems.append(Problem("model.config.model_type", model_type, rule, remedy))
    else:
        label, configuration, problems = _read_configuration(section)
        if configuration and not section.type:
            key = "model.path" if section.path is not None else "model.config"
            if configuration.get("model_type") not in model_types and _table_matches_installed():
                problems.append(not_causal(configuration, key, str(section.path or section.config)))

    # Check the keys that the run sets; the keys of a config.json are the model's own.
    values = {**configuration, **section.overrides}
    model_type = values.get("model_type")
    type_entry = model_types.get(model_type) if isinstance(model_type, str) else None
    if isinstance(section.config, dict):
        problems += _check_values(section.config, "model.config", model_type, type_entry)
    problems += _check_values(section.overrides, "model.overrides", model_type, type_entry)
    problems += check_layer_drop(values, label, section.overrides)

    # Token ids of the run must be in the vocabulary. Its size may be unknown, and with
    # model.vocabulary it grows to the tokenizer of the data.
    text_values = _text_values(values)
    alias = type_entry["aliases"].get("vocab_size", "") if type_entry else ""
    num_rows = text_values.get("vocab_size", text_values.get(alias))
    if type(num_rows) is int and section.vocabulary is None:
        for entry in given_ids(section):
            problems += outside_vocabulary(entry, num_rows)
    if problems or not configuration:
        return ModelDimensions(), problems
    dimensions, problems = _read_dimensions(values, label, type_entry)
    if section.type:  # a class of the user may have a separate plan
        dimensions = replace(dimensions, has_tensor_plan=None)
    return dimensions, problems


def _text_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration; `values` if it has no parts."""
    nested = values.get("text_config")
    return nested if isinstance(nested, Mapping) else values


def written_configuration(section: ModelSection) -> dict[str, Any]:
    """Return the model's config.json with the run's overrides; empty for a hub name that neither a
    recipe nor the Hub's cache has."""
    if isinstance(section.config, dict):
        configuration: Mapping[str, Any] = section.config
    else:
        _, configuration, _ = _read_configuration(section)
    return {**configuration, **section.overrides} if configuration else {}


def _read_configuration(section: ModelSection) -> tuple[str, Mapping[str, Any], list[Problem]]:
    """Return the path of the local config.json, or else the key of the setting; its contents, empty
    if there is none; and problems."""
    key = "model.path" if section.path is not None else "model.config"
    source = Path(str(section.path if section.path is not None else section.config))
    path = source / "config.json" if source.is_dir() else source
    if section.path is not None and source.is_file():
        rule = "is a file, and a run starts from the directory of a model"
        return key, {}, [Problem(key, str(source), rule, f"its directory, such as {source.parent}")]
    # A hub model's configuration may ship with the recipes, or be in the Hub's cache.
    if not source.exists() and not source.is_absolute():
        path = published_configuration(str(source))
        if not path.is_file() and is_hub_name(str(source)):
            path = cached_hub_file(str(source), "config.json") or path
    if not path.is_file() and not source.is_dir():
        return key, {}, []  # `missing_model` reports a path that does not exist
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            return str(path), tree, []
        reason = "it is not an object"
    except (OSError, ValueError) as error:
        reason = str(error)
    if (source / "adapter_config.json").is_file():
        rule = "is the folder of an adapter, and a run starts from a complete model"
        return key, {}, [Problem(key, str(source), rule, _MERGE)]
    rule = f"the directory has no usable config.json ({reason})"
    return key, {}, [Problem(key, str(source), rule, _NAME_A_MODEL)]


def missing_model(section: ModelSection) -> list[Problem]:
    """Return the problem of a model that is named by a path which is not on this machine.

    Not for scripts that start a run elsewhere: in a pod, the path may exist.
    """
    key = "model.path" if section.path is not None else "model.config"
    source = section.path if section.path is not None else section.config
    if not isinstance(source, str) or is_address(source) or is_hub_name(source):
        return []
    if Path(source).exists():
        return []
    return [Problem(key, source, "no such directory", _NAME_A_MODEL)]


def not_causal(written: Mapping[str, Any], key: str, source: str) -> Problem:
    """Return the problem of a model whose type transformers builds no causal LM of. `written`: its
    config.json; `key` and `source`: the setting that names it, and its value."""
    model_type = written.get("model_type")
    if not isinstance(model_type, str):
        rule = "its config.json has no model_type, by which transformers finds its class"
        return Problem(key, source, rule, _NAME_A_MODEL)
    # A multimodal model has a configuration for each part: text_config, vision_config, ...
    modalities = [
        name.removesuffix("_config")
        for name, value in written.items()
        if name.endswith("_config") and isinstance(value, Mapping)
    ]
    if len(modalities) > 1 or "text" in modalities:
        description = f"is composed of parts ({', '.join(sorted(modalities))})"
        remedy = "a text-only model of the same family, or save its language part as one"
    else:
        description, remedy = "is not a type of causal language model", _NAME_A_MODEL
    rule = f"model_type {model_type!r} {description}, and AutoModelForCausalLM has no class for it"
    return Problem(key, source, rule, remedy)


def check_layer_drop(
    values: Mapping[str, Any], label: str, overrides: Mapping[str, Any] = _NO_OVERRIDES
) -> list[Problem]:
    """Return problems of a configuration that skips layers at random.

    Each rank draws for itself: a rank that skips a layer has no gradients for the layer's
    parameters, and does not join the collectives of the ranks that compute the layer. values: the
    configuration; label: its name in problems; overrides: the keys of `values` that the run sets.
    Checked keys: `layerdrop`, `decoder_layerdrop` and similar ones, of the language model.
    """
    is_nested = isinstance(values.get("text_config"), Mapping)
    problems = []
    for name, value in _text_values(values).items():
        if not _LAYER_DROP.search(str(name)) or value in (0, None):
            continue
        key = f"{label}.text_config.{name}" if is_nested else f"{label}.{name}"
        remedy = "write 0.0 there" if is_nested else f"model.overrides.{name}=0.0"
        if name in overrides and not is_nested:
            key, remedy = f"model.overrides.{name}", "0.0"
        rule = "each rank would skip different layers at random, and wait for the others' gradients"
        problems.append(Problem(key, value, rule, remedy))
    return problems


@dataclass(frozen=True)
class GivenId:
    """Value of a key of `TEXT_IDS` that the run sets, and its key in the run YAML."""

    name: str
    key: str
    value: Any

    @property
    def ids(self) -> list[int]:
        """The ids in the value; none for null."""
        return listed_ids(self.value)


def listed_ids(value: object) -> list[int]:
    """Return the ids in the value of a key of `TEXT_IDS`: an id, a list of ids, or null."""
    ids = value if isinstance(value, list | tuple) else [value]
    return [number for number in ids if type(number) is int]


def given_ids(section: ModelSection) -> list[GivenId]:
    """Return the ids that the run sets itself; overriding ids come last."""
    run_ids = []
    for key, values in (("model.config", section.config), ("model.overrides", section.overrides)):
        if not isinstance(values, Mapping):
            continue  # the name of a configuration
        nested = values.get("text_config")
        nested = nested if isinstance(nested, Mapping) else {}
        for prefix, settings in ((key, values), (f"{key}.text_config", nested)):
            names = [name for name in TEXT_IDS if name in settings]
            run_ids += [GivenId(name, f"{prefix}.{name}", settings[name]) for name in names]
    return run_ids


def outside_vocabulary(entry: GivenId, num_rows: int) -> list[Problem]:
    """Return the problem of a token id that is not in a vocabulary of `num_rows` tokens."""
    outside_ids = [number for number in entry.ids if not 0 <= number < num_rows]
    if not outside_ids:
        return []
    rule = f"{outside_ids[0]} is outside the vocabulary of {num_rows} tokens"
    remedy = f"{entry.key}=null"
    if entry.name != "pad_token_id":
        remedy += ", for the id that the texts of the data have"
    return [Problem(entry.key, entry.value, rule, remedy)]


def _check_values(
    values: Mapping[str, Any],
    section: str,
    model_type: object,
    type_entry: Mapping[str, Any] | None,
) -> Iterator[Problem]:
    """Yield problems of the keys that the run sets in `section`: values that are not JSON, JSON
    types that the model's configuration class refuses, and unknown keys."""
    for name, value in values.items():
        key = f"{section}.{name}"
        json_problems = list(_json_problems(value, key))
        yield from json_problems
        if json_problems or type_entry is None or name == "model_type":
            continue
        if name in type_entry["keys"]:
            json_types = type_entry["keys"][name]
            python_types = [
                _JSON_TYPES[json_type] for json_type in json_types.split("|") if json_type
            ]
            if python_types and type(value) not in python_types:
                remedy = f"write {value}.0" if type(value) is int and "number" in json_types else ""
                rule = f"must be of JSON type {json_types.replace('|', ' or ')}"
                yield Problem(key, value, rule, remedy)
        elif not _source_mentions(type_entry["module"], name):
            close = difflib.get_close_matches(str(name), type_entry["keys"], n=1)
            remedy = f"did you mean {section}.{close[0]}?" if close else ""
            shown_value = None if isinstance(value, dict) else value
            yield Problem(key, shown_value, f"model_type {model_type} has no such key", remedy)


def _json_problems(value: object, key: str) -> Iterator[Problem]:
    """Yield problems of values, at any depth, that JSON does not have."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _json_problems(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _json_problems(item, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, value, "must be a finite number")
    elif not isinstance(value, (str, int, float, type(None))):
        yield Problem(key, value, "is not a JSON value", "write a number, a text or a list")


def _source_mentions(module: str, name: str) -> bool:
    """Return whether the installed source of the architecture mentions `name`.

    Some models read keys that published checkpoints have and their configuration class does not
    declare, such as Qwen3-MoE's head_dim. Another release may declare more than the table knows.
    """
    spec = importlib.util.find_spec("transformers")  # finds a package without importing it
    if spec is None or spec.origin is None:
        return False
    modules = [module.replace(".configuration_", ".modeling_")]
    if not _table_matches_installed():
        modules.append(module)
    name_pattern = rf"\b{re.escape(str(name))}\b"
    for module_name in modules:
        path = Path(spec.origin).parent.joinpath(*module_name.split("."))
        source = path.with_suffix(".py")
        if source.is_file() and re.search(name_pattern, source.read_text(encoding="utf-8")):
            return True
    return False


@functools.cache
def _table_matches_installed() -> bool:
    """Return whether the table is of the installed transformers' version."""
    try:
        installed = importlib.metadata.distribution("transformers")
    except importlib.metadata.PackageNotFoundError:  # a login node without it
        return True
    # `installed.version` would parse all of METADATA, with the long description, as an email.
    header = (installed.read_text("METADATA") or "").partition("\n\n")[0]
    return f"Version: {key_table()['transformers_version']}" in header.splitlines()


def _read_dimensions(
    values: Mapping[str, Any], label: str, type_entry: Mapping[str, Any] | None
) -> tuple[ModelDimensions, list[Problem]]:
    """Return the dimensions of the language model in a configuration (`get_text_config`)."""
    # A multimodal configuration has the language model's keys in text_config, with another type.
    text_entry = type_entry
    if isinstance(values.get("text_config"), Mapping):
        values, label = values["text_config"], f"{label}.text_config"
        text_entry = key_table()["model_types"].get(values.get("model_type"))
    aliases = text_entry["aliases"] if text_entry else {}
    # For a multimodal type the table has the defaults of the language model.
    defaults = type_entry["defaults"] if type_entry else {}
    problems: list[Problem] = []
    dimensions: dict[str, Any] = {}
    for key in _POSITIVE_KEYS:
        name = next((n for n in (key, aliases.get(key)) if n in values), None)
        value = defaults.get(key) if name is None else values[name]
        is_computed = key in defaults and defaults[key] is None  # by the class, whatever is written
        if type(value) is not int or is_computed:
            continue
        # The width of a dense layer has no meaning where all layers may be sparse.
        is_unused = key == "intermediate_size" and any(type(values.get(e)) is int for e in EXPERTS)
        if value < 1 and not is_unused:
            problems.append(Problem(f"{label}.{name}", value, "must be at least 1", "nearest: 1"))
        elif key in _DIMENSION_KEYS:
            dimensions[key] = value

    # Position numbers may begin after the padding id, as in RoBERTa.
    if text_entry is not None and "positions_after" in text_entry:
        padding_id = values.get("pad_token_id", text_entry["positions_after"])
        if type(padding_id) is int:
            dimensions["unused_positions"] = padding_id + 1

    # Query heads share key-value heads in groups of equal size.
    heads, key_heads = dimensions.get("num_attention_heads"), values.get("num_key_value_heads")
    if type(key_heads) is int and heads is not None and (key_heads < 1 or heads % key_heads):
        nearest = largest_divisor(heads, max(key_heads, 1))
        rule = f"num_attention_heads = {heads} must be a multiple of it"
        key = f"{label}.num_key_value_heads"
        problems.append(Problem(key, key_heads, rule, f"nearest: {nearest}"))

    # Heads that tensor parallelism divides, experts, and layers for multi-token prediction.
    tp_dimensions = (text_entry["cut"] or []) if text_entry else []
    if text_entry is not None and _table_matches_installed():
        dimensions["has_tensor_plan"] = text_entry["cut"] is not None
    if "num_attention_heads" in tp_dimensions:
        dimensions["cut_heads"] = heads
    # Only a written number of key heads: many classes derive the default from the number of heads.
    if "num_key_value_heads" in tp_dimensions and type(key_heads) is int and key_heads > 0:
        dimensions["cut_key_heads"] = key_heads
    expert_counts = [values[name] for name in EXPERTS if type(values.get(name)) is int]
    if expert_counts and expert_counts[0] > 0:
        dimensions["num_experts"] = expert_counts[0]
    if text_entry:
        names = (_MTP_LAYERS, text_entry["aliases"].get(_MTP_LAYERS))
        written_counts = [values[name] or 0 for name in names if name in values]  # null: 0
        if _MTP_LAYERS not in text_entry["keys"]:
            dimensions[_MTP_LAYERS] = 0
        elif written_counts and type(written_counts[0]) is int:  # a default is unknown
            dimensions[_MTP_LAYERS] = written_counts[0]
    return ModelDimensions(**dimensions), problems


def number_of(config: object, names: Iterable[str]) -> int | None:
    """Return the first positive integer among the attributes `names` of a configuration."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def share_of_experts(config: object) -> float:
    """Return the share of a layer's experts that a token is routed to; 1 if unknown."""
    num_chosen, num_experts = number_of(config, CHOSEN_EXPERTS), number_of(config, EXPERTS)
    return num_chosen / num_experts if num_chosen and num_experts else 1.0
