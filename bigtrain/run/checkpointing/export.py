"""From a checkpoint of a run to a verified Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.configuration import GENERATION_CONFIG, load_hf_config
from bigtrain.models.verified_export import Probe, export_model
from bigtrain.models.weights.export_hf import MAX_SHARD_SIZE
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.run_directory import MODEL_CONFIG
from bigtrain.settings.run_config import ModelSection, RunConfig


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
        open_weights(directory / checkpoints.TENSORS, checkpoints.list_tensors(directory)),
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
