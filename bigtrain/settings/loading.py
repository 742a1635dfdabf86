"""Reading of the run YAML: recipes by name, overrides, and every problem of a file at once.

Reads only YAML files and imports no torch. A table of the names that other programs (HF Trainer,
Megatron, DeepSpeed, torchtitan, Lightning) use for settings serves "did you mean".
"""

from __future__ import annotations

import copy
import difflib
import functools
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from bigtrain.errors import ConfigError, Problem, one_line, without_secrets
from bigtrain.settings.run_config import RunConfig, Section
from bigtrain.settings.sections.base import section_of, word_for_switch
from bigtrain.system.shipped_files import recipes
from bigtrain.system.storage.stores import is_address
from bigtrain.system.text_files import TextFileError, read_text


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (1e-4 is a number, off is a word), and no duplicate keys."""


# SafeLoader has YAML 1.1 patterns, by the first character of a scalar. Replace the
# patterns of numbers with an exponent and of words that are true or false.
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
    **dict.fromkeys(("dpo", "ipo", "simpo", "orpo", "cpo", "apo"), "preference"),
    **dict.fromkeys(("sft", "clm", "causal_lm", "pretrain", "pretraining", "lm"), "next_token"),
    **dict.fromkeys(("rm", "reward_model", "reward_modeling"), "reward"),
    **dict.fromkeys(("flash", "flash_attn", "flash_attention", "fa2"), "flash_attention_2"),
    "fa3": "flash_attention_3",
}
"""Values under the names that other programs use for them."""


_ODD_SPACES = {"\t": "tabs", "\xa0": "non-breaking spaces"}
"""Characters that look like spaces in an editor, and are none in YAML."""
_SHOWN_COLUMNS = 80
"""Columns that an error shows of a line that cannot be read."""


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Return the data of a mapping. Raises ConstructorError for a key that is written twice."""
    keys: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in keys:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {key!r} is given twice", key_node.start_mark
            )
        keys.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


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
    # Suggest a file of the directory with a similar name, else a recipe.
    close: list[str] = []
    if path.suffix and path.parent.is_dir() and not path.is_dir():
        names = [file.name for file in path.parent.iterdir() if file.is_file()]
        similar_names = difflib.get_close_matches(path.name, names, n=1, cutoff=0.8)
        close += [str(path.parent / name) for name in similar_names]
    close += difflib.get_close_matches(name_or_path, recipe_names(), n=1)
    remedy = f"did you mean {close[0]}? " if close else ""
    rule = "is a directory" if path.is_dir() else "neither a file nor the name of a recipe"
    fix = f"{remedy}a YAML file, or a recipe: {', '.join(recipe_names()) or 'none'}"
    raise ConfigError(Problem("--config", name_or_path, rule, fix))


def parse_yaml(text: str, source: str) -> Any:
    """Return `text` as YAML 1.2 data. Raises ConfigError with the line of a syntax error in
    `source`, the file or override that has the text."""
    try:
        return yaml.load(text, Loader=_Loader)
    # ValueError: a date or an integer that Python does not have. TypeError: a list as a key.
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        remedy = "correct the value" if "\n" not in text else "correct the line"
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None)
        position, rule = "", one_line(error, None)
        if mark is not None and reason is not None:
            # The mark of an unexpected end is after the last line.
            lines = text.splitlines() or [""]
            index = min(mark.line, len(lines) - 1)
            line = lines[index].strip()
            ellipsis = "..." if len(line) > _SHOWN_COLUMNS else ""
            context = getattr(error, "context", None)
            rule = f"{context}: {reason}" if context else str(reason)
            rule = f"{rule}: {line[:_SHOWN_COLUMNS]!r}{ellipsis}"
            position = f" line {index + 1}, column {mark.column + 1}"
            odd_spaces = [name for space, name in _ODD_SPACES.items() if space in lines[index]]
            if odd_spaces:
                remedy = f"write spaces instead of {' and '.join(odd_spaces)}"
        raise ConfigError(
            Problem(f"YAML of {source}{position}", None, rule, remedy), source
        ) from error


def apply_overrides(tree: dict[str, Any], overrides: Iterable[str]) -> list[Problem]:
    """Write `section.key=value` strings into `tree`, in order; the value is read as YAML. Return
    the problems of strings that are not overrides, which are not written."""
    problems = []
    words = list(overrides)
    for number, override in enumerate(words):
        path, separator, text = override.partition("=")
        keys = path.split(".")
        if not separator or not all(keys) or is_address(path):
            if override.startswith("=") and number and "=" not in words[number - 1]:
                continue  # `key =value`: the problem of the word `key` names both
            following = words[number + 1] if number + 1 < len(words) else ""
            fix = "write section.key=value"
            if following.startswith("=") and "=" not in override:
                fix = f"write {override}{following}, without spaces"
            elif override.endswith((".yaml", ".yml")):
                fix = f"--config {override}"
            elif override.endswith(".json"):
                fix = f"--deepspeed_config {override}"
            problems.append(Problem(override, None, "is not an override", fix))
            continue
        try:
            value = parse_yaml(text, override)
        except ConfigError as error:
            problems.extend(error.problems)
            continue
        # Sections on the way are created; a value that is not a section is replaced.
        node = tree
        for key in keys[:-1]:
            child = node.get(key)
            if not isinstance(child, dict):
                child = {}
                node[key] = child
            node = child
        node[keys[-1]] = value
    return problems


