"""What `bigtrain checkpoints` and `bigtrain verify` say, and that they need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.engine.checkpoint.tensor_file import NewPart, SaveIdentity, write_parts
from bigtrain.run.checkpointing import checkpoints
from bigtrain.system.boxes import Box
from tests.support.worlds import ROOT

FILE = "rank-00000.safetensors"


def save(directory: Path, step: int, loss: float | None, **more: object) -> None:
    """A complete checkpoint; `more`: in its `state.json`."""
    partial = checkpoints.partial_path(directory, step, "0123abcd")
    checkpoints.prepare(partial)
    topology = {"world_size": 4, "data_size": 2, "tensor_size": 2}
    topology |= {"pipeline_size": 1, "sequence_size": 1}
    state = {
        "run": "0123456789abcdef",
        "step": step,
        "held_out_loss": loss,
        "environment": {"topology": topology},
        "deepspeed": {"zero_optimization": {"stage": 3}},
        **more,
    }
    (partial / "state.json").write_text(json.dumps(state))
    identity = SaveIdentity("0123456789abcdef", step, "0123abcd")
    part = NewPart("m/a", (3000,), Box.full((3000,)), "U8", lambda: memoryview(bytes(3000)))
    written = {FILE: write_parts(partial / "tensors" / FILE, identity, 0, [part])}
    checkpoints.commit(partial, written, identity)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 to 40, that of 30 with a byte flipped, that of 20 cut off."""
    for step, loss in ((10, 2.25), (20, 3.0), (30, 2.5), (40, None)):
        save(tmp_path, step, loss)
    tensors = [tmp_path / f"checkpoints/step-000000{n}/tensors/{FILE}" for n in (20, 30)]
    tensors[0].write_bytes(tensors[0].read_bytes()[:-1])
    tensors[1].write_bytes(tensors[1].read_bytes()[:-1] + b"\1")
    section = {"keep_last": 1, "keep_best": 1}
    (tmp_path / "config.json").write_text(
        json.dumps({"checkpoint": section, "evaluation": {"best": {}}})
    )
    return tmp_path


def test_checkpoints_lists_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "--run", str(run)]) == 0
    path = checkpoints.checkpoint_path(run, 20) / "tensors" / FILE
    num_bytes = path.stat().st_size + 1
    head, *lines = capsys.readouterr().out.split("next:")[0].splitlines()
    assert head.split() == "step size state held-out loss written by kept".split()
    rows = [[cell for cell in line.split("  ") if cell] for line in lines]
    assert [[cell.strip() for cell in (row[0], *row[2:])] for row in rows] == [
        ["10", "complete", "2.2500", "4 ranks, ZeRO 3, tensor 2", "held-out loss 2.2500"],
        [
            "20",
            "corrupt",
            "3.0000",
            "4 ranks, ZeRO 3, tensor 2",
            f"{path}: {num_bytes - 1} bytes, should be {num_bytes}",
        ],
        ["30", "complete", "2.5000", "4 ranks, ZeRO 3, tensor 2", "until the next save"],
        ["40", "complete", "-", "4 ranks, ZeRO 3, tensor 2", "newest"],
    ]
    assert all("KiB" in row[1] for row in rows)


def test_verify_reads_every_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--run", str(run)]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[:2] for line in lines] == [
        ["step 10", lines[0].split(":")[1]],
        ["step 20", " corrupt"],
        ["step 30", " corrupt"],
        ["step 40", lines[3].split(":")[1]],
    ]
    assert lines[0].startswith("step 10: complete, ")
    assert lines[2].endswith(f"{FILE}: contents do not match their checksum")
    assert main(["verify", "--run", str(run), "--step", "40"]) == 0
    assert capsys.readouterr().out.startswith("step 40: complete, ")


def test_what_is_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--run", str(run), "--step", "15"]) == 2
    assert "no checkpoint of step 15; steps: 10, 20, 30, 40" in capsys.readouterr().err
    for command in ("checkpoints", "verify"):
        assert main([command, "--run", str(run / "nowhere")]) == 2
        assert f"{run / 'nowhere'}: no such directory -> name a run" in capsys.readouterr().err


def test_no_torch_is_imported() -> None:
    program = "import sys, bigtrain.run.checkpointing.listing; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_adapters_are_listed_by_their_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checksums tell bases apart. A corrupt checkpoint and a run without adapters do not count."""
    for name, base, adapters in (
        ("one", "a", {"rank": 4}),
        ("deep/two", "b", {"rank": 8, "targets": ["q_proj", "v_proj"]}),
        ("three", "a", {"dora": True}),
        ("none", "a", None),
    ):
        there = tmp_path / name
        save(there, 30, 2.5, base={"model.safetensors": base})
        save(there, 40, 2.0, base={"model.safetensors": base})
        config = {"model": {"path": f"bases/{name}"}, "adapters": adapters}
        (there / "config.json").write_text(json.dumps(config))
    corrupt = checkpoints.checkpoint_path(tmp_path / "three", 40) / "tensors" / FILE
    corrupt.write_bytes(corrupt.read_bytes()[:-1])
    assert main(["checkpoints", "--adapters", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split("next:")[0].splitlines() == [
        "base  run       step  held-out loss  adapters",
        "A     deep/two  40    2.0000         LoRA, rank 8, alpha 32, q_proj v_proj",
        "B     one       40    2.0000         LoRA, rank 4, alpha 32, all-linear",
        "B     three     30    2.5000         DoRA, rank 16, alpha 32, all-linear",
        "base A: bases/deep/two",
        "base B: bases/one, bases/three",
    ]
    assert main(["checkpoints", "--adapters", str(tmp_path / "none")]) != 0
    assert "no run below it has adapters" in capsys.readouterr().err
