"""Weights of the losses of tokens, from shards, items of user code and messages of conversations,
against transformers' own masks and plain PyTorch in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from bigtrain.cli import main
from bigtrain.data.loading.loader import open_training_data
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity.conftest import each_case
from tests.parity.objective_runs import (
    IGNORED,
    LAYOUTS,
    VOCAB_SIZE,
    Plain,
    compare,
    documents_in,
    plain_training,
    run_tree,
    save_llama,
    train,
)
from tests.support.chats import save_chat_tokenizer, turns
from tests.support.datasets import write_dataset
from tests.support.streams import Shuffled, item_of
from tests.support.weighted import FIRST_WEIGHTED, weights_of, write_weighted

pytestmark = [pytest.mark.distributed]

STEPS, SAMPLES = 6, 8
LENGTHS = {"shards": 32, "Items": 16, "Shuffled": 16, "messages": 192}
SETTINGS: dict[str, Any] = {"length": 16, "weights": "fractions"}
MESSAGE_WEIGHTS = (None, 0.25, 0, 2.5, 1, 0.1)


def conversations() -> list[list[dict[str, Any]]]:
    """Return conversations of one to three answers, which have `MESSAGE_WEIGHTS` in turn."""
    chats, number = [], 0
    for row in range(60):
        chat = turns(*(f"{'word ' * (row % 5)}{row}, {turn}?" for turn in range(2 + 2 * (row % 3))))
        for message in chat[1::2]:
            if (weight := MESSAGE_WEIGHTS[number % len(MESSAGE_WEIGHTS)]) is not None:
                message["weight"] = weight
            number += 1
        if any(message.get("weight") != 0 for message in chat[1::2]):
            chats.append(chat)
    return chats


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with weights, one without, and a small model."""
    directory = tmp_path_factory.mktemp("weights")
    write_weighted(directory / "weighted", low=FIRST_WEIGHTED, vocab_size=VOCAB_SIZE)
    write_weighted(directory / "plain", low=0, vocab_size=VOCAB_SIZE, seed=1)
    write_dataset(directory / "unweighted", vocab_size=VOCAB_SIZE)
    save_llama(directory / "base")
    return directory


