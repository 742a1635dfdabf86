"""Roles of parameters, for every causal LM of transformers as docs/architectures.md has them."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from bigtrain.models.layers.adapter_targets import layers_of, stacked_weights
from bigtrain.models.layers.parameter_roles import (
    Role,
    adapted_weight,
    collapsed,
    parameter_roles,
    routers,
    split_by_decay,
)
from bigtrain.models.parallel.hidden_matrices import hidden_matrices
from tests.support.worlds import ROOT
from tools import parameter_table
from tools.tiny_models import model_types, tiny_config

NOT_BUILT = {
    "dots3_note",
    "gemma3n",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "musicgen",
    "musicgen_melody",
}
"""No tiny configuration, or a library that is not installed."""


def built(config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    return model


@cache
def every_model() -> dict[str, PreTrainedModel]:
    names = [name for name in model_types() if name not in NOT_BUILT]
    return {name: tiny(name) for name in names}


def tiny(name: str) -> PreTrainedModel:
    return built(tiny_config(name) if name != "mpt" else AutoConfig.for_model(name))


@pytest.mark.slow
def test_every_block_of_experts_has_its_router_and_nothing_else_has() -> None:
    for model_type, model in every_model().items():
        router_names = routers(model)
        modules = dict(model.named_modules())
        stacks = [n for n, m in modules.items() if type(m).__name__.endswith("Experts")]
        assert bool(router_names) == bool(stacks), model_type
        for name in router_names:
            assert any(word in name for word in ("router", "gate")), (model_type, name)
    assert routers(every_model()["gemma3n_text"]) == []  # its modality_router chooses no experts
    doge = AutoConfig.for_model(
        "doge", is_moe=True, hidden_size=64, num_hidden_layers=1, num_experts=16
    )
    assert routers(built(doge)) == ["model.layers.0.mlp.router_gate"]


QWEN3_NEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "vocab_size": 32,
}


def test_a_linear_layer_as_wide_as_there_are_experts_is_no_router() -> None:
    model = built(AutoConfig.for_model("qwen3_next", **QWEN3_NEXT))
    matrices = collapsed(hidden_matrices(model))
    for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.shared_expert.up_proj"):
        assert f"model.layers.*.{name}.weight" in matrices
    assert "model.layers.*.mlp.gate.weight" not in matrices
    mlp = collapsed(layers_of(model, "mlp"))
    assert "model.layers.*.mlp.shared_expert.gate_proj" in mlp
    assert "model.layers.*.mlp.gate" not in mlp


def test_only_experts_are_stacked_weights() -> None:
    assert stacked_weights(tiny("mamba")) == []  # its convolutions have three dimensions
    assert len(stacked_weights(tiny("mixtral"))) == 8


class _Scaled(nn.Module):
    """A norm whose class is not called so, of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(4, 16))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.relative_attention_bias = nn.Embedding(8, 2)
        self.scaled = _Scaled()
        self.group = nn.GroupNorm(2, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.gate_bias = nn.Parameter(torch.zeros(2, 4))
        self.scale = nn.Parameter(torch.ones(2, 4))
        self.pos_embed = nn.Parameter(torch.ones(1, 8, 4))
        self.mixing_weight = nn.Parameter(torch.ones(4, 4))
        self.gamma_weight = nn.Parameter(torch.ones(1, 1, 4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.tokens.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_an_architecture_that_nobody_has_seen() -> None:
    roles = {name: entry.role for name, entry in parameter_roles(_Model()).items()}
    assert roles == {
        "gate_bias": Role.BIAS,
        "scale": Role.OTHER,
        "pos_embed": Role.POSITION,
        "mixing_weight": Role.MATRIX,
        "gamma_weight": Role.OTHER,
        "tokens.weight": Role.EMBEDDING,
        "relative_attention_bias.weight": Role.BIAS,
        "scaled.weight": Role.NORM,
        "group.weight": Role.NORM,
        "group.bias": Role.BIAS,
        "conv.weight": Role.CONVOLUTION,
        "conv.bias": Role.BIAS,
        "layers.0.weight": Role.MATRIX,
        "layers.0.bias": Role.BIAS,
    }


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_tables_of_embeddings_decay_as_the_setting_says(decay_embeddings: bool) -> None:
    model = _Model()
    groups = split_by_decay(model, decay_embeddings=decay_embeddings)
    decaying = {id(parameter) for parameter in groups.decay}
    assert (id(model.tokens.weight) in decaying) == decay_embeddings
    assert (id(model.pos_embed) in decaying) == decay_embeddings
    assert id(model.relative_attention_bias.weight) not in decaying


def test_an_adapter_of_a_weight_without_a_gradient_does_not_decay() -> None:
    name = "tower.layers.0.q_proj.lora_A.default.weight"
    assert adapted_weight(name) == "tower.layers.0.q_proj.weight"
    assert adapted_weight("tower.layers.0.q_proj.weight") == "tower.layers.0.q_proj.weight"
    layer = nn.ModuleDict({"lora_A": nn.ModuleDict({"default": nn.Linear(2, 2, bias=False)})})
    model = nn.Module()
    model.q_proj = layer
    assert len(split_by_decay(model, decay_embeddings=True).decay) == 1
    untrained = split_by_decay(model, decay_embeddings=True, untrained=["q_proj.weight"])
    assert (len(untrained.decay), len(untrained.no_decay)) == (0, 1)


PAGE = ROOT / "docs" / "architectures.md"


def of_this_transformers() -> str:
    text = PAGE.read_text(encoding="utf-8")
    if f"transformers {transformers.__version__} " not in text:
        pytest.skip("docs/architectures.md is of another release of transformers")
    return text.partition(parameter_table.TITLE)[2]


@pytest.mark.slow
def test_the_page_lists_what_decays_and_what_muon_takes() -> None:
    lines = dict(re.findall(r"^\| `([\w-]+)` \|(.*)\|$", of_this_transformers(), re.MULTILINE))
    assert len(lines) == 182
    for name, line in lines.items():
        cells = tuple(cell.strip() for cell in line.split("|"))
        assert cells[:3] == parameter_table.cells(every_model()[name]), name


@pytest.mark.slow
def test_what_decays_is_what_trainer_decays_but_for_these() -> None:
    """Trainer decays all that is no LayerNorm and has none of these in its name."""
    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    more, less = set(), set()
    for model in every_model().values():
        theirs = set(get_parameter_names(model, [nn.LayerNorm], forbidden))
        for name, entry in parameter_roles(model).items():
            if entry.role.decays() and name not in theirs:
                less.add(name.rpartition("layers.")[2] if "layers." in name else name)
            if name in theirs and not entry.role.decays():
                more.add(entry.role)
    assert more == {Role.NORM, Role.STATE, Role.OTHER}
    # Names with norm or bias in them: those of DBRX's attention, and of towers.
    assert all("norm" in name or "bias" in name for name in less), less
