"""Pipeline stages of many families, run one after another, compute what the whole model does."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from bigtrain.engine.pipeline.stage_module import P2PLayout, touch
from bigtrain.errors import ModelError
from bigtrain.models.build import WHOLE, build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.pipeline_stages import (
    find_stage_plan,
    plan_stages,
    stage_costs,
    stage_trial,
)
from bigtrain.models.equivalence.trial import GRADIENT, LOSS, OUTPUT, Difference, Tolerance
from bigtrain.models.layers.adapter_names import weight_of
from bigtrain.models.layers.adapters import add_adapters
from bigtrain.models.parallel.stage_layout import StageLayout, find_layout
from bigtrain.models.parallel.stages import LayerPlaceholder, Payload, Stage, stages_of_parameters
from bigtrain.planner.stages import StageCosts, balanced_cuts
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.support.hybrids import HYBRIDS, hybrid_config

VOCABULARY = 64
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "gemma2": {**LLAMA, **SLIDING, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        **LLAMA,
        "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 4,
    },
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 4, "n_head": 4},
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "ffn_dim": 48,
        "word_embed_proj_dim": 16,
    },
}


def small(model_type: str, **changes: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](**{**copy.deepcopy(FAMILIES[model_type]), **changes})
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # zeros would hide what is missing
            parameter += 0.02 * torch.randn(parameter.shape)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))


def difference(
    model: Any, layout: StageLayout, cuts: tuple[int, ...], positions: torch.Tensor | None = None
) -> Difference | None:
    """Logits and the router's loss have to be equal."""
    exact = {OUTPUT: Tolerance(), LOSS: Tolerance(), GRADIENT: Tolerance(common=1e-6)}
    trial = stage_trial(layout, cuts, tokens(), positions, tolerances=exact)
    return trial.difference(model)


POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(12)]])


FAST = ("gpt2", "gemma3n_text", "mixtral", "bloom")


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in sorted(FAMILIES)],
)
def test_stages_equal_the_whole(model_type: str) -> None:
    model = small(model_type)
    layout = find_layout(model, tokens())
    assert layout.num_layers == 4
    assert layout.tokens_everywhere == (model_type == "gemma3n_text")
    if layout.tokens_everywhere:
        model.train()
        model.activation_checkpointing_enable({"use_reentrant": False})
    for cuts in ((0, 1, 2, 3, 4), (0, 3, 4)):
        for positions in (None, POSITIONS):
            if positions is not None and model_type == "bloom":
                continue  # ALiBi: takes no positions
            assert difference(model, layout, cuts, positions) is None, cuts


def test_a_wrong_layout_is_found_out() -> None:
    model = small("gemma3n_text")
    layout = find_layout(model, tokens())
    assert layout.tokens_everywhere
    wrong = replace(layout, tokens_everywhere=False)
    plan, _ = find_stage_plan(model, wrong, (0, 2, 4), tokens())
    assert plan is not None
    assert plan.layout.tokens_everywhere  # the other way was tried
    lost = replace(layout, shared=frozenset())
    plan, reason = find_stage_plan(model, lost, (0, 2, 4), tokens())
    assert plan is None
    assert reason


def test_layers_called_twice_are_refused() -> None:
    model = small("llama")
    base: Any = model.model
    layers = base.layers
    original = layers[1].forward

    def twice(hidden: torch.Tensor, **kwargs: Any) -> Any:
        return layers[0](original(hidden, **kwargs), **kwargs)

    layers[1].forward = twice
    with pytest.raises(ModelError, match="once each"):
        find_layout(model, tokens())


def test_shared_layers_are_refused() -> None:
    model = small("llama", tie_word_embeddings=False)
    base: Any = model.model
    base.layers[3].mlp = base.layers[0].mlp
    layout = find_layout(model, tokens())
    with pytest.raises(ModelError, match=r"share the parameter model\.layers\.0\.mlp"):
        stages_of_parameters(model, layout, (0, 2, 4))


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_has_its_stages(tied: bool) -> None:
    model = small("llama", tie_word_embeddings=tied)
    layout = find_layout(model, tokens())
    stages = stages_of_parameters(model, layout, (0, 1, 4))
    assert stages.keys() == dict(model.named_parameters()).keys()
    assert stages["model.embed_tokens.weight"] == ((0, 1) if tied else (0,))
    assert stages["model.norm.weight"] == (1,)
    assert stages["model.layers.0.mlp.up_proj.weight"] == (0,)
    for index in (0, 1):
        stage = Stage(copy.deepcopy(model), layout, (0, 1, 4), index)
        held = dict(stage.model.named_parameters())
        assert held.keys() == {
            name for name, stages_of_parameter in stages.items() if index in stages_of_parameter
        }


