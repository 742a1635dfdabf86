"""pyproject.toml and constraints.txt say what is true."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bigtrain.system import extras
from bigtrain.system.extras import install_line
from tests.architecture.test_layers import MODULES, PACKAGE, imports_of
from tests.support.pages import page_text
from tests.support.worlds import ROOT

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    Requirement(text)
    for texts in (
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
    )
    for text in texts
]
# Distributions by the module they are imported as, where the two differ.
DISTRIBUTIONS = {"yaml": "pyyaml"}
OPTIONAL = {
    Requirement(text).name.replace("-", "_")
    for extra, texts in PROJECT["project"]["optional-dependencies"].items()
    if extra not in ("dev", "docs")
    for text in texts
}
# Imported only together with the distribution that brings them.
BROUGHT_ALONG = {
    "anyio": "starlette",
    "urllib3": "requests",
    "pyarrow": "datasets",
    "huggingface_hub": "transformers",
    "opentelemetry": "opentelemetry_sdk",
}


# With these the tests are not run, so their lower bounds are only what is known to work.
LINTERS = {"mypy", "ruff", "types-PyYAML", "types-tqdm", "liger-kernel"}
LINTERS |= {"mkdocs", "mkdocs-material"}


# What the top level holds; anything else there was committed by mistake.
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "AGENTS.md", "CONTRIBUTING.md", "Dockerfile", "LICENSE",
    "Makefile", "README.md", "benchmarks", "bigtrain", "constraints-oldest.txt", "constraints.txt",
    "docs", "ds_configs", "hostfiles", "mkdocs.yml", "pyproject.toml", "slurm", "tests", "tools",
}  # fmt: skip


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_requirement_is_pinned_within_its_range() -> None:
    """And `make test-oldest` passes with constraints-oldest.txt, so nothing lower is declared."""
    newest, oldest = pins(), pins("constraints-oldest.txt")
    for requirement in REQUIREMENTS:
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(newest[name]), name
        if requirement.name not in LINTERS:
            [bound] = [s.version for s in requirement.specifier if s.operator == ">="]
            assert Version(bound) == Version(oldest[name]), name


def test_pins_name_no_build_of_torch() -> None:
    """A local version such as +cpu would keep GPU machines from installing."""
    assert pins()["torch"] == "2.13.0"
    assert pins("constraints-oldest.txt")["torch"] == "2.11.0"  # what GPU machines have
    assert not any("+" in version for version in pins().values())


def test_every_folder_of_the_package_is_installed() -> None:
    folders = {
        ".".join(os.path.relpath(path.parent, ROOT).split(os.sep))
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    beside = {"bigtrain.ds_configs", "bigtrain.slurm"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders | beside


def test_every_file_of_the_package_is_installed() -> None:
    """setuptools takes modules by itself, and other files by the patterns of package-data."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    missing = [
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
        for package in [".".join(os.path.relpath(path.parent, ROOT).split(os.sep))]
        if not any(path.match(pattern) for pattern in patterns.get(package, ()))
    ]
    assert missing == []


def test_what_is_imported_is_required() -> None:
    """Every library that bigtrain imports stands in pyproject.toml, and the other way round."""
    imported = {name.split(".")[0] for path in MODULES.values() for _, name in imports_of(path)}
    imported -= sys.stdlib_module_names | {"bigtrain"}
    needed = {DISTRIBUTIONS.get(name, BROUGHT_ALONG.get(name, name)) for name in imported}
    required = {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    # Not imported by name: DeepSpeed runs ninja, a tracker loads tensorboard.
    assert needed - OPTIONAL == required - {"ninja", "tensorboard"}


def test_the_table_of_extras_is_that_of_the_project() -> None:
    page = page_text("docs/howto/install.md")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, flags=re.M))
    listed_extras = PROJECT["project"]["optional-dependencies"]
    assert list(rows) == sorted(listed_extras)
    for extra, texts in listed_extras.items():
        packages = {Requirement(text).name for text in texts}
        listed = {*rows[extra].removesuffix(" and others").split(", ")}
        assert listed <= packages if rows[extra].endswith("and others") else listed == packages


def test_no_text_installs_what_no_index_has() -> None:
    """Bigtrain itself: pip would find nothing, or a package of somebody else."""
    names = subprocess.run(
        ["git", "grep", "-lE", r"(install|extra).*bigtrain\[", "--", "bigtrain", "docs", "*.md"],
        cwd=ROOT, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert names in ([], ["bigtrain/system/extras.py"])


def test_the_line_of_an_extra_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a checkout, and of an installed distribution."""
    for extra, texts in PROJECT["project"]["optional-dependencies"].items():
        words = shlex.split(install_line(extra))
        assert words[:2] == ["pip", "install"]
        assert [Requirement(word).name for word in words[2:]] == [
            Requirement(text).name for text in texts
        ]
    monkeypatch.setattr(extras, "checkout", lambda: ROOT / "nowhere")
    metadata = [
        "torch>=2.11",
        "liger-kernel>=0.6.4; platform_system == 'Linux' and extra == 'gpu'",
        'bitsandbytes<0.51,>=0.50.2; extra == "qlora"',
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: metadata)
    assert install_line("gpu") == "pip install 'liger-kernel>=0.6.4'"
    assert install_line("qlora") == "pip install 'bitsandbytes<0.51,>=0.50.2'"


def test_the_top_level_holds_what_is_named_here() -> None:
    """A log or a note that a command left there is not taken into a commit."""
    command = ["git", "ls-files", "-z", "--cached"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {name.split("/")[0] for name in filter(None, names.split("\0"))} == TOP_LEVEL