@pytest.fixture(scope="module")
def chat_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of conversations, their tokenizer, and a small model."""
    directory = tmp_path_factory.mktemp("messages")
    source = directory / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": one}) + "\n" for one in conversations()))
    tokenizer = save_chat_tokenizer(directory / "tokenizer")
    command = ["tokenize", "--input", source, "--tokenizer", tokenizer]
    assert main([*map(str, command), "--output", str(directory / "shards")]) == 0
    length = LENGTHS["messages"]
    save_llama(directory / "base", vocab_size=412, max_position_embeddings=length)
    return directory


def run_of(root: Path, kind: str, **sections: Any) -> dict[str, Any]:
    data: dict[str, Any] = {"path": str(root / "unweighted"), "allow_other_tokenizer": True}
    if kind == "shards":
        sources = [{"path": str(root / name), "weight": 1} for name in ("weighted", "plain")]
        data = {"sources": sources, "packing": "best_fit", "allow_other_tokenizer": True}
    elif kind == "messages":
        data |= {"path": str(root / "shards"), "packing": "best_fit"}
    else:
        data["samples"] = {"type": f"tests.support.streams:{kind}", "settings": SETTINGS}
    if kind != "messages":
        sections["evaluation"] = {"every_steps": STEPS, "samples": 6}
    return run_tree(root, length=LENGTHS[kind], steps=STEPS, data=data, **sections)


def weighted_mean(losses: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    pairs = zip(losses, weights, strict=True)
    divisor = sum(float(weight.double().sum()) for weight in weights)
    return torch.stack([(loss * weight).sum() for loss, weight in pairs]).sum() / divisor


def shards_loss(model: Any, parts: list[Any]) -> tuple[torch.Tensor, Any]:
    """Each document by a pass of its own; weights are known from the labels."""
    losses, weights = [], []
    for ids, labels in (document for part in parts for document in documents_in(part)):
        present = labels != IGNORED
        if present.any():
            logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
            losses.append(F.cross_entropy(logits[present], labels[present], reduction="none"))
            weights.append(torch.from_numpy(weights_of(labels[present].numpy())))
    return weighted_mean(losses, weights), {}


def items_loss(model: Any, items: list[dict[str, Any]]) -> tuple[torch.Tensor, Any]:
    losses, weights = [], []
    for item in items:
        targets = torch.tensor(item["labels"][1:])
        ids = torch.tensor([item["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses.append(F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED))
        weights.append(torch.tensor(item["loss_weights"][1:]) * (targets != IGNORED))
    return weighted_mean(losses, weights), {}


def held_out_loss(model: Any, batches: list[Any]) -> tuple[torch.Tensor, Any]:
    """Without weights, which the shards of the held-out data have not."""
    ids, labels = (torch.cat([getattr(b, n) for b in batches]) for n in ("input_ids", "labels"))
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), {}


def message_weights(root: Path) -> dict[tuple[int, ...], torch.Tensor]:
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


def messages_loss(
    known: dict[tuple[int, ...], torch.Tensor], model: Any, parts: list[Any]
) -> tuple[torch.Tensor, Any]:
    """One forward pass for each conversation."""
    losses, weights = [], []
    for document, _ in (each for part in parts for each in documents_in(part)):
        row = tuple(document.tolist())
        whole = next((one for one in known if one[: len(row)] == row), None)
        if whole is None:  # padding
            assert not any(row)
            continue
        assert len(whole) in (len(row), len(row) + 1)  # the last is only a label in a row
        ids = torch.tensor(whole)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        losses.append(F.cross_entropy(logits, ids[1:], reduction="none"))
        weights.append(known[whole][1:])
    return weighted_mean(losses, weights), {}


def items_of(root: Path, kind: str) -> list[list[dict[str, Any]]]:
    """Return the items of each step, in the order in which a run reads them."""
    count = STEPS * SAMPLES
    if kind == "Shuffled":
        items = list(islice(Shuffled(**SETTINGS), count))
    else:
        config = parse_run_config(run_of(root, kind))
        plan, _ = plan_batch(config.batch, 1)
        assert plan is not None
        batches = open_training_data(config, plan, 0)
        numbers = batches.order.windows(0, count).tolist()
        batches.close()
        items = [item_of(number, **SETTINGS) for number in numbers]
    return [items[begin : begin + SAMPLES] for begin in range(0, count, SAMPLES)]


@cache
def plain_run(root: Path, kind: str) -> Plain:
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    tree = run_of(root, kind)
    if kind in ("Items", "Shuffled"):
        steps = items_of(root, kind)
        return plain_training(tree, model, items_loss, steps=steps, evaluate=held_out_loss)
    if kind == "messages":
        return plain_training(tree, model, partial(messages_loss, message_weights(root)))
    return plain_training(tree, model, shards_loss)


@dataclass(frozen=True)
class Case:
    kind: str
    layout: str
    loss: str
    slow: bool = True

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layout}-{self.loss}".replace(" ", "-")


CASES = [
    Case("shards", "zero3", "chunked", slow=False),
    Case("shards", "stages", "plain"),
    Case("shards", "tensor", "plain"),
    Case("shards", "sequence", "chunked"),
    Case("shards", "zero1 ring", "plain"),
    Case("shards", "tensor stages", "chunked"),
    Case("Items", "zero3", "plain"),
    Case("Items", "tensor", "chunked"),
    Case("Shuffled", "zero2", "chunked"),
    Case("Shuffled", "stages", "chunked"),
    Case("Shuffled", "zero3 sequence", "plain"),
    Case("messages", "tensor", "plain"),
    Case("messages", "stages", "chunked"),
]


@each_case(CASES)
def test_a_step_divides_the_weighted_losses_by_their_weights(
    case: Case, request: pytest.FixtureRequest
) -> None:
    root = request.getfixturevalue("chat_root" if case.kind == "messages" else "root")
    layout = LAYOUTS[case.layout]
    tree = run_of(root, case.kind, **layout.sections)
    tree["model"] |= {"loss": case.loss, "loss_chunk_tokens": 7}
    lines = train(root, case.name, tree, layout.world_size)
    learns = case.kind == "shards"
    compare(root / case.name, lines, plain_run(root, case.kind), learns=learns)
