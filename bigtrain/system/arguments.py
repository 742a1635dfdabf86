"""Command lines from frozen dataclasses: a field is an argument, its docstring the help. Pure.

The type of a field decides how its text is read: ``bool`` is a flag, ``Literal`` a choice,
``tuple[X, ...]`` an option that may be repeated, ``X | None`` and ``X | Y`` an ``X``; a field
without a default is required. `Annotated` adds the rest: a string is the name of the value in the
help, a function reads the text, and `Argument` has what else argparse's ``add_argument`` takes::

    @dataclass(frozen=True, kw_only=True)
    class PlanArguments:
        output: Annotated[Path, "DIR"]
        '''directory to write'''
        top: Annotated[int, positive_int, "N"] = 10
        '''layouts to show (default: 10)'''
"""

from __future__ import annotations

import argparse
import ast
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bigtrain.errors import DataError


class Argument:
    """Additions to the properties that an argument has by the type of its field.

    `flags`: names other than ``--its-name``; a name without dashes is a positional argument.
    `one_of`: at most, or exactly, one of the arguments with this value is given. `shorthand`:
    another flag, the value that it gives to the field, and its help. `example`: a pair of a
    mapping, for the error text. `settings`: for ``add_argument`` of argparse; they override those
    of the type.
    """

    def __init__(
        self,
        *flags: str,
        one_of: Literal["at most one", "exactly one"] | None = None,
        shorthand: tuple[str, object, str] | None = None,
        example: str = "",
        **settings: Any,
    ) -> None:
        self.flags = flags
        self.one_of = one_of
        self.shorthand = shorthand
        self.example = example
        self.settings = settings

    @property
    def is_positional(self) -> bool:
        return bool(self.flags) and not self.flags[0].startswith("-")


def add_arguments(parser: argparse.ArgumentParser, record: type, *, has_help: bool = True) -> None:
    """Add an argument for each field of the dataclass `record`, and store `record` itself in the
    result. has_help: whether help texts are read from the source of `record`."""
    texts = field_texts(record) if has_help else {}
    groups: dict[str, Any] = {}
    for field, annotation in _written_fields(record):
        argument, settings = _settings(field, annotation)
        settings = {"help": texts.get(field.name), **settings, **argument.settings}
        if argument.is_positional:
            parser.add_argument(field.name, **settings)
            continue
        # Arguments that exclude each other are in a group, which the first argument creates.
        target: Any = parser
        if argument.one_of is not None:
            if argument.one_of not in groups:
                required = argument.one_of == "exactly one"
                groups[argument.one_of] = parser.add_mutually_exclusive_group(required=required)
            target = groups[argument.one_of]
        # The option, and the option that gives the field a fixed value.
        flags = argument.flags or (f"--{field.name.replace('_', '-')}",)
        required = field.default is MISSING
        target.add_argument(*flags, dest=field.name, required=required, **settings)
        if argument.shorthand is not None:
            flag, value, text = argument.shorthand
            shared = {"dest": field.name, "default": field.default}
            target.add_argument(flag, action="store_const", const=value, help=text, **shared)
    parser.set_defaults(record=record)


def _settings(field: Field[Any], annotation: Any) -> tuple[Argument, dict[str, Any]]:
    """Return the additions to a field, and the settings for ``add_argument`` by its type."""
    value_type, notes = _unwrapped(annotation)
    argument = next((note for note in notes if isinstance(note, Argument)), Argument())
    settings: dict[str, Any] = {}
    # Several values: as many as the option is repeated, or as follow it.
    is_sequence = get_origin(value_type) in (tuple, Sequence, Mapping)
    if is_sequence:
        value_type, item_notes = _unwrapped(get_args(value_type)[0])
        notes = [*item_notes, *notes]
    if (is_sequence or "nargs" in argument.settings) and not argument.is_positional:
        settings["action"] = "extend" if "nargs" in argument.settings else "append"
    if value_type is bool:
        settings["action"] = "store_true"
    elif get_origin(value_type) is Literal:
        settings["choices"] = get_args(value_type)
    elif value_type is not str:
        settings["type"] = value_type
    # The notes of a field come after the notes of the alias in its type, and override them.
    for note in notes:
        if isinstance(note, str):
            settings["metavar"] = note
        elif not isinstance(note, Argument):
            settings["type"] = note
    if field.default is not MISSING and not argument.is_positional:
        settings["default"] = list(field.default) if field.default == () else field.default
    return argument, settings


def read_arguments(namespace: argparse.Namespace) -> Any:
    """Return the dataclass of the parsed arguments. Raises DataError for a malformed pair."""
    values: dict[str, Any] = {}
    for field, annotation in _written_fields(namespace.record):
        value = getattr(namespace, field.name)
        value_type, notes = _unwrapped(annotation)
        if get_origin(value_type) is Mapping and value is not None:
            (argument,) = (note for note in notes if isinstance(note, Argument))
            for text in value:
                if not re.fullmatch("[^=]+=.+", text, re.DOTALL):
                    form, flag = argument.settings["metavar"], argument.flags[0]
                    raise DataError(f"{flag} {text}: not {form}, such as {argument.example}")
            value = dict(text.split("=", 1) for text in value)
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return namespace.record(**values)


