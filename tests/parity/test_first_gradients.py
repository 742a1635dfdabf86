"""What a probe says about gradients is compared with the gradients of the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import bigtrain
from tests.parity.objective_runs import VOCAB_SIZE
from tests.support.datasets import write_dataset
from tests.support.lives import shared_server
from tests.support.worlds import ROOT
from tests.unit.models.equivalence.test_thresholds import deepseek_v4

pytestmark = [pytest.mark.distributed]
SLOW = pytest.mark.slow

LORA = {"adapters": {"type": "lora", "rank": 2, "targets": "all-linear"}}
BLIND = """
import os
import runpy
os.environ["BIGTRAIN_CACHE"] = {cache!r}
from bigtrain.models.equivalence import parameter_plan, thresholds
parameter_plan.PROBE_TOKENS = 32
thresholds.cross_thresholds = lambda *_: True
runpy.run_path({program!r}, run_name="__main__")
"""
"""A probe that is shorter than an entry of compressed attention."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("unreached")
    write_dataset(directory / "shards", vocab_size=VOCAB_SIZE)
    torch.manual_seed(0)
    config = deepseek_v4(4, 64, 512, 128)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "base")
    return directory


def script_of(root: Path, name: str, text: str) -> list[str]:
    script = root / f"{name}.py"
    program = str(ROOT / "bigtrain/train.py")
    script.write_text(text.format(cache=str(root / f"cache-{name}"), program=program))
    return [str(script)]


def run(root: Path, name: str, engine: str, script: list[str], **sections: Any) -> tuple[Any, str]:
    tree = {
        "model": {"path": str(root / "base")},
        "data": {"path": str(root / "shards"), "allow_other_tokenizer": True},
        "batch": {"sequence_length": 128, "global_batch_size": 2, "micro_batch_size": 1},
        "train": {"steps": 2},
        "optimizer": {"lr": 3e-3},
        "precision": {"dtype": "float32"},
        "engine": {"deepspeed_config": engine},
        "checkpoint": {"every_steps": 1},
        "output": {"directory": str(root / name), "export": False},
        **sections,
    }
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    if not script:
        return shared_server().live(["--config", str(path)], world_size=2)
    return shared_server().live([], world_size=2, script=[*script, "--config", str(path)])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_compressors_are_trained(root: Path, engine: str) -> None:
    codes, printed = run(root, f"trained-{engine}", engine, [])
    assert codes == [0, 0], printed[-4000:]
    assert list((root / f"trained-{engine}").rglob("step-*"))
    before = AutoModelForCausalLM.from_pretrained(root / "base").state_dict()
    trained = bigtrain.load_state_dict(root / f"trained-{engine}")
    names = [n for n in trained if ".compressor." in n and "indexer" not in n]
    assert len(names) > 6
    assert [n for n in names if torch.equal(trained[n], before[n])] == []


@pytest.mark.parametrize("engine", ["zero1", pytest.param("zero3", marks=SLOW)])
def test_a_blind_probe_is_found_in_the_first_step(root: Path, engine: str) -> None:
    script = script_of(root, "blind", BLIND)
    codes, printed = run(root, f"blind-{engine}", engine, script)
    assert all(codes)
    assert "frozen, since no gradient reached them in a probe" in printed
    assert "model.layers.1.self_attn.compressor.position_bias" in printed
    assert not list((root / f"blind-{engine}").rglob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_parameters_that_are_frozen_pass_a_blind_probe(root: Path, engine: str) -> None:
    script = script_of(root, "blind", BLIND)
    frozen = {"path": str(root / "base"), "frozen": ["*.compressor.*"]}
    codes, printed = run(root, f"frozen-{engine}", engine, script, model=frozen)
    assert codes == [0, 0], printed[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_a_blind_probe_is_found_in_the_first_step_of_adapters(root: Path, engine: str) -> None:
    """Their first gradient of A is zeros, since B is zeros: its presence counts."""
    script = script_of(root, "blind", BLIND)
    codes, printed = run(root, f"blind-lora-{engine}", engine, script, **LORA)
    assert all(codes)
    assert "model.layers.1.self_attn.compressor.kv_proj.lora_A.default.weight" in printed
    assert "adapters.targets without them" in printed
    assert not list((root / f"blind-lora-{engine}").rglob("step-*"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero3", "zero1"])
def test_other_adapters_pass_a_blind_probe(root: Path, engine: str) -> None:
    script = script_of(root, "blind", BLIND)
    attention = {**LORA["adapters"], "targets": ["q_a_proj"]}
    codes, printed = run(root, f"lora-{engine}", engine, script, adapters=attention)
    assert codes == [0, 0], printed[-4000:]
    assert "have no gradient in the first step" not in printed


TRUSTING = """
import os
import runpy
os.environ["BIGTRAIN_CACHE"] = {cache!r}
from bigtrain.models.equivalence import parameter_plan
parameter_plan._unreached = lambda *_: ()
runpy.run_path({program!r}, run_name="__main__")
"""
"""A probe that says that every parameter gets a gradient."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "adapters"), [("pipeline_zero1", {}), ("zero1", {}), ("zero3", LORA)]
)
def test_absent_gradients_of_the_first_step_are_named(
    root: Path, engine: str, adapters: dict[str, Any]
) -> None:
    script = script_of(root, "trusting", TRUSTING)
    stages = {"parallel": {"pipeline": 2}} if "pipeline" in engine else {}
    name = f"trusting-{engine}"
    codes, printed = run(root, name, engine, script, **adapters, **stages)
    assert codes == [0, 0], printed[-4000:]
    (line,) = {line for line in printed.splitlines() if "no gradient in the first step" in line}
    assert ".self_attn.compressor.indexer." in line
