"""`bigtrain parity` passes where the numbers are the same, and says where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bigtrain.cli import main
from bigtrain.config import RunConfig
from bigtrain.run.parity import (
    Figures,
    Point,
    compare,
    micro_batches,
    points,
    shrink,
    train_points,
    train_reference,
)
from bigtrain.topology import BatchPlan
from tests.parity.conftest import ARCHITECTURES, llama, run_config

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def config_of(data: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        run_config(data, {"config": llama()}, micro_samples=1, **sections)
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return shrink(config_of(Path("unread")), 2, tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def reference(small: RunConfig) -> Figures:
    return train_reference(small)


def test_every_topology_is_listed_once(small: RunConfig) -> None:
    found = points(small, 2)
    assert len({point.name for point in found}) == len(found)
    legal = [point.name for point in found if point.refusal is None]
    assert {"zero0, data 2", "zero3, data 2", "zero2, data 1, sequence 2"} <= set(legal)
    assert all(point.refusal for point in found if point.name not in legal)


def test_an_architecture_without_a_plan_is_refused_at_that_degree_alone(tmp_path: Path) -> None:
    run = run_config(Path("unread"), {"config": ARCHITECTURES["gpt2"]}, micro_samples=1)
    small = shrink(RunConfig.model_validate(run), 2, tmp_path / "model")
    refusals = {point.name: point.refusal for point in points(small, 2)}
    assert "gpt2" in str(refusals["zero1, data 1, tensor 2"])
    assert refusals["pipeline_zero1, data 1, pipeline 2"] is None


def test_batches_are_the_same_at_every_topology(small: RunConfig) -> None:
    whole = micro_batches(small, BatchPlan(4, 4, 1, 1, 16), 3, 0)[0]
    plan = BatchPlan(4, 1, 2, 2, 16)
    rows = [micro_batches(small, plan, 3, rank)[micro] for micro in (0, 1) for rank in (0, 1)]
    assert torch.equal(torch.cat([row.input_ids for row in rows]), whole.input_ids)
    assert torch.equal(torch.cat([row.labels for row in rows]), whole.labels)


def test_the_command_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: Path
) -> None:
    # The loss in chunks, on every topology; the reference takes all logits at once.
    run = run_config(dataset, {"config": llama(), "loss": "chunked"}, micro_samples=1)
    run["data"] = {"path": str(dataset), "document_boundaries": "isolate"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["parity", "--config", str(tmp_path / "run.yaml"), "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("  same") >= 8
    assert "DIFFERENT" not in out


def test_another_model_is_found_out(small: RunConfig, reference: Figures, tmp_path: Path) -> None:
    point = next(p for p in points(small, 2) if p.name == "zero1, data 2")
    other = small.model_copy(update={"seed": small.seed + 1})
    found = train_points(other, [point], 2, tmp_path)[point.name]
    verdict = compare(point, reference, found)
    assert not verdict.passed
    assert "layers.0, in the forward pass" in verdict.where


def test_where_a_difference_arises(small: RunConfig, reference: Figures) -> None:
    point: Point = points(small, 2)[0]
    assert compare(point, reference, reference).passed

    name = list(reference.first)[4]
    moved = {**reference.first, name: reference.first[name] + 1e-3}
    last = {**reference.last, name: reference.last[name] + 1e-3}
    verdict = compare(point, reference, replace(reference, first=moved, last=last))
    assert not verdict.passed
    assert verdict.where == f"the gradient of {name}, in the backward pass of the first step"

    losses = [reference.losses[0] + 1e-3, *reference.losses[1:]]
    verdict = compare(point, reference, replace(reference, losses=losses))
    assert verdict.where == "after the last layer: norm, head or loss"

    norms = [*reference.norms[:-1], float("nan")]
    assert not compare(point, reference, replace(reference, norms=norms)).passed

    missing = {key: value for key, value in reference.last.items() if key != name}
    assert not compare(point, reference, replace(reference, last=missing)).passed
