"""Everything that can be found wrong before a process group or a file exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from bigtrain.config import DataSection
from bigtrain.data.checks import check_dataset
from bigtrain.data.manifest import read_manifest
from bigtrain.engine.resolve import ResolvedRun
from bigtrain.errors import ConfigError, Problem
from bigtrain.models.configuration import load_hf_config, text_config, vocabulary_size
from bigtrain.models.isolation import check_isolation
from bigtrain.models.stage_proof import StagePlan, plan_stages
from bigtrain.models.tensor_degree import check_tensor_size
from bigtrain.run.metrics import check_trackers


@dataclass(frozen=True)
class Inputs:
    """What a run reads, found to exist and to fit together.

    hf_config: the model's Hugging Face configuration. data_hash: see `data_hash`. stages: where the
    model is cut; None without pipeline stages.
    """

    hf_config: Any
    data_hash: str
    stages: StagePlan | None = None


def inspect_inputs(run: ResolvedRun) -> Inputs:
    """Read the model's configuration and the dataset's manifest, and compare them with the run.

    Creates nothing; every process may call it. Raises ModelError for a model that cannot be found
    and one ConfigError with everything else that is wrong.
    """
    config = run.config
    hf_config = load_hf_config(config.model)
    problems: list[Problem] = [
        *check_trackers(config.logging.trackers),
        *_check_sequence(config.batch.sequence_length, hf_config),
        *check_dataset(config, vocabulary_size(hf_config)),
    ]
    problems += check_tensor_size(hf_config, config.parallel.tensor)
    if config.data.document_boundaries == "isolate" and not problems:
        problems += check_isolation(hf_config, config.model.attention)
    stages = None
    if run.topology.pipeline_size > 1 and not problems:
        stages, of_stages = plan_stages(
            hf_config, config.model.attention, run.topology.pipeline_size
        )
        problems += of_stages
    if problems:
        raise ConfigError(problems, "the run's inputs")
    return Inputs(hf_config, data_hash(config.data), stages)


def data_hash(data: DataSection) -> str:
    """Identity of what is trained on: tokenizer and training tokens in order, wherever they lie.

    A mixture's is also that of its weights; a mixture of one source is that source.
    """
    manifests = [read_manifest(Path(source.path)) for source in data.mixture]
    digest = xxhash.xxh3_64(manifests[0].tokenizer.hash.encode())
    for source, manifest in zip(data.mixture, manifests, strict=True):
        if len(manifests) > 1:
            digest.update(f"source:{source.weight!r}:{source.epochs!r}".encode())
        for shard in manifest.shards("train"):
            digest.update(f"{shard.tokens}:{shard.xxh3}".encode())
    return digest.hexdigest()


def _check_sequence(sequence_length: int, hf_config: Any) -> Sequence[Problem]:
    longest = getattr(text_config(hf_config), "max_position_embeddings", None)
    if not isinstance(longest, int) or sequence_length <= longest:
        return []
    return [
        Problem(
            "batch.sequence_length",
            sequence_length,
            f"is more than the model's max_position_embeddings = {longest}",
            f"at most {longest}, or raise model.overrides.max_position_embeddings",
        )
    ]
