"""A fixed set of runs, and all that they compute: what no refactoring may change.

    python -m tests.golden.runs     # write figures.json anew, after a change that is meant to show

Everything goes through the program's own doors (`bigtrain tokenizer`, `bigtrain tokenize`,
train.py), so that a golden run stays what it is while the code behind is moved. Figures:

* of a dataset, the SHA-256 of each of its files of tokens, boundaries and masks;
* of a run, its metrics without what the clock says, and digests of the tensors of every checkpoint
  and of the exported model: names, types, shapes and bytes.

Floating point is the same to the last bit on processors that have the same instructions, so these
are held to AVX2, and `canary.py` trains a model with plain transformers: only where that comes out
as it did when the figures were written must ours be the same to the last bit.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from bigtrain.cli import main as main_of_program
from bigtrain.engine.checkpoint.io import read_full
from bigtrain.run.checkpointing import checkpoints
from tests.support.chats import CHATML
from tests.support.lives import Server

FIGURES = Path(__file__).with_name("figures.json")
PORTABLE_ARITHMETIC = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
METRICS = (
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "samples",
    "held_out_loss",
    "held_out_tokens",
    "event",
)
"""Fields of metrics.jsonl that the clock has no part in."""

VOCAB_SIZE = 512
STEPS = 6


# -- Data ------------------------------------------------------------------------------------------


def write_texts(root: Path) -> None:
    """Documents and conversations, the same on every machine and with every Python."""
    chooser = random.Random(20261123)
    words = [_word(chooser) for _ in range(300)]
    with (root / "texts.jsonl").open("w", encoding="utf-8") as file:
        for number in range(400):
            text = _text(chooser, words, chooser.randint(3, 160))
            if number % 7 == 0:
                text += "\n\ndef f(x):\n    return x ** 2  # naïve café 東京 🙂\n"
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    with (root / "chats.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(160):
            turns = []
            for _ in range(chooser.randint(1, 2)):
                for role in ("user", "assistant"):
                    content = _text(chooser, words, chooser.randint(1, 8))
                    turns.append({"role": role, "content": content})
            file.write(json.dumps({"messages": turns}) + "\n")


def _word(chooser: random.Random) -> str:
    letters = "etaoinshrdlcumwfgypbvk"
    return "".join(chooser.choice(letters) for _ in range(chooser.randint(1, 9)))


def _text(chooser: random.Random, words: list[str], num_words: int) -> str:
    return " ".join(words[int(300 * chooser.random() ** 2)] for _ in range(num_words)) + "."


def write_datasets(root: Path) -> dict[str, Path]:
    """A tokenizer and the datasets made with it; by name, `text` and `chat`."""
    write_texts(root)
    tokenizer = root / "tokenizer"
    texts, chats = root / "texts.jsonl", root / "chats.jsonl"
    template = root / "template.jinja"
    # Ends answers by the token that ends the documents of a tokenizer without chat tokens.
    template.write_text(CHATML.replace("'<|im_end|>' }}{% endgen", "eos_token }}{% endgen"))
    size = str(VOCAB_SIZE)
    _bigtrain("tokenizer", "--input", texts, "--vocab-size", size, "--output", tokenizer)
    common = ("--tokenizer", tokenizer, "--held-out", "0.05", "--workers", "1")
    datasets_by_name = {"text": root / "text", "chat": root / "chat"}
    # So small that there are several.
    shards = ("--shard-size", "64KiB", "--output", datasets_by_name["text"])
    _bigtrain("tokenize", "--input", texts, *common, *shards)
    chat = (
        "--chat-key",
        "messages",
        "--chat-template",
        template,
        "--output",
        datasets_by_name["chat"],
    )
    _bigtrain("tokenize", "--input", chats, *common, *chat)
    return datasets_by_name


def _bigtrain(*arguments: str | Path) -> None:
    assert main_of_program([*map(str, arguments)]) == 0


def dataset_figures(directory: Path) -> dict[str, str]:
    """SHA-256 by file name, of tokens, boundaries and masks."""
    files = [path for path in directory.iterdir() if path.suffix in (".bin", ".idx", ".mask")]
    assert files, directory
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


# -- Runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A golden run: its lives, each a number of processes and overrides of `BASE`'s tree."""

    lives: tuple[tuple[int, Mapping[str, Any]], ...]
    model: str = "llama"
    data: str = "text"
    recipe: str | None = None
    steps: int = STEPS
    overrides: Mapping[str, Any] = field(default_factory=dict)
    slow: bool = False


_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SMALL},
    "llama with dropout": {"model_type": "llama", **_SMALL, "attention_dropout": 0.1},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SMALL,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
        "output_router_logits": True,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB_SIZE,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 64,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}

