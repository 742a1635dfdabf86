"""The run of tests that look at one section of it: the least that a run YAML has."""

from __future__ import annotations

from typing import Any

from bigtrain.settings.run_config import RunConfig


def run_tree(**sections: Any) -> dict[str, Any]:
    """Return a run of a llama: `model`, `data`, `train` replace the section, others are joined."""
    tree: dict[str, Any] = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"path": "shards"},
        "batch": {"sequence_length": 8, "global_batch_size": 4},
        "train": {"steps": 2},
        "optimizer": {"lr": 1e-3},
        "output": {"directory": "run"},
    }
    for name, section in sections.items():
        joins = name not in ("model", "data", "train") and isinstance(section, dict)
        tree[name] = {**tree.get(name, {}), **section} if joins else section
    return tree


def run_config(**sections: Any) -> RunConfig:
    """Return the settings of such a run."""
    return RunConfig.model_validate(run_tree(**sections))


def llama(vocab_size: int) -> dict[str, Any]:
    """Return a `model` whose vocabulary is known."""
    return {"config": {"model_type": "llama", "vocab_size": vocab_size}}
