"""Weights in 4 bits: which, in how many bytes, of what values, and what leaves them alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.errors import ModelError
from bigtrain.models.build import build_model, empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.pipeline_stages import plan_stages
from bigtrain.models.layers.adapter_checks import check_adapters
from bigtrain.models.layers.adapter_names import base_name
from bigtrain.models.layers.adapter_targets import quantized_layers
from bigtrain.models.parallel.adapter_costs import adapter_costs
from bigtrain.models.parallel.stages import Stage
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.packed import is_packed, packed_tensors
from bigtrain.models.weights.quantized import (
    bits_and_bytes,
    check_quantization,
    compute_plainly,
    dequantized,
    is_quantized,
    quantize_layers,
    read_quantized,
    with_magnitudes,
)
from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.model_costs import of_all_linear, with_adapters
from bigtrain.planner.tables.engines import engine_named
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.parity.conftest import ARCHITECTURES, llama

library = pytest.importorskip("bitsandbytes")
CPU = torch.device("cpu")
NF4 = AdaptersSection(rank=4, quantization="nf4")
FP4 = AdaptersSection(rank=4, quantization="fp4", double_quantization=False)
INT8 = AdaptersSection(rank=4, quantization="int8")
MODELS = {
    # 32 columns: blocks of 64 are two rows; of 24 x 40 the last one is not full.
    "llama": llama(num_hidden_layers=2, attention_bias=True),
    "narrow": llama(
        num_hidden_layers=1, hidden_size=24, intermediate_size=40, tie_word_embeddings=False
    ),
    "gpt2": ARCHITECTURES["gpt2"],
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directories_by_name = {}
    for name, config in MODELS.items():
        section = ModelSection(config=config)
        directories_by_name[name] = tmp_path_factory.mktemp("bases") / name
        build_model(section, load_hf_config(section), seed=3).save_pretrained(
            directories_by_name[name]
        )
    return directories_by_name


def packed_bytes(model: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in packed_tensors(model))


def built(base: Path, section: AdaptersSection, dtype: torch.dtype = torch.float32) -> Any:
    source = ModelSection(path=str(base))
    return build_model(
        source, load_hf_config(source), seed=0, weights="left", adapters=section, run_dtype=dtype
    )


def filled(base: Path, section: AdaptersSection, dtype: torch.dtype = torch.float32) -> Any:
    model = built(base, section, dtype)
    read_quantized(model, find_weights(str(base), model.config), CPU)
    return model


def plain(base: Path, section: AdaptersSection, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, quantization_config=bits_and_bytes(section, dtype), device_map="cpu"
    )


@pytest.mark.parametrize(
    ("name", "section", "dtype"),
    [
        ("llama", NF4, torch.bfloat16),
        ("narrow", FP4, torch.float32),
        ("gpt2", NF4, torch.float32),
    ],
)
def test_packs_what_transformers_packs(
    name: str, section: AdaptersSection, dtype: torch.dtype, bases: dict[str, Path]
) -> None:
    expected, model = plain(bases[name], section, dtype), filled(bases[name], section, dtype)
    layers = {n: m for n, m in expected.named_modules() if isinstance(m, library.nn.Linear4bit)}
    assert quantized_layers(empty_model(model.config)) == list(layers)
    for layer_name, layer in layers.items():
        own = model.get_submodule(f"{layer_name}.base_layer")
        assert torch.equal(own.weight, layer.weight), layer_name
        assert own.weight.dtype == torch.uint8
        assert not own.weight.requires_grad
        states = (
            own.weight.quant_state.as_dict(packed=True),
            layer.weight.quant_state.as_dict(packed=True),
        )
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
        assert own.compute_dtype == layer.compute_dtype == dtype


def test_values_are_those_of_the_paper(bases: dict[str, Path]) -> None:
    """Blocks of 64 in a row, each scaled by its largest: against NumPy-like code of our own, since
    the library's kernels are on both sides of every other comparison."""
    files = AutoModelForCausalLM.from_pretrained(bases["narrow"])
    model = filled(bases["narrow"], NF4.model_copy(update={"double_quantization": False}))
    levels = library.functional.get_4bit_type("nf4", device="cpu")
    for name in quantized_layers(files):
        weight = files.get_submodule(name).weight.detach()
        flat = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % 64)).view(-1, 64)
        scales = flat.abs().amax(1, keepdim=True)
        nearest = levels[(flat / scales)[..., None].sub(levels).abs().argmin(-1)] * scales
        expected = nearest.flatten()[: weight.numel()].view(weight.shape)
        values = dequantized(model.get_submodule(f"{name}.base_layer"))
        assert torch.allclose(values, expected, rtol=0, atol=1e-6), name


