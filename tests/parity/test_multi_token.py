"""Layers for multi-token prediction, trained with the model, against plain transformers and
PyTorch in one process."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bigtrain
from bigtrain.data.loading.loader import open_training_data
from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.models.configuration import MTP_MARK
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import parse_run_config
from tests.parity import multi_token_models, objective_runs
from tests.parity.multi_token_models import (
    CONFIGURATIONS,
    VOCAB_SIZE,
    plain_losses,
    small_deepseek_files,
)
from tests.parity.objective_runs import steps_of
from tests.support.datasets import write_dataset

pytestmark = [pytest.mark.distributed]

LENGTH, STEPS, WEIGHT = 32, 10, 0.3
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
    return {
        "model": {"path": str(root / model), "loss_chunk_tokens": 7},
        "objective": {"mtp_weight": WEIGHT},
        "data": {"sources": sources, "packing": packing},
        "batch": {"sequence_length": LENGTH, "global_batch_size": 8, "micro_batch_size": 2},
        "train": {"steps": STEPS},
        "optimizer": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.0, "clip_norm": 1.0},
        "schedule": {"type": "constant"},
        "precision": {"dtype": "float32"},
        "logging": {"every_steps": 1},
        "checkpoint": {"every_steps": STEPS // 2},
        "output": {"directory": str(root / "run"), "export": False},
        **sections,
    }


@cache
def plain_run(
    root: Path, model_name: str, packing: str
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses of the next token, mean losses of the layers, and weights under bigtrain's names."""
    config = parse_run_config(run_of(root, model_name, packing))
    model, mtp = multi_token_models.load(root / model_name)
    parameters = list(dict.fromkeys([*model.train().parameters(), *mtp.train().parameters()]))
    section = config.optimizer
    optimizer = torch.optim.AdamW(
        parameters, section.lr, tuple(section.betas), section.eps, weight_decay=0.0
    )
    plan, _ = plan_batch(config.batch.model_copy(update={"micro_batch_size": 8}), 1)
    assert plan is not None
    batches = open_training_data(config, plan, 0)
    losses, deeper_losses = [], []
    for step in range(STEPS):
        (batch,) = batches.step(8 * step)
        main, deeper = plain_losses(model, mtp, batch)
        added = torch.stack([one.sum() for one in deeper]).mean()
        loss = (main.sum() + WEIGHT * added) / len(main)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses.append(float(main.mean().detach()))
        deeper_losses.append(float(torch.stack([one.mean() for one in deeper]).mean().detach()))
    batches.close()
    weights = dict(model.state_dict())
    weights |= {f"mtp.layers.{name}": value for name, value in mtp.layers.state_dict().items()}
    return losses, deeper_losses, weights


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "engine", "packing", "settings"),
    [
        slow("deepseek", "zero1", PACKED, {}),
        slow("deepseek", "zero3", PACKED, {"gradient_checkpointing": "full"}),
        slow("deepseek", "zero0", CROSSING, {}),
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
    objective_runs.train(root, name, tree | {"train": {"steps": STEPS // 2}}, 2)
    more = {"checkpoint": {"allow_changes": ["train.steps"]}}
    rows = steps_of(objective_runs.train(root, name, tree | more, 1))
    losses, deeper, weights = plain_run(root, model, packing)
    assert [row["loss"] for row in rows] == pytest.approx(losses, abs=1e-5, rel=1e-5)
    assert [row["mtp_loss"] for row in rows] == pytest.approx(deeper, abs=1e-5, rel=1e-5)
    assert losses[-1] < losses[0]
    assert deeper[-1] < deeper[0]
    trained = bigtrain.load_state_dict(root / name)
    assert any(key.startswith("mtp.layers.") for key in trained)
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_a_resume_is_exact(root: Path, engine: str) -> None:
    """Losses and weights of a run that stops and resumes are those of one that does not."""
    tree = run_of(root, "deepseek", PACKED, engine={"deepspeed_config": engine})
    tree |= {"train": {"steps": 6}, "checkpoint": {"every_steps": 3}}
    rows = steps_of(objective_runs.train(root, f"unbroken-{engine}", tree, 2))
    objective_runs.train(root, f"resumed-{engine}", tree | {"train": {"steps": 3}}, 2)
    longer = tree | {"checkpoint": {"every_steps": 3, "allow_changes": ["train.steps"]}}
    again = steps_of(objective_runs.train(root, f"resumed-{engine}", longer, 2))
    for name in ("loss", "mtp_loss", "grad_norm"):
        assert [row[name] for row in again] == [row[name] for row in rows]
    weights = bigtrain.load_state_dict(root / f"unbroken-{engine}")
    for key, tensor in bigtrain.load_state_dict(root / f"resumed-{engine}").items():
        assert torch.equal(tensor, weights[key]), key


@pytest.mark.slow
def test_bfloat16_follows_float32(root: Path) -> None:
    """Within bfloat16's rounding, 2**-8, at ZeRO 3 on two ranks."""
    tree = run_of(root, "deepseek", PACKED, engine={"deepspeed_config": "zero3"})
    rows = steps_of(
        objective_runs.train(root, "rounded", tree | {"precision": {"dtype": "bfloat16"}}, 2)
    )
    losses, deeper, _ = plain_run(root, "deepseek", PACKED)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=2**-7)
    assert [row["mtp_loss"] for row in rows] == pytest.approx(deeper, rel=2**-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "has_base"),
    list(product(("deepseek", "mellum"), (True, False))),
)
def test_transformers_reads_an_export(
    root: Path, tmp_path: Path, model: str, has_base: bool
) -> None:
    """Names of the published files; values of transformers' `MtpModel`; sharded or not."""
    tree = run_of(root, model, PACKED, engine={"deepspeed_config": "zero3"}, train={"steps": 2})
    if not has_base:
        tree["model"] = {"config": CONFIGURATIONS[model]().to_diff_dict()}
    name = f"exported-{model}-{has_base}"
    objective_runs.train(root, name, tree, 2)
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
    objective_runs.train(root, name, tree, 1)
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
@pytest.mark.parametrize("engine", ["zero1", "zero3"])
def test_only_the_layers_are_trained_on_a_frozen_model(root: Path, engine: str) -> None:
    tree = run_of(root, "deepseek", PACKED, engine={"deepspeed_config": engine})
    tree["model"] |= {"frozen": ["model.*", "lm_head.*"]}
    tree["optimizer"] |= {"lr": 1e-2}
    rows = steps_of(objective_runs.train(root, f"frozen-{engine}", tree, 2))
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"] - 0.1
    base = tensors_of(root / "deepseek")
    for key, tensor in bigtrain.load_state_dict(root / f"frozen-{engine}").items():
        assert key not in base or torch.equal(tensor, base[key])


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