def command_words(values: Any, **changed: object) -> list[str]:
    """Return the words that `read_arguments` reads as the dataclass `values`, without defaults.
    changed: other values, by field."""
    options: list[str] = []
    positional: list[str] = []
    for field, annotation in _written_fields(type(values)):
        value = changed.get(field.name, getattr(values, field.name))
        if value == field.default:
            continue
        argument, settings = _settings(field, annotation)
        flag = argument.flags[0] if argument.flags else f"--{field.name.replace('_', '-')}"
        # The texts of the value: of a sequence or mapping one for each item.
        if isinstance(value, Mapping):
            items = [f"{name}={item}" for name, item in value.items()]
        elif isinstance(value, tuple | list):
            items = [str(item) for item in value]
        else:
            items = [str(value)]
        if argument.is_positional:
            positional += items
        elif value is True:
            options.append(flag)
        elif settings.get("action") == "append":
            for item in items:
                options += [flag, item]
        else:
            options += [flag, *items]
    return [*options, *positional]


def _written_fields(record: type) -> Iterator[tuple[Field[Any], Any]]:
    """Yield the fields that can be written on a command line: not those that hold a function."""
    annotations = get_type_hints(record, include_extras=True)
    for field in fields(record):
        value_type, _ = _unwrapped(annotations[field.name])
        if get_origin(value_type) is not Callable:
            yield field, annotations[field.name]


def _unwrapped(annotation: Any) -> tuple[Any, list[Any]]:
    """Return a type without `Annotated` and without further alternatives (``X`` of ``X | None``),
    and its notes, the notes of aliases first."""
    if get_origin(annotation) is Annotated:
        value_type, notes = _unwrapped(annotation.__origin__)
        return value_type, [*notes, *annotation.__metadata__]
    if get_origin(annotation) in (Union, UnionType):
        return _unwrapped(next(choice for choice in get_args(annotation) if choice is not NoneType))
    return annotation, []


def field_texts(record: type, root: type = object) -> dict[str, str]:
    """Return by field the string below it, in one line: of a class and its bases before `root`."""
    texts = {}
    for base in reversed(record.__mro__[: record.__mro__.index(root)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statements in pairwise(definition.body):
            match statements:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


# --- functions that read the text of an argument

_NUMBERS = {
    "int": "a whole number",
    "positive_int": "a whole number of at least 1",
    "count": "a whole number of at least 0",
    "float": "a number",
    "non_negative": "a number of at least 0",
    "above_zero": "a number above 0",
    "probability": "a number above 0 and at most 1",
    "seed": "a whole number",
    "fraction": "a number from 0 to below 1",
    "fraction_or_one": "a number from 0 to 1",
}
"""Descriptions of values, by the name of the function that reads the value."""


def with_plain_types(message: str) -> str:
    """Return a message of argparse about a text that is not a number, with a description instead of
    the name of the function that reads the number; return other messages unchanged."""
    match = re.fullmatch(
        r"(?P<argument>argument .*): invalid (?P<type>\w+) value: (?P<text>'.*')",
        message,
        re.DOTALL,
    )
    if match is None or match["type"] not in _NUMBERS:
        return message
    return f"{match['argument']}: {match['text']} is not {_NUMBERS[match['type']]}"


def positive_int(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def count(text: str) -> int:
    """Parse an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def size(text: str) -> int:
    """Parse bytes, as a number with or without a unit (KiB, MB, GiB, ...)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size, such as 67108864, 64MiB or 1GB")
    number, unit, binary_mark = match.groups()
    power = " kmgt".index(unit.lower()) if unit else 0
    value = int(float(number) * (1024 if binary_mark else 1000) ** power)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1 byte")
    return value


def fraction_or_one(text: str) -> float:
    """Parse a share from 0 to 1."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to 1")
    return value


def fraction(text: str) -> float:
    """Parse a share from 0 to below 1."""
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a fraction from 0 to below 1")
    return value


def probability(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    value = float(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and at most 1")
    return value


def non_negative(text: str) -> float:
    """Parse a finite number of at least 0."""
    value = float(text)
    if not 0.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of at least 0")
    return value


def above_zero(text: str) -> float:
    """Parse a finite number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


def seed(text: str) -> int:
    """Parse a seed of a random generator: not negative, and a signed 64-bit integer."""
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} is not an integer from 0 to below 2^63")
    return value


def port(text: str) -> int:
    """Parse the number of a port."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: an integer from 1 to 65535")
    return int(text)


Positive = Annotated[int, positive_int, "N"]
Size = Annotated[int, size, "SIZE"]
Seed = Annotated[int, seed, "N"]
Port = Annotated[int, port, "N"]
Directory = Annotated[Path, "DIR"]
File = Annotated[Path, "FILE"]
