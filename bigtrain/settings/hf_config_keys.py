"""Checks of a Hugging Face model configuration, and the dimensions that rules need, without
transformers.

Pure: importing transformers takes seconds, `bigtrain check` a fraction of one. The table next to
this module has the keys of every causal LM; ``tools/hf_config_keys.py`` writes it from
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.errors import Problem
from bigtrain.settings.run_config import ModelSection
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
_FIGURES = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
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
"""Names that they have for how many of them a token is routed to."""
_MTP_LAYERS = "num_mtp_layers"
_AT_LEAST_ONE = (*_FIGURES, "vocab_size", "hidden_size", "intermediate_size")
TEXT_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys with the ids of tokens that begin and end texts, and pad them."""
_LAYER_DROP = re.compile(r"layer_?drop(?!out)", re.IGNORECASE)
_NO_OVERRIDES: Mapping[str, Any] = {}
_NAME_A_MODEL = "name a directory of a Hugging Face model, or a model of the hub"


@dataclass(frozen=True)
class ModelDimensions:
    """Dimensions of a model, known before it is built; None if unknown.

    cut_heads, cut_key_heads: query and key-value heads, where tensor-parallel ranks divide them.
    num_experts: routed experts of a layer. num_mtp_layers: layers for multi-token prediction that
    transformers builds for the architecture.
    """

    num_attention_heads: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None
    cut_heads: int | None = None
    cut_key_heads: int | None = None
    num_experts: int | None = None
    num_mtp_layers: int | None = None


@functools.cache
def key_table() -> Mapping[str, Any]:
    """Return the table: ``transformers_version`` and ``model_types``, each with its ``module``,
    ``keys`` (to JSON types), ``aliases``, ``defaults`` and ``cut``, the dimensions that
    tensor-parallel ranks shard."""
    path = Path(__file__).with_name("hf_config_keys.json")
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def inspect_configuration(section: ModelSection) -> tuple[ModelDimensions, list[Problem]]:
    """Return the dimensions of the run's model, and every problem of its model section.

    A hub name, which may have to be downloaded, is only known if its configuration ships with the
    recipes.
    """
    problems: list[Problem] = []
    written: Mapping[str, Any]
    if isinstance(section.config, dict):
        where, written = "model.config", section.config
        problems += [] if section.type else _check_type(written["model_type"])
    else:
        where, written, problems = _read(section)
        if written and not section.type:
            key = "model.path" if section.path is not None else "model.config"
            problems += _check_causal(written, key, str(section.path or section.config))
    model_type = {**written, **section.overrides}.get("model_type")
    known = key_table()["model_types"].get(model_type) if isinstance(model_type, str) else None
    if where == "model.config":
        problems += _check_values(written, where, model_type, known)
    problems += _check_values(section.overrides, "model.overrides", model_type, known)
    problems += check_layer_drop({**written, **section.overrides}, where, section.overrides)
    problems += _check_text_ids(section, {**written, **section.overrides}, known)
    if problems or not written:
        return ModelDimensions(), problems
    return _figures({**written, **section.overrides}, where, known)


def written_configuration(section: ModelSection) -> dict[str, Any]:
    """Return the model's config.json with the run's overrides; empty for a hub name that no recipe
    has."""
    written = section.config if isinstance(section.config, dict) else _read(section)[1]
    return {**written, **section.overrides} if written else {}


def _read(section: ModelSection) -> tuple[str, Mapping[str, Any], list[Problem]]:
    """Path and contents of the local configuration; empty contents where there is none."""
    key = "model.path" if section.path is not None else "model.config"
    source = Path(str(section.path if section.path is not None else section.config))
    path = source / "config.json" if source.is_dir() else source
    if not source.exists() and not source.is_absolute():
        path = published_configuration(str(source))
    if not path.is_file() and not source.is_dir():
        return key, {}, []
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(tree, dict):
            return str(path), tree, []
        reason = "it is not an object"
    except (OSError, ValueError) as error:
        reason = str(error)
    rule = f"the directory has no usable config.json ({reason})"
    return key, {}, [Problem(key, str(source), rule, _NAME_A_MODEL)]


