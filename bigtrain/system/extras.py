"""Packages of bigtrain's extras. Pure: reads the metadata of the installation."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

from bigtrain.system.shipped_files import checkout


def install_line(extra: str) -> str:
    """Return the command that installs the packages of an extra. It names the packages: bigtrain
    is on no index from which pip could take ``bigtrain[EXTRA]``."""
    names = [shlex.quote(requirement.partition(";")[0].strip()) for requirement in _listed(extra)]
    return f"pip install {' '.join(names)}"


def _listed(extra: str) -> list[str]:
    """Return the requirements of `extra`: of the checkout, or of the installed distribution."""
    project = checkout() / "pyproject.toml"
    if project.is_file():
        import tomllib

        tree = tomllib.loads(project.read_text(encoding="utf-8"))
        return list(tree["project"]["optional-dependencies"][extra])
    pattern = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    listed = importlib.metadata.requires("bigtrain") or []
    return [text for text in listed if pattern.search(text.partition(";")[2])]
