"""Weights of messages, other than 0 and 1, from conversations to a step, against transformers' own
masks and plain PyTorch in one process."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from bigtrain.cli import main
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import objective_runs
from tests.parity.objective_runs import degrees_name, steps_of
from tests.support.chats import save_chat_tokenizer, turns

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

LENGTH, STEPS, SAMPLES, VOCAB_SIZE = 192, 6, 4, 412
WEIGHTS = (None, 0.25, 0, 2.5, 1, 0.1)


def conversations() -> list[list[dict[str, Any]]]:
    """Return conversations of one to three answers, which have `WEIGHTS` in turn."""
    chats, number = [], 0
    for row in range(60):
        chat = turns(*(f"{'word ' * (row % 5)}{row}, {turn}?" for turn in range(2 + 2 * (row % 3))))
        for message in chat[1::2]:
            if (weight := WEIGHTS[number % len(WEIGHTS)]) is not None:
                message["weight"] = weight
            number += 1
        if any(message.get("weight") != 0 for message in chat[1::2]):
            chats.append(chat)
    return chats


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards, their tokenizer, and a small model."""
    directory = tmp_path_factory.mktemp("weights")
    source = directory / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations()))
    tokenizer = save_chat_tokenizer(directory / "tokenizer")
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer]
    assert main([*map(str, command), "--output", str(directory / "shards")]) == 0
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "base")
    return directory


def run_of(root: Path, **sections: Any) -> dict[str, Any]:
    data = {"path": str(root / "shards"), "packing": "best_fit", "allow_other_tokenizer": True}
    return {
        "model": {"path": str(root / "base")},
        "data": data,
        "batch": {"sequence_length": LENGTH, "global_batch_size": SAMPLES, "micro_batch_size": 1},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


@cache
def known_weights(root: Path) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the weight of each token by the tokens of a conversation: by transformers' mask, whose
    runs are its answers in order."""
    tokenizer: Any = AutoTokenizer.from_pretrained(root / "tokenizer")
    known = {}
    for chat in conversations():
        made = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        answers = iter(message.get("weight", 1.0) for message in chat[1::2])
        weights, before = torch.zeros(len(made["input_ids"])), 0
        for place, marked in enumerate(made["assistant_masks"]):
            if marked and not before:
                weight = next(answers)
            if marked:
                weights[place] = weight
            before = marked
        known[tuple(made["input_ids"])] = weights
    return known


def summed_losses(
    model: Any, batch: MicroBatch, known: dict[tuple[int, ...], torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """Return the weighted sum of the losses of a batch, one forward pass for each conversation, and
    that of the weights."""
    assert batch.position_ids is not None
    total, divisor = torch.zeros(()), 0.0
    for row, positions in zip(batch.input_ids.tolist(), batch.position_ids, strict=True):
        begins = (positions == 0).nonzero().flatten().tolist()
        for low, high in zip(begins, [*begins[1:], len(row)], strict=True):
            whole = next((one for one in known if one[: high - low] == tuple(row[low:high])), None)
            if whole is None:  # padding
                assert not any(row[low:high])
                continue
            assert len(whole) in (high - low, high - low + 1)  # the last is only a label in a row
            ids, weights = torch.tensor(whole), known[whole][1:]
            logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
            losses = F.cross_entropy(logits, ids[1:], reduction="none")
            total = total + (losses * weights).sum()
            divisor += float(weights.double().sum())
    return total, divisor


@cache
def plain_run(root: Path) -> tuple[list[float], list[float]]:
    """Return losses and norms of gradients."""
    config = parse_run_config(run_of(root))
    model: Any = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), section.lr, tuple(section.betas), section.eps, weight_decay=0.0
    )
    plan, _ = plan_batch(config.batch, 1)
    assert plan is not None
    batches, known = open_training_data(config, plan, 0), known_weights(root)
    losses, norms = [], []
    for step in range(STEPS):
        parts = [summed_losses(model, part, known) for part in batches.step(SAMPLES * step)]
        loss = torch.stack([total for total, _ in parts]).sum() / sum(count for _, count in parts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    batches.close()
    return losses, norms


@pytest.mark.parametrize(
    ("engine", "loss", "sections"),
    [
        ("zero2", "chunked", {}),
        ("zero1", "plain", {"parallel": {"tensor": 2}}),
        ("zero1", "chunked", {"parallel": {"pipeline": 2}}),
        ("zero3", "plain", {"parallel": {"sequence": 2}}),
    ],
    ids=lambda value: degrees_name(value) if isinstance(value, dict) else value,
)
def test_a_step_weighs_the_tokens_of_messages(
    root: Path, engine: str, loss: str, sections: dict[str, Any]
) -> None:
    tree = run_of(root, engine={"deepspeed_config": engine}, **sections)
    tree["model"] = {**tree["model"], "loss": loss, "loss_chunk_tokens": 7}
    name = f"{engine}-{loss}-{degrees_name(sections)}"
    rows = steps_of(objective_runs.train(root, name, tree, 2))
    losses, norms = plain_run(root)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
