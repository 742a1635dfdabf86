"""`bigtrain export`: a run's weights as a verified Hugging Face directory, adapters as peft's."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bigtrain.commands.arguments import Dtype, NewDirectory, shard_size
from bigtrain.system.next_commands import model_line, next_lines


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """Command line of `bigtrain export`."""

    run: Path
    """run directory"""
    step: int | None = None
    """checkpoint to export (default: the newest)"""
    best: bool = False
    """export the best checkpoint by the run's evaluation.best"""
    output: NewDirectory
    dtype: Dtype | None = None
    """of the stored weights (default: the dtype of each tensor in the base; without a base the
    run's precision.dtype; for adapters: float32)"""
    merge: bool = False
    """for a run with adapters: export the full model with the adapters merged into its weights"""
    average: bool = False
    """export the moving average of the weights, of a run with optimizer.ema"""
    max_shard_size: Annotated[str, shard_size] = "5GB"
    """largest size of a weight file (default: 5GB), and of the memory for writing; a larger tensor
    gets a separate file"""
    push_to_hub: Annotated[str | None, "OWNER/NAME"] = None
    """also upload the verified directory to this repository of the Hugging Face Hub, which is
    created if it does not exist (login: hf auth login, or HF_TOKEN)"""
    private: bool = False
    """make a new repository of --push-to-hub private"""


def run(args: ExportArguments) -> int:
    """Write and verify the directory, and upload it to the Hub if requested.

    Raises ConfigError, before anything is written, if the Hub cannot be used."""
    from bigtrain.python_api.results import export_run

    exported = export_run(
        args.run,
        args.output,
        step=args.step,
        best=args.best,
        dtype=args.dtype,
        merge=args.merge,
        average=args.average,
        max_shard_size=args.max_shard_size,
        push_to_hub=args.push_to_hub,
        private=args.private,
        warn=lambda text: print(f"bigtrain export: {text}", file=sys.stderr),
    )
    print(
        f"{args.output}: step {exported.step}, reloaded with transformers and compared: same logits"
    )
    if exported.address is not None:
        print(f"pushed to {exported.address}")
    print(next_lines(model_line(args.output)))
    return 0
