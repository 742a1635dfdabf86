"""Which layers get adapters, what they are called, and what they begin with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model_state_dict

from bigtrain.models.build import build_model, empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.adapters import merged_weights
from bigtrain.models.layers.adapter_checks import check_adapters
from bigtrain.models.layers.adapter_names import base_name, peft_name
from bigtrain.models.layers.adapter_targets import find_parameters, find_targets
from bigtrain.models.weights.import_hf import Weights
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.parity.conftest import ARCHITECTURES, llama
from tools.tiny_models import tiny_config

LLAMA = load_hf_config(ModelSection(config=llama(tie_word_embeddings=False)))


def built(section: AdaptersSection, seed: int = 7, **options: Any) -> Any:
    return build_model(
        ModelSection(config=llama(tie_word_embeddings=False)),
        LLAMA,
        seed=seed,
        adapters=section,
        **options,
    )


def test_names_of_files_are_those_of_peft() -> None:
    model = built(AdaptersSection(rank=2, dora=True, modules_to_save=("lm_head", "norm")))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    expected = get_peft_model_state_dict(model)
    assert {peft_name(name) for name in trained} == {f"base_model.model.{n}" for n in expected}
    assert "lm_head.weight" in expected
    assert "model.layers.0.mlp.up_proj.lora_magnitude_vector" in expected
    assert {base_name(n) for n in dict(model.named_parameters()) if ".lora_" not in n} == {
        name for name, _ in empty_model(LLAMA).named_parameters()
    }


def test_targets() -> None:
    model = empty_model(LLAMA)
    everything, _ = find_targets(model, AdaptersSection())
    assert len(everything) == 3 * 7
    assert "lm_head" not in everything
    patterns = ("v_proj", "model.layers.[01].mlp.*", "lm_head", "embed_tokens")
    names, missing = find_targets(model, AdaptersSection(targets=patterns))
    assert len(names) == 3 + 2 * 3
    assert missing == ["lm_head", "embed_tokens"]


@pytest.mark.parametrize(
    ("model_type", "left_out"),
    [("llama4_text", {"router"}), ("deepseek_v4", {"o_a_proj"}), ("falcon", set())],
)
def test_layers_that_give_no_product_are_no_targets(model_type: str, left_out: set[str]) -> None:
    """Subclasses of a linear layer: a router that returns its choice, a product of groups."""
    model = empty_model(tiny_config(model_type))
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    names, _ = find_targets(model, AdaptersSection())
    assert {name.rpartition(".")[2] for name in linear - {*names, "lm_head"}} == left_out


def test_targets_that_are_no_linear_layers_are_refused() -> None:
    section = AdaptersSection(targets=("q_proj", "lm_head"))
    (problem,) = check_adapters(empty_model(LLAMA), section)
    assert (problem.key, problem.value) == ("adapters.targets", "lm_head")
    assert "q_proj" in problem.remedy


def test_layers_that_peft_refuses_beside_mamba_are_refused() -> None:
    model = empty_model(tiny_config("mamba2"))
    (problem,) = check_adapters(model, AdaptersSection())
    assert (problem.key, problem.value) == ("adapters.targets", "out_proj")
    assert problem.remedy == "some of: in_proj"
    assert check_adapters(model, AdaptersSection(targets=("in_proj",))) == []


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("head", "matches no module that has weights"),
        ("up_proj", "model.layers.0.mlp.up_proj has an adapter as well"),
    ],
)
def test_modules_that_cannot_be_copied_are_refused(pattern: str, rule: str) -> None:
    section = AdaptersSection(modules_to_save=(pattern,))
    problem, *_ = check_adapters(empty_model(LLAMA), section)
    assert problem.key == "adapters.modules_to_save"
    assert rule in problem.rule


def test_copies_of_tied_weights_are_refused() -> None:
    tied = empty_model(load_hf_config(ModelSection(config=llama())))
    (problem,) = check_adapters(tied, AdaptersSection(modules_to_save=("lm_head",)))
    assert "model.embed_tokens.weight and lm_head.weight are tied" in problem.rule


MOE = ARCHITECTURES["qwen3_moe"]
STACKS = AdaptersSection(rank=2, target_parameters=("gate_up_proj", "*.down_proj"))


def test_stacked_weights_are_targets_of_their_own() -> None:
    model = empty_model(load_hf_config(ModelSection(config=MOE)))
    names, missing = find_parameters(model, STACKS)
    assert len(names) == 2 * 2
    assert not missing
    assert check_adapters(model, STACKS) == []
    (problem,) = check_adapters(model, AdaptersSection(target_parameters=("q_proj",)))
    assert (problem.key, problem.value) == ("adapters.target_parameters", "q_proj")
    assert problem.remedy == "some of: down_proj, gate_up_proj"
    (problem,) = check_adapters(empty_model(LLAMA), STACKS.model_copy(update={"targets": ()}))[:1]
    assert problem.remedy == "remove it: the model has none"


@torch.no_grad()
def test_merged_stacks_compute_what_adapters_do() -> None:
    """In float64: in float32, rounding alone differs by 1e-5 for one draw of weights in many."""
    section, config = ModelSection(config=MOE), load_hf_config(ModelSection(config=MOE))
    model = build_model(section, config, seed=7, adapters=STACKS).eval().double()
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    expected_names = {f"base_model.model.{n}" for n in get_peft_model_state_dict(model)}
    assert {peft_name(name) for name in trained} == expected_names
    for name in trained:
        model.get_parameter(name).normal_(std=0.1)
    state = dict(model.state_dict())
    base = {base_name(name): tensor for name, tensor in state.items() if ".lora_" not in name}
    plain = build_model(section, config, seed=0).eval().double()
    plain.load_state_dict(base)
    for each in (model, plain):
        each.set_experts_implementation("eager")  # PyTorch's grouped product knows no float64
    ids = torch.arange(16)[None]
    expected = model(input_ids=ids).logits
    assert float((plain(input_ids=ids).logits - expected).abs().max()) > 1e-2
    weights: Any = Weights("model.path", base, ())  # type: ignore[arg-type]
    plain.load_state_dict(merged_weights(state, STACKS, weights, config))
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=0, atol=1e-12)


def test_initial_values_do_not_depend_on_the_generator_or_the_dtype() -> None:
    torch.manual_seed(1)
    one = dict(built(AdaptersSection(rank=4)).named_parameters())
    torch.manual_seed(2)
    other = dict(built(AdaptersSection(rank=4), dtype=torch.bfloat16).named_parameters())
    trained = [name for name, parameter in one.items() if parameter.requires_grad]
    assert len(trained) == 2 * 3 * 7
    for name in trained:
        assert torch.equal(one[name].bfloat16(), other[name]), name
        assert one[name].any() == (".lora_A." in name)
    again = dict(built(AdaptersSection(rank=4), seed=8).named_parameters())
    first = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(one[first], again[first])
    # Each layer has its own.
    assert not torch.equal(one[first], one[first.replace("layers.0", "layers.1")])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({"rslora": True}, id="rslora", marks=pytest.mark.slow),
        pytest.param({"dora": True}, id="dora"),
        pytest.param({"modules_to_save": ("lm_head", "norm")}, id="modules_to_save"),
    ],
)
@torch.no_grad()
def test_merged_weights_compute_what_adapters_do(kind: dict[str, Any]) -> None:
    section = AdaptersSection(rank=4, alpha=8, **kind)
    model = built(section).eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and ".lora_A." not in name:
            parameter.normal_(std=0.1)
    state = dict(model.state_dict())
    base = {
        base_name(name): tensor
        for name, tensor in state.items()
        if ".lora_" not in name and ".modules_to_save." not in name
    }
    plain = build_model(ModelSection(config=llama(tie_word_embeddings=False)), LLAMA, seed=0).eval()
    ids = torch.arange(16)[None]
    plain.load_state_dict(base)
    expected = model(input_ids=ids).logits
    assert float((plain(input_ids=ids).logits - expected).abs().max()) > 1e-2
    weights: Any = Weights("model.path", base, ())  # type: ignore[arg-type]
    plain.load_state_dict(merged_weights(state, section, weights, LLAMA))
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=0, atol=1e-5)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
OF_KINDS: dict[str, tuple[dict[str, Any], set[str], set[str]]] = {
    # Conv1D, and a c_proj in both.
    "gpt2": (ARCHITECTURES["gpt2"], {"attn.c_attn", "attn.c_proj"}, {"mlp.c_fc", "mlp.c_proj"}),
    # Linear layers of the MLP that are the decoder layer's own.
    "opt": (
        {"model_type": "opt", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},
        {"q_proj", "k_proj", "v_proj", "out_proj"},
        {"fc1", "fc2"},
    ),
    # Which declares no attention of its own.
    "falcon": (
        {"model_type": "falcon", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}
        | {"num_attention_heads": 4},
        {"query_key_value", "self_attention.dense"},
        {"dense_h_to_4h", "dense_4h_to_h"},
    ),
    "qwen3_moe": (MOE, set(ATTENTION), {"experts.gate_up_proj", "experts.down_proj"}),
    # Layers of Mamba between those with attention: they are of neither kind.
    "jamba": (
        llama(model_type="jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1)
        | {"num_experts": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        set(ATTENTION),
        {"gate_proj", "up_proj", "down_proj", "experts.gate_up_proj", "experts.down_proj"},
    ),
}


def ends(names: list[str], expected: set[str]) -> set[str]:
    """Those of `expected` that names end with; every name must end with one."""
    ends_by_name = {name: [e for e in expected if name.endswith(f".{e}")] for name in names}
    assert all(ends_by_name.values()), ends_by_name
    return {end for matching in ends_by_name.values() for end in matching}


@pytest.mark.parametrize("name", OF_KINDS)
def test_kinds_of_layers_are_found(name: str) -> None:
    config, attention, mlp = OF_KINDS[name]
    model = empty_model(load_hf_config(ModelSection(config=config)))
    for preset, expected in (("attention", attention), ("mlp", mlp)):
        section = AdaptersSection.model_validate({"targets": preset})
        assert check_adapters(model, section) == []
        linear, stacked = find_targets(model, section)[0], find_parameters(model, section)[0]
        assert ends(linear + stacked, expected) == expected
        assert not any("router" in n or n.endswith(".mlp.gate") for n in linear)
    both = AdaptersSection(targets=("mlp", "attention"))
    whole = {n for n in find_targets(model, AdaptersSection())[0] if "mamba" not in n}
    chosen = set(find_targets(model, both)[0])
    assert chosen <= whole
    assert {n.rpartition(".")[2] for n in whole - chosen} <= {"router", "gate"}


@pytest.mark.parametrize("preset", ["attention", "mlp"])
def test_a_kind_that_an_architecture_lacks_is_refused(preset: str) -> None:
    config = {"model_type": "mamba", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1}
    model = empty_model(load_hf_config(ModelSection(config=config)))
    (problem,) = check_adapters(model, AdaptersSection.model_validate({"targets": preset}))
    assert (problem.key, problem.value) == ("adapters.targets", preset)
    assert "a kind of layers of which nothing is known in this architecture" in problem.rule
    assert problem.remedy.startswith("all-linear, or some of: ")
    (problem,) = check_adapters(model, AdaptersSection(targets=(preset, "in_proj")))
    assert problem.value == preset


@pytest.mark.parametrize("kind", [{"dropout": 0.1}, {"dora": True}])
def test_experts_have_no_dropout_and_no_dora(kind: dict[str, Any]) -> None:
    model = empty_model(load_hf_config(ModelSection(config=MOE)))
    section = AdaptersSection(targets="mlp", **kind)
    (problem,) = check_adapters(model, section)
    assert f"peft has no {next(iter(kind))} for those" in problem.rule
    assert check_adapters(empty_model(LLAMA), section) == []
    with pytest.raises(ValueError, match=f"peft has no {next(iter(kind))} for stacked weights"):
        AdaptersSection(target_parameters=("down_proj",), **kind)


def test_peft_takes_experts_alone() -> None:
    """A kind of which all layers are stacked weights leaves no linear layer to name."""
    config = load_hf_config(ModelSection(config=MOE))
    section = AdaptersSection(rank=2, targets="mlp")
    model = build_model(ModelSection(config=MOE), config, seed=7, adapters=section)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".mlp.experts." in name and ".lora_" in name for name in trained)


def test_copies_around_adapters_are_refused() -> None:
    """Attention of gpt-oss has weights itself, its sinks."""
    config = {"model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1}
    model = empty_model(load_hf_config(ModelSection(config=config)))
    section = AdaptersSection(targets=("q_proj",), modules_to_save=("self_attn",))
    (problem,) = check_adapters(model, section)
    assert problem.rule == "model.layers.0.self_attn.q_proj has an adapter as well"


@pytest.mark.parametrize(
    ("base", "values", "words"),
    [
        (llama(), {"rank": 17}, "adapters.rank = 17: model.layers.0.self_attn.k_proj has only 16"),
        (ARCHITECTURES["qwen3_moe"], {"targets": "mlp"}, "and peft decomposes no stack"),
    ],
)
def test_weights_that_have_no_principal_adapters(
    base: dict[str, Any], values: dict[str, Any], words: str
) -> None:
    model = empty_model(load_hf_config(ModelSection(config=base)))
    section = AdaptersSection.model_validate({"init": "pissa", "rank": 2, **values})
    (problem,) = check_adapters(model, section)
    assert words in str(problem)
    assert check_adapters(model, section.model_copy(update={"init": "lora"})) == []
