"""From a checkpoint of a run to a verified Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from bigtrain.config import ModelSection, RunConfig
from bigtrain.engine.checkpoint_lazy import open_weights
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export import MAX_SHARD_SIZE, Probe, export_model
from bigtrain.run import checkpoints

MODEL_CONFIG = "model_config"
"""Folder of a run directory with the model's Hugging Face configuration."""


def export_run(
    run_directory: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    replace: bool = False,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> int:
    """Export the checkpoint of `step` (default: the newest valid one); returns its step.

    One process, no process group, one file's weights in memory. The weights are the fp32 masters
    rounded to `dtype` (default: the dtype the run computed in), checked against logits that the
    training engine itself stored.
    Raises CheckpointError or ModelError; on either, `output` stays as it was.
    """
    directory = checkpoints.find(run_directory, step)
    state = checkpoints.read_state(directory)
    config = RunConfig.model_validate(state["config"])
    export_model(
        open_weights(directory / checkpoints.TENSORS, checkpoints.read_manifest(directory).headers),
        # Not from config.model: a directory or hub name may be gone or changed by now.
        load_hf_config(ModelSection(config=str(run_directory / MODEL_CONFIG))),
        run_directory / "tokenizer",
        output,
        dtype=dtype or config.precision.dtype,
        probe=Probe.load(directory / checkpoints.PROBE, config.precision.dtype),
        replace=replace,
        max_shard_size=max_shard_size,
    )
    return int(state["step"])
