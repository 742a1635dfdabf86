"""What fits without offload if something else is trained is shown, and never taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigtrain.errors import ConfigError
from bigtrain.python_api.planning import plan
from bigtrain.python_api.proposals import offloads


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: Path = tmp_path_factory.getbasetemp() / "proposals-cache"
    monkeypatch.setenv("BIGTRAIN_CACHE", str(shared))


CASES = {
    # 1B from its weights on 24 GB: states of 20 bytes a parameter do not fit.
    "a chat model of 1B on 24 GB": (
        "chat_1b", "1xRTX4090-24GB",
        ["optimizer.type=adamw_8bit", "adapters={rank: 16, targets: all-linear}: LoRA"],
    ),
    # Only a base in 4 bits leaves room for activations.
    "8B on 24 GB": ("qwen3_8b_continue", "1xRTX4090-24GB", ["quantization: nf4"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_smaller_states_and_adapters_are_proposed(name: str) -> None:
    recipe, gpus, expected = CASES[name]
    overrides = ["batch.global_batch_size=8", "batch.global_tokens=null"]
    try:
        found = plan(recipe, gpus, *overrides)
    except ConfigError as error:
        text = str(error)
    else:
        assert all(offloads(candidate) for candidate in found.fitting)
        assert not any(offloads(proposal.candidate) for proposal in found.proposals)
        tree, _ = found.run_tree()
        assert "adapters" not in tree
        assert "type" not in tree["optimizer"]
        text = found.table()
    assert "trains something else, so that no plan takes it" in text
    for override in expected:
        assert override in text


def test_nothing_is_proposed_where_the_run_fits() -> None:
    found = plan("chat_1b", "1xH100-80GB")
    assert not offloads(found.fitting[0])
    assert not found.proposals
    assert "no plan takes it" not in found.table()
