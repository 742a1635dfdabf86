"""From a checkpoint of a run to a verified Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

from bigtrain.config import RunConfig
from bigtrain.engine.checkpoint_io import read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export import Probe, export_model
from bigtrain.run import checkpoints


def export_run(
    run_directory: Path, output: Path, *, step: int | None = None, dtype: str | None = None
) -> int:
    """Export the checkpoint of `step` (default: the newest valid one); returns its step.

    One process, no process group. The weights are the fp32 masters rounded to `dtype` (default:
    the dtype the run computed in), checked against logits that the training engine itself stored.
    Raises CheckpointError or ModelError; on either, nothing is left at `output`.
    """
    directory = checkpoints.find(run_directory, step)
    state = checkpoints.read_state(directory)
    config = RunConfig.model_validate(state["config"])
    export_model(
        read_full_masters(directory / checkpoints.TENSORS),
        load_hf_config(config.model),
        run_directory / "tokenizer",
        output,
        dtype=dtype or config.precision.dtype,
        probe=Probe.load(directory / checkpoints.PROBE, config.precision.dtype),
    )
    return int(state["step"])