@pytest.mark.parametrize("section", [FP4, INT8, NF4.model_copy(update={"dora": True})])
def test_nothing_is_there_to_be_sent_or_cast_before_it_is_read(
    section: AdaptersSection, bases: dict[str, Path]
) -> None:
    """DeepSpeed broadcasts every parameter, casts those of floating point, and moves the module."""
    model = built(bases["llama"], section)
    packed = [p for p in model.parameters() if is_packed(p)]
    assert len(packed) == 2 * 7
    assert all(p.numel() == 0 and p.dtype in (torch.uint8, torch.int8) for p in packed)
    assert packed_bytes(model) == 0
    model.to(CPU)
    model.bfloat16()
    assert packed_bytes(model) == 0
    read_quantized(model, find_weights(str(bases["llama"]), model.config), CPU)
    before = {n: dequantized(m) for n, m in model.named_modules() if is_quantized(m)}
    num_bytes = packed_bytes(model)
    model.float().to(CPU)
    assert packed_bytes(model) == num_bytes
    for name, weight in before.items():
        assert torch.equal(dequantized(model.get_submodule(name)), weight)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_8_bits_are_those_of_transformers(name: str, bases: dict[str, Path]) -> None:
    """Codes and scales have the bits that `from_pretrained` makes, of Conv1D too."""
    model = filled(bases[name], INT8)
    options: dict[str, Any] = {"quantization_config": bits_and_bytes(INT8, torch.float32)}
    theirs: Any = AutoModelForCausalLM.from_pretrained(bases[name], device_map="cpu", **options)
    layers = {n: m for n, m in model.named_modules() if is_quantized(m)}
    assert layers
    for layer_name, module in layers.items():
        layer: Any = module
        expected = theirs.get_submodule(base_name(f"{layer_name}.").rstrip("."))
        assert torch.equal(layer.weight.data, expected.weight.data), layer_name
        assert torch.equal(layer.state.SCB, expected.weight.SCB), layer_name
        assert layer.state.threshold == expected.state.threshold == 6.0


def test_magnitudes_are_of_what_is_packed(bases: dict[str, Path]) -> None:
    section = NF4.model_copy(update={"dora": True})
    model = filled(bases["llama"], section)
    weights = with_magnitudes(find_weights(str(bases["llama"]), model.config), model)
    name = "model.layers.0.mlp.up_proj"
    magnitudes = weights.tensors[f"{name}.lora_magnitude_vector.default.weight"]
    expected = dequantized(model.get_submodule(f"{name}.base_layer")).norm(dim=1)
    assert torch.equal(magnitudes.read(), expected)  # type: ignore[attr-defined]
    part = torch.empty(5)
    magnitudes.fill((3,), part)  # type: ignore[attr-defined]
    assert torch.equal(part, expected[3:8])


@pytest.mark.parametrize(
    ("name", "section"), [("llama", FP4), ("gpt2", NF4), ("gpt2", INT8), ("llama", INT8)]
)
def test_bytes_are_predicted(name: str, section: AdaptersSection, bases: dict[str, Path]) -> None:
    model = filled(bases[name], section)
    costs = adapter_costs(empty_model(model.config), section)
    traced = trace_model(model.config, torch.float32)
    adapted_costs = with_adapters(traced, costs)
    assert adapted_costs.packed.num_bytes == packed_bytes(model)
    # Nearly the same without the model.
    closed = with_adapters(traced, of_all_linear(traced, 4, section.packing))
    assert closed.packed.num_weights == adapted_costs.packed.num_weights
    if name == "llama":
        assert closed.packed.num_bytes == adapted_costs.packed.num_bytes
    held = sum(p.numel() * p.itemsize for p in model.parameters() if not is_packed(p))
    layout = Layout(data_size=2, parameter_bytes=4, loss_chunk_tokens=8)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    use = peak_memory(adapted_costs, layout, engine_named("deepspeed"))
    moments = 8 * trained
    assert use.states - moments == pytest.approx(held + packed_bytes(model))
    largest = max(m.in_features * m.out_features for m in model.modules() if is_quantized(m))
    assert use.gathered == 4 * largest


