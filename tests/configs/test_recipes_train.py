"""The recipes that `docs/howto/what_do_i_type.md` does not type are trained too, at a tiny size.

Hub names are directories of these names in the folder where the runs start, as on that page.
"""

from __future__ import annotations

import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.settings.loading import recipe_names
from tests.support.chats import CHATML, chat_tokenizer, unmarked
from tests.support.lives import run_forked_world
from tests.support.pages import page_text
from tests.support.worlds import ROOT

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
SHORT = [
    "batch.sequence_length=64", "batch.global_tokens=2048", "batch.micro_batch_size=2",
    "train.steps=3", "schedule.warmup_steps=1", "precision.dtype=float32", "evaluation.samples=4",
]  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "gpt2_124m": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt2_124m_muon": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4},
    "llama3_1b": SIZES,
    "qwen3_30b_a3b": {},
    "llama3_70b": {},
    "hybrid_9b": {
        **SIZES,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "llama3_8b_1m": {},
    "dpo_8b_lora": {},
    "reward_1b": {},
    "distill_1b": {},
    "qwen3_8b_lora": {},
}


WORKERS = ROOT / "tests/launch"


def call(folder: Path, *words: str) -> str:
    """Run a command of bigtrain in `folder`."""
    worker = [str(WORKERS / "command_worker.py"), str(folder)]
    return run_forked_world(1, [*worker, *words], {})


def test_every_recipe_is_trained_somewhere() -> None:
    """Here or by the pages whose commands a test types, quickstart by `make quickstart`."""
    page = page_text("docs/howto/what_do_i_type.md")
    typed = set(re.findall(r"bigtrain/train\.py --config (\w+)\b(?!/)", page))
    planned = set(re.findall(r"bigtrain plan --config (\w+) .*--write", page))
    assert typed | planned | {"quickstart"} | set(RUNS) == set(recipe_names())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("recipes")
    (folder / "texts").mkdir()
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]:
        (folder / "texts" / f"{source.stem}.txt").write_bytes(source.read_bytes())
    tokenizer = chat_tokenizer(unmarked(CHATML))
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for name, config in (
        ("Qwen/Qwen3-30B-A3B-Base", Qwen3MoeConfig(**SIZES, **ids, **experts)),
        ("meta-llama/Llama-3.1-70B", LlamaConfig(**SIZES, **ids)),
        ("meta-llama/Llama-3.1-8B", LlamaConfig(**SIZES, **ids)),
        ("meta-llama/Llama-3.1-8B-Instruct", LlamaConfig(**SIZES, **ids)),
        ("meta-llama/Llama-3.2-1B-Instruct", LlamaConfig(**SIZES, **ids)),
        ("meta-llama/Llama-3.2-1B", LlamaConfig(**SIZES, **ids)),
        ("Qwen/Qwen3-8B-Base", Qwen3Config(**SIZES, **ids)),
    ):
        tokenizer.save_pretrained(str(folder / name))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        if not (folder / f"shards-{name[:4]}").exists():
            words = ("--input", "texts", "--tokenizer", name, "--held-out", "0.05")
            call(folder, "tokenize", *words, "--output", f"shards-{name[:4]}")
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(200):
            row = {"prompt": f"{number} + 1 =", "chosen": f" {number + 1}", "rejected": " 0"}
            file.write(json.dumps(row) + "\n")
    name = "meta-llama/Llama-3.1-8B"
    words = ("--input", "pairs.jsonl", "--tokenizer", name, "--held-out", "0.1")
    call(folder, "tokenize", *words, "--output", "shards-pairs")
    (folder / "teacher.yaml").write_text(
        f"model: {{path: {name}}}\ndata: {{path: shards-meta, packing: best_fit}}\n"
        "batch: {sequence_length: 64, global_batch_size: 4}\ntrain: {steps: 1}\n"
        "optimizer: {lr: 1.0e-3}\nprecision: {dtype: float32}\noutput: {directory: teacher}\n"
    )
    top = ("--kind", "top-k", "--top-k", "8", "--output", "scores")
    call(folder, "score", "--config", "teacher.yaml", *top)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_it_trains_and_exports(folder: Path, name: str) -> None:
    of_pairs = name in ("dpo_8b_lora", "reward_1b")
    shards = "shards-Qwen" if name.startswith("qwen") else "shards-meta"
    shards = "shards-pairs" if of_pairs else shards
    values = {**RUNS[name], **({"bos_token_id": 0, "eos_token_id": 0} if RUNS[name] else {})}
    model = [f"model.config.{key}={value}" for key, value in values.items()]
    is_adapted = name.endswith("_lora")
    in_samples = is_adapted or of_pairs or name.endswith(("_1m", "distill_1b"))
    short = [s.replace("global_tokens=2048", "global_batch_size=32") for s in SHORT]
    words = ("--config", name, f"data.path={shards}", *(short if in_samples else SHORT), *model)
    # Of one process, on a CPU.
    words += tuple(f"parallel.{name}=1" for name in ("tensor", "pipeline", "expert", "sequence"))
    words += ("model.activation_offload=false",)
    worker = [str(WORKERS / "extension_worker.py"), str(folder)]
    assert "same logits" in run_forked_world(1, [*worker, *words], {})
    written = "adapter_config.json" if is_adapted else "config.json"
    assert (folder / "runs" / name / "hf" / written).is_file()
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    # One process sends nothing to others, and says so.
    sent = [json.loads(line).get("optimizer_exchange") for line in lines if '"loss"' in line]
    assert sent
    assert set(map(str, sent)) == {"{'sent_bytes': 0.0}" if name.endswith("_muon") else "None"}


@pytest.mark.slow
def test_the_hybrid_recipe_trains_in_its_layout(folder: Path) -> None:
    """With its engine, recomputation, isolated documents and dtype, on 2 ranks that share samples
    instead of 8."""
    values = {**RUNS["hybrid_9b"], "bos_token_id": 0, "eos_token_id": 0}
    model = [f"model.config.{key}={value}" for key, value in values.items()]
    changes = [s for s in SHORT if not s.startswith(("precision", "batch.micro_batch_size"))]
    words = ("--config", "hybrid_9b", "data.path=shards-meta", *changes, *model)
    words += ("parallel.sequence=2", "output.directory=runs/hybrid_9b_sequence")
    words += ("logging.every_steps=1",)
    worker = [str(WORKERS / "extension_worker.py"), str(folder)]
    assert "same logits" in run_forked_world(2, [*worker, *words], {})
    run = folder / "runs" / "hybrid_9b_sequence"
    settings = json.loads((run / "config.json").read_text())
    assert settings["parallel"]["sequence"] in (2, {"ulysses": 2, "ring": 1})
    assert settings["data"]["document_boundaries"] == "isolate"
    recipe = yaml.safe_load((ROOT / "bigtrain/recipes/hybrid_9b.yaml").read_text())
    recomputed = settings["model"]["gradient_checkpointing"]
    assert recomputed == recipe["model"]["gradient_checkpointing"] != "none"
    assert json.loads((run / "deepspeed.json").read_text())["zero_optimization"]["stage"] == 3
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
