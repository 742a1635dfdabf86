"""Write bigtrain/settings/hf_config_keys.json: what a causal LM's configuration may hold.

    python tools/hf_config_keys.py            # write the file for the installed transformers
    python tools/hf_config_keys.py --check    # exit 1 where the file differs

Of every model type that transformers has a causal LM for: keys, the JSON types of their values by
transformers' own validation, aliases, and the defaults that rules of bigtrain need. With it
`bigtrain check` refuses what the model would refuse, without the seconds that its import takes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]


from bigtrain.models.build import empty_model  # noqa: E402
from bigtrain.models.configuration import text_config  # noqa: E402
from bigtrain.models.equivalence.position_numbering import plan_numbering  # noqa: E402
from bigtrain.models.equivalence.proxy_model import TOKENS  # noqa: E402
from bigtrain.models.parallel.tensor import known_plan  # noqa: E402
from bigtrain.settings.hf_config_keys import (  # noqa: E402
    HEAD_PROJECTIONS,
    KEY_HEAD_PROJECTIONS,
)
from tools.generated_file import write_or_compare  # noqa: E402
from tools.tiny_models import tiny_config  # noqa: E402

TARGET = ROOT / "bigtrain" / "settings" / "hf_config_keys.json"
FIGURES = ("num_attention_heads", "num_hidden_layers", "max_position_embeddings")
EXAMPLES: dict[str, tuple[Any, ...]] = {
    "boolean": (True,),
    "integer": (1,),
    "number": (1.5,),
    "string": ("x",),
    "array": ([], [1], [1.5], ["x"]),
    "object": ({}, {"x": 1}),
}


def build_table() -> dict[str, Any]:
    """Return the table of the installed transformers, ready for JSON."""
    import transformers
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    classes = {name: CONFIG_MAPPING[name] for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    return {
        "transformers_version": transformers.__version__,
        "model_types": {
            name: {
                "module": config_class.__module__.removeprefix("transformers."),
                "keys": _kinds(config_class),
                "aliases": dict(sorted(config_class.attribute_map.items())),
                "defaults": _figures(config_class),
                "cut": _cut_figures(config_class),
                **_positions_after(config_class, name),
            }
            for name, config_class in classes.items()
        },
    }


def as_text(table: dict[str, Any]) -> str:
    """Return the table as JSON, a line for each model type."""
    types = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table["model_types"].items())
    version = json.dumps(table["transformers_version"])
    return f'{{"transformers_version": {version},\n"model_types": {{\n{types}\n}}}}\n'


def _kinds(config_class: Any) -> dict[str, str]:
    """Return the JSON types of every key, joined by ``|``; empty where any value may be taken."""
    from bigtrain.models.configuration import known_keys

    annotations = {field.name: field.type for field in dataclasses.fields(config_class)}
    own = {key: config_class.attribute_map.get(key, key) for key in known_keys(config_class)}
    return {
        key: _kind(config_class, key, annotations[own[key]]) if own[key] in annotations else ""
        for key in sorted(own)
    }


def _kind(config_class: Any, key: str, annotation: Any) -> str:
    from huggingface_hub.dataclasses import type_validator

    def takes(value: Any) -> bool:
        try:
            type_validator(key, value, annotation)
        except TypeError:
            return False
        return True

    kinds = [kind for kind, values in EXAMPLES.items() if any(map(takes, values))]
    if len(kinds) in (0, len(EXAMPLES)):  # for example one of some words, or not read
        return ""
    try:
        config_class(**{key: None})
        kinds.append("null")
    except Exception:  # whatever the class raises, the value is refused
        pass
    return "|".join(kinds)


def _figures(config_class: Any) -> dict[str, int | None]:
    """Null: the class computes it, so that what is written does not tell."""
    dimensions: dict[str, int | None] = {}
    for key in FIGURES:
        try:
            config = config_class().get_text_config()
            value = getattr(config, key, None)
        except Exception:  # it refuses its own defaults, or layers differ
            dimensions[key] = None
            continue
        name = config.attribute_map.get(key, key)
        if isinstance(inspect.getattr_static(type(config), name, None), property):
            dimensions[key] = None
        elif type(value) is int:
            dimensions[key] = value
    return dimensions


def _cut_figures(config_class: Any) -> list[str] | None:
    """Return the dimensions that tensor-parallel ranks shard, by transformers' own plan; as
    `bigtrain.models.equivalence.tensor_parallel` reads it of the model. None: it has no plan for
    the layers."""
    try:
        config = config_class()
        plan = config.get_text_config().base_model_tp_plan or {}
        # Classes may add to the plan of the configuration.
        if not any("*" in name for name in plan) and not known_plan(empty_model(config)):
            return None
    except Exception:  # it refuses its own defaults
        return []
    cut = {name.rpartition(".")[2] for name, style in plan.items() if style == "colwise"}
    heads = ["num_attention_heads"] if cut & HEAD_PROJECTIONS else []
    return heads + (["num_key_value_heads"] if cut & KEY_HEAD_PROJECTIONS else [])


def _positions_after(config_class: Any, model_type: str) -> dict[str, int]:
    """Return the default of the padding after which a model's position numbers begin; empty if
    they begin with 0."""
    try:
        config = tiny_config(model_type)
        for padding in (1, 5):
            text_config(config).pad_token_id = padding
            if plan_numbering(config, "auto", TOKENS)[0].first != padding + 1:
                return {}
        return {"positions_after": config_class().get_text_config().pad_token_id}
    except Exception:  # it cannot be built
        return {}


if __name__ == "__main__":
    sys.exit(write_or_compare(TARGET, lambda: as_text(build_table()), __doc__))
