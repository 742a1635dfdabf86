"""Documents that share a sample, kept apart, give the loss and gradients of each alone.

The engine trains on such samples in `test_matrix.py` and `test_sequence_parallel.py`.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from tests.parity.conftest import ARCHITECTURES, llama, run_config
from tests.parity.plain import IGNORED, read_steps, summed_loss
from tests.support.comparison import assert_same_tensors, gradients

LENGTH, SAMPLES = 48, 6
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "gpt2": ARCHITECTURES["gpt2"],
    "qwen3": llama(model_type="qwen3", head_dim=8),
}


def config_for(data: Path, model: dict[str, Any], micro_batch_size: int) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        model,
        micro_batch_size=micro_batch_size,
        batch={
            "sequence_length": LENGTH,
            "global_batch_size": SAMPLES,
            "micro_batch_size": micro_batch_size,
        },
        schedule={"type": "constant"},
    )
    config["data"] = {"path": str(data), "document_boundaries": "isolate"}
    return config


def packed_loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    logits = model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
    ).logits
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)


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
    step = read_steps(dataset, config_for(dataset, {}, SAMPLES))[0]
    assert int((step.positions == 0).sum()) > SAMPLES
    summed, _ = summed_loss(model, step, slice(None), separate=True)
    loss, expected = packed_loss(model, batch), summed / (step.labels != IGNORED).sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
    gradients_by_name, wanted = gradients(model, loss), gradients(model, expected)
    assert_same_tensors(gradients_by_name, wanted, limit=1e-6)
    crossing = packed_loss(model, MicroBatch(batch.input_ids, batch.labels))
    assert abs(float((crossing - expected).detach())) > 1e-5
