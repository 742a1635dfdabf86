"""The page on long samples: its run trains as one process does, and its commands work."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import main as bigtrain
from bigtrain.python_api.planning import plan
from tests.launch.conftest import Inputs, finished_run, inputs, metrics, trained
from tests.support.pages import page_blocks, page_text

__all__ = ["finished_run", "inputs"]

PAGE = page_text("docs/howto/long_samples.md")
WORLD_SIZE = 4


def lines(start: str) -> list[str]:
    """Lines of the page's blocks that start so."""
    every = (line for block in page_blocks(PAGE) for line in block.splitlines())
    return [line for line in every if line.startswith(start)]


@pytest.fixture
def folder(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the page's run and its shards, in which commands are typed."""
    block, phases = page_blocks(PAGE, "yaml")
    (tmp_path / "long.yaml").write_text(block)
    phased = yaml.safe_load(block) | yaml.safe_load(phases)
    del phased["parallel"]
    (tmp_path / "phased.yaml").write_text(yaml.safe_dump(phased))
    shutil.copytree(inputs.shards, tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_the_run_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    check = ["check", "--config", "long.yaml", "--world-size"]
    assert bigtrain([*check, str(WORLD_SIZE), "--resolved"]) == 0
    assert "ring: 2" in capsys.readouterr().out
    assert bigtrain([*check, str(WORLD_SIZE), "parallel.sequence=4"]) == 2
    refused = capsys.readouterr().err
    assert "parallel.sequence={ulysses: 2, ring: 2}" in refused
    assert bigtrain([*check, "3", "parallel.sequence={ring: 3}"]) == 2
    assert "batch.sequence_length = 64" in capsys.readouterr().err
    typed, phased = lines("bigtrain check")
    assert bigtrain([*shlex.split(phased)[1:], "--world-size", "2"]) == 0
    assert "steps 3 to 5: 4 samples per step" in capsys.readouterr().out
    assert bigtrain([*shlex.split(typed)[1:], "--world-size", str(WORLD_SIZE)]) == 0


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_kinds_train_as_one_process(folder: Path) -> None:
    """Losses, held-out losses and a resume with another kind; every run is exported, which compares
    its logits."""
    rings, tiles, _ = (shlex.split(line) for line in lines("torchrun"))
    start = ["torchrun", "--nproc-per-node", str(WORLD_SIZE), "bigtrain/train.py"]
    assert rings == [*start, "--config", "long.yaml"]
    changed = [*rings, "model.tiled_mlp=4", "output.directory=runs/tiled"]
    assert tiles == changed
    # Ranks are forked from a process with another working directory.
    run = ["--config", str(folder / "long.yaml"), f"data.path={folder / 'shards'}"]
    run.append("logging.every_steps=1")
    own = f"output.directory={folder / 'runs/long'}"
    trained(*run, own, num_processes=WORLD_SIZE)
    trained(*run, "parallel.sequence=1", f"output.directory={folder / 'runs/one'}")
    tiled = ["model.tiled_mlp=4", f"output.directory={folder / 'runs/tiled'}"]
    output = trained(*run, *tiled, num_processes=WORLD_SIZE)
    assert "MLPs: 2 in 4 tiles of 8 tokens" in output
    for key in ("loss", "grad_norm", "held_out_loss"):
        expected = metrics(folder / "runs/one", key)
        for name in ("long", "tiled"):
            assert metrics(folder / "runs" / name, key) == pytest.approx(expected, rel=1e-4), key
    assert (folder / "runs/long/hf/model.safetensors").is_file()
    (last,) = (folder / "runs/long").glob("**/step*8")
    shutil.rmtree(last)
    trained(*run, own, "parallel.sequence={ring: 2}", num_processes=2)
    expected = metrics(folder / "runs/one")
    assert metrics(folder / "runs/long") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_lengths_in_phases(folder: Path) -> None:
    typed = shlex.split(lines("torchrun")[-1])
    assert typed[:4] == ["torchrun", "--nproc-per-node", "2", "bigtrain/train.py"]
    assert typed[4:] == ["--config", "phased.yaml", "output.directory=runs/phased"]
    run = ["--config", str(folder / "phased.yaml"), f"data.path={folder / 'shards'}"]
    run += [f"output.directory={folder / 'runs/phased'}", "logging.every_steps=1"]
    trained(*run, num_processes=2)
    tokens = metrics(folder / "runs/phased", "tokens")
    assert tokens[8] == 2 * 8 * 16 + 3 * 4 * 32 + 3 * 4 * 64


@pytest.mark.slow
def test_plans_of_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, one_device, longest, million = lines("bigtrain plan")
    assert bigtrain([*shlex.split(line)[1:], "--write", "plans"]) == 0
    assert "SP 16, ring 2" in capsys.readouterr().out
    sequence = yaml.safe_load((folder / "plans/run.yaml").read_text())["parallel"]["sequence"]
    assert sequence == {"ulysses": 8, "ring": 2}
    assert bigtrain([*shlex.split(one_device)[1:], "--write", "offloaded"]) == 0
    assert "activation offload" in capsys.readouterr().out
    model = yaml.safe_load((folder / "offloaded/run.yaml").read_text())["model"]
    assert model["activation_offload"]
    assert model["gradient_checkpointing"] == "full"
    assert bigtrain([*shlex.split(longest)[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sample_tokens"] == 4292608
    assert bigtrain(shlex.split(million)[1:]) == 0
    assert "SP 8, micro 1, recompute, activation offload" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), ("model.compile=off", "model.kernels=none")])
@pytest.mark.parametrize(
    "row", [row for row in PAGE.splitlines() if re.match(r"\| .*H[12]00", row)]
)
def test_predictions_of_the_table(row: str, overrides: tuple[str, ...]) -> None:
    """In the second column compiled layers, in the third one uncompiled ones."""
    cells = [cell.strip() for cell in row.split("|")[1:]]
    first, told = cells[0], cells[2 if overrides else 1]
    number = {"one": 1, "eight": 8, "32": 32}[re.search(r"(\w+) H\d00", first)[1]]  # type: ignore[index]
    devices = f"{number}x" + ("H200-141GB" if "H200" in first else "H100-80GB")
    if "GiB" not in told:
        planned = plan("llama3_8b", devices, *overrides, longest=True, host_memory_bytes=1.9e12)
        assert f"{planned.config.batch.sequence_length:,}" == told
        return
    tokens = 1048576
    planned = plan("qwen3_8b_continue", devices, *overrides, f"batch.sequence_length={tokens}",
                   "batch.global_tokens=null", "batch.global_batch_size=1",
                   f"model.overrides={{max_position_embeddings: {tokens}}}")  # fmt: skip
    best = planned.fitting[0]
    assert told == f"{best.memory.total / 2**30:.1f} GiB, {tokens / best.tokens_per_second:.0f} s"
