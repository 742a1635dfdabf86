"""Importing does nothing, costs little, and is never hijacked by a file's name."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import COMMANDS, main
from tests.architecture.test_layers import MODULES, PACKAGE, PURE, REPORT, imports_in, parse
from tests.architecture.test_packaging import OPTIONAL
from tests.support.worlds import ROOT

HEAVY = ["torch", "deepspeed", "transformers", "peft", "accelerate", "datasets", "tokenizers"]
HEAVY += ["numpy"]


# Names of packages on PyPI that may be installed beside us where bigtrain is used.
ELSEWHERE = {"config", "launch", "processes", "schedule", "topology", "utils", "versions", "world"}


def library_imports() -> list[str]:
    """Every import of a library that stands in bigtrain, as a statement: transformers loads a
    submodule only when a name is taken from it."""
    own = sys.stdlib_module_names | {"bigtrain", "__future__"} | OPTIONAL
    return sorted(
        {
            ast.unparse(node)
            for path in MODULES.values()
            for node in ast.walk(parse(path))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for _, name in imports_in(node)
            if name.split(".")[0] not in own
        }
    )


def run_python(code: str, cwd: Path = ROOT) -> Any:
    """Run `code` in a fresh interpreter; returns the JSON in the last line of its output."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_no_name_shadows_a_module_of_python_or_of_a_package() -> None:
    """The launchers put bigtrain/ itself first on sys.path, where `import config` finds ours."""
    ours = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    distributions = importlib.metadata.packages_distributions()
    installed = {name for name, owners in distributions.items() if set(owners) != {"bigtrain"}}
    assert "torch" in installed
    assert ours & (installed | sys.stdlib_module_names | ELSEWHERE) - {"__init__"} == set()


@pytest.mark.parametrize(("modules", "heavy"), [(PURE, []), (REPORT, ["numpy"])])
def test_pure_modules_load_without_big_libraries(modules: set[str], heavy: list[str]) -> None:
    loaded = run_python(
        "import importlib, json, sys\n"
        f"for name in {sorted(modules)!r}: importlib.import_module(name)\n"
        f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    )
    assert loaded == heavy


def test_command_line_answers_without_big_libraries(tmp_path: Path) -> None:
    """In a folder without runs: of a checkpoint, check reads what needs numpy. Help also without
    the settings, which take longer to import than Python to start."""
    lines = [
        ["--help"],
        ["--version"],
        *([command, "--help"] for command in sorted(COMMANDS)),
        ["check", "--config", "quickstart"],
        ["check", "--config", "quickstart", "--world-size", "2"],
    ]
    loaded = run_python(
        f"""
import json, sys
from bigtrain.cli import main
loaded = []
for arguments in {lines!r}:
    try:
        code = main(arguments)
    except SystemExit as exit:
        code = exit.code
    assert code == 0, (arguments, code)
    heavy = {HEAVY!r} if "--config" in arguments else {[*HEAVY, "pydantic", "yaml"]!r}
    loaded += [(arguments, name) for name in heavy if name in sys.modules]
print(json.dumps(loaded))
""",
        cwd=tmp_path,
    )
    assert loaded == []


def test_check_makes_few_calls(tmp_path: Path) -> None:
    """All the time of a check is calls of Python functions: 0.3 s of a quiet CPU for 190,000. Each
    saving is more than what is left below the bound: annotations as texts in sections (9,000),
    help of a command that is not asked for help (18,000), plugins of pydantic (18,000), validators
    of default sections (1,800), the signature of every field's validator (7,000), the key of a
    model's costs that were never traced (10,000)."""
    num_calls = run_python(
        """
import os, sys
os.environ["BIGTRAIN_CACHE"] = "cache"
sys.argv = ["bigtrain", "check", "--config", "quickstart"]
num_calls = 0

def count(frame, event, argument):
    global num_calls
    num_calls += event == "call"

sys.setprofile(count)
from bigtrain.cli import main
code = main()
sys.setprofile(None)
assert code == 0
print(num_calls)
""",
        cwd=tmp_path,
    )
    assert num_calls < 192_000


@pytest.mark.slow
def test_importing_does_nothing(tmp_path: Path) -> None:
    """No environment writes, files, CUDA, process group, threads, random numbers or handlers.

    The libraries come first: what they do at import is theirs.
    """
    changed = run_python(
        f"""
import importlib, json, logging, os, random, signal, sys
import torch
for statement in {library_imports()!r}:
    exec(statement)

def state():
    return {{
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "torch random": torch.random.get_rng_state().tolist(),
        "random": list(random.getstate()[1]),
        "handlers": [repr(handler) for handler in logging.root.handlers],
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGUSR1)],
        "hook": repr(sys.excepthook),
        "process group": torch.distributed.is_initialized(),
        "cuda": torch.cuda.is_initialized(),
    }}

before = state()
for name in {sorted(MODULES)!r}:
    importlib.import_module(name)
after = state()
print()
print(json.dumps([[key, repr(after[key])] for key in before if before[key] != after[key]]))
""",
        cwd=tmp_path,
    )
    assert changed == []
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_a_module_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, said in COMMANDS.items():
        module = importlib.import_module(f"bigtrain.commands.{command.replace('-', '_')}")
        assert callable(module.run)
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--help"])
        assert exit_info.value.code == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: bigtrain {command}")
        assert " ".join(said.split()[:3]).lower() in shown.lower()


def test_help_keeps_names_as_they_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    shown = capsys.readouterr().out
    assert "\nWrite a run's weights as a verified Hugging Face directory\n" in shown


def test_every_module_that_runs_is_a_command() -> None:
    """Beside them commands/ holds only what several commands share."""
    runnable = {
        path.stem
        for path in (PACKAGE / "commands").glob("*.py")
        if any(isinstance(n, ast.FunctionDef) and n.name == "run" for n in parse(path).body)
    }
    assert runnable == {command.replace("-", "_") for command in COMMANDS}
