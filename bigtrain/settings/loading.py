"""Reading of the run YAML: recipes by name, overrides, and every problem of a file at once.

Reads only YAML files and imports no torch. A table of the names that other programs (HF Trainer,
Megatron, DeepSpeed, torchtitan, Lightning) use for settings serves "did you mean".
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from bigtrain.errors import ConfigError, Problem, one_line, without_secrets
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.shipped_files import recipes
from bigtrain.system.storage.stores import is_address


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-4 is a number, off is a word), and no duplicate keys."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:(?:[0-9][0-9_]*)?\.[0-9]+(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*\.?[eE][-+]?[0-9]+"
        r"|[0-9][0-9_]*\.|\.inf|\.nan)$"
    ),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)

_ALSO_KNOWN_AS = {
    **dict.fromkeys(("fp32", "float", "single", "32"), "float32"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp16", "half", "16"), "float16"),
}
"""Values under the names that other programs use for them."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is given twice", key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def recipe_names() -> list[str]:
    """Return names that `--config` takes instead of a path."""
    return sorted(path.stem for path in recipes().glob("*.yaml"))


def find_config(name_or_path: str) -> Path:
    """Return the file a `--config` argument means: a path, or the name of a shipped recipe."""
    path = Path(name_or_path)
    if path.is_file():
        return path
    recipe = recipes() / f"{name_or_path}.yaml"
    if recipe.is_file():
        return recipe
    close = difflib.get_close_matches(name_or_path, recipe_names(), n=1)
    remedy = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        Problem(
            "--config",
            name_or_path,
            "neither a file nor the name of a recipe",
            f"{remedy}recipes: {', '.join(recipe_names()) or 'none'}",
        )
    )


def parse_yaml(text: str, source: str) -> Any:
    """Return `text` as YAML 1.2 data. Raises ConfigError with file and line where it is not."""
    try:
        return yaml.load(text, Loader=_Loader)
    # ValueError: a date or an integer that Python does not have. TypeError: a list as a key.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        where, rule = _yaml_fault(error, text)
        remedy = "correct the value" if "\n" not in text else "correct the line"
        raise ConfigError(
            Problem(f"YAML of {source}{where}", None, rule, remedy), source
        ) from error


def _yaml_fault(error: Exception, text: str) -> tuple[str, str]:
    """Return the location of a YAML error, as `` line 3, column 5``, and the rule with the line."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None)
    if mark is None or reason is None:
        return "", one_line(error, None)
    lines = text.splitlines() or [""]
    # An unexpected end is reported after the last line.
    number = min(mark.line, len(lines) - 1)
    context = getattr(error, "context", None)
    rule = f"{context}: {reason}" if context else str(reason)
    return f" line {number + 1}, column {mark.column + 1}", f"{rule}: {lines[number].strip()!r}"


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> list[Problem]:
    """Write `section.key=value` strings into `tree`, in order; the value is read as YAML."""
    problems = []
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.split(".")
        if not separator or not all(keys) or is_address(path):
            problems.append(
                Problem(override, None, "is not an override", "write section.key=value")
            )
            continue
        try:
            value = parse_yaml(text, override)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        _assign(tree, keys, value)
    return problems


def _assign(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    node = tree
    for key in keys[:-1]:
        child = node.get(key)
        if not isinstance(child, dict):
            child = {}
            node[key] = child
        node = child
    node[keys[-1]] = value


def load_run_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run that a YAML file or recipe and its overrides describe.

    Raises ConfigError with all problems, not only the first.
    """
    path = find_config(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem("--config", str(path), f"cannot be read: {error}")) from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            Problem("YAML", tree, "the file must hold sections", "begin with `model:`"), str(path)
        )
    return parse_run_config(tree, overrides, str(path))


def parse_run_config(
    sections: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "the run"
) -> RunConfig:
    """Return the run of `sections`, as a run YAML holds them, and overrides.

    `source`: their origin, for problems. Raises ConfigError with all problems.
    """
    tree = copy.deepcopy(dict(sections))
    problems = apply_overrides(tree, overrides)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems.extend(_problem_of(detail) for detail in error.errors())
    if problems:
        raise ConfigError(problems, f"{source} and the command line" if overrides else source)
    return config


def _problem_of(detail: Any) -> Problem:
    location = _location(detail["loc"])
    key = ".".join(location) or "run"
    given = detail["input"]
    if isinstance(given, str):  # an address is shown without its password
        given = without_secrets(given)
    if detail["type"] == "extra_forbidden":
        remedy = f"{_suggestion(location)}known here: {', '.join(_fields_at(location[:-1]))}"
        return Problem(key, given, "unknown key", remedy)
    if detail["type"] == "missing":
        return Problem(key, None, "is required", f"add {key} to the file or as {key}=VALUE")
    rule = str(detail["msg"]).removeprefix("Value error, ")
    value = None if isinstance(given, (dict, BaseModel)) else given
    remedy = ""
    if rule.startswith("Input should be '"):  # one of these
        remedy = _meant_value(value, re.findall(r"'([^']*)'", rule))
    return Problem(key, value, rule[:1].lower() + rule[1:], remedy or _what_to_write(detail, key))