def missing_model(section: ModelSection) -> list[Problem]:
    """Return the problem of a model that is named by a path which is not on this machine.

    Not for scripts that start a run elsewhere: in a pod, the path may exist.
    """
    key = "model.path" if section.path is not None else "model.config"
    source = section.path if section.path is not None else section.config
    # A hub name is NAME or OWNER/NAME.
    if (
        not isinstance(source, str)
        or is_address(source)
        or not (source.startswith((".", "/", "~")) or source.count("/") > 1)
    ):
        return []
    there = Path(source).exists()
    return [] if there else [Problem(key, source, "no such directory", _NAME_A_MODEL)]


def _check_type(model_type: object) -> Iterator[Problem]:
    types = key_table()["model_types"]
    if model_type in types or not _same_release():
        return
    close = difflib.get_close_matches(str(model_type), types, n=3)
    remedy = f"did you mean {' or '.join(close)}?" if close else ""
    rule = "unknown type of causal LM in transformers"
    yield Problem("model.config.model_type", model_type, rule, remedy)


def _check_causal(written: Mapping[str, Any], key: str, source: str) -> list[Problem]:
    known = key_table()["model_types"]
    if written.get("model_type") in known or not _same_release():
        return []
    return [not_causal(written, key, source)]


def not_causal(written: Mapping[str, Any], key: str, source: str) -> Problem:
    """Return the problem of a model whose type transformers builds no causal LM of. `written`: its
    config.json; `key` and `source`: the setting that names it, and its value."""
    model_type = written.get("model_type")
    if not isinstance(model_type, str):
        rule = "its config.json has no model_type, by which transformers finds its class"
        return Problem(key, source, rule, _NAME_A_MODEL)
    parts = [name.removesuffix("_config") for name in written if name.endswith("_config")]
    composite = [name for name in parts if isinstance(written[f"{name}_config"], Mapping)]
    if len(composite) > 1 or "text" in composite:
        what = f"is composed of parts ({', '.join(sorted(composite))})"
        remedy = "a text-only model of the same family, or save its language part as one"
    else:
        what, remedy = "is not a type of causal language model", _NAME_A_MODEL
    rule = f"model_type {model_type!r} {what}, and AutoModelForCausalLM has no class for it"
    return Problem(key, source, rule, remedy)


def check_layer_drop(
    values: Mapping[str, Any], where: str, overrides: Mapping[str, Any] = _NO_OVERRIDES
) -> list[Problem]:
    """Return problems of a configuration that skips layers at random.

    Each rank draws for itself: a rank that skips a layer has no gradients of it, and does not join
    the collectives of those that compute it. values: the configuration; where: its name in
    problems; overrides: the part of `values` that the run gives. Names: `layerdrop`,
    `decoder_layerdrop` and their like, of the language model's part.
    """
    text = values.get("text_config")
    is_nested = isinstance(text, Mapping)
    part: Mapping[str, Any] = text if isinstance(text, Mapping) else values
    problems = []
    for name, value in part.items():
        if not _LAYER_DROP.search(str(name)) or value in (0, None):
            continue
        key = f"{where}.text_config.{name}" if is_nested else f"{where}.{name}"
        remedy = "write 0.0 there" if is_nested else f"model.overrides.{name}=0.0"
        if name in overrides and not is_nested:
            key, remedy = f"model.overrides.{name}", "0.0"
        rule = "each rank would skip different layers at random, and wait for the others' gradients"
        problems.append(Problem(key, value, rule, remedy))
    return problems


@dataclass(frozen=True)
class GivenId:
    """Value of one of `TEXT_IDS` that the run sets, and its key in the run YAML."""

    name: str
    key: str
    value: Any

    @property
    def ids(self) -> list[int]:
        """The ids in the value; none for null."""
        return listed_ids(self.value)


