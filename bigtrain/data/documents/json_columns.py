"""Values of Arrow's JSON type: text in a column, any JSON value for the reader.

`datasets` stores mixed objects so (its feature ``Json``), as a column or anywhere in lists and
structs: tool calls whose arguments differ from row to row. A file may have the type, or only the
features of `datasets` in the metadata of the schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from math import isfinite
from typing import Any

from bigtrain.data.documents.exact_json import InexactNumber, loads

Decoder = Callable[[Any], Any]
"""Converter of a value that is not None."""


class JsonObject(dict[str, Any]):
    """Object of a JSON value: unlike in a struct, a key without a value is one that its author
    wrote."""


class JsonList(list[Any]):
    """List of a JSON value."""


def features_of(schema: Any) -> Mapping[str, Any]:
    """Return the features of `datasets` in the metadata of an arrow schema; empty if none."""
    stored = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(stored)["info"]["features"] if stored else {}
    except (ValueError, LookupError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def decoders_of(
    types: Mapping[str, Any], features: Mapping[str, Any], *, is_text: bool = True
) -> dict[str, Decoder]:
    """Return the converters of the columns that contain JSON. `types`: arrow types of the columns
    if they are known, `features`: of `datasets`, if there are any. is_text: JSON is still text,
    also where `datasets` would decode it."""
    names = dict.fromkeys((*types, *features))
    decoders = {n: _decoder(types.get(n), features.get(n), is_text) for n in names}
    return {name: decoder for name, decoder in decoders.items() if decoder is not None}


def _decoder(arrow_type: Any, feature: Any, is_text: bool) -> Decoder | None:
    """Return the converter of a column by its arrow type and its feature of `datasets`, each None
    if unknown; None if the column contains no JSON."""
    description = feature if isinstance(feature, dict) else {}
    # A name of a type; a struct may have a field of this name, whose value is a feature.
    feature_type = description.get("_type")
    if feature_type == "Json" or getattr(arrow_type, "extension_name", None) == "arrow.json":
        if is_text or not description.get("decode", True):
            return lambda value: _of_json(loads(value))
        return _of_json
    arrow_type = getattr(arrow_type, "storage_type", arrow_type)
    arrow_item = getattr(arrow_type, "value_type", None)  # of a list or a dictionary column
    item = feature[0] if isinstance(feature, list) and feature else None
    if isinstance(feature_type, str):  # not a struct: maybe a list, with the feature of an item
        description, item = {}, description.get("feature")
    if arrow_item is not None or item is not None:
        item_decoder = _decoder(arrow_item, item, is_text)
        return None if item_decoder is None else partial(_each_item, item_decoder)
    # A struct, whose fields may contain JSON.
    import pyarrow

    is_struct = isinstance(arrow_type, pyarrow.DataType) and pyarrow.types.is_struct(arrow_type)
    fields = {field.name: field.type for field in arrow_type} if is_struct else {}
    field_decoders = decoders_of(fields, description, is_text=is_text)
    return partial(_each_field, field_decoders) if field_decoders else None


def _each_item(decoder: Decoder, value: Any) -> Any:
    if not isinstance(value, list):  # of a dictionary column
        return decoder(value)
    return [item if item is None else decoder(item) for item in value]


def _each_field(decoders: Mapping[str, Decoder], value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: item if item is None or key not in decoders else decoders[key](item)
        for key, item in value.items()
    }


def _of_json(value: Any) -> Any:
    """Return a JSON value whose keys without a value are kept."""
    if isinstance(value, dict):
        return JsonObject(value)
    return JsonList(value) if isinstance(value, list) else value


def without_missing(value: Any, *, keeps_none: bool = False) -> Any:
    """Return `value` without the None-valued keys of objects: a struct column has every key of any
    row in all rows, so that a tool would have the parameters of every tool. JSON keeps None-valued
    keys (`keeps_none`). A float that is not finite becomes an `InexactNumber`: JSON has none."""
    if isinstance(value, float) and not isfinite(value):
        return InexactNumber.of(repr(value))
    if isinstance(value, dict):
        keeps_none = keeps_none or isinstance(value, JsonObject)
        return {
            key: without_missing(item, keeps_none=keeps_none)
            for key, item in value.items()
            if keeps_none or item is not None
        }
    if isinstance(value, list):
        keeps_none = keeps_none or isinstance(value, JsonList)
        return [without_missing(item, keeps_none=keeps_none) for item in value]
    return value
