"""What is counted of adapters: as many elements as are trained, and states of those alone."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bigtrain.models.build import build_model, empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.parallel.adapter_costs import adapter_costs
from bigtrain.models.parallel.sharding import shard_of
from bigtrain.models.parallel.tensor import shard_model, tensor_plan
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
    name: {**tree, "vocab_size": 98}  # even, as a table that two ranks divide
    for name, tree in (
        ("llama", llama(tie_word_embeddings=False)),
        ("gpt2", ARCHITECTURES["gpt2"]),
        ("qwen3_moe", ARCHITECTURES["qwen3_moe"]),
    )
}


@cache
def traced(model: str, section: AdaptersSection) -> tuple[ModelCosts, AdapterCosts, int]:
    """The model's costs with adapters, those alone, and the elements that a built model trains."""
    own = ModelSection(config=MODELS[model])
    config = load_hf_config(own)
    costs = adapter_costs(empty_model(config), section)
    built = build_model(own, config, seed=0, adapters=section)
    trained = sum(p.numel() for p in built.parameters() if p.requires_grad)
    return with_adapters(trace_of(model), costs), costs, trained


@cache
def trace_of(model: str) -> ModelCosts:
    return trace_model(load_hf_config(ModelSection(config=MODELS[model])), torch.float32)


COPIES = ("lm_head", "embed_tokens", "norm", "o_proj")
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"dora": True, "modules_to_save": COPIES, "targets": ("q_proj", "down_proj")}),
    ("qwen3_moe", {"target_parameters": ("gate_up_proj", "down_proj")}),
    ("llama", {}),
    ("llama", {"targets": ("model.layers.1.*",)}),
    ("gpt2", {"targets": ("c_attn", "c_fc")}),
]


@pytest.mark.parametrize(("model", "options"), KINDS)
def test_as_much_is_counted_as_is_trained(model: str, options: dict[str, Any]) -> None:
    adapted_costs, _, trained = traced(model, AdaptersSection(rank=4, **options))
    inner = sum(
        adapted_costs.kinds[kind].num_adapter_parameters(1) for kind in adapted_costs.layers
    )
    assert inner + adapted_costs.others_outside.trained(1) == trained
    assert ModelCosts.from_json(adapted_costs.to_json()).kinds == adapted_costs.kinds


@pytest.mark.parametrize(("model", "options"), KINDS[:2])
def test_a_rank_has_its_part_of_what_is_cut(
    model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = AdaptersSection(rank=4, **options)
    adapted_costs, _, _ = traced(model, section)
    own = ModelSection(config=MODELS[model])
    built = build_model(own, load_hf_config(own), seed=0, adapters=section)
    monkeypatch.setattr(dist, "get_rank", lambda _group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _group: 2)
    group: Any = None  # nothing is sent
    shard_model(built, tensor_plan(built), group)
    shards = [shard_of(p) for p in built.parameters() if p.requires_grad]
    held = sum(math.prod(shard.local_shape) for shard in shards if shard is not None)
    inner = sum(
        adapted_costs.kinds[kind].num_adapter_parameters(2) for kind in adapted_costs.layers
    )
    assert inner + adapted_costs.others_outside.trained(2) == held


def test_sums_of_stacks_and_adapters_are_saved() -> None:
    _, costs, _ = traced("qwen3_moe", AdaptersSection(rank=4, targets="mlp"))
    config = MODELS["qwen3_moe"]
    matrices = 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert [layer.summed for layer in costs.others] == [config["num_experts"] * matrices] * 2
    adapted_costs, _, _ = traced("qwen3_moe", AdaptersSection(rank=4, targets="attention"))
    layout = Layout(data_size=2, zero_stage=2, loss_chunk_tokens=8)
    summed = replace(
        adapted_costs,
        kinds=tuple(replace(kind, others=costs.others[0]) for kind in adapted_costs.kinds),
    )
    engine = engine_named("deepspeed")
    uses = [peak_memory(model, layout, engine).activations for model in (summed, adapted_costs)]
    assert uses[0] - uses[1] == 4 * sum(layer.summed for layer in costs.others)


def test_all_linear_is_known_without_the_model() -> None:
    adapted_costs, costs, _ = traced("llama", AdaptersSection(rank=4))
    plain = replace(
        adapted_costs, kinds=tuple(replace(k, adapters=()) for k in adapted_costs.kinds)
    )
    closed = with_adapters(plain, of_all_linear(plain, 4))
    for size in (1, 2):
        sums = [
            sum(m.kinds[k].num_adapter_parameters(size) for k in m.layers)
            for m in (closed, adapted_costs)
        ]
        assert sums[0] == sums[1]
    assert AdapterCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_and_states_are_those_of_what_is_trained(stage: int) -> None:
    adapted_costs, _, trained = traced("llama", AdaptersSection(rank=4))
    layout = Layout(data_size=2, zero_stage=stage, loss_chunk_tokens=8)
    use = peak_memory(adapted_costs, layout, engine_named("deepspeed"))
    base = adapted_costs.num_parameters
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
    device, layout = find_device("H100-80GB"), Layout(micro_batch_size=4)
    engine = engine_named("deepspeed")
    times = [
        step_time(model, layout, device, engine)
        for model in (with_adapters(whole, of_all_linear(whole, 16)), whole)
    ]
    assert times[0].total < times[1].total
    assert times[0].optimizer < times[1].optimizer / 50
