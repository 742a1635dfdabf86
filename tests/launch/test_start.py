"""`bigtrain start` from a model and a file to a model; stopped by a signal, it continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from tests.support.chats import save_chat_tokenizer, turns
from tests.support.worlds import ROOT

START = "start --model base --data chats.jsonl --chat --adapters --epochs 30 --output out"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("devices", [[], ["--devices", "2xCPU"]])
def test_from_a_model_and_a_file_to_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_chat_tokenizer(tmp_path / "base")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(str(tmp_path / "base"))),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    rows = [{"messages": turns(f"what is {n} plus 1?", f"it is {n + 1}")} for n in range(80)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))

    # Stopped after the first checkpoint, which the launcher and its ranks are told.
    words = [*START.split(), *devices]
    command = [sys.executable, "-m", "bigtrain", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("first.txt", "w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        deadline = time.monotonic() + 600
        while not list(Path("out/run").glob("checkpoints/step-*")):
            assert process.poll() is None, Path("first.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        code = process.wait(300)
    first = Path("first.txt").read_text()
    assert "the same command continues; next:" in first, first
    assert code != 0
    assert f"  bigtrain {' '.join(words[:3])}" in first

    # The same command continues, exports, and ends with the line that talks to the model.
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step" in done.stderr
    *_, last = done.stderr.splitlines()
    assert last == "  bigtrain generate --model out/run/hf --chat"
    assert main([*last.split()[1:], "--prompt", "what is 4 plus 1?", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() != ""
