"""A run that trains adapters beside a base in 4 bits, as docs/howto/adapters.md starts it."""

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
from tests.launch.test_adapters import YAML
from tests.support.pages import page_text

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(900),
    # peft 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

PAGE = page_text("docs/howto/adapters.md")
SECTION = PAGE.partition("\n## A base in 4 bits")[2].partition("\n## ")[0]
COMMANDS, PYTHON, *_ = re.findall(r"^```\w*\n(.*?)^```", SECTION, flags=re.M | re.S)
TRAIN, EXPORT, MERGE = (shlex.split(line) for line in COMMANDS.splitlines())
STEPS, SAVED = 6, 3
IDS = torch.arange(3, 35)[None]


def start(inputs: Inputs, base: Path, run: Path, num_processes: int, *more: str) -> Any:
    """The run of the page, at a tiny size."""
    run.parent.mkdir(exist_ok=True)
    (run.parent / "lora.yaml").write_text(YAML)
    words = "torchrun --nproc_per_node 8 bigtrain/train.py --config lora.yaml".split()
    assert TRAIN[: len(words)] == words
    settings = [f"model.path={base}", f"data.path={inputs.shards}"]
    settings += ["batch.sequence_length=32", "batch.global_batch_size=8", "precision.dtype=float32"]
    settings += [f"train.steps={STEPS}", f"checkpoint.every_steps={SAVED}", "optimizer.lr=5e-3"]
    settings += ["schedule.warmup_steps=2", "logging.every_steps=1", "adapters.rank=4"]
    settings += [f"evaluation.every_steps={SAVED}", "evaluation.samples=8"]
    arguments = ["--config", run.parent / "lora.yaml", *TRAIN[len(words) :]]
    return train(
        *arguments, *settings, f"output.directory={run}", *more, num_processes=num_processes
    )


@pytest.fixture(scope="module")
def adapted(inputs: Inputs, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two processes under ZeRO 2."""
    run = tmp_path_factory.mktemp("adapted") / "run"
    before = snapshot(base)
    finished = start(inputs, base, run, 2)
    assert finished.code == 0, finished.output
    assert "reloaded and compared: same logits" in finished.output
    assert snapshot(base) == before
    return run


def logits(model: Any) -> torch.Tensor:
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # a kernel that computes in bfloat16
    with torch.no_grad():
        token_logits: torch.Tensor = model.eval()(input_ids=IDS).logits
    return token_logits


@pytest.mark.slow
def test_exports_what_plain_peft_loads(
    adapted: Path,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, there in (("runs/qlora", adapted), ("Qwen/Qwen3-8B", base)):
        Path(name).parent.mkdir()
        Path(name).symlink_to(there)
    for words in (EXPORT, MERGE):
        assert words[0] == "bigtrain"
        assert bigtrain(words[1:]) == 0
    said = capsys.readouterr().err
    match = re.search(r"differ from the trained model's by (\S+) \(root mean square", said)
    assert match is not None
    assert 1e-4 < float(match[1]) < 0.3
    written = "my-adapter/adapter_model.safetensors"
    assert Path(written).read_bytes() == (adapted / "hf" / Path(written).name).read_bytes()
    assert "quantization: nf4" in Path("my-adapter/README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(PYTHON.replace("bfloat16", "float32"), names)
    probe = load_file(checkpoints.checkpoint_path(adapted, STEPS) / checkpoints.PROBE)
    with torch.no_grad():
        logits(names["model"])
        again = names["model"](input_ids=probe["input_ids"]).logits
    assert_close(again, probe["logits"], rtol=0, atol=1e-5)
    # Merged into the weights as the base's files have them, by peft itself.
    from peft import PeftModel

    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "my-adapter")
    expected = logits(plain.merge_and_unload())
    assert_close(
        logits(AutoModelForCausalLM.from_pretrained("my-model")), expected, rtol=0, atol=1e-5
    )
    assert float((expected - logits(names["model"])).abs().max()) > 1e-3


@pytest.mark.slow
def test_checkpoints_hold_nothing_of_the_base(adapted: Path) -> None:
    directory = checkpoints.checkpoint_path(adapted, STEPS)
    keys = set()
    for file in (directory / checkpoints.TENSORS).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            keys |= set(opened.keys())
    assert keys
    assert all(".lora_A." in key or ".lora_B." in key for key in keys), keys
    state = json.loads((directory / checkpoints.STATE).read_text())
    assert state["config"]["adapters"]["quantization"] == "nf4"
    assert "bitsandbytes" in json.dumps(state["environment"])


def test_is_listed_and_generates(adapted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bigtrain(["checkpoints", "--adapters", str(adapted.parent)]) == 0
    assert "LoRA, rank 4, alpha 32, all-linear, base in nf4" in capsys.readouterr().out
    words = ["--model", str(adapted / "hf"), "--prompt", "Ada proved", "--max-new-tokens", "4"]
    assert bigtrain(["generate", *words, "--temperature", "0"]) == 0
    assert len(capsys.readouterr().out) > len("Ada proved")


def unfinished(adapted: Path, run: Path) -> Path:
    shutil.copytree(adapted, run)
    checkpoints.remove(checkpoints.checkpoint_path(run, STEPS))
    shutil.rmtree(run / "hf")
    return run


def test_another_quantization_is_refused(
    adapted: Path, inputs: Inputs, base: Path, tmp_path: Path
) -> None:
    run = unfinished(adapted, tmp_path / "run")
    before = snapshot(run)
    finished = start(inputs, base, run, 1, "adapters.quantization=none")
    assert finished.code != 0
    assert "adapters.quantization: 'nf4' there, 'none' now" in finished.output
    assert snapshot(run) == before


@pytest.mark.slow
def test_goes_on_with_one_process(
    adapted: Path, inputs: Inputs, base: Path, tmp_path: Path
) -> None:
    run = unfinished(adapted, tmp_path / "run")
    finished = start(inputs, base, run, 1, "checkpoint.asynchronous=false")
    assert finished.code == 0, finished.output
    assert f"resumed at step {SAVED} " in finished.output
    assert metrics(run) == pytest.approx(metrics(adapted), rel=1e-5)
    weights_by_name, expected = (
        load_file(r / "hf" / "adapter_model.safetensors") for r in (run, adapted)
    )
    for name, tensor in expected.items():
        assert_close(weights_by_name[name], tensor, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_base_in_8_bits_is_exported_and_merged(
    inputs: Inputs, base: Path, tmp_path: Path
) -> None:
    """Plain peft gives the trained model's logits on the base in 8 bits."""
    run = tmp_path / "run"
    finished = start(inputs, base, run, 2, "adapters.quantization=int8")
    assert finished.code == 0, finished.output
    assert "reloaded and compared: same logits" in finished.output
    assert "inputs will be cast" not in finished.output
    config = json.loads((run / "config.json").read_text())
    assert "int8" in json.dumps(config)
    words = ["export", "--run", str(run), "--merge", "--output", str(tmp_path / "merged")]
    assert bigtrain(words) == 0