def listed_ids(value: object) -> list[int]:
    """Return the ids in the value of one of `TEXT_IDS`: an id, a list of ids, or null."""
    ids = value if isinstance(value, list | tuple) else [value]
    return [number for number in ids if type(number) is int]


def given_ids(section: ModelSection) -> list[GivenId]:
    """Return the ids that the run sets itself, those that override others last."""
    run_ids = []
    for key, values in (("model.config", section.config), ("model.overrides", section.overrides)):
        if not isinstance(values, Mapping):
            continue  # the name of a configuration
        nested = values.get("text_config")
        parts = {key: values, f"{key}.text_config": nested if isinstance(nested, Mapping) else {}}
        run_ids += [
            GivenId(name, f"{section_key}.{name}", part[name])
            for section_key, part in parts.items()
            for name in TEXT_IDS
            if name in part
        ]
    return run_ids


def outside_vocabulary(entry: GivenId, num_rows: int) -> list[Problem]:
    """Return the problem of an id of the run that is none of `num_rows` tokens."""
    outside_ids = [number for number in entry.ids if not 0 <= number < num_rows]
    if not outside_ids:
        return []
    rule = f"{outside_ids[0]} is outside the vocabulary of {num_rows} tokens"
    remedy = f"{entry.key}=null"
    if entry.name != "pad_token_id":
        remedy += ", for the id that the texts of the data have"
    return [Problem(entry.key, entry.value, rule, remedy)]


def _check_text_ids(
    section: ModelSection, values: Mapping[str, Any], known: Mapping[str, Any] | None
) -> list[Problem]:
    """Check that ids of the run are in the vocabulary, if the number of rows is written."""
    text = values.get("text_config")
    part: Mapping[str, Any] = text if isinstance(text, Mapping) else values
    alias = known["aliases"].get("vocab_size", "") if known else ""
    num_rows = part.get("vocab_size", part.get(alias))
    if type(num_rows) is not int or section.vocabulary is not None:
        return []  # unknown, or the vocabulary grows to that of the data
    return [p for entry in given_ids(section) for p in outside_vocabulary(entry, num_rows)]


def _check_values(
    values: Mapping[str, Any], section: str, model_type: object, known: Mapping[str, Any] | None
) -> Iterator[Problem]:
    for name, value in values.items():
        key = f"{section}.{name}"
        wrong = list(_not_json(value, key))
        yield from wrong
        if wrong or known is None or name == "model_type":
            continue
        if name in known["keys"]:
            yield from _check_kind(key, value, known["keys"][name])
        elif not _source_reads(known["module"], name):
            close = difflib.get_close_matches(str(name), known["keys"], n=1)
            remedy = f"did you mean {section}.{close[0]}?" if close else ""
            shown = None if isinstance(value, dict) else value
            yield Problem(key, shown, f"model_type {model_type} has no such key", remedy)


