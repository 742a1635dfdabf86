"""The model card of an export says data, tokens, losses and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from bigtrain.run.checkpointing.export import model_card
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_config


def config_of(**sections: Any) -> RunConfig:
    batch = {"sequence_length": 16, "global_batch_size": 8, "micro_batch_size": 1}
    optimizer = {"lr": 1e-3, "type": "muon"}
    model = {"path": "some/model"}
    return run_config(**({"model": model, "batch": batch, "optimizer": optimizer} | sections))


def test_figures_up_to_the_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 10, "loss": 3.5},
        {"step": 10, "held_out_loss": 3.25},
        {"step": 20, "loss": 2.5},
        {"step": 20, "event": "skipped", "loss": None},
        {"step": 30, "loss": 1.5},
    ]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + "torn")
    card = model_card(config_of(), 20, metrics)
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "tags": ["bigtrain"],
        "base_model": "some/model",
    }
    assert "| tokens seen | 2,560 |" in body
    assert "| data | shards |" in body
    assert "| training loss | 2.5000 nats per token (step 20) |" in body
    assert "| held-out loss | 3.2500 nats per token (step 10) |" in body
    settings = yaml.safe_load(body.partition("```yaml\n")[2].partition("```")[0])
    assert settings["optimizer"] == {"lr": 1e-3, "type": "muon"}


def test_without_metrics_and_from_random_weights(tmp_path: Path) -> None:
    config = config_of(
        model={"config": {"model_type": "llama"}},
        data={"sources": [{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]},
    )
    card = model_card(config, 5, tmp_path / "none")
    assert "from random weights" in card
    assert "| data | a, b |" in card
    assert "base_model" not in card
    assert "loss |" not in card
