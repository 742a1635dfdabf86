"""Layers with adapters share their graphs, however many layers, and also with adapters off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig

from bigtrain.models.layers.adapter_names import adapters_off
from bigtrain.models.layers.adapters import add_adapters
from bigtrain.models.layers.compilation import compile_layers
from bigtrain.models.transformers_patches import trace_dora
from bigtrain.models.weights.quantized import weight_in_graph
from bigtrain.settings.sections.adapters import AdaptersSection
from tests.unit.models.layers.test_chunked_loss import COMMON


def model_of(num_layers: int, section: AdaptersSection) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**{**COMMON, "num_hidden_layers": num_layers})
    )
    add_adapters(model, section, lambda _: 0)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter)
    return model.train()


def passes(model: Any) -> list[torch.Tensor]:
    """Logits with adapters, their gradients, and logits with adapters off, where they can be."""
    ids = torch.arange(32).view(2, 16)
    logits = model(input_ids=ids, use_cache=False).logits
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(logits.square().mean(), trained)
    is_dora = any(".lora_magnitude_vector." in name for name, _ in model.named_parameters())
    with nullcontext() if is_dora else adapters_off(model), torch.no_grad():
        return [logits, *gradients, model(input_ids=ids, use_cache=False).logits]


@pytest.fixture(autouse=True)
def backend() -> Iterator[None]:
    previous_backend = torch.compiler.get_default_backend()
    torch.compiler.set_default_backend("aot_eager_decomp_partition")
    yield
    torch.compiler.set_default_backend(previous_backend)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_graphs_are_as_many_for_more_layers(dora: bool) -> None:
    """Of layers whose input needs no gradient, of the rest, and of the base without gradients."""
    section = AdaptersSection(rank=2, alpha=4, targets="all-linear", dora=dora)
    # torch compiles one function at most 8 times, and then no more.
    for num_layers in (3, 10):
        torch._dynamo.reset()
        counters.clear()
        model = model_of(num_layers, section)
        expected = passes(model)
        trace_dora(model, weight_in_graph)
        compile_layers(model)
        for _ in range(2):
            for value, wanted in zip(passes(model), expected, strict=True):
                assert torch.allclose(value, wanted, rtol=1e-4, atol=1e-5)
            assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (3, {})
