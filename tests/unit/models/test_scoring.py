"""Models that score the last token of a padded sample, and those that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from bigtrain.errors import ConfigError
from bigtrain.models.configuration import load_hf_config, scores_samples, with_objective_head
from bigtrain.models.equivalence.scoring import check_scoring
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.planner.run_prediction import predict_run
from bigtrain.planner.tables.hardware import find_device
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.resolve import resolve_run
from tests.support.run_trees import run_tree

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


SECTIONS = run_tree(
    objective={"type": "reward"}, batch={"sequence_length": 16, "global_batch_size": 1}
)


def configured(model: dict[str, Any], labels: tuple[str, ...] = ()) -> Any:
    config = parse_run_config({**SECTIONS, "model": model})
    return with_objective_head(load_hf_config(config.model), config, labels)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_neox"])
def test_causal_models_score_the_last_token(kind: str) -> None:
    hf_config = configured({"config": {"model_type": kind, **SIZES, "pad_token_id": 1}})
    assert scores_samples(hf_config)
    assert hf_config.num_labels == 1
    assert check_scoring(hf_config, "auto", 24, "model.config") == []


@pytest.mark.parametrize(
    ("kind", "is_decoder", "why"),
    [
        ("bert", False, "depend on the padding after a sample"),
        ("roberta", False, "depend on the padding after a sample"),
        ("roberta", True, "do not depend on the last token of a sample"),
    ],
)
def test_encoders_do_not(kind: str, is_decoder: bool, why: str) -> None:
    hf_config = configured({"config": {"model_type": kind, **SIZES, "is_decoder": is_decoder}})
    (problem,) = check_scoring(hf_config, "auto", 24, "model.config")
    assert problem.key == "model.config"
    assert why in problem.rule
    assert "llama" in problem.remedy


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"model_type": "mamba", "vocab_size": 128}, "transformers has no class with a score head"),
        (
            {"model_type": "llama", **SIZES, "eos_token_id": None},
            "neither pad_token_id nor eos",
        ),
    ],
)
def test_models_without_a_head_or_padding_are_refused(model: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configured({"config": model})


def test_padding_is_the_end_of_text_where_there_is_none() -> None:
    hf_config = configured({"config": {"model_type": "llama", **SIZES, "eos_token_id": [5, 6]}})
    assert hf_config.pad_token_id == 5
    assert AutoConfig.for_model("llama", **SIZES).pad_token_id is None  # not by transformers


def test_settings_that_read_tokens_are_refused() -> None:
    tree = {**SECTIONS, "model": {"config": {"model_type": "llama", **SIZES}}}
    tree |= {"evaluation": {"prompts": ["a"], "tasks": ["arc_easy"]}}
    config = parse_run_config(tree)
    problems = config.objective.kind.problems(config)
    assert [problem.key for problem in problems] == ["evaluation.prompts", "evaluation.tasks"]
    assert "predicts no tokens" in problems[0].rule
    with pytest.raises(ConfigError, match=r"objective.type = 'reward': its model predicts no tok"):
        resolve_run(parse_run_config({**tree, "evaluation": {}}), 1, scores=True)


@pytest.mark.parametrize(
    ("kind", "is_tied"), [("llama", False), ("gemma2", True), ("gpt_neox", False)]
)
def test_a_causal_models_weights_become_those_of_the_base(
    kind: str, is_tied: bool, tmp_path: Path
) -> None:
    causal_config = AutoConfig.for_model(
        kind, **SIZES, pad_token_id=1, eos_token_id=2, tie_word_embeddings=is_tied
    )
    AutoModelForCausalLM.from_config(causal_config).save_pretrained(tmp_path / "causal")
    labels = ("low", "middle", "high")
    hf_config = configured({"path": str(tmp_path / "causal")}, labels)
    weights = find_weights(str(tmp_path / "causal"), hf_config, seed=3)
    expected = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "causal", num_labels=len(labels)
    )
    names = {name for name, _ in expected.named_parameters()}
    assert names == {
        n for n in weights.tensors if "rotary" not in n and not n.endswith("bias_mask")
    }
    for name, parameter in expected.named_parameters():
        if name != "score.weight":
            assert torch.equal(weights.tensors[name].read(), parameter), name
    head, again = (
        find_weights(str(tmp_path / "causal"), hf_config, seed=seed).tensors["score.weight"].read()
        for seed in (3, 4)
    )
    assert head.shape == (3, 32)
    assert float(head.std()) == pytest.approx(0.02, rel=0.3)
    assert not torch.equal(head, again)
    assert weights.unused() == {}
    expected.config.id2label = hf_config.id2label
    expected.save_pretrained(tmp_path / "scorer")
    known = configured({"path": str(tmp_path / "scorer")}, labels)
    kept = find_weights(str(tmp_path / "scorer"), known).tensors["score.weight"].read()
    assert torch.equal(kept, expected.score.weight)
    for others, why in (
        (("middle", "low", "high"), "for low, middle, high, and the data has middle, low, high"),
        (("a", "b"), "with 3 labels, and the run needs 2"),
    ):
        with pytest.raises(ConfigError, match=why):
            configured({"path": str(tmp_path / "scorer")}, others)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_plan_has_no_logits_of_the_vocabulary(is_tied: bool) -> None:
    model = {"model_type": "llama", **SIZES, "vocab_size": 4096, "tie_word_embeddings": is_tied}
    config = parse_run_config({**SECTIONS, "model": {"config": model}})
    hf_config = with_objective_head(load_hf_config(config.model), config)
    costs, _ = model_costs(config, hf_config)
    expected = AutoModelForSequenceClassification.from_config(hf_config)
    assert costs.num_parameters == expected.num_parameters()
    for tensor_size in (1, 2):
        parallel = {"parallel": {"tensor": tensor_size}}
        run = resolve_run(
            parse_run_config({**SECTIONS, "model": {"config": model}, **parallel}), tensor_size
        )
        prediction = predict_run(run, costs, None, find_device("H100-SXM"))
        assert prediction.memory.terms()["loss"] < 4096  # its logits alone would be 131,072 bytes
        assert prediction.time is not None