def test_an_evaluation_changes_nothing(bases: dict[str, Path]) -> None:
    """On CPUs with AVX-512 BF16 bitsandbytes would pack the weights anew, and give no gradients."""
    model = filled(bases["llama"], NF4)
    find_weights(str(bases["llama"]), model.config).fill_model(model)
    layer = model.get_submodule("model.layers.0.mlp.up_proj")
    before = layer.base_layer.weight.clone()
    with torch.no_grad():
        evaluated = layer.eval()(torch.ones(2, 32))
    assert torch.equal(layer.base_layer.weight, before)
    inputs = torch.ones(2, 32, requires_grad=True)
    trained = layer.train()(inputs)
    trained.sum().backward()
    expected = dequantized(layer.base_layer)
    assert torch.allclose(evaluated, torch.ones(2, 32) @ expected.T, atol=1e-6)
    assert torch.allclose(trained, evaluated, atol=1e-6)
    assert inputs.grad is not None
    assert torch.allclose(inputs.grad, expected.sum(0).expand(2, -1), atol=1e-5)


def test_which_layers_compute_in_what(bases: dict[str, Path]) -> None:
    section = NF4.model_copy(update={"compute_dtype": "bfloat16"})
    layer = filled(bases["llama"], section).get_submodule("model.layers.0.mlp.up_proj.base_layer")
    inputs = torch.linspace(-1, 1, 64).view(2, 32)
    weight = dequantized(layer).bfloat16()
    assert torch.equal(layer(inputs), (inputs.bfloat16() @ weight.T).float())
    reference = plain(bases["llama"], section)
    compute_plainly(reference)
    assert torch.equal(reference.model.layers[0].mlp.up_proj(inputs), layer(inputs))


def test_adapters_are_not_in_what_layers_compute_in(bases: dict[str, Path]) -> None:
    """peft makes them so; their initial values would be rounded to bfloat16."""
    parameters_of_models = []
    for dtype in ("float32", "bfloat16"):
        model = built(bases["llama"], NF4.model_copy(update={"compute_dtype": dtype}))
        parameters_of_models.append({n: p for n, p in model.named_parameters() if p.requires_grad})
    for name, parameter in parameters_of_models[0].items():
        assert parameter.dtype == parameters_of_models[1][name].dtype == torch.float32
        assert torch.equal(parameter, parameters_of_models[1][name]), name


MOE = load_hf_config(ModelSection(config=ARCHITECTURES["qwen3_moe"]))
DENSE = load_hf_config(ModelSection(config=llama(tie_word_embeddings=False)))


@pytest.mark.parametrize(
    ("config", "changes", "key", "words"),
    [
        (MOE, {}, "adapters.quantization", "is a stacked weight"),
        (
            DENSE,
            {"targets": ("q_proj",), "modules_to_save": ("up_proj",)},
            "adapters.modules_to_save",
            "model.layers.0.mlp.up_proj would be in 4 bits",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    config: Any, changes: dict[str, Any], key: str, words: str
) -> None:
    section = NF4.model_copy(update=changes)
    problem = check_adapters(empty_model(config), section)[0]
    assert problem.key == key
    assert words in problem.rule
    assert check_adapters(empty_model(DENSE), NF4) == []
    allowed = {"targets": "all-linear", "modules_to_save": ("lm_head",)}
    assert check_adapters(empty_model(DENSE), NF4.model_copy(update=allowed)) == []


def test_layers_that_stages_cannot_divide_are_refused() -> None:
    """OPT has a linear layer between its embedding and its decoder layers."""
    values = {
        "model_type": "opt", "vocab_size": 97, "hidden_size": 32, "word_embed_proj_dim": 16,
        "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "do_layer_norm_before": False,
    }  # fmt: skip
    config = load_hf_config(ModelSection(config=values))
    plan, problems = plan_stages(config, "eager", 2, 16, router_losses=False)
    assert plan is not None, problems
    model = empty_model(config)
    quantize_layers(model, NF4, torch.float32)
    for index in (0, 1):  # on every rank, or some would wait for the others
        with pytest.raises(ModelError, match=r"project_.*\.weight is outside of the layers"):
            Stage(model, plan.layout, plan.cuts, index)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_quantization(NF4) == []
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else find(name)
    )
    assert check_quantization(AdaptersSection()) == check_quantization(None) == []
    (problem,) = check_quantization(NF4)
    assert str(problem) == (
        "adapters.quantization = 'nf4': bitsandbytes is not installed -> "
        "pip install 'bitsandbytes>=0.50.2,<0.51', or adapters.quantization=none"
    )
