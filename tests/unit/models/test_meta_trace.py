"""What is traced without memory is what a real layer keeps, multiplies and has."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from bigtrain.errors import ModelError
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import with_mtp_layers
from bigtrain.models.equivalence.pipeline_stages import stage_costs
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.layers.tiled_mlp import Tiles, find_mlps
from bigtrain.models.parallel.stage_layout import find_layout
from bigtrain.models.tracing import meta_trace
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.model_costs import DenseShape, ModelCosts, closed_form
from bigtrain.settings.loading import parse_run_config
from tests.parity.multi_token_models import deepseek
from tests.support.run_trees import run_tree

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SMALL),

    "gpt2": GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0),

    "gemma3": Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=128),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4),

    "deepseek_v3": DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, n_routed_experts=4,
                                    num_experts_per_tok=2, n_group=2, topk_group=1,
                                    moe_intermediate_size=32, q_lora_rank=32, kv_lora_rank=16,
                                    qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
                                    first_k_dense_replace=1),
}  # fmt: skip
MIXTURES: dict[str, PreTrainedConfig] = {
    name: CONFIG_MAPPING[name](**SMALL, **values)
    for name, values in {
        "gpt_oss": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
        "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32,
                         "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
        "lfm2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                     "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    }.items()
}  # fmt: skip
TOKENS = 64


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_products_are_those_of_the_model(name: str) -> None:
    costs = trace_model(CONFIGS[name], torch.bfloat16)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    assert costs.num_parameters == sum(p.numel() for p in model.parameters())
    assert len(costs.layers) == 2
    assert costs.source == "traced"
    # Norms and biases are parameters and no products.
    active = sum(costs.kinds[kind].num_active_parameters for kind in costs.layers)
    assert products_of(costs) == pytest.approx(active, rel=0.03)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_that_are_run_once_cost_as_those_that_all_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six layers; Gemma's and DeepSeek's are of two kinds, of which Gemma's differ in a figure."""
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = 6
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * 6
    if name == "gemma3":
        config.layer_types = [("sliding_attention", "full_attention")[n % 3 == 2] for n in range(6)]
    once = trace_model(config, torch.bfloat16)
    monkeypatch.setattr(meta_trace, "run_once", lambda *_: nullcontext())
    assert trace_model(config, torch.bfloat16) == once
    assert len(once.kinds) == (2 if name in ("gemma3", "deepseek_v3") else 1)


def test_equal_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    own = LlamaDecoderLayer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(self.self_attn.layer_idx)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    config = LlamaConfig(**{**SMALL, "num_hidden_layers": 12})
    assert len(trace_model(config, torch.bfloat16).layers) == 12
    assert ran == [0]


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_bytes_are_those_of_a_real_forward_pass(name: str) -> None:
    """On a CPU, with the fused attention of torch."""
    costs = trace_model(CONFIGS[name], torch.float32, TOKENS)
    layer = costs.kinds[costs.layers[1]]
    told = (layer.saved_bytes_whole + layer.saved_bytes_cut) * TOKENS
    assert told == pytest.approx(saved_by_layer(CONFIGS[name])[1], rel=0.005)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_bytes_of_mlps_are_what_tiles_save(name: str) -> None:
    """Of a real forward pass without tiles, and with them."""
    layer = (costs := trace_model(CONFIGS[name], torch.float32, TOKENS)).kinds[costs.layers[1]]
    told = (layer.mlp.saved_bytes_whole + layer.mlp.saved_bytes_cut) * TOKENS
    once, tiled = (saved_by_layer(CONFIGS[name], tile_tokens=size)[1] for size in (None, 5))
    assert told == pytest.approx(once - tiled, rel=0.005)
    assert 0.4 < layer.mlp.products < 1
    assert 0 < layer.mlp.moved < 1
    assert 0 < layer.mlp.num_kernels < layer.num_kernels


