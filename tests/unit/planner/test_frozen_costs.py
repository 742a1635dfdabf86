"""What is counted of parameters that `model.frozen` names: neither gradients nor states, and no
backward pass before the first trained parameter."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.tracing import traced_costs
from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.model_costs import ModelCosts
from bigtrain.planner.stages import stage_sizes, stages_of
from bigtrain.planner.step_time import step_time
from bigtrain.planner.tables.engines import engine_named
from bigtrain.planner.tables.hardware import find_device
from bigtrain.settings.run_config import ModelSection, RunConfig
from tests.parity.conftest import ARCHITECTURES, llama

MODELS = {
    "tied": llama(tie_word_embeddings=True),
    "untied": llama(tie_word_embeddings=False),
    "experts": ARCHITECTURES["qwen3_moe"],
}
FROZEN: list[tuple[str, tuple[str, ...]]] = [
    ("tied", ("*embed_tokens*",)),
    ("untied", ("*embed_tokens*", "*layers.0.*")),
    ("untied", ("lm_head*", "model.norm*", "*self_attn*")),
    ("experts", ("*experts*", "*layernorm*")),
]
LOWER = ("*embed_tokens*", "*layers.0.*")


@cache
def costs_of(model: str, frozen: tuple[str, ...]) -> ModelCosts:
    config = load_hf_config(ModelSection(config=MODELS[model]))
    return trace_model(config, torch.float32, frozen=frozen)


@pytest.mark.parametrize(("model", "frozen"), FROZEN)
@pytest.mark.parametrize("num_stages", [1, 2])
def test_as_much_is_counted_as_is_trained(
    model: str, frozen: tuple[str, ...], num_stages: int
) -> None:
    costs, layout = costs_of(model, frozen), Layout(pipeline_size=num_stages)
    section = ModelSection(config=MODELS[model], frozen=frozen)
    built = build_model(section, load_hf_config(section), seed=0)
    trained = {name: p.numel() for name, p in built.named_parameters() if p.requires_grad}
    num_expert = sum(size for name, size in trained.items() if ".experts." in name)
    stages = [
        (stage_sizes(stage, costs, layout), stage.num_alike)
        for stage in stages_of(costs, num_stages, True)
    ]
    assert sum(sizes.trained * alike for sizes, alike in stages) == sum(trained.values())
    assert sum(sizes.trained_expert * alike for sizes, alike in stages) == num_expert
    assert ModelCosts.from_json(costs.to_json()) == costs


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_and_states_are_of_what_is_trained(zero_stage: int) -> None:
    """In bfloat16 with sums in float32: 2 bytes a parameter; 12 of master and moments, 4 of
    gradients, and under ZeRO 1 2 of their 16-bit ones, of a trained parameter."""
    costs = costs_of("untied", LOWER)
    trained = costs.num_parameters - costs.embedding_parameters - costs.kinds[0].num_parameters
    use = peak_memory(costs, Layout(data_size=2, zero_stage=zero_stage), engine_named("deepspeed"))
    states = 2 * costs.num_parameters / (2 if zero_stage == 3 else 1)
    assert use.states == pytest.approx(states + 12 * trained / (2 if zero_stage else 1))
    gradients = 4 * trained / (2 if zero_stage >= 2 else 1)
    assert use.gradients == pytest.approx(gradients + (2 * trained if zero_stage == 1 else 0))


def test_nothing_is_saved_before_the_first_trained_parameter() -> None:
    costs = costs_of("untied", LOWER)
    first, second = (costs.kinds[kind] for kind in costs.layers[:2])
    whole = costs_of("untied", ()).kinds[0]
    assert not first.has_backward
    assert first.saved_bytes_whole + first.saved_bytes_cut == 0
    assert second.saved_bytes_cut == whole.saved_bytes_cut
    assert [matmul.is_frozen for matmul in (*first.matmuls, *second.matmuls)] == (
        [True] * len(first.matmuls) + [False] * len(second.matmuls)
    )


def test_frozen_weights_take_less_time() -> None:
    """Of one layer of two: no backward pass, two thirds of its products. Of attention's weights:
    no gradient of the weights, a third of theirs."""
    device, layout = find_device("H100-80GB"), Layout(sequence_length=512)

    def matmul_seconds(frozen: tuple[str, ...]) -> float:
        return step_time(
            costs_of("untied", frozen), layout, device, engine_named("deepspeed")
        ).matmul

    whole, lower, attention = map(matmul_seconds, ((), LOWER, ("*self_attn*",)))
    assert lower < attention < whole


def test_costs_of_a_run_are_of_what_it_trains() -> None:
    """Also where an equal model that trains everything was traced before."""
    tree = {
        "data": {"path": "unused"},
        "batch": {"sequence_length": 64, "global_batch_size": 1},
        "train": {"steps": 1},
        "optimizer": {"lr": 1e-3},
        "output": {"directory": "unused"},
    }
    plain, frozen = (
        RunConfig.model_validate(
            {**tree, "model": {"config": MODELS["untied"], "frozen": patterns}}
        )
        for patterns in ([], list(LOWER))
    )
    assert not traced_costs.model_costs(plain)[0].is_embedding_frozen
    assert traced_costs.model_costs(frozen)[0].is_embedding_frozen
