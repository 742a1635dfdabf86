"""The notebook of the docs, run in a kernel of its own from its top, and what it uses."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

import bigtrain
from tests.support.worlds import ROOT

PATH = ROOT / "docs/notebooks/quickstart.ipynb"


def cells(kind: str) -> list[str]:
    all_cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in all_cells if cell["cell_type"] == kind]


def test_it_has_no_outputs_and_calls_what_is_offered() -> None:
    tree: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    assert all(not cell["outputs"] for cell in tree["cells"] if cell["cell_type"] == "code")
    used = {
        node.attr
        for node in ast.walk(ast.parse("\n".join(cells("code"))))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "bigtrain"
    }
    assert used <= set(bigtrain.__all__)
    assert used >= {"tokenize", "load_config", "check", "plan", "train_run", "load_state_dict"}
    assert used >= {"read_metric_columns", "export_run", "generate"}


@pytest.mark.slow
# Of ipykernel's and zmq's own event loops.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_runs_from_its_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE", "1"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    notebook = nbformat.read(PATH, as_version=4)
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = {
        number: "".join(
            o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell_outputs
        )
        for number, cell_outputs in enumerate(
            c["outputs"] for c in notebook.cells if "outputs" in c
        )
    }
    assert "parallel.tensor" in outputs[3]
    # Plain lines, one for each logged step, and no bar in a notebook.
    assert "step 60/60 loss" in outputs[4]
    assert "\r" not in outputs[4]
    assert outputs[4].splitlines()[-1].startswith("(60, ")
    assert outputs[5].count("loss") == 6
    assert "def get(self, " in outputs[6]
    assert (tmp_path / "runs/notebook/exported/model.safetensors").is_file()
