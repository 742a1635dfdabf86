"""A run that goes on with other data: a real one, of two sources, stopped and started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from bigtrain.data.loading.loader import open_held_out
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import RunConfig
from tests.launch.conftest import (
    Inputs,
    metrics,
    run_tree,
    tokenize,
    train,
    write_documents,
)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tree(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of four steps of two sources, three to one, of which one has few held-out samples."""
    root = tmp_path_factory.mktemp("changed")
    texts = write_documents(root / "more.jsonl", 60, seed=1)
    more = tokenize(texts, inputs.tokenizer, root / "more")
    settings = run_tree(inputs.shards, root / "run")
    settings["data"] = {
        "sources": [
            {"path": str(inputs.shards), "weight": 3, "name": "old"},
            {"path": str(more), "weight": 1},
        ]
    }
    settings["train"] = {"steps": 4}
    settings["evaluation"]["samples"] = 3
    return settings


def start(tree: dict[str, Any], *overrides: str) -> tuple[int, str]:
    directory = Path(tree["output"]["directory"])
    run_yaml = directory.with_name("run.yaml")
    run_yaml.write_text(yaml.safe_dump(tree, sort_keys=False))
    finished = train("--config", run_yaml, *overrides)
    return finished.code, finished.output


def held_out_losses(tree: dict[str, Any], model_directory: Path) -> dict[str, float]:
    """Mean loss of each source's held-out samples, by plain transformers."""
    from transformers import AutoModelForCausalLM

    config = RunConfig.model_validate(tree)
    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32).eval()
    losses = {}
    plan = BatchPlan(8, 2, 1, 4, config.batch.sequence_length)
    for source in open_held_out(config, plan, 0):
        total, count = torch.zeros(()), 0
        for batch in source.batches:
            with torch.no_grad():
                logits = model(input_ids=batch.input_ids, use_cache=False).logits
            labels = batch.labels.flatten()
            total += F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            count += int((labels != -100).sum())
        losses[source.name] = float(total / count)
    return losses


def test_goes_on_with_other_shares_and_shorter_and_longer_samples(
    tree: dict[str, Any],
) -> None:
    run = Path(tree["output"]["directory"])
    code, output = start(tree, "data.verify=contents")
    assert code == 0, output
    assert "data verified: 12 files, " in output

    by_source = metrics(run, "held_out_sources")[4]
    assert isinstance(by_source, dict)
    expected = held_out_losses(tree, run / "hf")
    assert list(by_source) == ["old", "more"]
    for name, loss in expected.items():
        assert by_source[name]["loss"] == pytest.approx(loss, rel=1e-5)
        assert by_source[name]["tokens"] == 3 * 32
    weighted = (3 * expected["old"] + expected["more"]) / 4
    assert metrics(run, "held_out_loss")[4] == pytest.approx(weighted, rel=1e-5)

    tree["data"]["sources"][0]["weight"] = 1
    tree["batch"]["sequence_length"] = 16
    tree["train"]["steps"] = 8
    code, output = start(tree)
    assert code == 2, output
    for line in (
        "allow_changes=[batch.sequence_length,data.sources,train.steps]",
        "  batch.sequence_length: 32 there, 16 now\n",
        f"  data.sources: share of {tree['data']['sources'][1]['path']}: 0.25 there, 0.5 now\n",
    ):
        assert line in output

    allowed = "checkpoint.allow_changes=[data,batch.sequence_length,train.steps]"
    code, output = start(tree, allowed)
    assert code == 0, output
    assert "resumed at step 4 " in output
    assert "other data from sample 32 on: batch.sequence_length: 32 there, 16 now" in output
    assert sorted(metrics(run)) == list(range(1, 9))
    assert metrics(run, "tokens")[8] == 4 * 8 * 32 + 4 * 8 * 16
    state = json.loads((run / "checkpoints" / "step-00000008" / "state.json").read_text())
    assert [phase["first_sample"] for phase in state["phases"]] == [0, 32]
    # 32 samples of 32 tokens, three to one: as many halves, rounded up to whole groups of chunks.
    starts = [source["start"] for source in state["phases"][1]["sources"]]
    assert starts[0] >= 48
    assert starts[1] >= 16

    tree["batch"]["sequence_length"] = 48  # which nobody declared
    tree["train"]["steps"] = 10
    code, output = start(tree, allowed)
    assert code == 0, output
    assert "other data from sample 64 on: batch.sequence_length: 16 there, 48 now" in output
    assert f"{tree['data']['sources'][1]['path']}: " in output
    assert " samples are joined from pieces of 32 tokens until its epoch ends" in output
    assert metrics(run, "tokens")[10] == 4 * 8 * 32 + 4 * 8 * 16 + 2 * 8 * 48
    state = json.loads((run / "checkpoints" / "step-00000010" / "state.json").read_text())
    assert [phase["chunk_length"] for phase in state["phases"]] == [32, 32, 48]
