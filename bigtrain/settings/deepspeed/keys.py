"""Known keys of a DeepSpeed JSON, types and bounds of their values, suggestions for unknown keys.

DeepSpeed ignores misspelt top-level keys. `keys.json` in this directory names every key that the
pinned version reads; ``tools/deepspeed_keys.py`` writes it from DeepSpeed itself, so that reading
it needs neither torch nor deepspeed.
"""

from __future__ import annotations

import difflib
import functools
import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from bigtrain.errors import Problem

AUTO = "auto"

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}


def value_at(tree: object, path: str, default: Any = None) -> Any:
    """Return the value under a dotted path; `default` if a part of the path is absent or not a
    block."""
    for name in path.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return default
        tree = tree[name]
    return tree


@functools.cache
def key_table() -> Mapping[str, Any]:
    """Return the table: ``deepspeed_version``, ``keys`` (nested), ``removed`` (DeepSpeed's message
    by key) and ``former_blocks`` (today's name by former name)."""
    path = Path(__file__).with_name("keys.json")
    table: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def numbers_and_switches(block: str) -> list[str]:
    """Return the dotted keys in a top-level block, and in its blocks, whose values are numbers,
    true or false."""
    levels: list[tuple[str, Mapping[str, Any]]] = [(block, key_table()["keys"][block]["keys"])]
    keys = []
    for parent, nodes in levels:  # the loop appends inner blocks to the list
        for name, node in nodes.items():
            if "keys" in node:
                levels.append((f"{parent}.{name}", node["keys"]))
            elif {"integer", "number", "boolean"} & {*node.get("types", ())}:
                keys.append(f"{parent}.{name}")
    return keys


def check_keys(
    tree: Mapping[str, Any], source: str, suggest: Callable[[str], str]
) -> Iterator[Problem]:
    """Yield a problem for every key of `tree` that DeepSpeed does not know, and every value that it
    would refuse. suggest: returns the fix for an unknown dotted key.

    Any key may be ``"auto"``: `render` checks whether the run has a value for it.
    """
    yield from _check_block(tree, key_table()["keys"], (), source, suggest)