def test_adapters_are_on_the_stage_of_their_layer() -> None:
    """Also those outside of the decoder layers."""
    model = small("opt", word_embed_proj_dim=16, ffn_dim=48, do_layer_norm_before=False)
    layout = find_layout(model, tokens())
    plain = stages_of_parameters(model, layout, (0, 1, 4))
    assert plain["model.decoder.project_out.weight"] == (1,)
    add_adapters(model, AdaptersSection(rank=2), lambda _: 0)
    for name, stages in stages_of_parameters(model, layout, (0, 1, 4)).items():
        assert stages == plain[weight_of(name)], name


def test_absent_layers_answer_for_their_class() -> None:
    model = small("gemma2")
    layout = find_layout(model, tokens())
    layer: Any = model.get_submodule("model.layers.0")
    layer.of_the_object = 7
    kind: Any = type(layer)
    kind.bigtrain_test_attribute = "of the class"
    try:
        stage = Stage(model, layout, (0, 2, 4), 1)
        absent: Any = stage.model.get_submodule("model.layers.0")
        assert isinstance(absent, LayerPlaceholder)
        assert absent.of_the_object == 7
        assert absent.bigtrain_test_attribute == "of the class"
        with pytest.raises(AttributeError):
            _ = absent.no_such_attribute
        assert sum(p.numel() for p in absent.parameters()) == 0
    finally:
        del kind.bigtrain_test_attribute


@pytest.mark.parametrize(
    "model_type", ["llama", "opt", pytest.param("gemma3n_text", marks=pytest.mark.slow)]
)
def test_initial_weights_do_not_depend_on_the_stage(model_type: str) -> None:
    config = {"model_type": model_type, **FAMILIES[model_type]}
    section = ModelSection(config=config)
    whole = dict(build_model(section, load_hf_config(section), seed=3).named_parameters())
    layout = find_layout(small(model_type), tokens())
    names: set[str] = set()
    for index in range(3):
        stages: list[Stage] = []

        def cut(model: PreTrainedModel, index: int = index, stages: list[Stage] = stages) -> None:
            stages.append(Stage(model, layout, (0, 1, 3, 4), index))

        model = build_model(
            section, load_hf_config(section), seed=3, partitioning=replace(WHOLE, prepare=cut)
        )
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, whole[name]), name
            names.add(name)
    assert names == whole.keys()


def test_trained_weights_are_those_of_the_stage(tmp_path: Path) -> None:
    model = small("gpt2")
    model.save_pretrained(tmp_path)
    whole = dict(model.named_parameters())
    layout = find_layout(model, tokens())
    section = ModelSection(path=str(tmp_path))
    for index in range(2):
        prepare = partial(Stage, layout=layout, cuts=(0, 1, 4), index=index)
        partitioning = replace(WHOLE, prepare=prepare)
        stage = build_model(section, load_hf_config(section), seed=3, partitioning=partitioning)
        held = dict(stage.named_parameters())
        assert 0 < len(held) < len(whole)
        for name, parameter in held.items():
            assert torch.equal(parameter, whole[name]), name


def test_plan_balances_with_the_head() -> None:
    hf_config = CONFIG_MAPPING["llama"](**{**LLAMA, "vocab_size": 640, "num_hidden_layers": 8})
    plan, problems = plan_stages(hf_config, "sdpa", 2, 32)
    assert not problems
    assert plan is not None
    costs = stage_costs(hf_config, plan.layout)
    assert costs.last_time == 640 * 32
    assert plan.cuts == balanced_cuts(costs, 2)
    assert plan.cuts[1] > 4  # the last stage has the head, so fewer layers


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_score_head_finds_the_last_token_on_the_last_stage(model_type: str) -> None:
    """Which gets token ids, but no embedding."""
    config = CONFIG_MAPPING[model_type](**{**FAMILIES[model_type], "pad_token_id": 0})
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]
    plan, problems = plan_stages(config, "sdpa", 2, 32)
    assert not problems
    assert plan is not None
    assert not plan.layout.tokens_everywhere
    assert "score.weight" in plan.layout.epilogue - plan.layout.prologue


def test_more_stages_than_layers_are_refused() -> None:
    for layers in (1, 4):
        hf_config = CONFIG_MAPPING["llama"](**{**LLAMA, "num_hidden_layers": layers})
        plan, problems = plan_stages(hf_config, "sdpa", 5, 32)
        assert plan is None
        assert f"is more than the model's {layers} layers" in str(problems[0])
        assert f"parallel.pipeline={layers}" in str(problems[0])


