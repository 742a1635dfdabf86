"""What the page on optimizers says to type and to write is typed and read here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from bigtrain.models.build import empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.hidden_matrices import check_matrices
from bigtrain.settings.run_config import ModelSection, OptimizerSection
from bigtrain.settings.sections.optimizer import AverageSection
from tests.launch.conftest import Inputs, inputs, run_tree
from tests.support.lives import run_script
from tests.support.pages import page_text
from tests.support.worlds import ROOT

__all__ = ["inputs"]
PAGE = page_text("docs/howto/optimizers.md")
SMALL = {"vocab_size": 64, "hidden_size": 6144, "num_hidden_layers": 1, "intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "*.attn.c_attn.weight": {"model_type": "gpt2", "n_layer": 1, "vocab_size": 64},
    "*.qkv_proj.weight": {
        "model_type": "phi3",
        **SMALL,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
    },
    "*.query_key_value.weight": {"model_type": "gpt_neox", **SMALL, "num_attention_heads": 32},
}


def blocks(kind: str) -> list[str]:
    matches = re.findall(rf"^( *)```{kind}\n(.*?)^ *```", PAGE, flags=re.M | re.S)
    return [text for _, text in matches]


def test_the_sections_are_read() -> None:
    whole, splits, averages = (yaml.safe_load(block) for block in blocks("yaml"))
    assert OptimizerSection(**whole["optimizer"]).type == "muon"
    assert OptimizerSection(**averages["optimizer"]).ema == AverageSection(decay=0.999)
    inline = yaml.safe_load(re.findall(r"`(muon: \{.*?\})`", PAGE)[0])
    assert OptimizerSection(type="muon", lr=1e-3, **inline).muon.lr == 0.02
    patterns = splits["muon"]["split"]
    assert patterns.keys() == MODELS.keys()
    for pattern, split in patterns.items():
        section = OptimizerSection(type="muon", lr=1e-3, muon={"split": {pattern: split}})
        model = empty_model(load_hf_config(ModelSection(config=MODELS[pattern])))
        assert check_matrices(model, section) == []


def test_the_commands_as_they_stand(typed: Callable[[str], str]) -> None:
    """But for a comparison of a minute: tests/parity/test_parity_command.py makes all of them."""
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    for line in lines:
        if "parity" not in line:
            assert "zero" in typed(line).lower()


@pytest.mark.slow
@pytest.mark.distributed
def test_averages_are_exported_as_it_says(inputs: Inputs, tmp_path: Path) -> None:
    """With a smaller model and fewer steps than the page's."""
    train, export = (re.search(pattern, PAGE, flags=re.M) for pattern in (
        r"^torchrun .*bigtrain/train\.py --config quickstart(.*optimizer\.ema.*)$",
        "^bigtrain export(.*)$",
    ))  # fmt: skip
    assert train is not None
    assert export is not None
    (tmp_path / "shards").symlink_to(inputs.shards)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run_tree(inputs.shards, tmp_path / "run")))
    worker = ROOT / "tests/launch/extension_worker.py"
    run_script(2, worker, tmp_path, "--config", "run.yaml", *train[1].split(), "train.steps=4")
    run_script(1, ROOT / "tests/launch/command_worker.py", tmp_path, "export", *export[1].split())
    weights, averages = (
        load_file(tmp_path / place / "model.safetensors")
        for place in ("runs/averaged/hf", "averaged")
    )
    assert weights.keys() == averages.keys()
    assert not any(torch.equal(weights[name], average) for name, average in averages.items())
