"""The page `docs/howto/what_do_i_type.md`, typed from its top at a tiny size on two CPU processes.

Hub names are directories of these names in the folder where the commands are typed. What a command
is given besides what stands on the page is in `MORE` and `tiny`, and nowhere else.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from bigtrain.cli import main
from bigtrain.errors import EXIT_STOPPED
from bigtrain.planner.constraints import USED, settings_of
from bigtrain.settings.loading import recipe_names
from tests.support.chats import CHATML, chat_tokenizer, turns, unmarked
from tests.support.lives import shared_server
from tests.support.pages import page_text
from tests.support.worlds import ROOT

PAGE = page_text("docs/howto/what_do_i_type.md")
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# Of every run of the page: short samples and steps, on CPUs.
SHORT = [
    "batch.sequence_length=64", "schedule.warmup_steps=1", "checkpoint.every_steps=4",
    "evaluation.every_steps=4", "evaluation.samples=4", "precision.dtype=float32",
    "logging.every_steps=2",
]  # fmt: skip
MORE = {
    "llama3_8b": [
        *SHORT, *(f"model.config.{key}={value}" for key, value in SIZES.items()),
        "model.config.bos_token_id=null", "model.config.eos_token_id=null",
        "batch.global_tokens=1024", "train.steps=100", "checkpoint.every_steps=20",
    ],
    "qwen3_8b_continue": [*SHORT, "batch.global_tokens=1024", "train.steps=8"],
    "chat_1b": [*SHORT, "batch.global_batch_size=16", "train.steps=8"],
    # What the plan wrote is for eight GPUs.
    "plans/mine/run.yaml": [f"parallel.{d}=1" for d in ("tensor", "pipeline", "sequence")],
}  # fmt: skip


def blocks() -> list[list[list[str]]]:
    """Command lines of the page, by its blocks."""
    texts = re.findall(r"^```\n(.*?)^```", PAGE, flags=re.M | re.S)
    return [[shlex.split(line) for line in block.splitlines()] for block in texts]


def commands() -> list[list[str]]:
    return [words for block in blocks() for words in block]


def option(words: list[str], name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


def test_every_recipe_is_listed() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.M)
    assert sorted([*listed, "quickstart"]) == recipe_names()


def test_a_stopped_run_is_resumed_by_the_same_command() -> None:
    trained = [words for words in commands() if words[0] == "deepspeed"]
    assert trained[0] == trained[1]
    assert len(trained) == 4


def tiny(words: list[str]) -> list[str]:
    """A command of the page for two processes of this machine and a tiny model."""
    more = MORE.get(option(words, "--config") or "", [])
    if words[:2] == ["bigtrain", "plan"] and "--write" not in words:  # refuses unused settings
        more = [override for override in more if settings_of([override], USED)]
    if words[:2] == ["bigtrain", "check"]:
        place = words.index("--world-size") + 1
        words = [*words[:place], "2", *words[place + 1 :]]
    elif "--dataset-config" in words:  # a directory has none
        place = words.index("--dataset-config")
        words = [*words[:place], *words[place + 2 :]]
    return [*words, *more]


def train(folder: Path, words: list[str], code: int = 0, **more: Any) -> str:
    """Start train.py with a command's arguments on two forked ranks, for DeepSpeed's launcher on
    eight GPUs."""
    assert words[:5] == ["deepspeed", "--quiet", "--num_gpus", "8", "bigtrain/train.py"]
    worker = str(ROOT / "tests/launch/extension_worker.py")
    script = [worker, str(folder), *tiny(words)[5:]]
    codes, said = shared_server().live([], script=script, **more)
    assert codes == [code, code], said
    return said


@pytest.fixture
def reader(tmp_path: Path) -> Path:
    """A folder with texts, conversations, and what the page's hub names stand for."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    for name in ("bigtrain", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "texts").mkdir()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    for number, source in enumerate(sources):
        (tmp_path / "texts" / f"{number}.txt").write_bytes(source.read_bytes())
    rows = [{"text": source.read_text(encoding="utf-8", errors="replace")} for source in sources]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "HuggingFaceFW/fineweb-edu"))
    chats = [
        turns(*(f"{'word ' * (n % 9)}{n}, {turn}?" for turn in range(2 + 2 * (n % 3))))
        for n in range(800)
    ]
    lines = "".join(json.dumps({"messages": messages}) + "\n" for messages in chats)
    (tmp_path / "chats.jsonl").write_text(lines)
    tokenizer = chat_tokenizer(unmarked(CHATML))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    llama = LlamaConfig(**SIZES, **ids, head_dim=16, tie_word_embeddings=True)
    qwen = Qwen3Config(**SIZES, **ids, head_dim=16)
    for name, config in (
        ("meta-llama/Llama-3.1-8B", None),
        ("meta-llama/Llama-3.2-1B-Instruct", llama),
        ("Qwen/Qwen3-8B-Base", qwen),
    ):
        tokenizer.save_pretrained(str(tmp_path / name))
        if config is not None:
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_from_the_top(
    reader: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a Ctrl-C in the first training."""
    monkeypatch.chdir(reader)
    trained: list[str] = []
    for words in commands():
        if words[0] == "bigtrain":
            assert main(tiny(words)[1:]) == 0, words
            assert words[1] != "plan" or "ZeRO" in capfd.readouterr().out
        elif words[0] == "tail":
            assert subprocess.run(words, capture_output=True, check=True).stdout
        elif trained:
            trained.append(train(reader, words))
        else:
            log = str(reader / "runs/llama3_8b/metrics.jsonl")
            ctrl_c = {"signal": signal.SIGINT, "ranks": [0, 1], "times": 1, "delay_seconds": 0}
            interrupted = ctrl_c | {"log": log, "after_bytes": 1000}
            trained.append(train(reader, words, EXIT_STOPPED, send=interrupted))
    first, second, *others = trained
    assert "resumed at step" not in first
    assert "exported to" not in first
    assert "resumed at step" in second
    for text in (second, *others):
        assert "exported to" in text
    for run in ("llama3_8b", "qwen3_8b_continue", "chat_1b"):
        assert (reader / "runs" / run / "hf/config.json").is_file()
    assert (reader / "exported/model.safetensors").is_file()
