"""A run that trains adapters: what it saves, with what it goes on, and what it leaves."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from bigtrain.cli import main as bigtrain
from bigtrain.run.checkpointing import checkpoints
from tests.launch.conftest import Inputs, metrics, snapshot, train
from tests.support.pages import page_text

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    # peft 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

PAGE = page_text("docs/howto/adapters.md")
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", PAGE, flags=re.M | re.S)
YAML, COMMANDS, _PLAN, LISTED, PYTHON = BLOCKS[:5]
TRAIN, EXPORT, MERGE = (shlex.split(line) for line in COMMANDS.splitlines())
STEPS, SAVED = 6, 3
IDS = torch.arange(3, 35)[None]


def start(
    inputs: Inputs, base: Path, run: Path, engine: str, num_processes: int, *more: str
) -> Any:
    """The run of the page, at a tiny size."""
    run.parent.mkdir(exist_ok=True)
    (run.parent / "lora.yaml").write_text(YAML)
    assert TRAIN[:-1] == "torchrun --nproc_per_node 8 bigtrain/train.py --config".split()
    settings = [f"model.path={base}", f"data.path={inputs.shards}", f"output.directory={run}"]
    settings += ["batch.sequence_length=32", "batch.global_batch_size=8", "precision.dtype=float32"]
    settings += [f"train.steps={STEPS}", f"checkpoint.every_steps={SAVED}", "optimizer.lr=5e-3"]
    settings += ["schedule.warmup_steps=2", "logging.every_steps=1", "adapters.rank=4"]
    arguments = ["--config", run.parent / TRAIN[-1], "--deepspeed_config", engine]
    return train(*arguments, *settings, *more, num_processes=num_processes)


@pytest.fixture(scope="module")
def adapted(inputs: Inputs, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two processes under ZeRO 3."""
    run = tmp_path_factory.mktemp("adapted") / "run"
    before = snapshot(base)
    finished = start(inputs, base, run, "zero3", 2)
    assert finished.code == 0, finished.output
    assert snapshot(base) == before
    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        token_logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return token_logits


