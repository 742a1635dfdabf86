"""An expression is read once: no decision stands inside of a loop's header or of another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.test_layers import FILES, parse
from tests.support.worlds import ROOT

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_GENERATORS = 2
MOST_GROUPS = 3
"""Groups that a function may take from matches by their number."""


def is_numbered_group(node: ast.AST) -> bool:
    """Return whether `node` is a subscript such as ``match[1]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
        return False
    is_match = ast.unparse(node.value) in ("m", "match", "found")
    return is_match and isinstance(node.slice.value, int)


def dense(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the lines of dense expressions, and what to write instead."""
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            if isinstance(node.iter, ast.IfExp):
                yield node.iter.lineno, "an `if` statement, or a named list before the loop"
            if ast.unparse(node.iter).endswith(("[:1]", "[-1:]")):
                yield node.iter.lineno, "`if` with the element, instead of a loop over one"
        if isinstance(node, ast.AugAssign) and isinstance(node.value, ast.IfExp):
            if {ast.unparse(node.value.body), ast.unparse(node.value.orelse)} & {"[]", "()"}:
                yield node.lineno, "an `if` statement with `append` or `+=`"
        if isinstance(node, ast.IfExp):
            branches = (node.test, node.body, node.orelse)
            if any(isinstance(branch, ast.IfExp) for branch in branches):
                yield node.lineno, "an `if` statement, or a name for the inner conditional"
            if any(isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node.test)):
                yield node.lineno, "a name for the test: `is_complete = all(...)`"
        if isinstance(node, (*COMPREHENSIONS, ast.IfExp)):
            if any(isinstance(inner, ast.NamedExpr) for inner in ast.walk(node)):
                yield node.lineno, "a loop, or an assignment before the expression"
        if isinstance(node, COMPREHENSIONS) and len(node.generators) > MOST_GENERATORS:
            yield node.lineno, "loops, of which the innermost may be a comprehension"
        num_groups = 0
        if isinstance(node, ast.FunctionDef):
            num_groups = sum(is_numbered_group(inner) for inner in ast.walk(node))
        if num_groups > MOST_GROUPS:
            yield node.lineno, "named groups: `(?P<layer>...)` and `match['layer']`"


def test_expressions_are_read_once() -> None:
    places = [
        f"{file.relative_to(ROOT)}:{line}: write {remedy}"
        for file in FILES
        for line, remedy in dense(parse(file))
    ]
    assert not places, "\n".join(places)


@pytest.mark.parametrize(
    "text",
    [
        "for x in xs if c else ys: pass",
        "for x in () if xs is None else xs: pass",
        "zs = [x for x in (xs if c else ys)]",
        "for x in xs[-1:]: pass",
        "for x in xs[:1]: pass",
        "xs += [x] if c else []",
        "zs = [y for x in xs if (y := f(x))]",
        "z = y[0] if (y := f(x)) else None",
        "z = a if c else b if d else e",
        "z = 0 if any(x > 1 for x in xs) else 1",
        "zs = {x for xs in ys for ys in zs for x in xs}",
        "def f(match): return match[1], match[2], match[1], match[2]",
    ],
)
def test_dense_expressions_are_found(text: str) -> None:
    assert len(list(dense(ast.parse(text)))) == 1


def test_plain_expressions_are_not_found() -> None:
    text = "if found := f(x):\n    zs = [x for xs in ys for x in (a if c else b, *xs)]"
    assert not list(dense(ast.parse(text)))
