"""Imports go down only, and each big library stays in its layer (docs/architecture.md)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bigtrain.objectives.section import KINDS
from bigtrain.objectives.user import UserObjective
from tests.support.worlds import ROOT

PACKAGE = ROOT / "bigtrain"
FILES = sorted(PACKAGE.rglob("*.py"))

# No torch: nothing but the standard library and these.
PURE_LIBRARIES = {"pydantic", "yaml"}
PURE_FOLDERS = (
    *("bigtrain.system", "bigtrain.settings", "bigtrain.objectives", "bigtrain.metrics"),
    "bigtrain.planner",
    "bigtrain.launchers",
)
# No torch either, but a million figures, and a page: these load nothing else.
REPORT_LIBRARIES = {"numpy", "orjson", "jinja2"}
NOT_PURE = {
    *(f"bigtrain.objectives.losses.{path.stem}" for path in PACKAGE.glob("objectives/losses/*.py")),
    "bigtrain.objectives.losses",
    "bigtrain.launchers.agent",
    "bigtrain.launchers.agent_patches",
    "bigtrain.launchers.doctor.collective_probe",
    "bigtrain.launchers.elastic_patches",
    "bigtrain.launchers.rendezvous_server",
}
# The places below that take a library, when they are called.
LAZILY = {
    "bigtrain.launchers.templates": {"jinja2"},
    "bigtrain.system.files": {"xxhash"},
    "bigtrain.system.storage.aws_files": {"botocore"},
    "bigtrain.system.storage.fsspec_store": {"fsspec"},
    "bigtrain.system.storage.http_store": {"requests", "urllib3"},
    "bigtrain.system.storage.object_store": {"obstore"},
}
# Folders and loose files of bigtrain/ from the ground up. What stands in one line may not import
# each other; within a folder the circles are looked for.
FLOORS = (
    ("errors",),
    ("system",),
    ("settings.degrees",),
    ("settings.sections",),
    ("settings.extensions",),
    ("objectives",),
    ("settings",),
    ("metrics", "planner"),
    ("launchers", "report", "data", "models"),
    ("objectives.losses",),
    ("engine",),
    ("sites",),
    ("run", "parity"),
    ("python_api",),
    ("commands",),
    ("cli", "train"),
    ("forked_rank",),
    ("__main__",),
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top_of(module: str) -> str:
    """The folder or file of bigtrain/ on a floor that `module` belongs to: the innermost one."""
    parts = module.split(".")[1:]
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    name = next((name for name in names if name in FLOOR), parts[0] if parts else "")
    assert name in FLOOR or not name, f"{module} is on no floor: name its folder in this test"
    return name


MODULES = {module_of(path): path for path in FILES}
PURE = {
    name
    for name in MODULES
    if name in ("bigtrain", "bigtrain.errors")
    or (name.startswith(PURE_FOLDERS) and name not in NOT_PURE)
}
REPORT = {name for name in MODULES if name.startswith("bigtrain.report")}


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of every import of a file, wherever it stands."""
    return tuple(imports_in(parse(path)))


