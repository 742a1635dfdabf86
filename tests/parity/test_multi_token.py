"""Layers for multi-token prediction, trained with the model, against plain transformers and
PyTorch in one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bigtrain
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.models.configuration import MTP_MARK
from tests.parity import multi_token_models
from tests.parity.multi_token_models import (
    CONFIGURATIONS,
    VOCAB_SIZE,
    plain_losses,
    small_deepseek_files,
)
from tests.parity.objective_runs import (
    Plain,
    plain_training,
    run_tree,
    steps_of,
    train,
    train_in_two,
)
from tests.support.datasets import write_dataset

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, WEIGHT = 32, 6, 0.3
PACKED, CROSSING = "best_fit", "concatenate"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets, one with masked targets, and models."""
    directory = tmp_path_factory.mktemp("multi_token")
    for name, seed in (("one", 0), ("two", 1)):
        write_dataset(directory / name, vocab_size=VOCAB_SIZE, seed=seed, masked=name == "two")
    for name in CONFIGURATIONS:
        multi_token_models.save(name, directory / name)
    return directory


def run_of(root: Path, model: str, packing: str, **sections: Any) -> dict[str, Any]:
    names = ("one", "two") if packing == PACKED else ("one",)  # conversations are not split
    sources = [{"path": str(root / name), "weight": 1.0} for name in names]
    return run_tree(
        root,
        length=LENGTH,
        steps=STEPS,
        **{
            "model": {"path": str(root / model), "loss_chunk_tokens": 7},
            "objective": {"mtp_weight": WEIGHT},
            "data": {"sources": sources, "packing": packing},
            "optimizer": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0, "clip_norm": 1.0},
            **sections,
        },
    )


