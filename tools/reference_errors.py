"""The page docs/reference/errors.md: texts of all errors, read from the code. No torch."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from bigtrain import errors

ROOT = Path(__file__).resolve().parents[1]


def error_texts() -> tuple[str, str]:
    """Its title, and all that stands below the line on how it is written."""
    parts = [
        "Search this page for the words of an error that do not depend on your run; `…` stands for "
        "what does, and what may stand there has rows of its own. A configuration error has the "
        "form `KEY = VALUE: RULE -> REMEDY`. [Troubleshooting](../troubleshooting.md) goes by "
        "symptom, and [What cannot run](../compatibility.md) has the reasons for which "
        "combinations are refused.\n",
    ]
    trees = {
        path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "bigtrain").rglob("*.py"))
    }
    returned = _returned(trees.values())
    by_folder: dict[str, list[tuple[str, str, str]]] = {}
    for place, tree in trees.items():
        for kind, text in _texts_of(tree, returned):
            by_folder.setdefault(str(place.parent), []).append((text, kind, place.name))
    for folder, found in sorted(by_folder.items()):
        parts.append(f"## {folder}\n")
        parts.append("| text | error | file |\n|---|---|---|")
        unique = sorted(set(found), key=lambda row: (row[2], not row[1], row[0]))
        rows = [
            f"| {markdown_cell(text)} | {f'`{kind}`' if kind else 'part of one'} | `{file}` |"
            for text, kind, file in unique
        ]
        parts.append("\n".join(rows) + "\n")
    return "# Error texts\n\n", "\n" + "\n".join(parts)


Strings = dict[str, list[ast.expr]]


def _returned(trees: Collection[ast.Module]) -> Strings:
    """What functions return or yield, by their names, where only one of the package has it."""
    found: Strings = {}
    names = Counter(
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    )
    for tree in trees:
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and names[function.name] == 1:
                for node in ast.walk(function):
                    if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                        found.setdefault(function.name, []).append(node.value)
    return found


def _assigned(tree: ast.Module) -> Strings:
    """What names are given anywhere in a module: by assignment, loops, `append` and arguments."""
    found: Strings = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = [node.value] * len(names)
                if isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names):
                    values = node.value.elts
                for name, value in zip(names, values, strict=True):
                    found.setdefault(ast.unparse(name), []).append(value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value:
            found.setdefault(ast.unparse(node.target), []).append(node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            for name in ast.walk(node.target):
                if isinstance(name, ast.Name):
                    found.setdefault(name.id, []).append(node.iter)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("append", "extend", "add") and node.args:
                found.setdefault(ast.unparse(node.func.value), []).append(node.args[0])
    return found | _arguments(tree)


def _arguments(tree: ast.Module) -> Strings:
    """What the functions of a module are called with in it, by the names of their parameters."""
    found: Strings = {}
    names = {
        node.name: [argument.arg for argument in node.args.args if argument.arg != "self"]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            given = list(zip(names.get(called, []), node.args, strict=False))
            given += [
                (word.arg, word.value)
                for word in node.keywords
                if word.arg in names.get(called, [])
            ]
            for name, value in given:
                found.setdefault(name, []).append(value)
    return found


def _texts_of(tree: ast.Module, returned: Strings) -> Iterator[tuple[str, str]]:
    """The name of the error and its text, for every error of bigtrain, and what is put into it."""
    assigned = _assigned(tree)
    raised = {id(node.exc) for node in ast.walk(tree) if isinstance(node, ast.Raise)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
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
        else:
            continue
        yield from ((name, text) for text in texts if _says(text))
        for value in inside:
            parts = _parts(value, assigned, returned, set())
            yield from (("", part) for part in parts if not any(part in text for text in texts))


def _parts(node: ast.AST, assigned: Strings, returned: Strings, seen: set[str]) -> set[str]:
    """The strings that an expression may hold, through names and functions of this package."""
    found: set[str] = set()
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
        found.add(_text(node))
    if isinstance(node, ast.JoinedStr):
        children = [part for part in node.values if isinstance(part, ast.FormattedValue)]
    name, table = "", assigned
    if isinstance(node, ast.Name):
        name = node.id
    elif isinstance(node, ast.Call):
        name, table = ast.unparse(node.func).rpartition(".")[2], returned
    if name and name not in seen:
        seen.add(name)
        children = [*children, *table.get(name, ())]
    for child in children:
        found |= _parts(child, assigned, returned, seen)
    return {text for text in found if re.search(r"\w \w.* \w", text) and "(?P<" not in text}


def _is_error(name: str) -> bool:
    found = vars(errors).get(name)
    return isinstance(found, type) and issubclass(found, errors.BigtrainError)


def _text(node: ast.expr) -> str:
    """A string as it stands in the code, with … for what is put in."""
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


def markdown_cell(text: str) -> str:
    """`text` in a cell of a table: one line, and nothing of it is taken for Markdown or HTML."""
    line = " ".join(text.split()).replace("``", "`")
    for sign, written in (("&", "&amp;"), ("<", "&lt;"), ("|", "\\|"), ("*", "\\*")):
        line = line.replace(sign, written)
    return re.sub(r"([\[\]])", r"\\\1", line)


def sentence(text: str | None) -> str:
    """The first paragraph of `text` as one line that ends with a full stop."""
    words = " ".join((text or "").split("\n\n")[0].split())
    return f"{words}{'' if words.endswith('.') else '.'}\n"
