"""The loss in chunks is the plain loss, with masks, accumulation, ZeRO stages and cut models."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.conftest import VOCAB_SIZE, llama, run_config, train_cases
from tests.support.datasets import write_dataset

# The matrix has chunks in `make test`, held against plain transformers.
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_STEPS = 3
LOSS = 1e-6
"""In nats per token, at every step."""
NORM = 1e-6
"""Of the gradient norm before clipping, at every step."""
WEIGHT = 1e-6
"""Of every weight after the last step; they moved by some 1e-3."""

PLACES: dict[str, tuple[str, dict[str, int]]] = {
    "zero0-dp4": ("zero0", {}),
    "zero1-tp2-dp2": ("zero1", {"tensor": 2}),
    "zero3-tp2-dp2": ("zero3", {"tensor": 2}),
    "zero2-tp2-sp2": ("zero2", {"tensor": 2, "sequence": 2}),
    "zero1-pp2-dp2": ("pipeline_zero1", {"pipeline": 2}),
    "zero1-tp2-pp2": ("pipeline_zero1", {"tensor": 2, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Figures and final weights of every place, with the plain loss and in chunks."""
    directory = tmp_path_factory.mktemp("chunked_loss")
    data = write_dataset(directory / "data", vocab_size=VOCAB_SIZE, num_documents=90, masked=True)
    cases: dict[str, Any] = {}
    for place, (engine, parallel) in PLACES.items():
        for tied in (True, False):
            for loss in ("plain", "chunked"):
                name = f"{place}-{tied}-{loss}"
                size = parallel.get("tensor", 1) * parallel.get("pipeline", 1)
                data_size = 4 // (size * parallel.get("sequence", 1))
                config = run_config(
                    data,
                    {
                        "config": llama(num_hidden_layers=2, tie_word_embeddings=tied),
                        "loss": loss,
                        "loss_chunk_tokens": 5,
                    },
                    micro_batch_size=4 // data_size,
                    parallel=parallel,
                    # As in the matrix: no updates of full size from rounding errors.
                    optimizer={"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6},
                )
                config["data"] = {"path": str(data)}
                cases[name] = {
                    "config": config,
                    "deepspeed_config": engine,
                    "last_step": NUM_STEPS,
                    "weights": {str(NUM_STEPS): str(directory / f"{name}.pt")},
                }
    results = train_cases(4, cases, directory)
    for name, case in cases.items():
        results[name]["weights"] = torch.load(case["weights"][str(NUM_STEPS)])
    return results


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_equals_the_plain_loss(trained: dict[str, Any], place: str, tied: bool) -> None:
    plain, chunked = (trained[f"{place}-{tied}-{loss}"] for loss in ("plain", "chunked"))
    assert plain["accumulation"] == chunked["accumulation"] == 2
    worst = {
        "loss": max(abs(a - b) for a, b in zip(chunked["losses"], plain["losses"], strict=True)),
        "norm": max(abs(a / b - 1) for a, b in zip(chunked["norms"], plain["norms"], strict=True)),
        "weight": max(
            float((chunked["weights"][name] - weight).abs().max())
            for name, weight in plain["weights"].items()
        ),
    }
    print(worst)  # pytest -rP
    assert worst["loss"] <= LOSS
    assert worst["norm"] <= NORM
    assert worst["weight"] <= WEIGHT
