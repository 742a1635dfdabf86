"""docs/troubleshooting.md quotes errors as the code words them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from tests.support.worlds import ROOT
from tools.markdown import markdown_cell

PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")


def literals(tree: ast.Module) -> Iterator[str]:
    """The string literals of a file, but for docstrings, with … for inserted values."""
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.value


def test_every_quote_is_an_error_of_the_code() -> None:
    """Key, rule and fix of an error are literals of their own."""
    package = ROOT / "bigtrain"
    files = (path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    texts = {text for file in files for text in literals(ast.parse(file))}
    reasons = json.loads((package / "settings/deepspeed/accepted.json").read_text())
    code = "\n".join(map(markdown_cell, texts)) + json.dumps(reasons, ensure_ascii=False)
    tables = re.findall(r"^\| Error text .*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, flags=re.M)
    quotes = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    assert len(quotes) > 20
    for quote in quotes:
        assert quote[0] == quote[-1] == "`"
        for part in re.split(r": | -> ", quote.strip("`")):
            assert part in code, f"{quote}: the error has another text now"
