"""Which changed settings make another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigtrain.config import RunConfig
from bigtrain.errors import CheckpointError
from bigtrain.run.resume import _refuse_another_run


def tree(**data: Any) -> dict[str, Any]:
    return {
        "model": {"config": {"model_type": "llama"}},
        "data": data or {"path": "shards"},
        "batch": {"sequence_length": 8, "global_samples": 4},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "output": {"directory": "unused"},
    }


def stored(config: dict[str, Any]) -> dict[str, Any]:
    return {"config": RunConfig.model_validate(config).model_dump(mode="json"), "data_hash": "h"}


def refuse(document: dict[str, Any], now: dict[str, Any], data_hash: str = "h") -> None:
    _refuse_another_run(document, RunConfig.model_validate(now), data_hash, Path("checkpoint"))


def test_a_checkpoint_from_before_mixtures_and_boundaries_goes_on() -> None:
    document = stored(tree())
    del document["config"]["data"]["sources"], document["config"]["data"]["document_boundaries"]
    refuse(document, tree())
    with pytest.raises(
        CheckpointError, match=r"data\.document_boundaries: 'ignore' there, 'isolate' now"
    ):
        refuse(document, tree(path="shards", document_boundaries="isolate"))


def test_a_path_may_become_a_mixture_of_one() -> None:
    refuse(stored(tree()), tree(sources=[{"path": "moved", "weight": 2}]))


def test_other_data_is_another_run() -> None:
    with pytest.raises(CheckpointError, match=r"data: 'h' there, 'other' now"):
        refuse(stored(tree()), tree(), "other")
