"""A rank whose experts get no token takes part as every other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from bigtrain.models.equivalence.trial import RankThreads
from bigtrain.models.parallel.experts import shard_experts
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sharding import cut_parameter, is_expert


@pytest.mark.parametrize("width", [16, 20], ids=["grouped products", "padded ones"])
def test_idle_experts_get_gradients_of_zeros(width: int) -> None:
    config = CONFIG_MAPPING["gpt_oss"](
        vocab_size=64,
        hidden_size=32,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.model.layers[0].mlp.router.bias.data = torch.tensor([50.0, 50.0, -50.0, -50.0])
    copies = [copy.deepcopy(model) for _ in range(2)]
    exchange = RankThreads(2)

    def train(rank: int) -> list[torch.Tensor | None]:
        shard_experts(copies[rank], exchange)
        for parameter in copies[rank].parameters():
            cut_parameter(parameter)
        fit_experts(copies[rank])
        ids = torch.arange(8).view(1, 8) + rank
        copies[rank](input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad for p in copies[rank].parameters() if is_expert(p)]

    busy, idle = exchange.run(train)
    assert len(busy) == len(idle) == 4
    assert all(gradient is not None and gradient.any() for gradient in busy)
    assert all(gradient is not None and not gradient.any() for gradient in idle)
