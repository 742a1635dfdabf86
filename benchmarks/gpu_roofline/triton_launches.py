"""Bytes of Triton kernels by their source: which of their arguments they load and store."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch


def loads_and_stores(source: str) -> tuple[set[str], set[str]]:
    """Return the parameters that the function of `source` loads from and stores to, following
    pointers through assignments; of sizes and strides those in the places. An argument counts once,
    however often a loop comes back to it."""
    (function,) = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    pointers = {argument.arg: {argument.arg} for argument in function.args.args}
    loaded: set[str] = set()
    stored: set[str] = set()

    def parameters_in(expression: ast.AST) -> set[str]:
        names = (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))
        return set().union(*(pointers.get(name, set()) for name in names))

    for node in _in_order(function):
        for call in _calls(node):
            if call.func.attr == "load":  # type: ignore[attr-defined]
                loaded |= parameters_in(call.args[0])
            if call.func.attr == "store":  # type: ignore[attr-defined]
                stored |= parameters_in(call.args[0])
        # What a load returns is a value, and points nowhere.
        if isinstance(node, ast.Assign | ast.AugAssign) and not _calls(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found = parameters_in(node.value)
            for target in targets:
                if isinstance(target, ast.Name):
                    before = pointers.get(target.id, set())
                    pointers[target.id] = found | (
                        before if isinstance(node, ast.AugAssign) else set()
                    )
    return loaded, stored


def _in_order(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the statements without a body, in the order of the source."""
    simple = [
        node for node in ast.walk(function)
        if isinstance(node, ast.stmt) and not hasattr(node, "body")
    ]  # fmt: skip
    return sorted(simple, key=lambda node: node.lineno)


def _calls(statement: ast.stmt) -> list[ast.Call]:
    """Return the calls of tl.load and tl.store in `statement`."""
    return [
        node for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("load", "store")
    ]  # fmt: skip


def record_launches(launched: Callable[[str, int], None]) -> None:
    """Call `launched` with name and bytes of every Triton kernel instead of launching it, for the
    rest of this process. Only tensors count; sizes and strides travel with the launch."""
    from triton.runtime.jit import JITFunction

    accesses: dict[Any, tuple[set[str], set[str]]] = {}

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        if self not in accesses:
            accesses[self] = loads_and_stores(inspect.getsource(self.fn))
        loaded, stored = accesses[self]
        values = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        num_bytes = 0
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                num_bytes += value.nbytes * ((name in loaded) + (name in stored))
        launched(self.fn.__name__, num_bytes)

    jit: Any = JITFunction
    jit.run = run
