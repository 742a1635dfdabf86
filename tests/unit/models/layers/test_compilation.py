"""Layers that are compiled one by one share their graphs, keep their names and their numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from bigtrain.errors import ModelError
from bigtrain.models.layers.activation_offload import HostCopies, offload_checkpoints
from bigtrain.models.layers.compilation import (
    compile_layers,
    uncompiled,
)
from tests.unit.models.layers.test_chunked_loss import COMMON, gradients

LAYERS = 4


def model_of(model_type: str, num_layers: int = LAYERS) -> Any:
    config = CONFIG_MAPPING[model_type](**{**COMMON, "num_hidden_layers": num_layers})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def recompute(model: Any, every: int = 1) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable  # before transformers 5.23
    enable({"use_reentrant": False}, every_n_layers=every)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nothing_is_compiled_after_step_2() -> None:
    torch._dynamo.reset()
    counters.clear()
    models = [model_of("gemma2"), model_of("gemma2")]
    for model in models:
        recompute(model.train())
    assert compile_layers(models[1]) == LAYERS
    assert [n for n, _ in models[1].named_parameters()] == [
        n for n, _ in models[0].named_parameters()
    ]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3) for model in models]
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for _ in range(4):
        ids = torch.randint(1, 97, (2, 16), generator=generator)
        losses = [m(input_ids=ids, labels=ids, use_cache=False).loss for m in models]
        assert float(losses[1].detach()) == pytest.approx(float(losses[0].detach()), abs=1e-5)
        wanted, gradients_by_name = (
            gradients(m, loss) for m, loss in zip(models, losses, strict=True)
        )
        for name, gradient in wanted.items():
            assert torch.allclose(gradients_by_name[name], gradient, rtol=0, atol=1e-5), name
        for optimizer in optimizers:
            optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    # Layers share one graph, those of gemma2 with and without a window too: that is in their masks.
    assert graphs == [1] * 4
    with uncompiled(), torch.no_grad():
        models[1](input_ids=ids[:, :5])
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_of_any_number_of_widths_are_compiled() -> None:
    """More than the 8 graphs that torch keeps by default."""
    torch._dynamo.reset()
    counters.clear()
    num_widths = 11
    model = model_of("llama", num_widths)
    for number, layer in enumerate(model.model.layers):
        sizes = (model.config.hidden_size, 16 + number)
        layer.mlp.gate_proj, layer.mlp.up_proj = torch.nn.Linear(*sizes), torch.nn.Linear(*sizes)
        layer.mlp.down_proj = torch.nn.Linear(*sizes[::-1])
    previous_backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("eager")
    try:
        compile_layers(model)
        for _ in range(2):
            model(input_ids=torch.arange(1, 9)[None], use_cache=False)
    finally:
        torch.compiler.set_default_backend(previous_backend)
    assert counters["stats"]["unique_graphs"] == num_widths


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_activations_are_in_other_memory_around_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    previous_backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("aot_eager_decomp_partition")
    models = [model_of("llama"), model_of("llama")]
    for model in models:
        recompute(model.train())
    assert offload_checkpoints(models[1], "cpu") == LAYERS
    compile_layers(models[1], divided=True)
    copied: list[torch.Tensor] = []
    pack = HostCopies.pack
    monkeypatch.setattr(
        HostCopies, "pack", lambda copies, tensor: copied.append(tensor) or pack(copies, tensor)
    )
    for _ in range(2):
        ids = torch.randint(1, 97, (2, 16), generator=torch.Generator().manual_seed(0))
        expected, computed = (
            gradients(m, m(input_ids=ids, labels=ids, use_cache=False).loss) for m in models
        )
        for name, gradient in expected.items():
            assert torch.allclose(computed[name], gradient, rtol=0, atol=1e-5), name
    torch.compiler.set_default_backend(previous_backend)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    # Of each layer and step the hidden states, and no tensor that the graph saves for itself.
    hidden = [tensor for tensor in copied if tensor.shape == (2, 16, COMMON["hidden_size"])]
    assert len(hidden) == 2 * LAYERS


def test_models_without_layers_of_transformers_kind_are_refused() -> None:
    model = model_of("llama")
    model.model.layers = torch.nn.ModuleList([torch.nn.Identity()])
    with pytest.raises(ModelError, match="a llama has no decoder layers"):
        compile_layers(model)
