"""A run of epochs: trained to its counted step, resumed with the same, refused with others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.launch.conftest import Inputs, metrics, run_tree, train, trained

pytestmark = [pytest.mark.timeout(600)]


@pytest.mark.slow
def test_a_run_of_epochs_ends_and_resumes_at_its_counted_step(
    inputs: Inputs, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    tree = run_tree(inputs.shards, run)
    tree["train"] = {"epochs": 0.2}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    output = trained("--config", path, "output.export=false")
    (line,) = set(re.findall(r"train\.epochs = 0\.2 of .*", output))
    (steps,) = map(int, re.findall(r"is train\.steps = (\d+) of 8 samples", line))
    assert max(metrics(run)) == steps > 2
    assert json.loads((run / "config.json").read_text())["train"] == {
        "epochs": None,
        "steps": steps,
    }
    output = trained("--config", path, "output.export=false")
    assert f"complete: the run is at step {steps} of {steps}" in output
    longer = train("--config", path, "output.export=false", "train.epochs=0.4")
    assert longer.code == 2, longer.output
    assert f"train.steps: {steps} there, {2 * steps} now" in longer.output or (
        f"train.steps: {steps} there, {2 * steps - 1} now" in longer.output
    )