def _what_to_write(detail: Any, key: str) -> str:
    """Return the fix for a value of a wrong type or out of bounds; empty for any other."""
    kind, bounds = detail["type"], detail.get("ctx", {})
    if kind == "model_type":
        fields = _section_fields(key)
        return f"write its settings: {', '.join(f'{key}.{name}=VALUE' for name in fields)}"
    if kind == "tuple_type":
        return f"write a list: {key}=[a, b]"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"nearest: {bounds.get('ge', bounds.get('le'))}"
    if kind in ("greater_than", "less_than"):
        words = "more than" if kind == "greater_than" else "less than"
        return f"write a number {words} {bounds.get('gt', bounds.get('lt'))}"
    return ""


def _section_fields(key: str) -> list[str]:
    """Return the required settings of the section at `key`, or its first one where none is
    required."""
    model: type[BaseModel] | None = RunConfig
    for name in key.split("."):
        field = model.model_fields.get(name) if model else None
        model = _section_of(field.annotation) if field else None
    if model is None:
        return ["KEY"]
    required = [name for name, field in model.model_fields.items() if field.is_required()]
    return required or list(model.model_fields)[:1]


def _meant_value(value: object, choices: Sequence[str]) -> str:
    name = str(value).lower()
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    meant = _ALSO_KNOWN_AS[name] if _ALSO_KNOWN_AS.get(name) in choices else next(iter(close), "")
    return f"did you mean {meant}?" if meant else ""


def _suggestion(location: Sequence[str]) -> str:
    """Return a suggestion for the unknown key at `location`: a field that another program calls so,
    a field of another section, or a similar name."""
    name, parent = location[-1], location[:-1]
    if instead := why_no_field(name):
        return f"{instead}; "
    meant = field_known_as(name)
    if meant is None:
        homes = [section for section in _fields_at(()) if name in _fields_at((section,))]
        close = difflib.get_close_matches(name, _fields_at(parent), n=1, cutoff=0.5)
        if close:
            meant = ".".join((*parent, close[0]))
        elif len(homes) == 1:
            meant = f"{homes[0]}.{name}"
    return f"did you mean {meant}? " if meant else ""


def _location(parts: Sequence[int | str]) -> list[str]:
    """Return the YAML path of a pydantic location: union branches are not part of it."""
    names: list[str] = []
    model: type[BaseModel] | None = RunConfig
    for part in parts:
        if model is None and isinstance(part, str):
            break
        names.append(str(part))
        if model is not None and isinstance(
            part, str
        ):  # a number is an index into a list of models
            field = model.model_fields.get(str(part))
            model = _section_of(field.annotation) if field else None
    return names


def _section_of(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _fields_at(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] | None = RunConfig
    for name in location:
        if name.isdigit():
            continue
        field = model.model_fields.get(name) if model else None
        model = _section_of(field.annotation) if field else None
    return sorted(model.model_fields) if model else []


@functools.cache
def _other_names() -> dict[str, dict[str, str]]:
    path = Path(__file__).with_name("other_names.yaml")
    tree: dict[str, dict[str, str]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree


def field_known_as(name: str) -> str | None:
    """Return the field that other programs call `name`, as section.key; None where there is
    none."""
    fields = _other_names()["fields"]
    return next((field for field, names in fields.items() if name in names.split()), None)


def why_no_field(name: str) -> str | None:
    """Return what replaces `name`, a setting of other programs; None if it is unknown."""
    instead = _other_names()["instead"]
    return next((text for names, text in instead.items() if name in names.split()), None)


def with_setting_names(message: str) -> str:
    """Return the message of argparse about arguments that it does not know, with how the settings
    are written that they may mean; other messages as they are."""
    kind, _, words = message.partition("unrecognized arguments: ")
    if kind or not words:
        return message
    names = [word.lstrip("-").split("=")[0] for word in words.split() if word.startswith("--")]
    hints = [_how_to_write(name.replace("-", "_")) for name in names]
    return "; ".join([message, *hints])


def _how_to_write(name: str) -> str:
    field = field_known_as(name) or (name if "." in name else None)
    if field is None and (reason := why_no_field(name)):
        return f"unknown setting {name}: {reason}"
    return f"a setting of the run is written {field or 'section.key'}=VALUE, without dashes"
