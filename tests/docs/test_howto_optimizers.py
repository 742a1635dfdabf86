"""What the page on optimizers says to type and to write is typed and read here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.models.build import empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.hidden_matrices import check_matrices
from bigtrain.settings.run_config import ModelSection, OptimizerSection
from tests.support.worlds import ROOT

PAGE = (ROOT / "docs/howto/optimizers.md").read_text(encoding="utf-8")
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
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```", PAGE, flags=re.M | re.S)
    return [text for _, text in found]


def test_the_sections_are_read() -> None:
    whole, splits = (yaml.safe_load(block) for block in blocks("yaml"))
    assert OptimizerSection(**whole["optimizer"]).type == "muon"
    inline = yaml.safe_load(re.findall(r"`(muon: \{.*?\})`", PAGE)[0])
    assert OptimizerSection(type="muon", lr=1e-3, **inline).muon.lr == 0.02
    patterns = splits["muon"]["split"]
    assert patterns.keys() == MODELS.keys()
    for pattern, split in patterns.items():
        section = OptimizerSection(type="muon", lr=1e-3, muon={"split": {pattern: split}})
        model = empty_model(load_hf_config(ModelSection(config=MODELS[pattern])))
        assert check_matrices(model, section) == []


LINES = [line for block in blocks("bash") for line in block.splitlines()]


@pytest.mark.parametrize(
    "line",
    # A minute: tests/parity/test_parity_command.py compares all of them.
    [pytest.param(n, marks=pytest.mark.slow if "parity" in n else ()) for n in LINES],
)
def test_the_commands_as_they_stand(line: str, tmp_path: Path) -> None:
    words = shlex.split(line)
    command = Path(sys.executable).parent / words[0]
    done = subprocess.run([command, *words[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "zero" in done.stdout.lower()
