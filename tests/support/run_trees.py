"""Settings of a run with nothing beyond what every run needs."""

from __future__ import annotations

from typing import Any

from bigtrain.settings.run_config import RunConfig


def run_tree(**sections: Any) -> dict[str, Any]:
    """Return the sections that every run has; `sections` replace them, and add others."""
    return {
        "model": {"config": {"model_type": "llama"}},
        "data": {"path": "shards"},
        "batch": {"sequence_length": 8, "global_batch_size": 4},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "output": {"directory": "unused"},
        **sections,
    }


def small_run(**sections: Any) -> RunConfig:
    """Return the settings of `run_tree`, validated."""
    return RunConfig.model_validate(run_tree(**sections))