def _not_json(value: object, key: str) -> Iterator[Problem]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _not_json(item, f"{key}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_json(item, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Problem(key, value, "must be a finite number")
    elif not isinstance(value, (str, int, float, type(None))):
        yield Problem(key, value, "is not a JSON value", "write a number, a text or a list")


def _check_kind(key: str, value: object, kinds: str) -> Iterator[Problem]:
    if not kinds or any(type(value) is _JSON_TYPES[kind] for kind in kinds.split("|")):
        return
    remedy = f"write {value}.0" if type(value) is int and "number" in kinds else ""
    yield Problem(key, value, f"must be of JSON type {kinds.replace('|', ' or ')}", remedy)


def _source_reads(module: str, name: str) -> bool:
    """Return whether the installed source of the architecture mentions `name`.

    Some models read keys that published checkpoints have and their configuration class does not
    declare, such as Qwen3-MoE's head_dim. Another release may declare more than the table knows.
    """
    path = _installed(module)
    modeling = _installed(module.replace(".configuration_", ".modeling_"))
    for source in (modeling,) if _same_release() else (modeling, path):
        if source is None or not source.is_file():
            continue
        if re.search(rf"\b{re.escape(str(name))}\b", source.read_text(encoding="utf-8")):
            return True
    return False


def _installed(module: str) -> Path | None:
    spec = importlib.util.find_spec("transformers")  # finds a package without importing it
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent.joinpath(*module.split(".")).with_suffix(".py")


@functools.cache
def _same_release() -> bool:
    try:
        installed = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # a login node without it
        return True
    return installed == str(key_table()["transformers_version"])


def _figures(
    values: Mapping[str, Any], where: str, known: Mapping[str, Any] | None
) -> tuple[ModelDimensions, list[Problem]]:
    """Return the dimensions of the language model in a configuration (`get_text_config`)."""
    text = values.get("text_config")
    of_text = known
    if isinstance(text, Mapping):
        values, where = text, f"{where}.text_config"
        of_text = key_table()["model_types"].get(text.get("model_type"))
    aliases = of_text["aliases"] if of_text else {}
    defaults = known["defaults"] if known else {}
    problems: list[Problem] = []
    dimensions: dict[str, int | None] = {}
    for key in _AT_LEAST_ONE:
        name = next((n for n in (key, aliases.get(key)) if n in values), None)
        value = defaults.get(key) if name is None else values[name]
        if type(value) is not int or (key in defaults and defaults[key] is None):
            continue
        if value < 1 and not (key == "intermediate_size" and _has_experts(values)):
            problems.append(Problem(f"{where}.{name}", value, "must be at least 1", "nearest: 1"))
        elif key in _FIGURES:
            dimensions[key] = value
    problems += _check_key_heads(values, where, dimensions.get("num_attention_heads"))
    tp_dimensions = of_text["cut"] if of_text else []
    if "num_attention_heads" in tp_dimensions:
        dimensions["cut_heads"] = dimensions.get("num_attention_heads")
    # Not the default, which many classes derive from the number of heads.
    key_heads = values.get("num_key_value_heads")
    if "num_key_value_heads" in tp_dimensions and type(key_heads) is int and key_heads > 0:
        dimensions["cut_key_heads"] = key_heads
    experts = [values[name] for name in EXPERTS if type(values.get(name)) is int]
    if experts and experts[0] > 0:
        dimensions["num_experts"] = experts[0]
    if of_text:
        dimensions[_MTP_LAYERS] = _num_mtp_layers(values, of_text)
    return ModelDimensions(**dimensions), problems


def _num_mtp_layers(values: Mapping[str, Any], known: Mapping[str, Any]) -> int | None:
    """Return the layers for multi-token prediction; None for the default of a class with such."""
    if _MTP_LAYERS not in known["keys"]:
        return 0
    names = (_MTP_LAYERS, known["aliases"].get(_MTP_LAYERS))
    name = next((name for name in names if name in values), None)
    count = None if name is None else values[name] or 0
    return count if type(count) is int else None


def _has_experts(values: Mapping[str, Any]) -> bool:
    """Return whether all layers may be sparse; then a dense layer's width has no meaning."""
    return any(type(values.get(name)) is int for name in EXPERTS)


def _check_key_heads(values: Mapping[str, Any], where: str, heads: int | None) -> list[Problem]:
    """Return the problem if the query heads are not a multiple of the key-value heads."""
    key_heads = values.get("num_key_value_heads")
    if type(key_heads) is not int or heads is None or (key_heads > 0 and heads % key_heads == 0):
        return []
    nearest = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(key_heads, 1))
    rule = f"num_attention_heads = {heads} must be a multiple of it"
    return [Problem(f"{where}.num_key_value_heads", key_heads, rule, f"nearest: {nearest}")]


def number_of(config: object, names: Iterable[str]) -> int | None:
    """Return the first positive integer among the attributes `names` of a configuration."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def share_of_experts(config: object) -> float:
    """Return the share of a layer's experts that a token is routed to; 1 if unknown."""
    chosen, experts = number_of(config, CHOSEN_EXPERTS), number_of(config, EXPERTS)
    return chosen / experts if chosen and experts else 1.0