def plain_loss(both: Any, parts: list[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of the next token and of the layers; metrics: the mean of each."""
    losses = [plain_losses(both["model"], both["mtp"], part) for part in parts]
    main = torch.cat([of_next for of_next, _ in losses])
    deeper = [torch.cat(of_layer) for of_layer in zip(*(d for _, d in losses), strict=True)]
    added = torch.stack([one.sum() for one in deeper]).mean()
    means = torch.stack([one.mean() for one in deeper])
    metrics = {"loss": main.mean(), "mtp_loss": means.mean()}
    return (main.sum() + WEIGHT * added) / len(main), metrics


@cache
def plain_run(root: Path, model_name: str, packing: str) -> Plain:
    model, mtp = multi_token_models.load(root / model_name)
    both = torch.nn.ModuleDict({"model": model, "mtp": mtp})
    return plain_training(run_of(root, model_name, packing), both, plain_loss)


def assert_same_losses(lines: list[dict[str, Any]], plain: Plain, rel: float = 1e-5) -> None:
    for name in ("loss", "mtp_loss"):
        expected = [row["recorded"][name] for row in plain.rows]
        values = [row[name] for row in steps_of(lines)]
        assert values == pytest.approx(expected, abs=1e-5, rel=rel)
        assert min(expected[STEPS // 2 :]) < expected[0]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "engine", "packing", "settings"),
    [
        slow("deepseek", "zero3", PACKED, {"gradient_checkpointing": "full"}),
        slow("deepseek", "zero2", CROSSING, {"gradient_checkpointing": 2}),
        slow("deepseek", "zero3", CROSSING, {}),
        slow("deepseek", "zero2_offload", PACKED, {"attention": "eager"}),
        ("mellum", "zero1", PACKED, {}),
        slow("mellum", "zero3", PACKED, {}),
    ],
)
def test_equals_a_plain_loop(
    root: Path, model: str, engine: str, packing: str, settings: dict[str, Any]
) -> None:
    """Half of it on two ranks, the rest, resumed, on one."""
    tree = run_of(root, model, packing, engine={"deepspeed_config": engine})
    tree["model"] |= settings
    name = f"{model}-{engine}-{packing}-{len(settings)}"
    plain = plain_run(root, model, packing)
    assert_same_losses(train_in_two(root, name, tree), plain)
    trained = bigtrain.load_state_dict(root / name)
    assert any(key.startswith("mtp.layers.") for key in trained)
    for key, tensor in trained.items():
        own = key if key.startswith("mtp.layers.") else f"model.{key}"
        torch.testing.assert_close(tensor, plain.weights[own], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_resume_is_exact(root: Path) -> None:
    """Losses and weights of a run that stops and resumes are those of one that does not."""
    tree = run_of(root, "deepseek", PACKED, engine={"deepspeed_config": "zero3"})
    rows = steps_of(train(root, "unbroken", tree, 2))
    again = steps_of(train_in_two(root, "resumed", tree, then_size=2))
    for name in ("loss", "mtp_loss", "grad_norm"):
        assert [row[name] for row in again] == [row[name] for row in rows]
    weights = bigtrain.load_state_dict(root / "unbroken")
    for key, tensor in bigtrain.load_state_dict(root / "resumed").items():
        assert torch.equal(tensor, weights[key]), key


@pytest.mark.slow
def test_bfloat16_follows_float32(root: Path) -> None:
    """Within bfloat16's rounding, 2**-8, at ZeRO 3 on two ranks."""
    tree = run_of(root, "deepseek", PACKED, engine={"deepspeed_config": "zero3"})
    lines = train(root, "rounded", tree | {"precision": {"dtype": "bfloat16"}}, 2)
    assert_same_losses(lines, plain_run(root, "deepseek", PACKED), rel=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "has_base"),
    [("deepseek", True), ("deepseek", False), ("mellum", True)],
)
def test_transformers_reads_an_export(
    root: Path, tmp_path: Path, model: str, has_base: bool
) -> None:
    """Names of the published files; values of transformers' `MtpModel`; sharded or not."""
    tree = run_of(root, model, PACKED, engine={"deepspeed_config": "zero3"}, train={"steps": 2})
    if not has_base:
        tree["model"] = {"config": CONFIGURATIONS[model]().to_diff_dict()}
    name = f"exported-{model}-{has_base}"
    train(root, name, tree, 2)
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(root / name / "tokenizer")
    output = tmp_path / "exported"
    with small_deepseek_files():
        bigtrain.export_run(root / name, output, max_shard_size="5GB" if has_base else "20KB")
    plain, mtp = multi_token_models.load(output)
    weights = dict(plain.state_dict())
    weights |= {f"mtp.layers.{key}": tensor for key, tensor in mtp.layers.state_dict().items()}
    trained = bigtrain.load_state_dict(root / name)
    for key, tensor in trained.items():
        assert torch.equal(tensor.view_as(weights[key]), weights[key]), key
    base, written = (tensors_of(directory) for directory in (root / model, output))
    assert written.keys() == base.keys()
    for number in (2, 3) if model == "deepseek" else ():
        for end, name in (
            ("embed_tokens", "model.embed_tokens"),
            ("shared_head.head", "lm_head"),
        ):
            copied = written[f"model.layers.{number}.{end}.weight"]
            assert torch.equal(copied, weights[f"{name}.weight"])
    assert MTP_MARK not in (output / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("has_base", [True, False])
def test_layers_that_are_not_trained_are_named(root: Path, tmp_path: Path, has_base: bool) -> None:
    """At the start and at the export, which copies a base's."""
    tree = run_of(root, "deepseek", PACKED, objective={}, train={"steps": 1})
    if not has_base:
        tree["model"] = {"config": CONFIGURATIONS["deepseek"]().to_diff_dict()}
    name = f"untrained-{has_base}"
    train(root, name, tree, 1)
    log = (root / name / "log.txt").read_text()
    assert "multi-token prediction that the configuration counts: 2, not built" in log
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(root / name / "tokenizer")
    with small_deepseek_files():
        bigtrain.export_run(root / name, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    base, written = tensors_of(root / "deepseek"), tensors_of(tmp_path / "out")
    if has_base:
        assert written.keys() == base.keys()
        copied = [key for key in base if key.startswith(("model.layers.2.", "model.layers.3."))]
        assert all(torch.equal(written[key], base[key]) for key in copied)
        assert "are copied from the base, not trained: model.layers.2." in card
    else:
        assert "counts layers for multi-token prediction (2), which were not trained" in card


@pytest.mark.slow
def test_only_the_layers_are_trained_on_a_frozen_model(root: Path) -> None:
    tree = run_of(root, "deepseek", PACKED, engine={"deepspeed_config": "zero3"})
    tree["model"] |= {"frozen": ["model.*", "lm_head.*"]}
    tree["optimizer"] |= {"lr": 1e-2}
    rows = steps_of(train(root, "frozen", tree, 2))
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"] - 0.1
    base = tensors_of(root / "deepseek")
    for key, tensor in bigtrain.load_state_dict(root / "frozen").items():
        assert key not in base or torch.equal(tensor, base[key])


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
