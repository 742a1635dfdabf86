"""Parameters without a gradient, found before a run, against a backward pass of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bigtrain.models.build import empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence import parameter_plan
from bigtrain.models.equivalence.parameter_plan import (
    GradientReach,
    find_gradient_reach,
    plan_parameters,
    summarized,
)
from bigtrain.settings.run_config import ModelSection, RunConfig
from tests.support.run_trees import run_config
from tests.unit.models.equivalence.test_thresholds import deepseek_v4
from tools.tiny_models import model_types, tiny_config, tiny_model

SAMPLE = ("llama", "gemma3", "deepseek_v32", "ernie4_5_moe", "jetmoe")


def absent_gradients(model_type: str) -> list[str]:
    model: Any = tiny_model(model_type)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (2, 32), generator=generator)
    outputs = model(input_ids=ids, use_cache=False)
    (outputs.logits.float().square().mean()).backward()
    return [name for name, p in model.named_parameters() if p.grad is None]


@pytest.mark.parametrize("model_type", SAMPLE)
def test_found_without_a_backward_pass(model_type: str) -> None:
    names = find_gradient_reach(tiny_config(model_type), 32).absent
    assert names is not None
    assert list(names) == absent_gradients(model_type)
    assert bool(names) == (model_type not in ("llama", "jetmoe"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [n for n in model_types() if n not in SAMPLE])
def test_found_for_every_architecture(model_type: str) -> None:
    try:
        expected = absent_gradients(model_type)
    except Exception as error:
        pytest.skip(f"no tiny model: {type(error).__name__}")
    names = find_gradient_reach(tiny_config(model_type), 32).absent
    if model_type == "xmod":  # its configuration has no default language beside tiny_config's
        assert names in (None, ())
        return
    assert names is not None
    assert list(names) == expected


def test_a_model_that_cannot_be_run_is_trained_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(parameter_plan, "_on_meta", refuse)
    assert find_gradient_reach(tiny_config("llama"), 32).absent == ()  # of a proxy model
    monkeypatch.setattr(parameter_plan, "_on_cpu", refuse)
    assert find_gradient_reach(tiny_config("llama"), 32).absent is None
    plan = plan_parameters(run_of("llama"), tiny_config("llama"))
    assert plan.untrained == ()
    assert "not known" in plan.reason


def run_of(model_type: str, **model: Any) -> RunConfig:
    return run_config(model={"config": {"model_type": model_type}, **model})


def test_the_log_names_modules_that_are_not_trained() -> None:
    config = tiny_config("gemma3")
    plan = plan_parameters(run_of("gemma3"), config)
    assert plan.reason == (
        "not trained, since they get no gradient from text: 82 parameters "
        "(model.multi_modal_projector.*, model.vision_tower.*)"
    )
    assert "model.language_model.layers.*.mlp.up_proj.weight" in plan.decaying
    assert not any("vision_tower" in name for name in plan.decaying)
    frozen = plan_parameters(run_of("gemma3", frozen=["model.vision_tower.*"]), config)
    assert "vision_tower" not in frozen.reason
    assert "multi_modal_projector" in frozen.reason


def test_modules_are_named_where_all_of_them_is_meant() -> None:
    every = ["a.0.x", "a.0.y", "a.1.x", "a.1.y", "b.x", "b.y"]
    assert summarized(["a.0.x", "a.1.x", "b.x", "b.y"], every) == ["a.*.x", "b.*"]


def test_a_matrix_that_no_input_multiplies_does_not_decay() -> None:
    config = AutoConfig.for_model(
        "mamba", hidden_size=16, num_hidden_layers=2, vocab_size=32, state_size=4
    )
    plan = plan_parameters(run_of("mamba"), config)
    assert "backbone.layers.*.mixer.A_log" not in plan.decaying
    assert "backbone.layers.*.mixer.conv1d.weight" in plan.decaying
    assert len(list(empty_model(config).parameters())) > len(plan.decaying)


USER_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class FailingConfig(LlamaConfig):
    model_type = "failing_{name}"

class Failing(LlamaForCausalLM):
    config_class = FailingConfig

    def {method}(self, *args, **options):
        {body}
        return super().{method}(*args, **options)
"""


@pytest.mark.parametrize(
    ("method", "body"),
    [
        ("forward", "args[5]"),
        ("__init__", "raise ValueError('as asked')"),
        ("forward", "self.model.absent_attribute"),
    ],
)
def test_a_failure_of_the_users_class_names_its_line(
    method: str, body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is raised below it, in torch."""
    name = f"failing_{len(body)}_{method.strip('_')}"
    file = tmp_path / f"{name}.py"
    file.write_text(USER_CODE.format(name=name, method=method, body=body))
    monkeypatch.chdir(tmp_path)
    sizes = {
        **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
    }
    section = ModelSection(type=f"{name}:Failing", config=sizes)
    reach = find_gradient_reach(load_hf_config(section), 32)
    line = file.read_text().splitlines().index(f"        {body}") + 1
    assert f"({file}:{line})" in reach.failure


@pytest.mark.parametrize(
    ("sequence_length", "num_compressors"),
    [(80, 1), pytest.param(160, 2, marks=pytest.mark.slow)],
)
def test_parameters_of_compressed_attention_are_trained_where_samples_hold_an_entry(
    sequence_length: int, num_compressors: int
) -> None:
    """One layer has an entry for 64 tokens, one for 128."""
    config = deepseek_v4(64, 128, 512, 128)
    names = find_gradient_reach(config, sequence_length).absent
    assert names is not None
    absent = {name for name in names if ".compressor.kv_proj." in name and "indexer" not in name}
    assert len(absent) == 2 - num_compressors

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model(input_ids=torch.randint(0, 128, (1, sequence_length))).logits.square().mean().backward()
    assert list(names) == [name for name, p in model.named_parameters() if p.grad is None]


def test_adapters_without_effect_are_named() -> None:
    tree = {**run_of("llama").model_dump(exclude_unset=True), "adapters": {"rank": 2}}
    tree["model"] = {"path": "base"}
    config = RunConfig.model_validate(tree)
    hf_config = tiny_config("llama")
    absent = ("model.layers.0.mlp.up_proj.weight", "model.norm.weight")
    plan = plan_parameters(config, hf_config, GradientReach(absent))
    assert plan.unreached == absent[:1]
    assert plan.reason == (
        "adapters without effect, since text gives these weights no gradient: 1 parameters "
        "(model.layers.*.mlp.up_proj.*)"
    )
