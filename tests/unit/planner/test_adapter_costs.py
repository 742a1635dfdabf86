"""What is counted of adapters: as many elements as are trained, and states of those alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bigtrain.models.build import build_model, empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.adapter_costs import adapter_costs
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.model_costs import (
    AdapterCosts,
    ModelCosts,
    closed_form,
    dense_shape,
    of_all_linear,
    with_adapters,
)
from bigtrain.planner.step_time import step_time
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import find_device
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.parity.conftest import ARCHITECTURES, llama

MODELS = {
    "llama": llama(tie_word_embeddings=False),
    "gpt2": ARCHITECTURES["gpt2"],
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"dora": True, "modules_to_save": ("lm_head", "norm", "input_layernorm")}),
    ("llama", {"targets": ("model.layers.1.*",)}),
    ("gpt2", {"targets": ("c_attn", "c_fc")}),
    ("qwen3_moe", {"target_parameters": ("gate_up_proj", "down_proj")}),
]


def traced(model: str, section: AdaptersSection) -> tuple[ModelCosts, AdapterCosts, int]:
    """The model's costs with adapters, those alone, and the elements that a built model trains."""
    own = ModelSection(config=MODELS[model])
    config = load_hf_config(own)
    costs = adapter_costs(empty_model(config), section)
    built = build_model(own, config, seed=0, adapters=section)
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    return with_adapters(trace_model(config, torch.float32), costs), costs, trained


@pytest.mark.parametrize(("model", "options"), KINDS)
def test_as_much_is_counted_as_is_trained(model: str, options: dict[str, Any]) -> None:
    found, _, trained = traced(model, AdaptersSection(rank=4, **options))
    inner = sum(found.kinds[kind].num_adapter_parameters(1) for kind in found.layers)
    assert inner + found.num_trained_outside == trained
    assert ModelCosts.from_json(found.to_json()).kinds == found.kinds


def test_all_linear_is_known_without_the_model() -> None:
    found, costs, _ = traced("llama", AdaptersSection(rank=4))
    plain = replace(found, kinds=tuple(replace(k, adapters=()) for k in found.kinds))
    closed = with_adapters(plain, of_all_linear(plain, 4))
    for size in (1, 2):
        sums = [
            sum(m.kinds[k].num_adapter_parameters(size) for k in m.layers) for m in (closed, found)
        ]
        assert sums[0] == sums[1]
    assert AdapterCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_and_states_are_those_of_what_is_trained(stage: int) -> None:
    found, _, trained = traced("llama", AdaptersSection(rank=4))
    layout = Layout(data_size=2, zero_stage=stage, loss_chunk_tokens=8)
    use = peak_memory(found, layout, engine_named("deepspeed"))
    base = found.num_parameters
    parts = 2 if stage else 1
    parameters = 2 * (base + trained) / (2 if stage == 3 else 1)
    assert use.states == pytest.approx(parameters + 12 * trained / parts)
    gradients = 4 * trained / (2 if stage >= 2 else 1)
    assert use.gradients == pytest.approx(gradients + (2 * trained if stage == 1 else 0))


def test_frozen_weights_cost_less_time() -> None:
    values = {"num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32}
    shape = dense_shape(values | {"intermediate_size": 14336, "vocab_size": 32000})
    assert shape is not None
    whole = closed_form(shape, 2)
    device, layout = find_device("H100-80GB"), Layout(data_size=1, micro_batch_size=4)
    engine = engine_named("deepspeed")
    times = [
        step_time(model, layout, device, engine)
        for model in (with_adapters(whole, of_all_linear(whole, 16)), whole)
    ]
    assert times[0].total < times[1].total
    assert times[0].optimizer < times[1].optimizer / 50
