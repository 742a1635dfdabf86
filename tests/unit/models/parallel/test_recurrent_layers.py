"""Recurrent layers divided among tensor-parallel ranks: which rows a rank holds, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bigtrain.errors import ModelError
from bigtrain.models.build import empty_model
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.models.layers.recurrence.functions import layers_with_functions
from bigtrain.models.parallel.recurrent_divisions import LAYER, recurrent_divisions
from bigtrain.models.parallel.sharding import Shard
from bigtrain.models.parallel.tensor import _shard_of_style, _styled_parameters, tensor_plan
from bigtrain.settings.run_config import AdaptersSection
from tests.support.hybrids import HYBRIDS, hybrid_config
from tools.tiny_models import tiny_config


def shards(model: Any, size: int) -> dict[str, list[Shard]]:
    """Return the shards of every rank by parameter."""
    plan = tensor_plan(model)
    return {
        name: [
            _shard_of_style(model, name, style, tuple(parameter.shape), rank=rank, size=size)
            for rank in range(size)
        ]
        for name, style, parameter in _styled_parameters(model, plan)
    }


@pytest.mark.parametrize("model_type", sorted(HYBRIDS))
def test_shards_are_the_full_parameter(model_type: str) -> None:
    model = empty_model(hybrid_config(model_type))
    layers = [layer for layer, _, _ in recurrent_divisions(model)]
    assert len(layers) == len(list(layers_with_functions(model)))
    for name, by_rank in shards(model, 2).items():
        full = torch.arange(_size(by_rank[0]))
        full = full.reshape(by_rank[0].shape)
        parts = [shard.take(full) for shard in by_rank]
        if by_rank[0].dim is not None:
            placed = [shard.put(part) for shard, part in zip(by_rank, parts, strict=True)]
            assert torch.equal(torch.stack(placed).sum(0), full), name
        elif name.startswith(tuple(f"{layer}." for layer in layers)):
            assert full.numel() <= 128 * 16, name  # norms of a head, biases, low-rank factors


def test_a_layer_with_parameters_of_another_shape_is_left_to_the_plan() -> None:
    """Kimi's function, and its attributes, with a vector where Kimi's layer has four dimensions."""
    model = empty_model(tiny_config("bailing_hybrid"))
    assert list(layers_with_functions(model))
    assert list(recurrent_divisions(model)) == []
    assert not any(name.endswith("A_log") for name in tensor_plan(model))


def _size(shard: Shard) -> int:
    return torch.Size(shard.shape).numel()


def test_a_projection_is_divided_part_by_part() -> None:
    # z and x of 64 channels, B and C of 8 states, a time step for each of 4 heads.
    bamba = shards(empty_model(hybrid_config("bamba")), 2)
    first, second = bamba["model.layers.0.mamba.in_proj.weight"]
    assert first.ranges == ((0, 32), (64, 96), (128, 132), (136, 140), (144, 146))
    assert second.ranges == ((32, 64), (96, 128), (132, 136), (140, 144), (146, 148))
    assert bamba["model.layers.0.mamba.out_proj.weight"][1].dim == 1
    # Queries, keys and values of a key head are together in Qwen3-Next, apart in Qwen3.5.
    fused = shards(empty_model(hybrid_config("qwen3_next")), 2)
    assert len(fused["model.layers.0.linear_attn.in_proj_qkvz.weight"][0].ranges) == 1
    apart = shards(empty_model(hybrid_config("qwen3_5_text")), 2)
    convolution = apart["model.layers.0.linear_attn.conv1d.weight"][1]
    assert convolution.ranges == ((8, 16), (24, 32), (48, 64))


@pytest.mark.parametrize(
    ("model_type", "changes", "size", "reason"),
    [
        (
            "qwen3_5_text",
            {"num_key_value_heads": 4},
            4,
            "num_k_heads = 2 is not a multiple of 4 -> nearest: 2",
        ),
        ("bamba", {"mamba_n_heads": 4}, 3, "num_heads = 4 is not a multiple of 3 -> nearest: 2"),
        (
            "bamba",
            {"mamba_n_heads": 6, "mamba_d_head": 12, "mamba_n_groups": 2, "hidden_size": 36},
            3,
            "n_groups = 2 and 3 ranks: neither is a multiple of the other -> nearest: 2",
        ),
        ("bamba", {"mamba_d_state": 3}, 2, "3 rows of one kind, not a multiple of 2 -> nearest: 1"),
        ("lfm2", {"num_attention_heads": 8}, 5, "conv.in_channels = 32 is not a multiple of 5"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_nearest_degree(
    model_type: str, changes: dict[str, Any], size: int, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        check_tensor_size(hybrid_config(model_type, **changes), size)


def test_a_layer_with_a_parameter_that_is_not_known_is_not_divided() -> None:
    model = empty_model(hybrid_config("bamba"))
    mixer: Any = model.get_submodule("model.layers.0.mamba")
    mixer.gain = nn.Parameter(torch.ones(4, device="meta"))
    assert not list(recurrent_divisions(model))
    mixer.gain = None
    mixer.num_heads = 8  # other parts than its projection has
    assert not list(recurrent_divisions(model))


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "kimi_linear"])
def test_layers_with_adapters_are_not_divided(model_type: str) -> None:
    config = hybrid_config(model_type)
    assert check_tensor_size(config, 2, AdaptersSection(targets="all-linear")) == []
    model = empty_model(config)
    layer = next(name for name, _, _ in recurrent_divisions(model))
    linear = next(n for n, m in model.get_submodule(layer).named_modules() if type(m) is nn.Linear)
    assert layer not in tensor_plan(model, [f"{layer}.{linear}"])
    assert tensor_plan(model, ["model.layers.1.self_attn.q_proj"])[layer] == LAYER
