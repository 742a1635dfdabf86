"""bigtrain: train any Hugging Face causal LM under DeepSpeed, on one CPU or on a cluster.

Importing this package does nothing: no I/O, no environment writes, no torch. What it offers is
imported when it is first used::

    import bigtrain

    shards = bigtrain.tokenize("texts/", "tokenizer/", "shards/", held_out=0.02)
    run = bigtrain.load_config("quickstart", "data.path=shards/", "train.steps=20")
    result = bigtrain.train_run(run)
    print(result.loss, bigtrain.read_metric_columns(result.directory)["loss"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bigtrain.data.shards.dataset import TokenDataset, open_dataset
    from bigtrain.data.shards.scores import Scores, open_scores
    from bigtrain.errors import (
        BigtrainError,
        CheckpointError,
        ConfigError,
        DataError,
        ExtensionError,
        LaunchError,
        ModelError,
        OutputError,
        TrainingError,
    )
    from bigtrain.metrics.recording import record
    from bigtrain.objectives.losses.objective_batch import ObjectiveBatch
    from bigtrain.python_api.configuring import check, load_config, train_run
    from bigtrain.python_api.converting import Converted, convert
    from bigtrain.python_api.new_run import NewRun, write_new_run
    from bigtrain.python_api.planning import Plan, plan
    from bigtrain.python_api.results import (
        add_tokens,
        export_run,
        fetch,
        generate,
        grow_model,
        list_checkpoints,
        load_state_dict,
        merge_run,
        open_conversation,
        read_metric_columns,
        read_metrics,
        verify_model,
        verify_run,
        write_report,
    )
    from bigtrain.python_api.scoring import PerplexityFilter, score
    from bigtrain.python_api.shards import (
        describe_shards,
        make_manifest,
        read_documents,
        verify_shards,
    )
    from bigtrain.python_api.tokenizing import tokenize, train_tokenizer
    from bigtrain.run.checkpointing.listing import ListedCheckpoint
    from bigtrain.run.run_view import RunView, TrainingResult
    from bigtrain.settings.commented_yaml import run_schema
    from bigtrain.settings.resolve import ResolvedRun
    from bigtrain.settings.run_config import RunConfig

__version__ = "0.1.0"

_HOMES = {
    "bigtrain.python_api.tokenizing": ("train_tokenizer", "tokenize"),
    "bigtrain.data.shards.dataset": ("open_dataset", "TokenDataset"),
    "bigtrain.data.shards.scores": ("Scores", "open_scores"),
    "bigtrain.python_api.scoring": ("score", "PerplexityFilter"),
    "bigtrain.python_api.shards": (
        "describe_shards",
        "make_manifest",
        "read_documents",
        "verify_shards",
    ),
    "bigtrain.python_api.results": (
        "add_tokens",
        "grow_model",
        "read_metrics",
        "read_metric_columns",
        "load_state_dict",
        "export_run",
        "merge_run",
        "generate",
        "open_conversation",
        "list_checkpoints",
        "verify_run",
        "verify_model",
        "write_report",
        "fetch",
    ),
    "bigtrain.python_api.converting": ("convert", "Converted"),
    "bigtrain.python_api.new_run": ("write_new_run", "NewRun"),
    "bigtrain.settings.commented_yaml": ("run_schema",),
    "bigtrain.python_api.configuring": ("load_config", "check", "train_run"),
    "bigtrain.metrics.recording": ("record",),
    "bigtrain.run.run_view": ("RunView", "TrainingResult"),
    "bigtrain.objectives.losses.objective_batch": ("ObjectiveBatch",),
    "bigtrain.settings.run_config": ("RunConfig",),
    "bigtrain.settings.resolve": ("ResolvedRun",),
    "bigtrain.python_api.planning": ("plan", "Plan"),
    "bigtrain.run.checkpointing.listing": ("ListedCheckpoint",),
    "bigtrain.errors": (
        "BigtrainError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "ExtensionError",
        "LaunchError",
        "ModelError",
        "OutputError",
        "TrainingError",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BigtrainError",
    "CheckpointError",
    "ConfigError",
    "Converted",
    "DataError",
    "ExtensionError",
    "LaunchError",
    "ListedCheckpoint",
    "ModelError",
    "NewRun",
    "ObjectiveBatch",
    "OutputError",
    "PerplexityFilter",
    "Plan",
    "ResolvedRun",
    "RunConfig",
    "RunView",
    "Scores",
    "TokenDataset",
    "TrainingError",
    "TrainingResult",
    "__version__",
    "add_tokens",
    "check",
    "convert",
    "describe_shards",
    "export_run",
    "fetch",
    "generate",
    "grow_model",
    "list_checkpoints",
    "load_config",
    "load_state_dict",
    "make_manifest",
    "merge_run",
    "open_conversation",
    "open_dataset",
    "open_scores",
    "plan",
    "read_documents",
    "read_metric_columns",
    "read_metrics",
    "record",
    "run_schema",
    "score",
    "tokenize",
    "train_run",
    "train_tokenizer",
    "verify_model",
    "verify_run",
    "verify_shards",
    "write_new_run",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Return a name of this package, imported from the module that defines it."""
    if name not in _HOME:
        raise AttributeError(f"module 'bigtrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names of this package, including names that are not loaded yet."""
    return sorted({*globals(), *__all__})
