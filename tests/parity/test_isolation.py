"""Documents that share a sample, kept apart, are trained on as if each were alone."""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.config import RunConfig
from bigtrain.data.loader import MicroBatch, open_training_data
from bigtrain.data.packing import PackedWindows, split_stream
from bigtrain.data.sampling import SampleOrder
from bigtrain.data.token_datasets import open_dataset
from bigtrain.topology import BatchPlan
from tests.parity.conftest import ARCHITECTURES, llama, run_config, train_cases
from tests.support.datasets import END_OF_DOCUMENT

LENGTH, SAMPLES, STEPS = 48, 6, 4
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "gpt2": ARCHITECTURES["gpt2"],
    "qwen3": llama(model_type="qwen3", head_dim=8),
}


def config_for(data: Path, model: dict[str, Any], micro_samples: int) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        model,
        micro_samples=micro_samples,
        batch={
            "sequence_length": LENGTH,
            "global_samples": SAMPLES,
            "micro_samples": micro_samples,
        },
        schedule={"type": "constant"},
    )
    config["data"] = {"path": str(data), "document_boundaries": "isolate"}
    return config


def documents(data: Path, step: int) -> list[torch.Tensor]:
    """The documents of a step's samples, each cut at end-of-document tokens alone."""
    windows = PackedWindows(split_stream(open_dataset(data), "train"), LENGTH)
    found = []
    for window in SampleOrder(windows.num_samples, 7).windows(step * SAMPLES, SAMPLES):
        row = torch.zeros(LENGTH + 1, dtype=torch.int64)
        windows.read_into(int(window), row.numpy())
        ends = (torch.nonzero(row == END_OF_DOCUMENT).flatten() + 1).tolist()
        bounds = [0, *(end for end in ends if end <= LENGTH), LENGTH + 1]
        found += [row[low:high] for low, high in pairwise(bounds)]
    return found


def separate_loss(model: Any, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy in nats over all targets of the documents, one forward pass for each."""
    total, count = torch.zeros(()), 0
    for piece in pieces:
        if len(piece) > 1:
            logits = model(input_ids=piece[None, :-1], use_cache=False).logits[0]
            total = total + F.cross_entropy(logits.float(), piece[1:], reduction="sum")
            count += len(piece) - 1
    return total / count


def packed_loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    logits = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", sorted(MODELS))
def test_packed_equals_separate(dataset: Path, architecture: str, attention: str) -> None:
    values = dict(MODELS[architecture])
    hf_config = CONFIG_MAPPING[values.pop("model_type")](**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config, attn_implementation=attention)
    config = RunConfig.model_validate(config_for(dataset, {"config": llama()}, SAMPLES))
    plan = BatchPlan(SAMPLES, SAMPLES, 1, 1, LENGTH)
    with closing(open_training_data(config, plan, 0)) as batches:
        (batch,) = batches.step(0)
    pieces = documents(dataset, 0)
    assert len(pieces) > SAMPLES
    loss, expected = packed_loss(model, batch), separate_loss(model, pieces)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    found, wanted = gradients(model, loss), gradients(model, expected)
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=0, atol=1e-6), name
    crossing = packed_loss(model, MicroBatch(batch.input_ids, batch.labels))
    assert abs(float((crossing - expected).detach())) > 1e-5


@pytest.fixture(scope="module")
def trained(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the engine computes: two processes, two architectures, two stages, and cut."""
    cases = {
        f"{architecture}-{engine}": {
            "config": config_for(dataset, {"config": MODELS[architecture]}, 3),
            "deepspeed_config": engine,
            "last_step": STEPS,
        }
        for architecture in ("llama", "gpt2")
        for engine in ("zero1", "zero3")
    }
    cut = config_for(dataset, {"config": MODELS["llama"]}, 6) | {"parallel": {"tensor": 2}}
    cases["llama-tensor2"] = {"config": cut, "deepspeed_config": "zero2", "last_step": STEPS}
    return train_cases(2, cases, tmp_path_factory.mktemp("isolation"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("architecture", "engine"),
    [
        ("llama", "zero1"),
        ("llama", "zero3"),
        ("llama", "tensor2"),
        ("gpt2", "zero1"),
        ("gpt2", "zero3"),
    ],
)
def test_training_equals_separate_documents(
    dataset: Path,
    hf_directories: dict[str, Path],
    trained: dict[str, Any],
    architecture: str,
    engine: str,
) -> None:
    expected = isolated_training(dataset, hf_directories[architecture], STEPS)
    result = trained[f"{architecture}-{engine}"]
    assert result["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)


def isolated_training(data: Path, hf_directory: Path, num_steps: int) -> dict[str, list[float]]:
    """Train on separate documents with plain transformers and torch's AdamW."""
    model = AutoModelForCausalLM.from_pretrained(hf_directory)
    model.train()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=3e-3,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    losses, norms = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = separate_loss(model, documents(data, step))
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms}
