"""Model FLOPs against hand counts and a published figure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bigtrain.planner.flops import (
    ModelShape,
    flops_per_token,
    model_flops_utilization,
    model_shape,
    peak_flops_per_second,
)

CONFIG = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, hidden_size=32)
PARAMETERS = [("embed.weight", 1000), ("layers.0.weight", 300), ("lm_head.weight", 1000)]


def test_formula_reproduces_the_utilization_published_for_palm_540b() -> None:
    """PaLM, table 3: 238.3K tokens/s on 6144 TPU v4 (275 TFLOP/s) is 46.2 % MFU."""
    palm = ModelShape(540_350_000_000, attention_width=118 * 48 * 256)
    per_token = flops_per_token(palm, 2048)
    utilization = model_flops_utilization(238_300, per_token, 275e12, num_devices=6144)
    assert utilization == pytest.approx(0.462, abs=0.001)


def test_terms_of_the_formula() -> None:
    shape = ModelShape(num_matmul_parameters=1000, attention_width=2 * 4 * 8)
    assert flops_per_token(shape, 16) == 6 * 1000 + 12 * 2 * 4 * 8 * 16
    assert flops_per_token(shape, 16, frozen=True) == 4 * 1000 + 12 * 2 * 4 * 8 * 16


def test_input_embedding_counts_only_where_it_is_also_the_head() -> None:
    untied = model_shape(CONFIG, PARAMETERS, "embed.weight", tied=False)
    assert untied == ModelShape(1300, attention_width=2 * 4 * 8)
    tied = model_shape(CONFIG, PARAMETERS[:2], "embed.weight", tied=True)
    assert tied == ModelShape(1300, attention_width=2 * 4 * 8)
    own = SimpleNamespace(**vars(CONFIG), head_dim=64)  # not the quotient
    shape = model_shape(own, PARAMETERS, "embed.weight", tied=False)
    assert shape == ModelShape(1300, attention_width=2 * 4 * 64)


def test_layers_with_other_heads_count_with_their_own() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma4TextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        per_layer_config={1: {"head_dim": 32}},
        layer_types=["sliding_attention", "full_attention"],
    )
    shape = model_shape(config, PARAMETERS, "embed.weight", tied=False)
    assert shape is not None
    assert shape.attention_width == 4 * 16 + 4 * 32


@pytest.mark.parametrize("count_name", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_experts_count_as_far_as_a_token_uses_them(count_name: str) -> None:
    config = SimpleNamespace(**vars(CONFIG), num_experts_per_tok=2, **{count_name: 8})
    parameters = [*PARAMETERS, ("layers.0.mlp.experts.gate_up_proj", 8000)]
    shape = model_shape(config, parameters, "embed.weight", tied=False)
    assert shape is not None
    assert shape.num_matmul_parameters == 1300 + 2000


def test_unknown_where_the_configuration_does_not_tell() -> None:
    assert model_shape(SimpleNamespace(), PARAMETERS, "embed.weight", tied=False) is None
    experts = [("layers.0.mlp.experts.gate_up_proj", 8000)]
    assert model_shape(CONFIG, experts, "embed.weight", tied=False) is None


def test_shape_of_real_models_matches_their_parameter_count() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    parameters = [(name, value.numel()) for name, value in model.named_parameters()]
    shape = model_shape(
        config.get_text_config(), parameters, "model.embed_tokens.weight", tied=True
    )
    assert shape == ModelShape(model.num_parameters(), attention_width=2 * 4 * 8)
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4)
    assert model_shape(gpt2.get_text_config(), [], "wte", tied=True) == ModelShape(0, 3 * 32)


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "float16", 756.4),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA A10", "bfloat16", 125.0),
        ("Tesla T4", "float16", 65.0),
    ],
)
def test_peak_of_known_devices(name: str, dtype: str, teraflops: float) -> None:
    assert peak_flops_per_second(name, dtype) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu", "bfloat16"),
        ("Tesla V100-SXM2-16GB", "bfloat16"),  # has no bfloat16
        ("NVIDIA A1000", "bfloat16"),  # not an A100
        ("NVIDIA B200", "float32"),
        ("NVIDIA H100", "float64"),
    ],
)
def test_unknown_peak_gives_no_utilization(name: str, dtype: str) -> None:
    peak = peak_flops_per_second(name, dtype)
    assert peak is None
    assert model_flops_utilization(1e6, 10**9, peak, num_devices=1) is None
