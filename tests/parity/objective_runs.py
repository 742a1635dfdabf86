"""Small models of the tests of objectives, and runs that train them in a world of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bigtrain.metrics.recording import record
from tests.support.lives import shared_server

VOCAB_SIZE = 96
SPREAD = 0.2
COMMON = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
COMMON += ("num_key_value_heads", "max_position_embeddings", "initializer_range", "eos_token_id")


def save_llama(
    directory: Path, *, hidden_size: int = 32, seed: int = 0, spread: float = SPREAD
) -> None:
    """Save a random causal language model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def save_experts(base: Path, directory: Path) -> None:
    """Save a random model with experts, of the sizes of the Llama in `base`."""
    config = LlamaConfig.from_pretrained(base).to_dict()
    common = {name: value for name, value in config.items() if name in COMMON}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, head_dim=8)).save_pretrained(directory)


def degrees_name(sections: dict[str, Any]) -> str:
    """Return a name for the parallelism in `sections` of a run."""
    return "".join(filter(str.isalnum, str(sections.get("parallel", "data"))))


def train(root: Path, name: str, tree: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """Train `tree` in a world of processes; return the lines of its metrics."""
    tree = {**tree, "output": {"directory": str(root / name), "export": False}}
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    codes, printed = shared_server().live(["--config", str(path)], world_size=world_size)
    assert codes == [0] * world_size, printed[-6000:]
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of logged steps."""
    return [line for line in lines if "loss" in line]


class SummedPairs:
    """An objective of a user that records sums."""

    unit = "pairs"

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the summed margins of the pairs."""
        record("pairs", len(batch.row_sums) // 2, "sum")
        record("chosen", batch.row_sums[0::2].sum(), "sum")
        return torch.nn.functional.softplus(batch.row_sums[1::2] - batch.row_sums[0::2]).sum()