def imports_in(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            assert node.module is not None
            # `from bigtrain.run import loop` imports a module, `from ... import Loop` a name.
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield node.lineno, full if full in MODULES else node.module


@cache
def parse(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    if path == PACKAGE / "__init__.py":
        # What the package offers is imported when it is first used; for type checkers it is named
        # at the top, and tests/unit/python_api compares the two.
        tree.body = [node for node in tree.body if not _is_for_type_checkers(node)]
    return tree


@cache
def nodes_of(tree: ast.AST) -> tuple[ast.AST, ...]:
    """As `ast.walk`, which asks each node for its fields again."""
    return tuple(ast.walk(tree))


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def test_imports_go_down_only() -> None:
    upward = [
        f"{path}:{line}: {name}"
        for module, path in MODULES.items()
        for line, name in imports_of(path)
        if name.startswith("bigtrain.") and top_of(name) != top_of(module)
        # The package itself holds nothing but the version.
        if top_of(module) == "" or FLOOR[top_of(name)] >= FLOOR[top_of(module)]
    ]
    assert upward == [], "upward or sideways"


def test_no_circle_between_rooms() -> None:
    """Neither between files, nor between folders; loose files beside folders stand for
    themselves."""
    files: dict[str, set[str]] = {}
    rooms: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        for _, name in imports_of(path):
            if name in MODULES and name != module:
                files.setdefault(module, set()).add(name)
                if room_of(name) != room_of(module):
                    rooms.setdefault(room_of(module), set()).add(room_of(name))
    assert circle(files) == []
    assert circle(rooms) == []


def test_the_loop_reaches_few_modules() -> None:
    """It gets data, evaluation, checkpoints and sites as arguments (`bigtrain/run/loop.py`)."""
    # The settings list the fields of every kind of objective, which are a module each.
    kinds = {kind.__module__ for kind in (*KINDS.values(), UserObjective)}
    reached = reached_from("bigtrain.run.loop") - kinds
    assert len(reached) <= 149, sorted(reached)
    others = ("bigtrain.sites", "bigtrain.run.checkpointing", "bigtrain.engine.checkpoint.io")
    assert [name for name in reached if name.startswith(others)] == []


def reached_from(start: str) -> set[str]:
    """Modules that are imported with `start`, without their packages."""
    reached, ahead = {start}, [start]
    while ahead:
        for _, name in imports_of(MODULES[ahead.pop()]):
            if name in MODULES and name not in reached:
                reached.add(name)
                ahead.append(name)
    return reached


def test_circles_are_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


@cache
def room_of(module: str) -> str:
    """A folder without folders is one room; beside folders, each file is one."""
    folder = MODULES[module].parent
    if any(path.is_dir() and path.name != "__pycache__" for path in folder.iterdir()):
        return module
    return module_of(folder / "__init__.py")


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Names along a circle, the first one again at the end; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for following in sorted(arrows.get(name, ())):
            if cycle := walk(following, [*way, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(arrows) if (cycle := walk(name, []))), [])


def test_a_folder_states_its_purpose() -> None:
    for folder in {path.parent for path in FILES}:
        said = ast.get_docstring(parse(folder / "__init__.py")) or ""
        # What it is for, who may import it, where to start reading.
        assert len(said.split()) >= 20, f"{folder}/__init__.py says too little: {said!r}"


def test_unit_tests_lie_in_folders_as_those_of_the_package() -> None:
    tests = ROOT / "tests/unit"
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    strangers = {path for path in folders if not (ROOT / "bigtrain" / path).is_dir()}
    assert {str(path) for path in strangers} == {"benchmarks"}


@pytest.mark.parametrize(
    ("modules", "libraries"), [(PURE, PURE_LIBRARIES), (REPORT, REPORT_LIBRARIES)]
)
def test_pure_modules_import_no_big_library(modules: set[str], libraries: set[str]) -> None:
    allowed = sys.stdlib_module_names | libraries | {"bigtrain"}
    others = [
        f"{MODULES[module]}:{line}: {name}"
        for module in sorted(modules)
        for line, name in imports_of(MODULES[module])
        if name.split(".")[0] not in allowed | LAZILY.get(module, set())
    ]
    assert others == []


def test_only_the_engine_imports_deepspeed() -> None:
    importers = importers_of("deepspeed")
    assert {name for name in importers if not name.startswith("bigtrain.engine.")} == set()
    assert importers, "nobody imports deepspeed: this test looks in the wrong place"


def test_only_models_and_tokenization_import_transformers() -> None:
    importers = importers_of("transformers")
    allowed = {name for name in importers if name.startswith("bigtrain.models.")}
    tokenizers = {name for name in importers if name.startswith("bigtrain.data.tokenizers.")}
    # What bigtrain is compared with is built without it.
    plain = {"bigtrain.parity.adapters", "bigtrain.parity.reference"}
    assert importers - allowed - tokenizers - plain == set()
    assert importers, "nobody imports transformers: this test looks in the wrong place"


def test_only_models_import_peft() -> None:
    importers = importers_of("peft")
    others = {name for name in importers if not name.startswith("bigtrain.models.")}
    # What bigtrain is compared with.
    assert others - {"bigtrain.parity.adapters"} == set()
    assert importers, "nobody imports peft: this test looks in the wrong place"


def test_one_file_imports_each_of_some_libraries() -> None:
    assert importers_of("lm_eval") == {"bigtrain.models.lm_eval_tasks"}
    assert importers_of("bitsandbytes") == {"bigtrain.models.weights.quantized"}


def importers_of(library: str) -> set[str]:
    return {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for _, name in imports_of(path))
    }


def test_modules_and_public_names_have_docstrings() -> None:
    missing = []
    for path in FILES:
        tree = parse(path)
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
        ]
        missing += [
            f"{path}:{getattr(node, 'lineno', 1)}"
            for node in (tree, *public)
            if not ast.get_docstring(node)
        ]
    assert missing == []


def test_a_class_name_has_one_meaning() -> None:
    """A protocol has the name of the class that it stands for."""
    defined: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes_of(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
                if "Protocol" not in bases:
                    defined.setdefault(node.name, []).append(module_of(path))
    assert {name: modules for name, modules in defined.items() if len(modules) > 1} == {}
