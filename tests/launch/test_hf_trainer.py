"""The files of ds_configs/ work with Hugging Face's Trainer, and need no compiler there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.worlds import ROOT, run_world

FILES = sorted((ROOT / "ds_configs").glob("*.json"))
NEED_MORE = {"zero3_nvme": "libaio", "zeropp": "CUDA"}
WORKER = Path(__file__).with_name("hf_trainer_worker.py")


def test_the_optimizer_is_torchs() -> None:
    """In those that cannot run here too: DeepSpeed's own Adam is compiled at its first use."""
    for file in FILES:
        parameters = json.loads(file.read_text())["optimizer"]["params"]
        assert parameters["torch_adam"] is True, file


@pytest.mark.slow
def test_one_step_of_the_trainer_with_each_compiles_nothing(tmp_path: Path) -> None:
    files = [file for file in FILES if file.stem not in NEED_MORE]
    output = tmp_path / "results.json"
    run_world(1, [str(WORKER), str(output), *map(str, files)])
    results = json.loads(output.read_text())
    assert results.keys() == {file.stem for file in files}
    for name, result in results.items():
        assert result["optimizer"] == "torch.optim.adamw.AdamW", name
        assert result["loss"] == pytest.approx(results["zero0"]["loss"], abs=1e-6), name
        assert result["weight"] == pytest.approx(results["zero0"]["weight"], abs=1e-6), name
