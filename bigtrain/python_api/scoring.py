"""Log-probabilities of a run's data under its model, and datasets of documents by perplexity."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigtrain.errors import ConfigError, Problem
from bigtrain.python_api.configuring import resolve
from bigtrain.system.world import read_world

if TYPE_CHECKING:
    from bigtrain.data.shards.scores import ScoreKind, Scores
    from bigtrain.settings.run_config import RunConfig

DEFAULT_TOP_K = 32
_PASS_DIRECTORY = ".pass"  # run directory of the pass, into which nothing is written


@dataclass(frozen=True)
class PerplexityFilter:
    """Dataset `output` of the documents with a perplexity from `lowest` to `highest`."""

    output: Path
    lowest: float = 0.0
    highest: float = math.inf


def score(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *overrides: str,
    output: str | Path,
    kind: ScoreKind = "documents",
    top_k: int | None = None,
    part_tokens: int | None = None,
    deepspeed_config: str | Path | None = None,
    keep: PerplexityFilter | None = None,
) -> list[Scores]:
    """Write log-probabilities of all documents of a run's data under the model it begins with, and
    return them in the order of its datasets and held-out sets.

    One rank in a plain process; under a launcher its ranks, and then collective. Adapters of the
    run are omitted. Complete scores of the same model and data in `output` are not computed again.

    output: directory of the scores. kind: what is stored, of each document, of each token, or of
    the `top_k` (default: 32) most probable tokens at each. part_tokens: tokens of a part. keep:
    also write a dataset of some documents; for a run with one dataset.

    Raises ConfigError, DataError, ModelError, CheckpointError, OutputError, LaunchError: all are
    BigtrainError. DataError if `output` has other scores of this data.
    """
    if top_k is not None and kind != "top-k":
        raise ConfigError(Problem("--top-k", top_k, "has no effect", "--kind top-k"))
    world = read_world(os.environ)
    # A run whose settings decide model and data of the pass, without adapters and callbacks.
    run = resolve(config, overrides, world.size, deepspeed_config, scores=True)
    section = run.config.output.model_copy(
        update={"directory": str(Path(output) / _PASS_DIRECTORY), "copy_to": None, "export": False}
    )
    changes = {"output": section, "adapters": None, "callbacks": ()}
    run = replace(run, config=run.config.model_copy(update=changes))
    if keep is not None and (run.config.data.sources or run.config.evaluation.held_out):
        rule = "is for a run with one dataset"
        raise ConfigError(Problem("--filter", str(keep.output), rule, "data.path=DIR only"))

    # Settings, device and inputs are checked before the model is built.
    from bigtrain.engine.startup.device import refuse_for_device
    from bigtrain.run.preflight import inspect_inputs

    refuse_for_device(run.config, world.size)
    inputs = inspect_inputs(run, "sizes" if world.local_rank == 0 else "listed")
    num_ids = min(dataset.table.tokenizer.vocab_size for dataset in inputs.datasets)
    top_k = (top_k or DEFAULT_TOP_K) if kind == "top-k" else 0
    if top_k > num_ids:
        rule = f"the tokenizer of the data has {num_ids} tokens"
        raise ConfigError(Problem("--top-k", top_k, rule, f"{num_ids} or less"))
    from bigtrain.data.loading.stored_scores import PART_TOKENS
    from bigtrain.run.score_pass import PassOptions, score_inputs

    # The pass is collective; one rank writes the dataset of the kept documents.
    options = PassOptions(Path(output), kind, top_k, part_tokens or PART_TOKENS)
    scores = score_inputs(run, inputs, world, options)
    if keep is not None and world.is_main:
        _write_kept(scores[0], inputs.datasets[0], keep)
    return scores


def _write_kept(scores: Scores, dataset: Any, keep: PerplexityFilter) -> None:
    """Write the documents of `dataset` that `keep` selects by their scores."""
    from bigtrain.data.samples.kept_documents import kept_documents, write_kept
    from bigtrain.data.shards.manifest import PerplexityFilterRecord

    model = scores.request.model
    highest = min(keep.highest, 1e308)  # JSON has no infinity
    record = PerplexityFilterRecord(
        lowest=keep.lowest, highest=highest, model=f"{model.name} ({model.hash})"
    )
    documents = kept_documents(scores, dataset, keep.lowest, highest)
    write_kept(dataset, documents, keep.output, record)


def summary(scores: Sequence[Scores]) -> list[str]:
    """Return a line for every split of a dataset: documents, targets, perplexity over the split's
    targets, and quantiles of the documents' perplexities."""
    import numpy as np

    lines = []
    for dataset in scores:
        for split, document_perplexities in dataset.perplexities.items():
            num_targets = int(dataset.targets(split).sum())
            # exp(-mean log-probability of a target).
            perplexity = math.exp(-float(dataset.sums(split).sum()) / max(1, num_targets))
            # A document without targets has no perplexity (NaN).
            values = document_perplexities[~np.isnan(document_perplexities)]
            low, median, high = np.quantile(values, (0.1, 0.5, 0.9)) if len(values) else (0.0,) * 3
            lines.append(
                f"{dataset.request.data.name} {split}: {len(document_perplexities):,} documents, "
                f"{num_targets:,} targets, perplexity {perplexity:.6g}; of documents: 10% up to "
                f"{low:.6g}, half up to {median:.6g}, 90% up to {high:.6g}"
            )
    return lines
