"""docs/reference/ says what the code says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bigtrain.cli import COMMANDS
from bigtrain.settings.run_config import RunConfig
from tests.support.worlds import ROOT
from tools.reference_fields import UNITS, numeric_fields, unit_of


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """As the tool makes them in a process of its own, which needs no torch."""
    script = (
        "import json, sys; from tools import reference; found = reference.pages(); "
        "assert 'torch' not in sys.modules; print(json.dumps(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    pages_by_path: dict[str, str] = json.loads(done.stdout)
    return pages_by_path


def test_the_pages_are_what_the_tool_writes(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        written = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/reference/{name}: run `make reference`"


def test_every_number_has_a_unit() -> None:
    without = [path for path, kind in numeric_fields() if not unit_of(path, kind)]
    assert without == [], "name it by its unit, or add it to UNITS in tools/reference_fields.py"
    assert set(UNITS) <= {path for path, _ in numeric_fields()}


def test_every_field_and_command_is_there(pages: dict[str, str]) -> None:
    for section, field in RunConfig.model_fields.items():
        for key in getattr(field.annotation, "model_fields", {}):
            assert f"| `{section}.{key}` |" in pages["configuration.md"]
    for name in COMMANDS:
        assert f"\n## bigtrain {name}\n" in pages["commands.md"]