def load_run_config(name_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run that a YAML file or recipe and its overrides describe.

    Raises ConfigError with all problems, not only the first.
    """
    path = find_config(name_or_path)
    try:
        text = read_text(path)
    except TextFileError as error:
        raise ConfigError(Problem("--config", str(path), error.rule, error.fix)) from error
    tree = parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(
            Problem("YAML", tree, "the file must hold sections", "begin with `model:`"), str(path)
        )
    # A file of another trainer gets one problem, not a problem of every key. It may have up to one
    # key that is also a section's name, and a seed.
    sections = sorted((tree.keys() & RunConfig.model_fields.keys()) - {"seed"})
    if len(sections) <= 1 and len(tree) - len(sections) > 2:
        section_name = sections[0] if sections else "none"
        rule = f"is no run: of its {len(tree)} keys, {section_name} is a section"
        remedy = f"bigtrain convert {shlex.quote(str(path))}, if it is another trainer's file"
        raise ConfigError(Problem("--config", str(path), rule, remedy))
    return parse_run_config(tree, overrides, str(path))


def parse_run_config(
    sections: Mapping[str, Any], overrides: Sequence[str] = (), source: str = "the run"
) -> RunConfig:
    """Return the run of `sections`, which are as in a run YAML, with `overrides` applied.

    `source`: their origin, for problems. Raises ConfigError with all problems.
    """
    tree = copy.deepcopy(dict(sections))
    problems = apply_overrides(tree, overrides)
    try:
        config = RunConfig.model_validate(tree)
    except ValidationError as error:
        problems.extend(_problems_of_values(error.errors()))
    if problems:
        raise ConfigError(problems, f"{source} and the command line" if overrides else source)
    return config


def _problems_of_values(details: Iterable[Any]) -> list[Problem]:
    """Return one problem for each wrong value. pydantic reports an error of the value for every
    branch of a union: these errors are joined."""
    # For each key: the length of the error's location, and the error as a problem.
    errors_of_key: dict[str, list[tuple[int, Problem]]] = {}
    for detail in details:
        problem = _problem_of_error(detail)
        errors_of_key.setdefault(problem.key, []).append((len(detail["loc"]), problem))
    problems = []
    for errors in errors_of_key.values():
        # The branch of a union with the deepest location, as an item of a list, is intended.
        max_depth = max(depth for depth, _ in errors)
        errors_of_value: dict[str, list[Problem]] = {}
        for depth, problem in errors:
            if depth == max_depth:
                errors_of_value.setdefault(repr(problem.value), []).append(problem)
        for branches in errors_of_value.values():
            rule = ", or ".join(dict.fromkeys(problem.rule for problem in branches))
            suggestions = [p.remedy for p in branches if p.remedy.startswith("did you mean")]
            remedies = suggestions or [problem.remedy for problem in branches]
            problems.append(Problem(branches[0].key, branches[0].value, rule, remedies[-1]))
    return problems


def _problem_of_error(detail: Any) -> Problem:
    """Return the problem of an error of pydantic, with the key as the YAML has it."""
    # pydantic's location goes on, after the last field that is not a section, with names of a
    # union's branches, which are not keys. Numbers are indices into lists of sections.
    location: list[str] = []
    section: type[Section] | None = RunConfig
    for part in detail["loc"]:
        if section is None and isinstance(part, str):
            break
        location.append(str(part))
        if isinstance(part, str):
            section = _inner_section(section, part)
    key = ".".join(location) or "run"

    # Unknown and missing keys.
    input_value = detail["input"]
    if isinstance(input_value, str):  # an address is shown without its password
        input_value = without_secrets(input_value)
    if detail["type"] == "extra_forbidden":
        remedy = f"{_suggestion(location)}known here: {', '.join(_fields_at(location[:-1]))}"
        return Problem(key, input_value, "unknown key", remedy)
    if detail["type"] == "missing":
        settings = _settings_to_write(key)
        overrides = " ".join(f"{setting}=VALUE" for setting in settings)
        fix = f"add {' and '.join(settings)} to the file or as {overrides}"
        return Problem(key, None, "is required", fix)

    # Wrong values: the fix follows from the type of the error, or is the choice that is meant.
    rule = str(detail["msg"]).removeprefix("Value error, ")
    value = None if isinstance(input_value, (dict, BaseModel)) else input_value
    remedy = _value_fix(detail, key)
    if rule.startswith("Input should be '"):
        choices = re.findall(r"'([^']*)'", rule)
        name = str(value).lower()
        # Another way to write a choice, else a similar choice.
        nearest = word_for_switch(value, choices) or _ALSO_KNOWN_AS.get(name)
        if nearest not in choices:
            close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
            nearest = close[0] if close else None
        remedy = f"did you mean {nearest}?" if nearest else "write one of these"
    for pydantic_rule, yaml_rule in _RULES_IN_YAML_WORDS:
        rule = re.sub(pydantic_rule, yaml_rule, rule)
    return Problem(key, value, rule[:1].lower() + rule[1:], remedy)


def _inner_section(section: type[Section] | None, name: str) -> type[Section] | None:
    """Return the section that the field `name` of `section` holds; None for any other field."""
    field = section.model_fields.get(name) if section else None
    return section_of(field.annotation) if field else None


_RULES_IN_YAML_WORDS = (
    (r"Input should be a valid dictionary or instance of \w+", "must be a section with settings"),
    (r"Input should be a valid tuple", "must be a list"),
    (r"Input should be a valid number, unable to parse string as a number", "must be a number"),
    (r"Input should be a valid integer, unable to parse .*", "must be a whole number"),
    (r"Input should be a valid integer, got a number .*", "must be a whole number"),
    (r"Tuple should have at (most|least) (\d+) items? after validation, not", r"must have \2, not"),
)
"""Rules in the words of pydantic (patterns), and in the words of a YAML's reader."""


def _settings_to_write(key: str) -> list[str]:
    """Return the settings to write so that `key` has a value: the required settings of a section,
    else its first setting; for a key that is not a section, the key itself."""
    section: type[Section] | None = RunConfig
    for name in key.split("."):
        section = _inner_section(section, name)
    if section is None:
        return [key]
    required = [name for name, field in section.model_fields.items() if field.is_required()]
    settings = required or [next(iter(section.model_fields))]
    return [f"{key}.{name}" for name in settings]


def _value_fix(detail: Any, key: str) -> str:
    """Return the fix for a value of a wrong type or out of bounds; empty for any other."""
    error_type, bounds = detail["type"], detail.get("ctx", {})  # as {"ge": 1}
    if error_type == "model_type":
        settings = ", ".join(f"{name}=VALUE" for name in _settings_to_write(key))
        return f"write its settings: {settings}"
    if error_type == "tuple_type":
        items = detail["input"] if isinstance(detail["input"], str) else "a, b"
        return f"write a list: {key}=[{without_secrets(items)}]"
    if error_type in ("too_long", "too_short"):
        length = bounds.get("max_length", bounds.get("min_length"))
        return f"write {length} values in a list: {key}=[a, b]"
    if error_type == "int_from_float":
        floor = math.floor(detail["input"])
        return f"nearest: {floor} or {floor + 1}"
    if error_type.startswith(("int_", "float_")):
        return f"write a number: {key}={'1' if error_type.startswith('int_') else '0.1'}"
    if error_type in ("greater_than_equal", "less_than_equal"):
        return f"nearest: {bounds.get('ge', bounds.get('le'))}"
    if error_type in ("greater_than", "less_than"):
        words = "more than" if error_type == "greater_than" else "less than"
        return f"write a number {words} {bounds.get('gt', bounds.get('lt'))}"
    return ""


def _suggestion(location: Sequence[str]) -> str:
    """Return a suggestion for the unknown key at `location`: the field for which another program
    has this name, a field of another section, or a similar name."""
    name, parent = location[-1], location[:-1]
    if instead := why_no_field(name):
        return f"{instead}; "
    field_name = field_known_as(name)
    if field_name is None:
        sections = [section for section in _fields_at(()) if name in _fields_at((section,))]
        close = difflib.get_close_matches(name, _fields_at(parent), n=1, cutoff=0.5)
        if sections and not parent:  # a setting without its section
            field_name = " or ".join(f"{section}.{name}" for section in sections)
        elif close:
            field_name = ".".join((*parent, close[0]))
        elif len(sections) == 1:
            field_name = f"{sections[0]}.{name}"
    return f"did you mean {field_name}? " if field_name else ""


def _fields_at(location: Sequence[str]) -> list[str]:
    """Return the sorted fields of the section at `location`; () is the run. Empty if there is no
    section there."""
    section: type[Section] | None = RunConfig
    for name in location:
        if not name.isdigit():
            section = _inner_section(section, name)
    return sorted(section.model_fields) if section else []


@functools.cache
def _other_names() -> dict[str, dict[str, str]]:
    """Return the table: ``fields`` (of a field, the names that other programs have for it, divided
    by spaces) and ``instead`` (what replaces a name that has no field)."""
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
    """Return a message of argparse about unknown arguments, completed by how to write the settings
    that these arguments may mean; any other message unchanged."""
    prefix, _, words = message.partition("unrecognized arguments: ")
    if prefix or not words:
        return message
    options = [word for word in words.split() if word.startswith("--")]
    hints = []
    for option in options:
        name = option.lstrip("-").split("=")[0].replace("-", "_")
        field = field_known_as(name) or (name if "." in name else None)
        if field is None and (reason := why_no_field(name)):
            hints.append(f"unknown setting {name}: {reason}")
        else:
            example = f"{field or 'section.key'}=VALUE"
            hints.append(f"a setting of the run is written {example}, without dashes")
    return "; ".join([message, *hints])
