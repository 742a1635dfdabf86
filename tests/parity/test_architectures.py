"""Plans that are right train exactly, plans that are wrong are refused before a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worlds import ROOT, run_world

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

# A family for every style of plan: packed, split inputs, experts, latent attention, biases, a
# head without vocabulary, sums over gradients; and one that is wrong upstream.
SAMPLE = [
    "apertus",
    "cohere",
    "deepseek_v3",
    "glm4",
    "gpt_neox",
    "granitemoe",
    "longcat_flash",
    "olmo2",
    "phi3",
    "qwen3_moe",
]
# What is not exact, and why.
WRONG_UPSTREAM = {"apertus", "doge", "gemma3n_text", "inkling2_text", "inkling_text"}


def swept(tmp_path: Path, *model_types: str) -> dict[str, tuple[str, str]]:
    file = tmp_path / "outcomes.jsonl"
    command = [sys.executable, "tools/architectures.py", "--outcomes", str(file), *model_types]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {name: (result, reason) for name, result, reason in lines}


def test_sample_of_families(tmp_path: Path) -> None:
    outcomes = swept(tmp_path, *SAMPLE)
    assert outcomes.keys() == set(SAMPLE)
    for name, (result, reason) in outcomes.items():
        assert result == ("refused" if name in WRONG_UPSTREAM else "exact"), (name, reason)
    assert "mlp.act_fn.alpha_" in outcomes["apertus"][1]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_architecture(tmp_path: Path) -> None:
    outcomes = swept(tmp_path)
    assert len(outcomes) > 90
    not_exact = {name: reason for name, (result, reason) in outcomes.items() if result != "exact"}
    assert not_exact.keys() <= WRONG_UPSTREAM | {"gemma4_unified_assistant"}, not_exact


def test_wrong_plans_are_named_on_every_process(tmp_path: Path) -> None:
    output = tmp_path / "said"
    run_world(2, [str(Path(__file__).with_name("plan_worker.py")), str(output)])
    said = json.loads(Path(f"{output}.0").read_text())
    assert said == json.loads(Path(f"{output}.1").read_text())
    assert said["qwen3_moe"] == said["gemma2"] == ""
    assert "model_type apertus is wrong" in said["apertus"]
    assert "the gradient of model.layers.0.mlp.act_fn.alpha_" in said["apertus"]
    assert "self_attn.k_norm.weight is not that of the whole model" in said["without_sum"]
    assert "it fails with RuntimeError" in said["uncut"]
    assert "-> parallel.tensor=1" in said["uncut"]
