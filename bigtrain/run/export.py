"""From a checkpoint of a run to a verified Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from bigtrain.config import ModelSection, RunConfig
from bigtrain.engine.checkpoint_lazy import open_weights
from bigtrain.models.configuration import GENERATION_CONFIG, load_hf_config
from bigtrain.models.export import MAX_SHARD_SIZE, Probe, export_model
from bigtrain.run import checkpoints

MODEL_CONFIG = "model_config"
"""Folder of a run directory with the model's Hugging Face configuration, as it was loaded, and its
generation settings."""


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
    model_config = run_directory / MODEL_CONFIG
    export_model(
        open_weights(directory / checkpoints.TENSORS, checkpoints.read_manifest(directory).headers),
        # Not from config.model: a directory or hub name may be gone or changed by now.
        load_hf_config(ModelSection(config=str(model_config))),
        run_directory / "tokenizer",
        output,
        dtype=dtype or config.precision.dtype,
        probe=Probe.load(directory / checkpoints.PROBE, config.precision.dtype),
        generation_config=model_config / GENERATION_CONFIG,
        replace=replace,
        max_shard_size=max_shard_size,
    )
    return int(state["step"])
