"""A working directory with the configuration of a base, for tests of plans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def enter_folder_with_base(
    folder: Path, model: Mapping[str, Any], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Make `folder`, which has the configuration `model` in ``base``, the working directory, and
    return it. cache: bigtrain's, so that a model is traced once for all tests."""
    monkeypatch.setenv("BIGTRAIN_CACHE", str(cache))
    monkeypatch.chdir(folder)
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(model))
    return folder
