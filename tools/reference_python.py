"""The page docs/reference/python.md: what `import bigtrain` offers. Imports no torch."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import bigtrain
from bigtrain.data.tokenize_job.options import ReadingOptions, TokenizeOptions
from bigtrain.system.arguments import add_arguments, field_texts
from tools.markdown import markdown_cell

# In the order of a user's work; errors have a table in exit_codes.md.
_FUNCTIONS = [name for name in bigtrain._HOME if name[0].islower()]
_CLASSES = [
    name
    for name in bigtrain._HOME
    if name[0].isupper() and bigtrain._HOME[name] != "bigtrain.errors"
]
_ERRORS = [name for name in bigtrain._HOME if bigtrain._HOME[name] == "bigtrain.errors"]


def python_page() -> str:
    """Return the page, without the line that names its source."""
    parts = [
        "\n[Use it from Python](../howto/python.md) has an example of each.\n",
        "## Functions\n",
    ]
    for name in _FUNCTIONS:
        parts += _function(name, getattr(bigtrain, name))
    parts += ["### Options of bigtrain.tokenize\n", *_options()]
    parts.append("## Classes\n")
    for name in _CLASSES:
        parts += _class(name, getattr(bigtrain, name))
    parts += [
        "## Errors\n",
        f"{', '.join(f'`bigtrain.{name}`' for name in _ERRORS)}: see "
        "[exit codes and errors](exit_codes.md).\n",
    ]
    return "# Python\n\n" + "\n".join(parts)


def _function(name: str, function: Any) -> Iterator[str]:
    yield f"### bigtrain.{name}\n"
    yield f"```python\n{_signature(name, function)}\n```\n"
    yield _text(function)


def _options() -> Iterator[str]:
    """Yield the table of the options of `bigtrain.tokenize`, which are those of its command."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, TokenizeOptions)
    flags = {action.dest: action.option_strings[0] for action in reversed(parser._actions)}
    read_names = {field.name for field in fields(ReadingOptions)}
    yield "| parameter | on the command line | meaning |\n|---|---|---|"
    for name, text in field_texts(TokenizeOptions).items():
        flag = f"`{flags[name]}`" if name in flags else ""
        star = "*" if name in read_names else ""
        yield f"| `{name}`{star} | {flag} | {markdown_cell(text)} |"
    yield "\n\\* also of `bigtrain.train_tokenizer`\n"


def _class(name: str, kind: Any) -> Iterator[str]:
    yield f"### bigtrain.{name}\n"
    yield _text(kind)
    own = [
        (key, value)
        for key, value in vars(kind).items()
        if not key.startswith("_") and getattr(_called(value), "__doc__", None)
    ]
    members = [(k, v) for k, v in own if isinstance(v, property) or inspect.isfunction(_called(v))]
    if members and not hasattr(kind, "model_fields"):
        yield "| member | meaning |\n|---|---|"
        for key, value in members:
            call = "" if isinstance(value, property) else "()"
            doc = " ".join(inspect.cleandoc(_called(value).__doc__).split("\n\n")[0].split())
            yield f"| `{key}{call}` | {doc.replace('|', chr(92) + '|')} |"
        yield ""


def _called(value: Any) -> Any:
    """Return the function of a property, a cached one or a method."""
    if isinstance(value, property):
        return value.fget
    return getattr(value, "func", value)


def _signature(name: str, function: Any) -> str:
    """Return a parameter a line, with its annotation as it is written in the code."""
    signature = inspect.signature(function)
    lines = [f"bigtrain.{name}("]
    keyword_only = False
    parameters = list(signature.parameters.values())
    if function in (bigtrain.tokenize, bigtrain.train_tokenizer):  # below, with their meaning
        parameters = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        parameters.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            has_rest = any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values())
            keyword_only = True
            lines += [] if has_rest else ["    *,"]
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        annotation = parameter.annotation
        typed = "" if annotation is parameter.empty else f": {annotation}"
        lines.append(f"    {stars}{parameter.name}{typed}{default},")
    return "\n".join([*lines, f") -> {signature.return_annotation}"])


def _text(thing: Any) -> str:
    """Return a docstring as Markdown: sections of `name: text` become a list."""
    paragraphs = inspect.cleandoc(thing.__doc__ or "").split("\n\n")
    return "\n\n".join(_paragraph(text) for text in paragraphs).replace("``", "`") + "\n"


def _paragraph(text: str) -> str:
    starts = re.findall(r"^(?:\w+, )*\w+: ", text, flags=re.M)
    if not starts or not text.startswith(starts[0]):
        return " ".join(text.split())
    text, raises, errors = " ".join(text.split()).partition(" Raises ")
    items = re.split(r"(?<=[.),]) (?=(?:\w+, )*\w+: )", text)
    if raises:
        return "\n".join(f"- {_named(item)}" for item in items) + f"\n\nRaises {errors}"
    return "\n".join(f"- {_named(item)}" for item in items)


def _named(item: str) -> str:
    names, _, meaning = item.partition(": ")
    return f"{', '.join(f'`{name}`' for name in names.split(', '))}: {meaning}"
