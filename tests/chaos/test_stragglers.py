"""A process that computes more slowly than its peers is named."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.chaos.conftest import arguments, complete, events
from tests.support.lives import Server

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.mark.slow
def test_a_slow_process_is_named(server: Server, run_yaml: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = arguments(
        run_yaml, run, "watchdog.straggler_seconds=0.2", "--deepspeed_config", "zero3"
    )
    text = complete(server, words, slow={"rank": 1, "seconds": 0.01})
    stragglers = events(run, "straggler")
    assert stragglers
    assert {(event["rank"], event["host"]) for event in stragglers} == {(1, socket.gethostname())}
    assert all(event["work_seconds"] > 1.5 * event["median_seconds"] for event in stragglers)
    assert f"rank 1 on {socket.gethostname()} is slow: " in text


@pytest.mark.slow
def test_waiting_for_the_busiest_experts_is_not_being_slow(
    server: Server, run_yaml: Path, tmp_path: Path
) -> None:
    """Two ranks divide experts, in modules without others inside as gpt-oss has them. The slow one
    keeps its peer waiting in every layer's exchange."""
    run = tmp_path / "run"
    model = {
        "model_type": "gpt_oss",
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "full_attention"],
        "tie_word_embeddings": False,
    }
    words = arguments(
        run_yaml,
        run,
        *(f"model.config.{key}={json.dumps(value)}" for key, value in model.items()),
        "parallel.expert=2",
        "watchdog.straggler_seconds=0.2",
        "--deepspeed_config",
        "zero1",
    )
    text = complete(server, words, slow={"rank": 1, "seconds": 0.01})
    stragglers = events(run, "straggler")
    assert {event["rank"] for event in stragglers} == {1}, text
    assert all(event["work_seconds"] > 1.5 * event["median_seconds"] for event in stragglers)