def test_exports_what_plain_peft_loads(
    adapted: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, there in (("runs/lora", adapted), ("Qwen/Qwen3-8B", base)):
        Path(name).parent.mkdir()
        Path(name).symlink_to(there)
    for words in (EXPORT, MERGE):
        assert words[0] == "bigtrain"
        assert bigtrain(words[1:]) == 0
    written = "my-adapter/adapter_model.safetensors"
    assert Path(written).read_bytes() == (adapted / "hf" / Path(written).name).read_bytes()
    assert json.loads(Path("my-adapter/adapter_config.json").read_text())["r"] == 4
    for export in ("my-adapter", "my-model"):
        modes = {path.name: path.stat().st_mode for path in Path(export).iterdir()}
        assert len(set(modes.values())) == 1, modes
    card = Path("my-adapter/README.md").read_text(encoding="utf-8")
    assert "library_name: peft" in card
    assert "rank: 4" in card
    assert "library_name: transformers" in Path("my-model/README.md").read_text(encoding="utf-8")
    state = load_file(written)
    assert len(state) == 2 * 7 * 2  # matrices x linear layers x decoder layers
    assert all(t.dtype == torch.float32 and t.abs().max() > 0 for t in state.values())
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in state
    names: dict[str, Any] = {}
    exec(PYTHON, names)
    beside = logits(names["model"])
    untrained = logits(AutoModelForCausalLM.from_pretrained(base))
    assert float((beside - untrained).abs().max()) > 1e-2
    merged = logits(AutoModelForCausalLM.from_pretrained("my-model"))
    assert_close(merged, beside, rtol=0, atol=1e-5)


def test_runs_are_listed_by_their_base(
    adapted: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert LISTED.split() == "bigtrain checkpoints --adapters runs/".split()
    assert bigtrain(["checkpoints", "--adapters", str(adapted.parent)]) == 0
    _, row, its_base, *_ = capsys.readouterr().out.splitlines()
    assert row.split()[:3] == ["A", adapted.name, str(STEPS)]
    assert its_base == f"base A: {base}"


def test_checkpoints_hold_what_is_trained(adapted: Path) -> None:
    directory = checkpoints.checkpoint_path(adapted, STEPS) / checkpoints.TENSORS
    keys = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            keys |= set(opened.keys())
    assert keys
    assert all(".lora_A." in key or ".lora_B." in key for key in keys), keys


@pytest.mark.slow
def test_goes_on_at_another_topology(
    adapted: Path, inputs: Inputs, base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapted, run)
    checkpoints.remove(checkpoints.checkpoint_path(run, STEPS))
    shutil.rmtree(run / "hf")
    finished = start(inputs, base, run, "zero1", 2, *PIPELINE)
    assert finished.code == 0, finished.output
    assert f"resumed at step {SAVED} " in finished.output
    assert metrics(run) == pytest.approx(metrics(adapted), rel=1e-5)
    weights_by_name, expected = (
        load_file(r / "hf" / "adapter_model.safetensors") for r in (run, adapted)
    )
    assert weights_by_name.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(weights_by_name[name], tensor, rtol=0, atol=1e-5)


FILES = ("adapter_model.safetensors", "adapter_config.json")
PIPELINE = ("parallel.pipeline=2", "batch.micro_batch_size=2")
CARRIED = [
    pytest.param("zero0", 1, (), id="one process"),
    pytest.param("zero3", 2, ("parallel.tensor=2",), id="ZeRO 3, TP 2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "num_processes", "parallel"), CARRIED)
def test_files_have_the_same_bytes(
    engine: str,
    num_processes: int,
    parallel: tuple[str, ...],
    adapted: Path,
    inputs: Inputs,
    base: Path,
    tmp_path: Path,
) -> None:
    """Of equal adapters: topologies add up in other orders, so a trained state is carried over by
    its checkpoint, and a last step is made that is too small for a float32 of its size."""
    run, before = tmp_path / "run", snapshot(base)
    shutil.copytree(adapted, run)
    shutil.rmtree(run / "hf")
    small = (f"train.steps={STEPS + 1}", "optimizer.lr=1e-30")
    allowed = "checkpoint.allow_changes=[train.steps,optimizer.lr]"
    finished = start(inputs, base, run, engine, num_processes, *parallel, *small, allowed)
    assert finished.code == 0, finished.output
    assert f"resumed at step {STEPS} " in finished.output
    assert list(metrics(run)) == list(range(1, STEPS + 2))
    export = ["export", "--run", str(run)]
    assert bigtrain([*export, "--output", str(tmp_path / "adapter")]) == 0
    for name in FILES:
        expected = (adapted / "hf" / name).read_bytes()
        assert (run / "hf" / name).read_bytes() == expected
        assert (tmp_path / "adapter" / name).read_bytes() == expected
    for trained, output in ((adapted, "expected"), (run, "merged")):
        words = ["export", "--run", str(trained), "--merge", "--output", str(tmp_path / output)]
        assert bigtrain(words) == 0
    merged, expected = (tmp_path / name / "model.safetensors" for name in ("merged", "expected"))
    assert merged.read_bytes() == expected.read_bytes()
    assert snapshot(base) == before


def test_another_base_is_refused(adapted: Path, inputs: Inputs, base: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(adapted, run)
    checkpoints.remove(checkpoints.checkpoint_path(run, STEPS))
    shutil.copytree(base, other)
    (other / "checksums.json").unlink()
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    before = snapshot(run)
    finished = start(inputs, other, run, "zero0", 1, "checkpoint.allow_changes=[model.path]")
    assert finished.code != 0
    assert "has adapters of a base other than the current model.path" in finished.output
    assert "config.json: " in finished.output
    assert snapshot(run) == before


@pytest.mark.slow
def test_principal_adapters_resume_and_fit_the_base(
    inputs: Inputs, base: Path, tmp_path: Path
) -> None:
    """The export at the end is compared with the trained model's logits by plain peft on the base;
    a resumed run has the same bytes, and another kind of initial values is refused."""
    run, again = tmp_path / "whole" / "run", tmp_path / "again" / "run"
    kind = ("adapters.init=pissa", "adapters.loraplus_lr_ratio=4")
    finished = start(inputs, base, run, "zero3", 2, *kind)
    assert finished.code == 0, finished.output
    config = json.loads((run / "hf" / "adapter_config.json").read_text())
    assert (config["r"], config["init_lora_weights"]) == (8, True)
    again.parent.mkdir()
    shutil.copytree(run, again)
    checkpoints.remove(checkpoints.checkpoint_path(again, STEPS))
    shutil.rmtree(again / "hf")
    finished = start(inputs, base, again, "zero3", 2, "checkpoint.allow_changes=[adapters.init]")
    assert finished.code != 0
    assert "adapters.init" in finished.output
    finished = start(inputs, base, again, "zero3", 2, *kind)
    assert finished.code == 0, finished.output
    assert f"resumed at step {SAVED} " in finished.output
    for name in FILES:
        assert (again / "hf" / name).read_bytes() == (run / "hf" / name).read_bytes()
    words = ["export", "--run", str(run), "--merge", "--output", str(tmp_path / "merged")]
    assert bigtrain(words) == 0
