"""Compiled recurrent layers compute what uncompiled layers do, with documents in samples, and share
graphs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from bigtrain.models.equivalence.document_isolation import find_isolation
from bigtrain.models.layers.compilation import compile_layers
from tests.support.hybrids import HYBRIDS, hybrid_config
from tests.unit.models.layers.test_chunked_loss import gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

DOCUMENTS = ((7, 9, 8), (1, 20, 3), (24,), (5, 5, 5, 5, 4))
"""Tokens of the documents of a sample, for each step."""
FAST = ("bamba", "qwen3_5_text")


def deeper(model_type: str, factor: int) -> Any:
    """Return the model's configuration with `factor` times as many layers of each kind."""
    values = HYBRIDS[model_type]
    changes = {"num_hidden_layers": values["num_hidden_layers"] * factor}
    for name in ("layer_types", "mlp_layer_types"):
        if name in values:
            changes[name] = values[name] * factor
    return hybrid_config(model_type, **changes)


def train(model_type: str, factor: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare a compiled model with an uncompiled one; return the number of graphs after each
    step."""
    torch._dynamo.reset()
    counters.clear()
    isolation, reason = find_isolation(deeper(model_type, factor), "auto", 24)
    assert not reason
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(deeper(model_type, factor))
        isolation.install(model)
        models.append(model)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compile_layers(models[1], divided=True)
    num_graphs = []
    for step, lengths in enumerate(DOCUMENTS):
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        ids = torch.randint(3, 60, (1, 24), generator=torch.Generator().manual_seed(step))
        results = []
        for model in models:
            with isolation.document_mask(positions):
                output = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False)
                results.append(gradients(model, output.loss))
        for name, gradient in results[0].items():
            assert torch.allclose(results[1][name], gradient, rtol=0, atol=1e-6), name
        num_graphs.append(counters["stats"]["unique_graphs"])
    return num_graphs


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(t, marks=() if t in FAST else pytest.mark.slow) for t in sorted(HYBRIDS)],
)
def test_layers_share_graphs_and_restart_at_documents(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_graphs = train(model_type, 1, monkeypatch)
    assert num_graphs == [num_graphs[0]] * len(DOCUMENTS)
    assert 2 <= num_graphs[0] <= 7
    monkeypatch.undo()
    assert train(model_type, 3, monkeypatch) == num_graphs