ZERO = "engine.deepspeed_config"
RUNS: dict[str, Run] = {
    "quickstart, 50 steps": Run(
        ((1, {}),),
        recipe="quickstart",
        steps=50,
        overrides={"model.config.vocab_size": VOCAB_SIZE, "evaluation.samples": 8},
        slow=True,
    ),
    "ZeRO 0, bfloat16, recompute, chunked loss": Run(
        (
            (
                1,
                {
                    ZERO: "zero0",
                    "precision.dtype": "bfloat16",
                    "model.gradient_checkpointing": "full",
                    "model.loss": "chunked",
                },
            ),
        )
    ),
    "ZeRO 1, accumulation": Run(((2, {ZERO: "zero1", "batch.micro_batch_size": 1}),), slow=True),
    "ZeRO 2, dropout, documents apart": Run(
        ((2, {ZERO: "zero2", "data.document_boundaries": "isolate"}),),
        "llama with dropout",
        slow=True,
    ),
    "ZeRO 3, packed": Run(
        ((2, {ZERO: "zero3", "data.packing": "best_fit", "data.balance_attention": False}),),
        slow=True,
    ),
    "ZeRO 2, experts": Run(((2, {ZERO: "zero2"}),), "qwen3_moe", slow=True),
    "ZeRO 1, experts divided, their biases updated": Run(
        ((2, {ZERO: "zero1", "parallel.expert": 2, "moe.bias_update_rate": 0.01}),),
        "deepseek_v3",
    ),
    "tensor parallel": Run(((2, {ZERO: "zero1", "parallel.tensor": 2}),), slow=True),
    "pipeline": Run(
        ((2, {ZERO: "pipeline_zero1", "parallel.pipeline": 2, "batch.micro_batch_size": 1}),),
        "gpt2",
    ),
    "sequence parallel": Run(((2, {ZERO: "zero2", "parallel.sequence": 2}),), slow=True),
    "tensor parallel x pipeline": Run(
        (
            (
                4,
                {
                    ZERO: "pipeline_zero1",
                    "parallel.tensor": 2,
                    "parallel.pipeline": 2,
                    "batch.micro_batch_size": 1,
                },
            ),
        ),
        slow=True,
    ),
    "ZeRO 1, chat": Run(
        ((2, {ZERO: "zero1"}),),
        data="chat",
        overrides={"data.document_boundaries": "isolate", "batch.sequence_length": 64},
        slow=True,
    ),
    "ZeRO 3, chat, packed, then tensor parallel": Run(
        (
            (2, {ZERO: "zero3", "train.steps": 3}),
            (
                2,
                {
                    ZERO: "zero1",
                    "parallel.tensor": 2,
                    "checkpoint.allow_changes": "[train.steps]",
                },
            ),
        ),
        data="chat",
        overrides={
            "data.packing": "best_fit",
            "data.balance_attention": False,
            "batch.sequence_length": 64,
        },
        slow=True,
    ),
}


def run_golden(run: Run, server: Server, datasets: Mapping[str, Path], root: Path) -> Path:
    """Train it in `root`; returns the run directory."""
    directory = root / "run"
    if run.recipe is None:
        config = root / "run.yaml"
        config.write_text(yaml.safe_dump(_tree(MODELS[run.model])))
    else:
        config = Path(run.recipe)
    for world_size, overrides in run.lives:
        common = {
            "data.path": datasets[run.data],
            "output.directory": directory,
            "train.steps": run.steps,
        }
        settings = {**common, **run.overrides, **overrides}
        words = [f"{key}={value}" for key, value in settings.items()]
        codes, text = server.live(["--config", str(config), *words], world_size=world_size)
        assert codes == [0] * world_size, text
    return directory


def _tree(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"config": model},
        "data": {"path": "unused"},
        "batch": {"sequence_length": 32, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "clip_norm": 0.5},
        "schedule": {"warmup_steps": 2},
        "precision": {"dtype": "float32"},
        "checkpoint": {"every_steps": 3},
        "evaluation": {"every_steps": 3, "samples": 16},
        "logging": {"every_steps": 1},
        "output": {"directory": "unused"},
        "seed": 11,
    }


def run_figures(directory: Path) -> dict[str, Any]:
    """What a run computed: its metrics, and digests of its checkpoints and its export."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return {
        "metrics": [{key: line[key] for key in METRICS if key in line} for line in lines],
        "checkpoints": {
            str(step): digest(read_full(checkpoints.find(directory, step) / checkpoints.TENSORS))
            for step in checkpoints.list_steps(directory)
        },
        "export": digest(
            {
                name: tensor
                for file in sorted((directory / "hf").glob("*.safetensors"))
                for name, tensor in load_file(file).items()
            }
        ),
    }


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and bytes."""
    assert tensors
    checksum = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return checksum.hexdigest()


def canary(server: Server) -> str:
    """What plain transformers computes here, with the arithmetic of the server."""
    script = [str(Path(__file__).with_name("canary.py"))]
    codes, text = server.live([], world_size=1, script=script)
    assert codes == [0], text
    return text.splitlines()[-1].strip()


def all_figures(root: Path, server: Server) -> Iterator[tuple[str, Any]]:
    """Name and figures, the datasets' first."""
    datasets = write_datasets(root)
    for name, directory in datasets.items():
        yield f"dataset {name}", dataset_figures(directory)
    for number, (name, run) in enumerate(RUNS.items()):
        place = root / f"run-{number}"
        place.mkdir()
        yield name, run_figures(run_golden(run, server, datasets, place))
        shutil.rmtree(place)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), PORTABLE_ARITHMETIC)
        try:
            figures = {"canary": canary(server), **dict(all_figures(Path(name), server))}
        finally:
            server.close()
    FIGURES.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