def test_the_router_loss_is_that_of_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("mixtral", output_router_logits=True)
    layout = find_layout(model, tokens())
    assert difference(model, layout, (0, 1, 3, 4)) is None
    monkeypatch.setattr("bigtrain.models.parallel.stages.recorded", lambda: None)
    plan, problems = plan_stages(model.config, "sdpa", 2, 32)
    assert plan is None
    assert "splitting into stages changes the auxiliary loss (by" in str(problems[0])


@pytest.mark.parametrize(
    ("costs", "num_stages", "cuts"),
    [
        (StageCosts((1.0,) * 8, (1.0,) * 8), 4, (0, 2, 4, 6, 8)),
        (StageCosts((1.0,) * 8, (1.0,) * 8, last_time=2.0), 2, (0, 5, 8)),
        (StageCosts((1.0,) * 4, (1.0,) * 4, last_time=9.0), 3, (0, 1, 3, 4)),
        # Equally fast either way: the layer goes where less memory is taken.
        (StageCosts((1.0,) * 3, (1.0,) * 3, first_memory=5.0), 2, (0, 1, 3)),
        (StageCosts((1.0,) * 3, (1.0,) * 3, last_memory=5.0), 2, (0, 2, 3)),
        (StageCosts((5.0, 1.0, 1.0, 1.0), (1.0,) * 4), 2, (0, 1, 4)),
        (StageCosts((1.0,), (1.0,)), 1, (0, 1)),
    ],
)
def test_balanced_cuts(costs: StageCosts, num_stages: int, cuts: tuple[int, ...]) -> None:
    assert balanced_cuts(costs, num_stages) == cuts


def test_balance_is_the_best_there_is() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        time = tuple(torch.rand(7, generator=generator).tolist())
        costs = StageCosts(time, (0.0,) * 7, last_time=1.5)

        def slowest(cuts: tuple[int, ...], time: tuple[float, ...] = time) -> float:
            stages = [sum(time[a:b]) for a, b in pairwise(cuts)]
            return max(*stages[:-1], stages[-1] + 1.5)

        best = min(slowest((0, a, b, 7)) for a in range(1, 6) for b in range(a + 1, 7))
        assert slowest(balanced_cuts(costs, 3)) <= best * 1.05 + 1e-9


def test_payloads_survive_packing() -> None:
    hidden = torch.randn(2, 3, requires_grad=True)
    other = torch.randn(4, requires_grad=True)
    payload = Payload(
        (hidden, None, torch.tensor([1, 2]), torch.tensor([True, False])),
        {"states": {0: (other, torch.tensor([0.5, -0.0], dtype=torch.bfloat16))}},
    )
    packing = P2PLayout.of(payload)
    tensors = packing.pack(payload)
    assert packing.num_differentiable == 2
    assert [t.is_floating_point() for t in tensors] == [True, True, False, False, False]
    again = packing.unpack(tensors)
    assert again.outputs[0] is hidden
    assert again.outputs[1] is None
    assert torch.equal(again.outputs[3], torch.tensor([True, False]))
    assert again.shared["states"][0][0] is other
    assert again.shared["states"][0][1].dtype == torch.bfloat16
    assert torch.equal(again.shared["states"][0][1], payload.shared["states"][0][1])


def test_touched_tensors_get_a_gradient() -> None:
    first = torch.tensor([1.0, 2.0], requires_grad=True)
    second = torch.tensor([float("inf")], requires_grad=True)
    result = touch(first * 2, (second,))
    assert torch.equal(result, torch.tensor([2.0, 4.0]))
    result.sum().backward()
    assert torch.equal(first.grad, torch.tensor([2.0, 2.0]))  # type: ignore[arg-type]
    assert torch.equal(second.grad, torch.zeros(1))  # type: ignore[arg-type]


def test_rules_of_a_model_reach_into_layers_of_other_stages() -> None:
    """Initial weights of stages are the full model's, where the model sets a buffer of each layer
    (Falcon-H1)."""
    config = hybrid_config("falcon_h1")
    plan, problems = plan_stages(config, "auto", 2, 24)
    assert plan is not None, problems
    section = ModelSection(config=HYBRIDS["falcon_h1"])
    full = build_model(section, hybrid_config("falcon_h1"), seed=0)
    expected = dict(full.named_parameters()) | dict(full.named_buffers())
    found = set()
    for index in range(2):
        stages: list[Stage] = []

        def split(model: Any, index: int = index, stages: list[Stage] = stages) -> None:
            stages.append(Stage(model, plan.layout, plan.cuts, index))

        build_model(
            section,
            hybrid_config("falcon_h1"),
            seed=0,
            partitioning=replace(WHOLE, prepare=split),
            weights="left",
        )
        model = stages[0].model
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(tensor, expected[name]), name
            found.add(name)
    assert found == set(expected)
    assert "model.layers.1.mamba.mup_vector" in found
