"""Everything that can be found wrong before a process group or a file exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigtrain.config import RunConfig
from bigtrain.data.checks import check_dataset
from bigtrain.data.identity import SourceIdentity, data_hash, identify_sources
from bigtrain.data.manifest import read_manifest
from bigtrain.data.packed_documents import PackingReport, packing_reports
from bigtrain.engine.resolve import ResolvedRun
from bigtrain.errors import ConfigError, DataError, Problem
from bigtrain.legality import Facts, check_model
from bigtrain.models.configuration import load_hf_config, text_config, vocabulary_size
from bigtrain.models.isolation import check_isolation
from bigtrain.models.sequence_check import check_sequence_parallel
from bigtrain.models.stage_proof import StagePlan, plan_stages
from bigtrain.models.tensor_degree import check_tensor_size
from bigtrain.run.metrics import check_trackers


@dataclass(frozen=True)
class Inputs:
    """What a run reads, found to exist and to fit together.

    hf_config: the model's Hugging Face configuration. data_hash: `bigtrain.data.identity`.
    sources: the datasets of the mixture, in its order. packing: what became of their documents.
    stages: where the model is cut; None without pipeline stages.
    """

    hf_config: Any
    data_hash: str
    sources: tuple[SourceIdentity, ...]
    packing: tuple[PackingReport, ...] = ()
    stages: StagePlan | None = None


def inspect_inputs(run: ResolvedRun) -> Inputs:
    """Read the model's configuration and the dataset's manifest, and compare them with the run.

    Creates nothing but a packing plan, which is a cache of the dataset's; every process may call
    it. Raises ModelError for a model that cannot be found and one ConfigError with everything else
    that is wrong.
    """
    config = run.config
    hf_config = load_hf_config(config.model)
    problems: list[Problem] = [
        *check_trackers(config.logging.trackers),
        *_check_positions(config.batch.sequence_length, hf_config),
        *check_dataset(config, vocabulary_size(hf_config)),
        *_check_best(config),
    ]
    problems += check_tensor_size(hf_config, config.parallel.tensor)
    stages = None
    if not problems:
        problems, stages = try_model(config, hf_config)
    if problems:
        raise ConfigError(problems, "the run's inputs")
    return Inputs(
        hf_config,
        data_hash(config.data),
        identify_sources(config),
        packing_reports(config),
        stages,
    )


def try_model(config: RunConfig, hf_config: Any) -> tuple[list[Problem], StagePlan | None]:
    """What the model's own code rules out of `config`, and where it is cut into stages, if it is.

    Found on small copies of the model, a second or so for each. `check_tensor_size` comes first.
    """
    attention, parallel = config.model.attention, config.parallel
    problems: list[Problem] = []
    if config.data.isolates:
        problems += _check_isolation(config, hf_config)
    if parallel.sequence > 1 and not problems:
        problems += check_sequence_parallel(
            hf_config,
            attention,
            parallel.sequence,
            isolate=config.data.isolates,
            tensor_size=parallel.tensor,
        )
    stages = None
    if parallel.pipeline > 1 and not problems:
        stages, problems = plan_stages(hf_config, attention, parallel.pipeline)
    return problems, stages


def _check_isolation(config: RunConfig, hf_config: Any) -> list[Problem]:
    found = check_isolation(hf_config, config.model.attention)
    if config.data.packing == "concatenate":
        return found
    remedy = "set data.packing=concatenate, or take another architecture"
    return [Problem("data.packing", "best_fit", problem.rule, remedy) for problem in found]


def _check_best(config: RunConfig) -> Sequence[Problem]:
    try:
        held_out = [read_manifest(Path(s.path)).shards("held_out") for s in config.data.mixture]
    except DataError:
        return []  # `check_dataset` says so
    if config.checkpoint.keep_best == 0 or any(held_out):
        return []
    return [
        Problem(
            "checkpoint.keep_best",
            config.checkpoint.keep_best,
            "the data holds out no documents to tell the best checkpoint by",
            "make shards with `bigtrain tokenize --held-out`, or set checkpoint.keep_best=0",
        )
    ]


def _check_positions(sequence_length: int, hf_config: Any) -> Sequence[Problem]:
    longest = getattr(text_config(hf_config), "max_position_embeddings", None)
    return check_model(
        Facts(
            sequence_length=sequence_length,
            max_positions=longest if isinstance(longest, int) else None,
        )
    )