def with_integers(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of `tree` in which floats such as 5e7 are integers where DeepSpeed
    requires them."""
    copied: dict[str, Any] = _copy_with_integers(tree, {"keys": key_table()["keys"]})
    return copied


def _copy_with_integers(value: Any, node: Mapping[str, Any]) -> Any:
    """Return a copy of `value`. node: the entry of its key in the table; empty for unknown keys."""
    if isinstance(value, Mapping):
        keys = node.get("keys", {})
        return {
            name: _copy_with_integers(child, keys.get(name, {})) for name, child in value.items()
        }
    if isinstance(value, list):
        return [_copy_with_integers(child, {}) for child in value]
    if isinstance(value, float) and _is_integer_as_float(value, node):
        return int(value)
    return value


def _is_integer_as_float(value: object, node: Mapping[str, Any]) -> bool:
    """Return whether a key that requires an integer has a float such as 5e7."""
    types = node.get("types", ())
    return (
        isinstance(value, float)
        and value.is_integer()
        and "integer" in types
        and "number" not in types
    )


def _check_block(
    block: Mapping[str, Any],
    known_keys: Mapping[str, Any],
    parents: tuple[str, ...],
    source: str,
    suggest: Callable[[str], str],
) -> Iterator[Problem]:
    """Yield problems of a block's keys. known_keys: of the block, in the table; parents: names of
    the block and of those around it."""
    for name, value in block.items():
        path = ".".join((*parents, name))
        key = f"{source}: {path}"
        removed = key_table()["removed"].get(path)
        if removed is not None:
            version = key_table()["deepspeed_version"]
            yield Problem(
                key, None, f"was removed from DeepSpeed ({version}): {removed}", f"remove {path}"
            )
        elif name not in known_keys:
            shown_value = None if isinstance(value, dict) else value
            rule = "unknown key, which DeepSpeed would ignore or reject"
            yield Problem(key, shown_value, rule, suggest(path))
        elif "deprecated" in known_keys[name]:
            newer = known_keys[name]["deprecated"]
            remedy = f"use {newer}" if newer else f"remove {path}"
            # A switch may have become a block.
            if value is True and "device" in known_keys.get(newer, {}).get("keys", {}):
                remedy += ': {"device": "cpu"}'
            yield Problem(key, value, "is deprecated in DeepSpeed", remedy)
        elif value != AUTO:
            yield from _check_value(value, known_keys[name], (*parents, name), source, suggest)


def _check_value(
    value: Any,
    node: Mapping[str, Any],
    path: tuple[str, ...],
    source: str,
    suggest: Callable[[str], str],
) -> Iterator[Problem]:
    """Yield problems of a value: a block, a choice, the type or the bounds. node: entry of the key
    in the table."""
    key = f"{source}: {'.'.join(path)}"
    if "keys" in node:
        if isinstance(value, dict):
            yield from _check_block(value, node["keys"], path, source, suggest)
        else:
            example = f'{{"{next(iter(node["keys"]))}": ...}}'
            yield Problem(key, value, "must be a block of settings", f"write {example}")
        return
    if "choices" in node and not any(
        type(value) is type(choice) and value == choice for choice in node["choices"]
    ):
        choices = ", ".join(json.dumps(choice) for choice in node["choices"])
        yield Problem(key, value, f"must be one of {choices}")
        return
    types = node.get("types")
    if types and not _is_integer_as_float(value, node) and not _has_type(value, types):
        yield Problem(key, value, f"must be of JSON type {' or '.join(types)}")
        return
    for bound, (holds, words) in _BOUNDS.items():
        if bound in node and isinstance(value, (int, float)) and not holds(value, node[bound]):
            yield Problem(key, value, f"must be {words} {node[bound]:g}")


def _has_type(value: object, names: list[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in names
    return any(isinstance(value, _JSON_TYPES[name]) for name in names)


FORMER_NAMES = {"aio.thread_count": "aio.intra_op_parallelism"}
"""Keys that DeepSpeed has renamed to something different, without marking them as deprecated."""

_MIN_SIMILARITY = 0.6
_MAX_LISTED_KEYS = 16  # a longer list would bury the message


def suggestion(path: str, accepted: Collection[str]) -> str:
    """Return the fix for the key `path` of a DeepSpeed JSON, which DeepSpeed does not know.

    accepted: dotted keys that a run may have, from which suggestions are chosen.
    """
    block, _, name = path.rpartition(".")
    prefix = f"{block}." if block else ""
    keys_in_block = (key.removeprefix(prefix) for key in accepted if key.startswith(prefix))
    siblings = sorted({key.partition(".")[0] for key in keys_in_block})
    # The shortest key that contains the complete name, else a similar one.
    matches = [sibling for sibling in siblings if f"_{name}_" in f"_{sibling}_"]
    matches = sorted(matches, key=len)
    matches += difflib.get_close_matches(name, siblings, n=1, cutoff=_MIN_SIMILARITY)
    keys_of_name = [key for key in accepted if key.rpartition(".")[2] == name]
    if path in FORMER_NAMES:
        return f"write {FORMER_NAMES[path]}"
    if matches:
        return f"did you mean {prefix}{matches[0]}?"
    if len(keys_of_name) == 1:
        return f"it belongs to {keys_of_name[0].rpartition('.')[0]}: write {keys_of_name[0]}"
    if not block or not siblings:
        return "remove it; docs/reference/deepspeed_keys.md lists the accepted keys"
    if len(siblings) <= _MAX_LISTED_KEYS:
        return f"known in {block}: {', '.join(siblings)}"
    nearest = difflib.get_close_matches(name, siblings, n=1, cutoff=0.0)[0]
    return f"the nearest known key is {prefix}{nearest}, or remove it"
