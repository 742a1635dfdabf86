"""Imports go down only, and each big library stays in its layer (docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.worlds import ROOT

PACKAGE = ROOT / "bigtrain"
FILES = sorted(PACKAGE.rglob("*.py"))

# Layer 0: no torch, nothing but the standard library and these.
PURE_LIBRARIES = {"pydantic", "yaml"}
PURE = {
    "bigtrain",
    "bigtrain.config",
    "bigtrain.config_loading",
    "bigtrain.errors",
    "bigtrain.legality",
    "bigtrain.legality.engine",
    "bigtrain.legality.facts",
    "bigtrain.legality.parallel",
    "bigtrain.legality.speed",
    "bigtrain.machine",
    "bigtrain.processes",
    "bigtrain.schedule",
    "bigtrain.sections",
    "bigtrain.sections.base",
    "bigtrain.sections.data",
    "bigtrain.sections.failures",
    "bigtrain.sections.model",
    "bigtrain.sections.running",
    "bigtrain.sections.training",
    "bigtrain.stop_signals",
    "bigtrain.topology",
    "bigtrain.world",
    # What of the engine is text alone, so that `bigtrain check` needs no torch.
    "bigtrain.engine",
    "bigtrain.engine.accelerate_settings",
    "bigtrain.engine.deepspeed_config",
    "bigtrain.engine.deepspeed_keys",
    "bigtrain.engine.deepspeed_owners",
    "bigtrain.engine.resolve",
    # What of the launch layer only reads and writes text.
    "bigtrain.launch",
    "bigtrain.launch.checkout",
    "bigtrain.launch.findings",
    "bigtrain.launch.hostfile",
    "bigtrain.launch.kubernetes",
    "bigtrain.launch.nodes",
    "bigtrain.launch.remote_environment",
    "bigtrain.launch.slurm",
    "bigtrain.launch.torchrun",
    "bigtrain.launch.versions",
}
LAYERS = {
    "data": 1,
    "models": 1,
    "engine": 2,
    "run": 3,
    "commands": 4,
    "launch": 4,
    "cli": 4,
    "train": 4,
}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    if module in PURE:
        return 0
    folder = module.split(".")[1]
    assert folder in LAYERS, f"{module} belongs to no layer: name its layer in this test"
    return LAYERS[folder]


MODULES = {module_of(path): path for path in FILES}


def imports_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full name of every import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            assert node.module is not None
            # `from bigtrain.run import loop` imports a module, `from ... import Loop` a name.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else node.module


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_down_only(module: str) -> None:
    upward = [
        f"line {line}: {name} (layer {layer_of(name)})"
        for line, name in imports_of(parse(MODULES[module]))
        if name.split(".")[0] == "bigtrain" and layer_of(name) > layer_of(module)
    ]
    assert not upward, f"{module} (layer {layer_of(module)}) imports upward: {upward}"


@pytest.mark.parametrize("module", sorted(PURE & MODULES.keys()))
def test_pure_modules_import_no_big_library(module: str) -> None:
    allowed = sys.stdlib_module_names | PURE_LIBRARIES | {"bigtrain"}
    others = [
        f"line {line}: {name}"
        for line, name in imports_of(parse(MODULES[module]))
        if name.split(".")[0] not in allowed
    ]
    assert not others


def test_only_the_engine_imports_deepspeed() -> None:
    importers = importers_of("deepspeed")
    assert {name for name in importers if not name.startswith("bigtrain.engine.")} == set()
    assert importers, "nobody imports deepspeed: this test looks in the wrong place"


def test_only_models_and_tokenization_import_transformers() -> None:
    importers = importers_of("transformers")
    allowed = {name for name in importers if name.startswith("bigtrain.models.")}
    assert importers - allowed - {"bigtrain.data.tokenization"} == set()
    assert importers, "nobody imports transformers: this test looks in the wrong place"


def importers_of(library: str) -> set[str]:
    return {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for _, name in imports_of(parse(path)))
    }


@pytest.mark.parametrize("module", sorted(MODULES))
def test_public_names_have_docstrings(module: str) -> None:
    tree = parse(MODULES[module])
    assert ast.get_docstring(tree), f"{module} has no docstring"
    missing = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not missing
