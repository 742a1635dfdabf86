"""Runs where only bigtrain's own dependencies are installed, none of its extras."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.launch.conftest import VOCAB_SIZE, Inputs, launch, run_tree

ROOT = Path(__file__).resolve().parents[2]
# Packages whose modules have other names.
MODULES = {
    "lm-eval": "lm_eval",
    "liger-kernel": "liger_kernel",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "prometheus-client": "prometheus_client",
}
PROGRAM = """
import sys
for name in {modules}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
from bigtrain.train import main
sys.exit(main({arguments}))
"""


def extras() -> list[str]:
    """Return the modules of the extras that users install."""
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        line.partition(">")[0]
        for name, lines in tables["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for line in lines
    ]
    return [MODULES.get(name, name) for name in wanted]


@pytest.mark.slow
def test_weights_are_read_trained_and_exported(inputs: Inputs, tmp_path: Path, home: Path) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tree = run_tree(inputs.shards, tmp_path / "run")
    tree["model"] = {"path": str(tmp_path / "base")}
    tree["train"], tree["schedule"] = {"steps": 1}, {"warmup_steps": 0}
    tree["adapters"] = {"rank": 2}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    arguments = ["--config", str(tmp_path / "run.yaml"), "data.allow_other_tokenizer=true"]
    assert {"bitsandbytes", "torchao", "liger_kernel"} <= set(extras())
    program = PROGRAM.format(modules=extras(), arguments=arguments)
    finished = launch(["-c", program], home)
    assert finished.code == 0, finished.output
    assert (tmp_path / "run" / "hf").is_dir()
