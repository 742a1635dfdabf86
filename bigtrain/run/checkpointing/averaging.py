"""Mean of the weights of several checkpoints of a run, as a verified Hugging Face directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.errors import CheckpointError, ConfigError, ModelError, Problem
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, probe_of
from bigtrain.models.file_names import GENERATION_CONFIG
from bigtrain.models.weights.export_hf import MAX_SHARD_SIZE
from bigtrain.models.weights.lazy_tensors import LazyTensor, Offsets
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.export import frozen_names, model_card, write_export
from bigtrain.run.checkpointing.listing import one_site_note
from bigtrain.run.run_directory import MODEL_CONFIG
from bigtrain.settings.run_config import ModelSection, RunConfig


def chosen_steps(
    run_directory: Path, steps: Sequence[int], last: int | None, warn: Callable[[str], None]
) -> list[int]:
    """Return the `steps`, or the `last` complete checkpoints of a run, oldest first. Raises
    ConfigError for fewer than two, CheckpointError if there are too few."""
    if last is None:
        if len(set(steps)) != len(steps) or len(steps) < 2:
            rule = "is not several different steps"
            raise ConfigError(
                Problem("--steps", ",".join(map(str, steps)), rule, "--steps 100,200")
            )
        return list(steps)
    if last < 2:
        raise ConfigError(Problem("--last", last, "is not several checkpoints", "--last 2"))
    complete_steps: list[int] = []
    for directory in checkpoints.usable(run_directory, warn, "all"):
        complete_steps.append(int(checkpoints.read_state(directory)["step"]))
        if len(complete_steps) == last:
            return complete_steps[::-1]
    num_complete = len(complete_steps)
    raise CheckpointError(
        f"{run_directory} has {num_complete} complete checkpoints, and --last {last} needs {last} "
        f"-> {f'--last {num_complete}' if num_complete > 1 else 'train longer'}, or keep more "
        "(checkpoint.keep_last)"
    )


def merge_run(
    run_directory: Path,
    output: Path,
    steps: Sequence[int],
    *,
    shares: Sequence[float] = (),
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    warn: Callable[[str], None] = lambda text: None,
) -> None:
    """Write the mean of the checkpoints of `steps` to `output`, weighted by `shares` (default:
    equally), as `export_run` writes one.

    One process. Sums are in float64, a block at a time; then the weights are rounded to `dtype`.
    The directory's logits are compared with the logits of the mean in memory, which takes the
    memory of the model. Raises CheckpointError, ConfigError or ModelError; `output` is then
    unchanged.
    """
    # Check the shares, and divide them by their sum.
    shares = shares or [1.0] * len(steps)
    shares_text = ",".join(f"{share:g}" for share in shares)
    if len(shares) != len(steps):
        rule = f"has {len(shares)} shares for {len(steps)} checkpoints"
        raise ConfigError(Problem("--weights", shares_text, rule, "one for each, oldest first"))
    if not all(0 < share < math.inf for share in shares):
        raise ConfigError(Problem("--weights", shares_text, "is not above zero", "--weights 1,1"))
    shares = [share / sum(shares) for share in shares]

    directories = [checkpoints.find(run_directory, step, warn=warn) for step in steps]
    states = [checkpoints.read_state(directory) for directory in directories]
    last_state = states[-1]
    config = RunConfig.model_validate(last_state["config"])
    if config.adapters is not None:
        raise ModelError(
            f"{run_directory} has adapters, and the mean of their two factors is not the mean of "
            "their products -> bigtrain export --merge, for one checkpoint"
        )

    # Open the tensors of all checkpoints; the means are computed when they are written.
    model_directory = run_directory / MODEL_CONFIG
    hf_config = load_hf_config(ModelSection(config=str(model_directory), type=config.model.type))
    tensors_by_checkpoint = [
        open_weights(directory / checkpoints.TENSORS, checkpoints.list_tensors(directory))
        for directory in directories
    ]
    weights = _means(tensors_by_checkpoint, directories, shares)
    last_probe = Probe.load(directories[-1] / checkpoints.PROBE, config.precision.dtype)
    card = model_card(config, int(last_state["step"]), run_directory / "metrics.jsonl")
    listed = ", ".join(f"{step} ({share:.3g})" for step, share in zip(steps, shares, strict=True))
    card += f"\nThe weights are the mean of the checkpoints of steps (shares) {listed}.\n"
    site_notes = [note for note in map(one_site_note, states) if note]
    if site_notes:
        site_note = site_notes[0]
        card += f"\n{site_note}\n"
        warn(f"{output}: {site_note}")
    notes = write_export(
        run_directory,
        Destination(
            output,
            run_directory / "tokenizer",
            dtype,
            model_directory / GENERATION_CONFIG,
            card,
            max_shard_size=max_shard_size,
        ),
        weights,
        hf_config,
        config,
        as_stored=frozen_names(config, last_state),
        # Logits of the mean, for the input of the last checkpoint's probe.
        probe=probe_of(weights, hf_config, last_probe),
    )
    for note in notes:
        warn(f"{output}: {note}")


def _means(
    checkpoint_tensors: Sequence[Mapping[str, LazyTensor]],
    directories: Sequence[Path],
    shares: Sequence[float],
) -> dict[str, torch.Tensor]:
    """Return lazy means by name. checkpoint_tensors: tensors by name, for each checkpoint. Raises
    ModelError for checkpoints of another model."""
    last_tensors = checkpoint_tensors[-1]
    expected = {name: tuple(tensor.shape) for name, tensor in last_tensors.items()}
    for directory, tensors in zip(directories, checkpoint_tensors, strict=True):
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != expected:
            names = sorted(name for name, _ in shapes.items() ^ expected.items())
            raise ModelError(
                f"{directory} has other tensors than {directories[-1]} ({names[0]}) -> merge "
                "checkpoints of one model"
            )
    means: dict[str, torch.Tensor] = {}
    for name, tensor in last_tensors.items():
        mean = _Mean([tensors[name] for tensors in checkpoint_tensors], shares)
        means[name] = LazyTensor(tensor.shape, tensor.dtype, mean)
    return means


@dataclass(frozen=True)
class _Mean:
    """Weighted mean of tensors. Integers, which are counts in buffers, have no mean: the last
    tensor is taken."""

    tensors: Sequence[LazyTensor]
    shares: Sequence[float]

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        last = self.tensors[-1]
        if not last.dtype.is_floating_point:
            last.fill(offsets, out)
            return
        # mean = sum_i share_i * tensor_i, with shares that add up to 1.
        total = torch.zeros(out.shape, dtype=torch.float64)
        for tensor, share in zip(self.tensors, self.shares, strict=True):
            part = torch.empty(out.shape, dtype=tensor.dtype)
            tensor.fill(offsets, part)
            total += part.double() * share
        out.copy_(total)

    def sources(self) -> Iterator[object]:
        for tensor in self.tensors:
            yield from tensor.origin.sources()
