"""Packed and masked samples are trained on as if each conversation were alone."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.cli import main
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.samples.packing_plan import packing_reports
from bigtrain.data.samples.shuffle import SampleOrder
from bigtrain.data.shards.dataset import open_dataset, open_sources
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from tests.parity.conftest import ARCHITECTURES, SEED, llama, run_config, train_cases
from tests.parity.plain import adamw
from tests.parity.test_isolation import packed_loss
from tests.support.chats import CHATML, chat_tokenizer, save_chat_tokenizer, turns
from tests.support.comparison import assert_same_tensors, gradients
from tests.support.datasets import write_dataset

LENGTH, SAMPLES, STEPS = 128, 4, 2
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(vocab_size=412, max_position_embeddings=LENGTH),
    "gpt2": {**ARCHITECTURES["gpt2"], "vocab_size": 412, "n_positions": LENGTH},
}


def config_of(
    data: Path, model: dict[str, Any], packing: str = "best_fit", **changes: Any
) -> dict[str, Any]:
    batch = {"sequence_length": LENGTH, "global_batch_size": SAMPLES, "micro_batch_size": SAMPLES}
    config: dict[str, Any] = run_config(
        data,
        model,
        micro_batch_size=SAMPLES,
        batch=batch,
        schedule={"type": "constant"},
        train={"steps": STEPS},
        **changes,
    )
    config["data"] = {"path": str(data), "packing": packing}
    return config


@pytest.fixture(scope="module")
def chats() -> list[list[dict[str, Any]]]:
    return [
        turns(*(f"{'word ' * (n % 5)}{n}, {turn}?" for turn in range(2 + 2 * (n % 2))))
        for n in range(60)
    ]


@pytest.fixture(scope="module")
def chat_dataset(
    chats: list[list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    directory = tmp_path_factory.mktemp("chats")
    source = directory / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    tokenizer = save_chat_tokenizer(directory / "tokenizer")
    command = ["tokenize", "--input", source, "--chat-key", "messages", "--tokenizer", tokenizer]
    assert main([*map(str, command), "--output", str(directory / "shards")]) == 0
    return directory / "shards"


def documents_of(
    data: Path, sample: int, packing: str = "best_fit"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and mask of the pieces of one sample, each read by itself."""
    config = RunConfig.model_validate(config_of(data, {"config": llama()}, packing))
    plan = packing_reports(config, open_sources(config.data))[0].plan
    shards = open_dataset(data).shards("train")
    assert len(shards) == 1
    tokens = torch.tensor(shards[0].tokens.astype("int64"))
    bits = torch.tensor(
        [byte >> bit & 1 for byte in shards[0].mask_bytes.tolist() for bit in range(8)]
    )
    low = int(plan.row_ends[sample - 1]) if sample else 0
    documents = []
    for piece in range(low, int(plan.row_ends[sample])):
        start, length = int(plan.starts[piece]), int(plan.lengths[piece])
        documents.append((tokens[start : start + length], bits[start : start + length].bool()))
    return documents


def separate_loss(model: Any, pieces: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Mean cross-entropy in nats over the targets, one forward pass for each conversation."""
    total, count = torch.zeros(()), 0
    for tokens, mask in pieces:
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0]
        labels = torch.where(mask[1:], tokens[1:], -100)
        total = total + F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
        count += int(mask[1:].sum())
    return total / count


@pytest.mark.parametrize(
    ("kind", "architecture", "attention"),
    [
        ("chats", "llama", "sdpa"),
        ("chats", "gpt2", "eager"),
        ("random", "llama", "eager"),
        ("random", "gpt2", "sdpa"),
    ],
)
def test_packed_equals_separate(
    chat_dataset: Path, tmp_path: Path, architecture: str, attention: str, kind: str
) -> None:
    values = dict(MODELS[architecture])
    hf_config = CONFIG_MAPPING[values.pop("model_type")](**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention)
    data = chat_dataset
    if kind == "random":
        data = write_dataset(tmp_path / "set", vocab_size=97, masked=True)
    config = RunConfig.model_validate(config_of(data, {"config": llama()}))
    with closing(open_training_data(config, BatchPlan(SAMPLES, SAMPLES, 1, 1, LENGTH), 0)) as data_:
        (batch,) = data_.step(0)
    num_packs = packing_reports(config, open_sources(config.data))[0].plan.num_packs
    samples = SampleOrder(num_packs, SEED).windows(0, SAMPLES).tolist()
    pieces = [piece for sample in samples for piece in documents_of(data, sample)]
    assert len(pieces) > SAMPLES
    loss, expected = packed_loss(model, batch), separate_loss(model, pieces)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    gradients_by_name, wanted = gradients(model, loss), gradients(model, expected)
    assert_same_tensors(gradients_by_name, wanted, limit=1e-6)


def transformers_pieces(
    chats: list[list[dict[str, Any]]], pieces: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same conversations, as transformers makes tokens and masks of them."""
    tokenizer = chat_tokenizer(CHATML)
    known = {}
    for messages in chats:
        result = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = torch.tensor(result["assistant_masks"]).bool()
        known[tuple(result["input_ids"])] = torch.tensor(result["input_ids"]), mask
    return [known[tuple(tokens.tolist())] for tokens, _ in pieces]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_from_conversations_to_training(
    packing: str,
    chats: list[list[dict[str, Any]]],
    chat_dataset: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """jsonl, tokenize, two steps of the engine: losses and norms of plain transformers, with as
    many conversations in a step as the packing puts there."""
    directory = tmp_path_factory.mktemp("training")
    torch.manual_seed(1)
    values = dict(MODELS["llama"])
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values.pop("model_type")](**values))
    model.save_pretrained(directory / "hf")
    config = config_of(chat_dataset, {"path": str(directory / "hf")}, packing)
    case = {"config": config, "deepspeed_config": "zero1"}
    result = train_cases(1, {"chat": case}, directory)["chat"]
    run = RunConfig.model_validate(config)
    plan = packing_reports(run, open_sources(run.data))[0].plan
    model.train()
    optimizer = adamw(list(model.parameters()), config["optimizer"])
    for step in range(STEPS):
        samples = SampleOrder(plan.num_packs, SEED).windows(step * SAMPLES, SAMPLES).tolist()
        documents = [documents_of(chat_dataset, sample, packing) for sample in samples]
        assert packing == "best_fit" or all(len(pieces) == 1 for pieces in documents)
        pieces = [piece for pieces in documents for piece in pieces]
        optimizer.zero_grad()
        loss = separate_loss(model, transformers_pieces(chats, pieces))
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        assert result["losses"][step] == pytest.approx(float(loss.detach()), abs=1e-5)
        assert result["norms"][step] == pytest.approx(norm, rel=1e-4)
