"""Names say what value they hold, prose repeats the noun, and functions are short."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.test_layers import FILES, nodes_of, parse
from tests.support.worlds import ROOT

NAMES_OF_NO_VALUE = frozenset(
    """one other others each own mine ours theirs whole beside held heard kept known unknown given
    taken tried wanted shown told begun ended made rest more most less least here there where when
    what why which who whose same such both either asked chosen found lost left gone seen done used
    called meant put apart together alone again back far once of to by at from with without inside
    outside place places kind kinds way thing things it them they this that these those some none
    """.split()
)
PREFIXES_OF_NO_VALUE = ("of_", "by_", "in_", "not_", "to_")
"""``of_model`` says of what a value is, and not which value."""
WITH_A_PREFIX = {"to_dict", "to_json", "by_name", "in_features", "in_channels", "in_place"}
"""Names that the field uses."""
MOST_NAMES = 3.0
"""Names in a thousand that may be in the list."""

BACK_REFERENCE = re.compile(
    r"\b(those (of|that|which|with|in|it)|that of|of (it|them|these|those|each|all|both|one)\b|the "
    r"(one|ones|other|others|rest|same|former|latter)\b|its own|their own|of its|of their|as of|"
    r"and so on|likewise|thereof|such (a|an)?\b|in (it|them)\b|another one)",
    re.IGNORECASE,
)
MOST_BACK_REFERENCES = 4.0
"""Back-references in a thousand words of docstrings and comments."""

# A tenth of the time of `tokenize`; Python 3.12 also has quotes within an f-string.
TEXT_OR_COMMENT = re.compile(
    r'''"""(?:\\.|[^\\])*?"""|\'{3}(?:\\.|[^\\])*?\'{3}|"(?:\\.|[^"\\\n])*"'''
    r"""|'(?:\\.|[^'\\\n])*'|(?P<comment>\#[^\n]*)""",
    re.DOTALL,
)

MOST_LINES = 80
MOST_PARAMETERS = 7
MANY_PARAMETERS = 9
"""Functions that may have more than `MOST_PARAMETERS`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def bound_names(tree: ast.Module) -> Iterator[str]:
    """Variables and parameters of a file."""
    for node in nodes_of(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls", "_"):
            yield node.arg


def names_no_value(name: str) -> bool:
    has_prefix = name.startswith(PREFIXES_OF_NO_VALUE) and name not in WITH_A_PREFIX
    return name in NAMES_OF_NO_VALUE or has_prefix


def prose_of(text: str, tree: ast.Module) -> Iterator[str]:
    """Comments and docstrings of a file."""
    yield from (match["comment"] for match in TEXT_OR_COMMENT.finditer(text) if match["comment"])
    for node in nodes_of(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            yield ast.get_docstring(node) or ""


def functions() -> Iterator[tuple[str, Function]]:
    """Functions of the package with their places."""
    for file in FILES:
        for node in nodes_of(parse(file)):
            if isinstance(node, Function):
                yield f"{file.relative_to(ROOT)}:{node.lineno} {node.name}", node


def test_names_say_what_value_they_hold() -> None:
    num_names, places = 0, []
    for file in FILES:
        for name in bound_names(parse(file)):
            num_names += 1
            if names_no_value(name):
                places.append(f"{file.relative_to(ROOT)}: {name}")
    assert len(places) / num_names <= MOST_NAMES / 1000, "\n".join(places)


def test_prose_repeats_the_noun() -> None:
    num_words, found = 0, []
    for file in FILES:
        for prose in prose_of(file.read_text(), parse(file)):
            num_words += len(prose.split())
            found += [f"{file.relative_to(ROOT)}: {m[0]}" for m in BACK_REFERENCE.finditer(prose)]
    assert len(found) / num_words <= MOST_BACK_REFERENCES / 1000, "\n".join(found)


def test_no_function_is_long() -> None:
    lengths = {place: node.end_lineno - node.lineno + 1 for place, node in functions()}  # type: ignore[operator]
    assert not [place for place, length in lengths.items() if length > MOST_LINES]


def test_few_functions_have_many_parameters() -> None:
    wide = []
    for place, node in functions():
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if len([p for p in parameters if p.arg not in ("self", "cls")]) > MOST_PARAMETERS:
            wide.append(place)
    assert len(wide) <= MANY_PARAMETERS, wide


@pytest.mark.parametrize(
    ("name", "is_bad"),
    [("own", True), ("of_model", True), ("gather_seconds", False), ("to_dict", False)],
)
def test_the_list_of_names(name: str, is_bad: bool) -> None:
    [bound] = bound_names(ast.parse(f"{name} = 1"))
    assert names_no_value(bound) is is_bad


def test_back_references_are_found_in_docstrings_and_comments() -> None:
    text = '"""Those of the model, and the others."""\n# its own rank\n'
    found = [
        match
        for prose in prose_of(text, ast.parse(text))
        for match in BACK_REFERENCE.findall(prose)
    ]
    assert len(found) == 3
