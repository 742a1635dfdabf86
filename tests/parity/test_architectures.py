"""What is not refused before a run is exact, in every kind of parallelism."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.parity.plan_worker import MUTATIONS
from tests.support.hybrids import HYBRIDS
from tests.support.lives import run_forked_world, run_script
from tests.support.worlds import ROOT
from tools import architectures
from tools.architectures import COLUMNS, statuses

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

# One family for each of: packed matrices, experts with their router's loss, latent attention and
# ids in every layer, recurrent layers, one key-value head, no plan, a plan that is wrong, layers
# that cannot be cut.
SAMPLE = [
    "apertus",
    "gemma",
    "inkling2_text",
    "qwen3_moe",
]
EP_2, EP_2_PP_2 = "EP 2", "EP 2 x PP 2"
PAGE = ROOT / "docs" / "architectures.md"


def swept(cache: Path, *arguments: str) -> str:
    """What the sweep prints, which ends with 1 where anything is wrong."""
    done = subprocess.run(
        [sys.executable, "tools/architectures.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "BIGTRAIN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def written() -> dict[str, dict[str, str]]:
    """The committed table; empty where it is of another transformers."""
    text = PAGE.read_text(encoding="utf-8")
    return statuses(text) if f"transformers {transformers.__version__} " in text else {}


def known(
    results_by_name: dict[str, dict[str, str]], table: dict[str, dict[str, str]]
) -> dict[str, dict[str, str]]:
    """Of `results_by_name`, the columns that the committed table has."""
    return {
        name: {c: results_by_name[name][c] for c in table[name]}
        for name in results_by_name
        if name in table
    }


@pytest.mark.slow
def test_a_sample_of_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In forked processes, which spares imports; the program itself sweeps all of them below."""

    def run_forked(tasks: Any) -> None:
        given = tmp_path / "tasks.json"
        given.write_text(json.dumps(tasks))
        words = [str(architectures.WORKER), str(given), str(tmp_path / "progress.json")]
        run_forked_world(2, words, {"BIGTRAIN_CACHE": str(tmp_path)})

    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(architectures, "_run_world", run_forked)
    outcomes = architectures.sweep(SAMPLE)
    results_by_name = {
        name: {c: result for c, (result, _) in of.items()} for name, of in outcomes.items()
    }
    assert results_by_name.keys() == set(SAMPLE)
    assert all(results_by_name[name].keys() == set(COLUMNS) for name in SAMPLE)
    table = written()
    assert not table or known(results_by_name, table) == {name: table[name] for name in SAMPLE}
    assert set(results_by_name["qwen3_moe"].values()) == {"exact"}
    assert {c for c, result in results_by_name["gemma"].items() if result != "exact"} == {
        EP_2,
        EP_2_PP_2,
    }
    for name, column, reason in (
        ("gemma", EP_2, "no expert-parallel plan"),
        ("apertus", "TP 2", "mlp.act_fn.alpha_"),
        ("inkling2_text", "PP 2", "is given more of the layers before"),
    ):
        result, said = outcomes[name][column]
        assert result == "refused"
        assert reason in said


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_architecture(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    swept(tmp_path / "cache", "--output", str(page), "--record", str(tmp_path / "record.json"))
    results_by_name = statuses(page.read_text(encoding="utf-8"))
    assert len(results_by_name) > 150
    table = written()
    assert not table or known(results_by_name, table) == table


def test_what_ends_the_processes_is_wrong_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path))
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\n"
        "from pathlib import Path\n"
        "from bigtrain.system.user_cache import cache_put\n"
        "for task in json.loads(Path(sys.argv[1]).read_text()):\n"
        "    Path(sys.argv[2]).write_text(json.dumps([task['model_type'], ['TP 2']]))\n"
        "    if task['model_type'] == 'gemma':\n"
        "        os._exit(3)\n"
        "    cache_put('architectures', task['key'], {'TP 2': ('exact', '')})\n"
    )
    monkeypatch.setattr(architectures, "WORKER", worker)
    results_by_name = architectures.sweep(["gemma", "gpt2"], ["TP 2"])
    assert results_by_name["gpt2"] == {"TP 2": ("exact", "")}
    assert results_by_name["gemma"] == {
        "TP 2": ("wrong", "its processes end with exit codes [3, 3]")
    }


@pytest.mark.slow
def test_wrong_plans_are_named_on_every_process(tmp_path: Path) -> None:
    output = tmp_path / "said"
    run_script(2, Path(__file__).with_name("plan_worker.py"), output)
    said = json.loads(Path(f"{output}.0").read_text())
    assert said == json.loads(Path(f"{output}.1").read_text())
    assert said["qwen3_moe"] == said["gemma2"] == ""
    assert said["phi3"] == said["gemma"] == said["minicpm3"] == ""  # with adapters
    assert "model_type apertus is wrong" in said["apertus"]
    assert "gradient of model.layers.0.mlp.act_fn.alpha_" in said["apertus"]
    assert "self_attn.k_norm.weight differs from the unsharded model" in said["without_sum"]
    assert "it fails with RuntimeError" in said["uncut"]
    assert "-> parallel.tensor=1" in said["uncut"]
    assert [said[name] for name in HYBRIDS] == [""] * len(HYBRIDS)
    wrong = {
        name: said[name].partition("model, ")[2].partition(" differs")[0] for name in MUTATIONS
    }
    assert wrong == {
        "fused": "loss",
        "local_norm": "loss",
        "local_gradient": "gradient of model.layers.0.mamba.conv1d.weight",
        "local_time_steps": "gradient of model.layers.0.mamba.b_layernorm.weight",
    }
