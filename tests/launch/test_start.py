"""`bigtrain start` from a model and a file to a model; stopped by a signal, it continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from bigtrain.errors import EXIT_STOPPED
from tests.support.chats import TEMPLATES, save_chat_tokenizer, turns
from tests.support.worlds import ROOT

ROWS: list[dict[str, Any]] = [
    {"messages": turns(f"what is {n} plus 1?", f"it is {n + 1}")} for n in range(80)
]
ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}
TOOL_ROWS: list[dict[str, Any]] = [
    {
        "tools": [{"type": "function", "function": ADD}],
        "messages": [
            {"role": "user", "content": f"what is {n} plus 1?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"type": "function", "function": {"name": "add", "arguments": f'{{"a": {n}}}'}}
                ],
            },
            {"role": "tool", "content": f"{n + 1}"},
            {"role": "assistant", "content": f"it is {n + 1}"},
        ],
    }
    for n in range(80)
]
PAIR_ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "user", "content": f"is {n} even?"}],
        "chosen": [{"role": "assistant", "content": "yes" if n % 2 else "no"}],
        "rejected": [{"role": "assistant", "content": "who knows"}],
    }
    for n in range(80)
]
TEXT_PAIR_ROWS: list[dict[str, Any]] = [
    {"prompt": f"is {n} even? ", "chosen": "yes", "rejected": "who knows"} for n in range(80)
]


def _save_base(base: Path, template: str) -> None:
    """Save a tiny model with a tokenizer and the chat template `template`."""
    save_chat_tokenizer(base)
    (base / "chat_template.jinja").write_text(TEMPLATES[template])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(str(base))),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).save_pretrained(base)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("options", "rows", "template", "stop"),
    [
        ("--chat --adapters", ROWS, "chatml", signal.SIGTERM),
        ("--chat --adapters --devices 2xCPU", ROWS, "chatml", signal.SIGTERM),
        ("--preference --devices 2", PAIR_ROWS, "chatml", signal.SIGINT),
        ("--preference --adapters", TEXT_PAIR_ROWS, "chatml", signal.SIGINT),
        ("--adapters --devices 2", TOOL_ROWS, "qwen3", signal.SIGINT),
    ],
)
def test_from_a_model_and_a_file_to_a_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    rows: list[dict[str, Any]],
    template: str,
    stop: signal.Signals,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    _save_base(tmp_path / "base", template)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = f"start --model base --data rows.jsonl {options} --epochs 30 --output out".split()
    command = [sys.executable, "-m", "bigtrain", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    # Stopped after the first checkpoint: the ranks save, and none is left behind.
    with open("first.txt", "w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        deadline = time.monotonic() + 600
        while not list(Path("out/run").glob("checkpoints/step-*")):
            assert process.poll() is None, Path("first.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        ranks = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(stop)
        code = process.wait(300)
    first = Path("first.txt").read_text()
    assert code == EXIT_STOPPED, first
    assert "stopped and saved; the same command continues; next:\n" in first
    assert "Traceback" not in first
    assert f"  bigtrain {' '.join(words[:3])}" in first
    assert psutil.wait_procs(ranks, timeout=60)[1] == []

    # The same command continues, exports, and ends with the line that talks to the model.
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step" in done.stderr
    *_, last = done.stderr.splitlines()
    assert last == "  bigtrain generate --model out/run/hf --chat"
    assert main([*last.split()[1:], "--prompt", "what is 4 plus 1?", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() != ""
