"""Other folders ask an objective what differs between kinds, and compare no names of kinds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bigtrain.objectives.section import KINDS, ROWS
from tests.architecture.test_layers import MODULES, nodes_of, parse

NAMES = {*KINDS, *ROWS}


def test_no_other_folder_compares_the_kind_of_an_objective() -> None:
    switches = [
        f"{path}:{line}: {name}"
        for module, path in MODULES.items()
        if not module.startswith("bigtrain.objectives")
        for line, name in switches_in(parse(path))
    ]
    assert switches == [], "ask config.objective.kind or ROWS of bigtrain.objectives.section"


def switches_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of comparisons with the name of a kind, and of tables by such names."""
    for node in nodes_of(tree):
        names: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            names = [*ast.walk(node)]
        elif isinstance(node, ast.Dict):
            names = [*node.keys]
        elif isinstance(node, ast.MatchValue):
            names = [node.value]
        for name in names:
            if isinstance(name, ast.Constant) and name.value in NAMES:
                yield name.lineno, str(name.value)


def test_switches_are_found() -> None:
    text = """
if kind == "kto" or kind in ("reward", "text"):
    units = {"preference": 2}
match kind:
    case "classification":
        pass
message = "kto"
"""
    found = {name for _, name in switches_in(ast.parse(text))}
    assert found == {"kto", "reward", "preference", "classification"}
