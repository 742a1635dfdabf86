"""A launch on CUDA says where it computes its layers otherwise than the launch before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from bigtrain.models.layers.plans import MAY_COMPILE
from bigtrain.run.run_directory import LAYERS, layer_lines
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.resolve import resolve_run
from tests.support.run_trees import run_tree


@pytest.mark.parametrize(
    ("before", "saved", "settings"),
    [
        ("compiled", True, "model.compile=on and model.kernels=none keep it"),
        ("by Liger's kernels", True, "model.compile=off and model.kernels=liger keep it"),
        ("by Liger's kernels, compiled", True, "model.compile=on and model.kernels=liger keep it"),
        ("by single kernels", True, None),
        ("compiled", False, None),
        (None, True, None),
    ],
)
def test_another_choice_than_the_launch_before_is_said(
    tmp_path: Path, before: str | None, saved: bool, settings: str | None
) -> None:
    """Not where nothing was saved, nor without a record of the choice."""
    model = {"config": {"model_type": "llama", "vocab_size": 50}, "compile": "off"}
    tree = run_tree(model=model | {"kernels": "none"}, output={"directory": str(tmp_path)})
    run = resolve_run(parse_run_config(tree), 1)
    if saved:
        (tmp_path / "checkpoints" / "step-2").mkdir(parents=True)
    record = {} if before is None else {LAYERS: before}
    (tmp_path / "environment.json").write_text(json.dumps(record))
    first, *rest = layer_lines(run, LlamaConfig(), "cuda", MAY_COMPILE)
    assert first == "layers: by single kernels"
    if settings is None:
        assert rest == []
    else:
        (line,) = rest
        assert line.startswith(f"layers were {before} in the launch before: rounding differs")
        assert line.endswith(settings)
