"""Compiled layers and chunks of the loss under DeepSpeed train as a plain loop does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import ARCHITECTURES, STEPS, run_config, train_cases
from tests.parity.plain import plain_training

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_compiled_layers_train_as_a_plain_loop(
    dataset: Path, hf_directories: dict[str, Path], tmp_path: Path
) -> None:
    reference = plain_training(
        dataset, hf_directories["llama"], run_config(dataset, {}, micro_batch_size=8)
    )
    cases = {
        f"{engine}-{checkpointing}": {
            "config": run_config(
                dataset,
                {
                    "config": ARCHITECTURES["llama"],
                    "compile": "on",
                    "gradient_checkpointing": checkpointing,
                    "loss": "chunked",
                    "loss_chunk_tokens": 5,
                },
                micro_batch_size=2,
            ),
            "deepspeed_config": engine,
        }
        for engine, checkpointing in [("zero1", "full")]
    }
    results: dict[str, Any] = train_cases(2, cases, tmp_path)
    for name, result in results.items():
        after_step_2 = result["graphs"][1]
        assert after_step_2 > 0
        assert result["graphs"][1:] == [after_step_2] * (STEPS - 1), name
        for step in range(STEPS):
            loss, norm = reference.losses[step], reference.norms[step]
            assert result["losses"][step] == pytest.approx(loss, abs=1e-5), (name, step)
            assert result["norms"][step] == pytest.approx(norm, rel=1e-4), (name, step)
