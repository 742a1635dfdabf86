"""Measured points: sizes of models, a point, its run and its dataset of random tokens."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bigtrain.data.shards.format import token_dtype
from bigtrain.data.shards.manifest import Manifest, OptionsRecord, TokenizerRecord, write_manifest
from bigtrain.data.shards.writer import ShardWriter
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig

LOG_EVERY_STEPS = 10
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# Llama's shape; "50m" has 50.0 million parameters, "1b" and "3b" are those of Llama 3.2.
SIZES: dict[str, dict[str, int]] = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sequence_length": 4096,
    },
    "3b": {
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "sequence_length": 4096,
    },
    # Llama 3.1 8B's, but for tied embeddings: 7.5 billion parameters.
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sequence_length": 4096,
    },
    "50m": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "sequence_length": 256,
    },
    "10m": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "sequence_length": 256,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "sequence_length": 32,
    },
}


@dataclass(frozen=True)
class Point:
    """One comparison: everything that is the same for all contenders.

    engine: a file of ds_configs/, that of the ZeRO stage if not given. quick_weights: a block of
    random numbers over and over, since drawing billions of them takes a minute. profile: one more
    round, which is recorded and not counted.
    """

    size: str
    zero_stage: int
    accumulation: int
    micro_batch_size: int
    dtype: str
    rounds: int
    steps_per_round: int
    threads: int
    contenders: tuple[str, ...]
    sequence_length: int | None = None  # default: that of the size
    compile: str = "off"
    loss: str = "plain"
    loss_chunk_tokens: int | None = None
    checkpointing: str = "none"
    engine: str | None = None
    gradient_dtype: str | None = None
    float8: str = "none"
    kernels: str = "none"
    quick_weights: bool = False
    profile: bool = False
    memory_every_steps: int | None = None
    model_config: dict[str, Any] | None = None
    adapters: dict[str, Any] | None = None

    @property
    def engine_name(self) -> str:
        """Name of the DeepSpeed JSON."""
        return self.engine or f"zero{self.zero_stage}"

    @property
    def total_steps(self) -> int:
        """Steps of every contender: the first round warms up and is not counted."""
        return (self.rounds + 1 + self.profile) * self.steps_per_round


def write_random_dataset(directory: Path, *, vocab_size: int, num_tokens: int) -> None:
    """Write one shard of uniformly random tokens, written as `bigtrain tokenize` writes shards."""
    directory.mkdir(parents=True)
    (directory / "tokenizer").mkdir()  # the run directory keeps a copy; nothing here reads text
    dtype = token_dtype(vocab_size)
    tokens = np.random.default_rng(0).integers(1, vocab_size, num_tokens, dtype=np.int64)
    with ShardWriter(directory, "train_00000", dtype) as writer:
        writer.add(tokens, np.array([num_tokens]), num_tokens)
        record = writer.close()
    write_manifest(
        directory,
        Manifest(
            tokenizer=TokenizerRecord(
                name="random",
                hash="0" * 16,
                vocab_size=vocab_size,
                end_of_document_id=0,
                engine="none",
            ),
            token_dtype=dtype,
            sources=(),
            options=OptionsRecord(),
            splits={"train": (record,), "held_out": ()},
        ),
    )


def write_empty_weights(directory: Path, config: Mapping[str, Any]) -> None:
    """Write a model of the Hugging Face configuration `config` in bfloat16 whose weights are a hole
    in their file, which takes no time and no disk and reads as zeros; measurements of speed fill
    them. Only embeddings and head are there: tokens whose rows are equal are refused."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    entries: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        shape = list(parameter.shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    directory.mkdir(parents=True)
    hf_config.save_pretrained(directory)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
        # Values of 0.002 to 0.03 in bfloat16.
        random = np.random.default_rng(0)
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            # Tied ones are one parameter, under its first name.
            name = next(name for name, p in model.named_parameters() if p is layer.weight)
            begin, end = entries[name]["data_offsets"]
            file.seek(8 + len(header) + begin)
            random.integers(0x3B00, 0x3D00, (end - begin) // 2, np.uint16).tofile(file)


def llama(shape: Mapping[str, int], sequence_length: int) -> dict[str, Any]:
    """Return the Hugging Face configuration of a size of `SIZES`, tied embeddings, no special
    tokens."""
    return {
        "model_type": "llama",
        **{key: value for key, value in shape.items() if key != "sequence_length"},
        "max_position_embeddings": sequence_length,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def resolve_point(point: Point, directory: Path, num_ranks: int = 1) -> ResolvedRun:
    """Return the point as a run of bigtrain in `num_ranks` processes, and its dataset."""
    shape = SIZES[point.size]
    sequence_length = point.sequence_length or shape["sequence_length"]
    model = point.model_config or llama(shape, sequence_length)
    global_batch_size = point.micro_batch_size * point.accumulation * num_ranks
    # A round more than is trained: the loader reads ahead, and the loop must not reach its end,
    # where it would evaluate and save.
    num_tokens = (point.total_steps + 2) * global_batch_size * sequence_length + 1
    write_random_dataset(
        directory / "shards", vocab_size=model["vocab_size"], num_tokens=num_tokens
    )
    if point.adapters is None:
        source: dict[str, Any] = {"config": model}
    else:
        write_empty_weights(directory / "base", model)
        source = {"path": str(directory / "base")}
    config: dict[str, Any] = {
        "model": {
            **source,
            "compile": point.compile,
            "loss": point.loss,
            "loss_chunk_tokens": point.loss_chunk_tokens,
            "kernels": point.kernels,
            "gradient_checkpointing": point.checkpointing,
        },
        "data": {"path": str(directory / "shards")},
        "batch": {
            "sequence_length": sequence_length,
            "global_batch_size": global_batch_size,
            "micro_batch_size": point.micro_batch_size,
        },
        "train": {"steps": point.total_steps + 1},
        "optimizer": {"lr": 1e-4, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {
            "dtype": DTYPES[point.dtype],
            "gradient_dtype": point.gradient_dtype,
            "float8": point.float8,
        },
        "logging": {"every_steps": LOG_EVERY_STEPS},
        # The dataset has no tokenizer that an export could have.
        "output": {"directory": str(directory / "run"), "export": False},
    }
    if point.adapters is not None:
        config["adapters"] = point.adapters
    if point.memory_every_steps is not None:
        memory = {"every_steps": point.memory_every_steps, "copies": 0}
        config["checkpoint"] = {"memory": memory}
    return resolve_run(RunConfig.model_validate(config), num_ranks, point.engine_name)
