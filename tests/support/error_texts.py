"""Texts of all errors, read from the code."""

from __future__ import annotations

import ast
import gc
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bigtrain import errors
from tools.markdown import markdown_cell

ROOT = Path(__file__).resolve().parents[2]

RULES = "bigtrain/settings/compatibility"
"""Folder whose strings are the reasons and fixes of refusals."""
ACCEPTED = "bigtrain/settings/deepspeed/accepted.json"
"""File that has reasons of refusals as data."""


def error_texts() -> str:
    """Return the texts of all errors in `bigtrain/`, one per line, escaped as in a Markdown table,
    with … for what depends on a run."""
    was_enabled = gc.isenabled()
    gc.disable()  # it would look at millions of nodes again and again
    try:
        trees = _parsed("bigtrain")
        returned = _returned(trees)
        makers = _makers(trees)
        texts = {text for tree in trees for _, text in _texts_of(tree, returned, makers)}
        for tree in _parsed(RULES):
            texts |= _parts(tree, {}, {}, set())
    finally:
        _nodes.cache_clear()
        if was_enabled:
            gc.enable()
    texts |= _strings(json.loads((ROOT / ACCEPTED).read_text(encoding="utf-8")))
    return "\n".join(sorted(map(markdown_cell, texts)))


def _parsed(folder: str) -> list[ast.Module]:
    """Parse all modules of a folder."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


def _strings(tree: Any) -> set[str]:
    """Return all strings of a tree of JSON."""
    if isinstance(tree, str):
        return {tree}
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return {text for child in children for text in _strings(child)}


@cache
def _nodes(tree: ast.Module) -> list[ast.AST]:
    """Return all nodes of a module, which are read several times."""
    return list(ast.walk(tree))


Strings = dict[str, list[ast.expr]]


def _returned(trees: Collection[ast.Module]) -> Strings:
    """Collect the values that functions return or yield, by names that are unique in the
    package."""
    nodes: Strings = {}
    names = Counter(
        node.name for tree in trees for node in _nodes(tree) if isinstance(node, ast.FunctionDef)
    )
    for tree in trees:
        for function in _nodes(tree):
            if isinstance(function, ast.FunctionDef) and names[function.name] == 1:
                for node in ast.walk(function):
                    if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                        nodes.setdefault(function.name, []).append(node.value)
    return nodes


def _makers(trees: Collection[ast.Module]) -> set[str]:
    """Collect the names of functions that return an error."""
    return {
        node.name
        for tree in trees
        for node in _nodes(tree)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and _is_error(ast.unparse(node.returns))
    }


def _assigned(tree: ast.Module) -> Strings:
    """Collect the values of names anywhere in a module: by assignment, loops, `append` and
    arguments."""
    nodes: Strings = {}
    for node in _nodes(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = [node.value] * len(names)
                if isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names):
                    values = node.value.elts
                for name, value in zip(names, values, strict=True):
                    nodes.setdefault(ast.unparse(name), []).append(value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value:
            nodes.setdefault(ast.unparse(node.target), []).append(node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    nodes.setdefault(name.id, []).append(node.iter)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("append", "extend", "add") and node.args:
                nodes.setdefault(ast.unparse(node.func.value), []).append(node.args[0])
    return nodes | _arguments(tree)


def _arguments(tree: ast.Module) -> Strings:
    """Collect the arguments of calls within a module, by the names of parameters."""
    nodes: Strings = {}
    names = {
        node.name: [argument.arg for argument in node.args.args if argument.arg != "self"]
        for node in _nodes(tree)
        if isinstance(node, ast.FunctionDef)
    }
    for node in _nodes(tree):
        if isinstance(node, ast.Call):
            called = _called(node)
            given = list(zip(names.get(called, []), node.args, strict=False))
            given += [
                (word.arg, word.value)
                for word in node.keywords
                if word.arg in names.get(called, [])
            ]
            for name, value in given:
                nodes.setdefault(name, []).append(value)
    return nodes


def _texts_of(
    tree: ast.Module, returned: Strings, makers: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield the name of the error and its text, for every error of bigtrain, and what is put into
    it."""
    assigned = _assigned(tree)
    raised = {id(node.exc) for node in _nodes(tree) if isinstance(node, ast.Raise)}
    for node in _nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if name == "Problem":
            given = dict(zip(("key", "value", "rule", "remedy"), node.args, strict=False))
            given |= {word.arg: word.value for word in node.keywords if word.arg}
            said = {key: _text(value) for key, value in given.items()}
            remedy = f" -> {said['remedy']}" if said.get("remedy") else ""
            texts = {f"{said.get('key', '…')}: {said.get('rule', '…')}{remedy}"}
            inside = [value for key, value in given.items() if key in ("rule", "remedy")]
            name = "ConfigError"
        elif node.args and (_is_error(name) or (name == "ValueError" and id(node) in raised)):
            texts, inside = {_text(node.args[0])}, [node.args[0]]
        elif name in makers:
            texts, inside = set(), [*node.args, *(word.value for word in node.keywords)]
        else:
            continue
        yield from ((name, text) for text in texts if _says(text))
        for value in inside:
            parts = _parts(value, assigned, returned, set())
            yield from (("", part) for part in parts if not any(part in text for text in texts))


def _parts(node: ast.AST, assigned: Strings, returned: Strings, seen: set[str]) -> set[str]:
    """Return the strings that an expression may hold, through names and functions of this
    package."""
    texts: set[str] = set()
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        texts.add(_text(node))
    if isinstance(node, ast.JoinedStr):
        children = [part for part in node.values if isinstance(part, ast.FormattedValue)]
    name, table = "", assigned
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Call):
        name, table = _called(node), returned
    if name and name not in seen:
        seen.add(name)
        children = [*children, *table.get(name, ())]
    for child in children:
        texts |= _parts(child, assigned, returned, seen)
    return {text for text in texts if re.search(r"\w \w.* \w", text) and "(?P<" not in text}


def _called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ast.unparse(call.func)


def _is_error(name: str) -> bool:
    error_class = vars(errors).get(name)
    return isinstance(error_class, type) and issubclass(error_class, errors.BigtrainError)


def _text(node: ast.expr) -> str:
    """Return a string as in the code, with … for inserted values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def _says(text: str) -> bool:
    return len(re.findall(r"\w{3,}", text)) >= 2