def test_parameters_of_the_largest_mlp() -> None:
    dense = trace_model(CONFIGS["llama"], torch.bfloat16).kinds[0].mlp
    assert (dense.num_parameters, dense.num_parameters_expert) == (3 * 64 * 160, 0)
    costs = trace_model(CONFIGS["deepseek_v3"], torch.bfloat16)
    first, second = (costs.kinds[kind].mlp for kind in costs.layers)
    assert (first.num_parameters, first.num_parameters_expert) == (3 * 64 * 160, 0)
    assert (second.num_parameters, second.num_parameters_expert) == (3 * 64 * 32, 4 * 3 * 64 * 32)


def saved_by_layer(config: PreTrainedConfig, tile_tokens: int | None = None) -> list[float]:
    """Bytes that autograd keeps first of each layer, parameters left out; what all layers share is
    counted with the first."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    for name in find_mlps(model) if tile_tokens else ():
        Tiles(model.get_submodule(name), tile_tokens)
    layers = [layer for _, layer in decoder_layers(model)][:2]
    own = {p.data_ptr() for p in model.parameters()}
    sizes = [0.0] * len(layers)
    seen: dict[int, torch.Tensor] = {}
    running: list[int] = []
    before: list[torch.Tensor] = []

    def begin(index: int) -> Any:
        return lambda *_: running.append(index)

    def end(*_: Any) -> None:
        running.pop()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage().data_ptr()
        if running and key not in own and key not in seen:
            seen[key] = tensor
            sizes[running[-1]] += tensor.untyped_storage().nbytes()
        return tensor

    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(begin(index))
        layer.register_forward_hook(end)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        before.append(model(torch.arange(TOKENS)[None] % 96, use_cache=False).logits)
    return sizes


def products_of(costs: ModelCosts) -> float:
    return sum(
        m.in_size * m.out_size * m.share * m.count
        for kind in costs.layers
        for m in costs.kinds[kind].matmuls
    )


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "ernie4_5_moe", "lfm2_moe"])
def test_experts_are_told_by_their_role(name: str) -> None:
    """Biases of experts have two dimensions, and a convolution beside them has three."""
    config = CONFIGS.get(name) or MIXTURES[name]
    costs = trace_model(config, torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config)
    stacked = {
        n: p for n, p in model.named_parameters() if re.search(r"\.experts\.(gate_up|down)_proj", n)
    }
    assert stacked
    num_parameters = sum(costs.kinds[kind].num_parameters_expert for kind in costs.layers)
    assert num_parameters == sum(p.numel() for p in stacked.values())
    layout = find_layout(model.eval(), torch.arange(8)[None])
    times = stage_costs(config, layout).layer_time
    share = 2 / (4 if name == "deepseek_v3" else 8)
    for number, time in enumerate(times):
        inside = f"{layout.layers}.{number}."
        own = {n: p for n, p in model.named_parameters() if n.startswith(inside)}
        parts = [p.numel() * (share if n in stacked else 1.0) for n, p in own.items()]
        assert time == pytest.approx(sum(parts))


def test_closed_form_agrees_where_there_is_one() -> None:
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1536, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2,
    )  # fmt: skip
    traced = trace_model(config, torch.bfloat16)
    counted = closed_form(DenseShape(2, 512, 8, 2, 1536, 512))
    assert traced.num_parameters == counted.num_parameters
    assert products_of(traced) == products_of(counted)
    (layer,), (other,) = traced.kinds, counted.kinds
    for name in ("num_parameters_whole", "num_parameters_cut", "attention"):
        assert getattr(layer, name) == getattr(other, name)
    # RMSNorm keeps float32 copies, which the closed form has not.
    kept = (layer.saved_bytes_whole + layer.saved_bytes_cut) / (
        other.saved_bytes_whole + other.saved_bytes_cut
    )
    assert 1.0 < kept < 1.25  # two norms: 8 of 40 bytes
    assert layer.moved_bytes_whole == pytest.approx(other.moved_bytes_whole, rel=0.1)
    assert layer.moved_bytes_cut == pytest.approx(other.moved_bytes_cut, rel=0.1)


def test_what_tensor_parallelism_divides_is_told_from_the_rest() -> None:
    costs = trace_model(CONFIGS["llama"], torch.bfloat16)
    (layer,) = costs.kinds
    assert {(m.in_size, m.out_size, m.cut) for m in layer.matmuls} == {
        (64, 64, "out"), (64, 32, "out"), (64, 64, "in"), (64, 160, "out"), (160, 64, "in"),
    }  # fmt: skip
    # What autograd keeps of one token between the products: q, k, v, output and log-sum-exp; gate,
    # its activation, up and their product.
    inside = 2 * (64 + 32 + 32 + 64 + 4 * 160) + 4 * 4
    assert layer.saved_bytes_cut == pytest.approx(inside)


def test_sizes_do_not_depend_on_the_tokens_traced() -> None:
    first, second = (trace_model(CONFIGS["llama"], torch.bfloat16, n) for n in (64, 256))
    for one, other in zip(first.kinds, second.kinds, strict=True):
        assert one.saved_bytes_whole == pytest.approx(other.saved_bytes_whole, rel=0.01)
        assert one.saved_bytes_cut == pytest.approx(other.saved_bytes_cut, rel=0.01)


def test_costs_come_back_from_json() -> None:
    costs = trace_model(CONFIGS["deepseek_v3"], torch.bfloat16)
    assert ModelCosts.from_json(costs.to_json()) == costs
    assert len(costs.kinds) == 2  # dense, and mixture


def test_a_model_that_cannot_be_traced_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no kernel for meta")

    monkeypatch.setattr(nn.Linear, "forward", fails)
    with pytest.raises(ModelError, match="cannot be traced on the meta device: no kernel"):
        trace_model(CONFIGS["llama"], torch.bfloat16)


@pytest.mark.parametrize("count", [1, 2])
def test_layers_for_multi_token_prediction_cost_as_others(count: int) -> None:
    """Each is a layer with experts, a product of twice the hidden size, and three norms."""
    config = deepseek(count)
    marked = with_mtp_layers(config, trains=True)
    plain, costs = (trace_model(each, torch.float32) for each in (config, marked))
    assert costs.num_further_losses == count
    assert costs.num_parameters == sum(p.numel() for p in empty_model(marked).parameters())
    kinds = [costs.kinds[kind] for kind in costs.layers]
    assert kinds[:-count] == [plain.kinds[kind] for kind in plain.layers]
    width = costs.hidden_size
    for kind in kinds[-count:]:
        assert kind.num_parameters == kinds[1].num_parameters + 2 * width**2 + 3 * width
        assert kind.saved_bytes_whole > kinds[1].saved_bytes_whole
        products = {(m.in_size, m.out_size) for m in kind.matmuls}
        assert (2 * width, width) in products


@pytest.mark.parametrize(("dtype", "score_bytes"), [("float32", 4.0), ("bfloat16", 6.0)])
def test_eager_attention_keeps_its_scores(dtype: str, score_bytes: float) -> None:
    """Bytes per score of what autograd saves, against the costs of a run with eager attention."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    heads, layers, tokens = 4, 2, 256
    shape = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    saved_bytes = {}
    for attention in ("sdpa", "eager"):
        config = LlamaConfig(**sizes, **shape)
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(input_ids=torch.arange(tokens)[None] % 64, use_cache=False).logits
        assert logits.requires_grad
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved_bytes[attention] = sum(n for key, n in storages.items() if key not in weights)
    measured = (saved_bytes["eager"] - saved_bytes["sdpa"]) / (layers * heads * tokens**2)
    assert measured == pytest.approx(score_bytes, rel=0.02)

    model_config = {"model_type": "llama", **sizes, **shape}
    for attention, expected in (("sdpa", 0.0), ("eager", score_bytes)):
        tree = run_tree(
            model={"config": model_config, "attention": attention}, precision={"dtype": dtype}
        )
        costs, _ = model_costs(parse_run_config(tree))
        assert {layer.score_bytes for layer in costs.kinds} == {expected}
