"""Export of a run's checkpoint to a verified Hugging Face directory, with a model card."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replace_field
from pathlib import Path
from typing import Any

import torch
import yaml

from bigtrain import __version__
from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.errors import CheckpointError, ModelError
from bigtrain.models.configuration import load_hf_config, with_mtp_layers
from bigtrain.models.export.base_record import BaseRecord
from bigtrain.models.export.verified import Destination, Probe, export_model, probe_of
from bigtrain.models.file_names import GENERATION_CONFIG
from bigtrain.models.weights.export_hf import MAX_SHARD_SIZE
from bigtrain.models.weights.import_hf import Weights, find_weights
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.changed_settings import base_sums, refuse_other_base
from bigtrain.run.checkpointing.listing import one_site_note
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
    merge: bool = False,
    average: bool = False,
    warn: Callable[[str], None] = lambda text: None,
) -> int:
    """Export the checkpoint of `step` (default: the newest valid one); return its step.

    One process, one file's weights in memory. The weights are the fp32 masters rounded to `dtype`
    (default: the dtypes of the base's tensors, or the run's), frozen ones as in the base's files;
    the logits are compared with the logits that the training engine stored. Adapters are exported
    in peft's format (default dtype: float32), or with `merge` merged into the base: one trained in
    4 bits is merged in its files' precision, and the result compared with plain peft's, which needs
    the full base in memory. `average`: instead of the weights their averages (``optimizer.ema``),
    whose logits are computed here, with all averages in memory. `warn` is called with the distance
    of the two bases, for each newer checkpoint that is skipped as corrupt, and if the weights are
    of one site of several; the card contains that, too. Raises CheckpointError or ModelError;
    `output` is then unchanged.
    """
    directory = checkpoints.find(run_directory, step, warn=warn)
    state = checkpoints.read_state(directory)
    config = RunConfig.model_validate(state["config"])
    # From the run directory: the model of `config.model` may be deleted or changed by now.
    section = ModelSection(config=str(run_directory / MODEL_CONFIG), type=config.model.type)
    hf_config = with_mtp_layers(load_hf_config(section), trains=config.objective.mtp_weight > 0)
    _refuse_options(directory, state, config, merge=merge, average=average)
    site_note = one_site_note(state)
    if site_note:
        warn(f"{output}: {site_note}")
    weights: Mapping[str, torch.Tensor] = open_weights(
        directory / checkpoints.TENSORS, checkpoints.list_tensors(directory), average=average
    )
    probe = Probe.load(directory / checkpoints.PROBE, config.precision.dtype)
    library = "transformers" if config.adapters is None or merge else "peft"
    card = model_card(config, state["step"], run_directory / "metrics.jsonl", library=library)
    if site_note:
        card += f"\n{site_note}\n"
    destination = Destination(
        output,
        run_directory / "tokenizer",
        dtype,
        run_directory / MODEL_CONFIG / GENERATION_CONFIG,
        card,
        replace,
        max_shard_size,
    )
    if config.adapters is not None:
        from bigtrain.models.export.adapters import export_adapter

        # Compare the base with the base that the adapters were trained on; reads all base files.
        assert config.model.path is not None
        base = find_weights(config.model.path, hf_config, seed=config.seed)
        refuse_other_base(state, base_sums(base.files), directory)
        if not merge:
            notes = export_adapter(
                weights, config.adapters, config.model.path, hf_config, destination, probe
            )
            for note in notes:
                warn(f"{output}: {note}")
            return int(state["step"])
        weights, probe = _merged(weights, config, base, hf_config, probe=probe, warn=warn)
    if average:
        probe = probe_of(weights, hf_config, probe)
        decay = state["engine"]["ema"]
        card += f"\nThe weights are a moving average (decay {decay:g} per update).\n"
        destination = replace_field(destination, card=card)
    as_stored = () if merge else frozen_names(config, state)
    notes = write_export(
        run_directory, destination, weights, hf_config, config, as_stored=as_stored, probe=probe
    )
    for note in notes:
        warn(f"{output}: {note}")
    return int(state["step"])


def _refuse_options(
    directory: Path, state: dict[str, Any], config: RunConfig, *, merge: bool, average: bool
) -> None:
    if average and state["engine"].get("ema") is None:
        raise CheckpointError(
            f"{directory}: --average: it has no averages of the weights -> omit --average, or "
            "train with optimizer.ema.decay=0.999, which begins averages when it resumes"
        )
    if merge and config.adapters is None:
        raise ModelError(f"{directory}: has no adapters to merge -> remove --merge")


def write_export(
    run_directory: Path,
    destination: Destination,
    weights: Mapping[str, torch.Tensor],
    hf_config: Any,
    config: RunConfig,
    *,
    as_stored: Sequence[str],
    probe: Probe,
) -> list[str]:
    """Write `weights` of a run as a verified Hugging Face directory, with the base files of the run
    directory. `as_stored`: names of weights that stay as in the base's files. Returns a note for
    each thing that was changed or added. Raises as `export_model`."""
    record = BaseRecord.find(run_directory)
    base_notes = []
    if record is None and config.model.path is not None:
        base_notes.append(
            f"the run has no record of its base {config.model.path} (started by an older bigtrain, "
            "or its folder base was removed): other files of the base, tensors that transformers "
            "does not load, and the dtype of each tensor are not kept"
        )
    if record is None and destination.dtype is None:
        destination = replace_field(destination, dtype=config.precision.dtype)
    return export_model(
        weights,
        hf_config,
        destination,
        probe=probe,
        base=record,
        as_stored=as_stored,
        base_notes=base_notes,
    )


def frozen_names(config: RunConfig, state: dict[str, Any]) -> list[str]:
    """Return names of the parameters that are exported as in the base's files."""
    if config.model.path is None and config.checkpoint.initialize_from is None:
        return []
    return list(state.get("parameters", {}).get("frozen", ()))


def _merged(
    weights: Mapping[str, torch.Tensor],
    config: RunConfig,
    base: Weights,
    hf_config: Any,
    *,
    probe: Probe,
    warn: Callable[[str], None],
) -> tuple[Mapping[str, torch.Tensor], Probe]:
    """Return the base with the adapters merged, and the logits to compare its export with."""
    from bigtrain.models.export.adapters import merged_weights, probe_beside

    adapters = config.adapters
    assert adapters is not None
    if adapters.is_quantized:
        probe, distance = probe_beside(weights, adapters, str(config.model.path), hf_config, probe)
        warn(
            "merged into the base's own weights, not into those in "
            f"{adapters.quantization} that the run computed with: its logits are those "
            "of plain peft with that base, and differ from the trained model's by "
            f"{distance:.1e} (root mean square, relative)"
        )
    return merged_weights(weights, adapters, base, hf_config), probe


_TAIL_BYTES = 1 << 22  # of a file that grows with the run
_SECTIONS = ("model", "adapters", "batch", "train", "optimizer", "schedule", "precision", "seed")


def model_card(
    config: RunConfig, step: int, metrics: Path, *, library: str = "transformers"
) -> str:
    """Return Markdown with the front matter that the Hugging Face Hub reads. `metrics`: the run's
    metrics.jsonl; `library`: the Hub's name of the library that loads the export."""
    base = config.model.path
    front_matter: dict[str, Any] = {"library_name": library, "tags": ["bigtrain"]}
    if base is not None and not Path(base).exists():  # a name of the hub
        front_matter["base_model"] = base
    num_tokens = config.batch.tokens_until(step) * config.objective.kind.rows_per_sample
    data_paths = [config.data.path, *(source.path for source in config.data.sources)]
    facts = {
        "step": f"{step:,} of {config.train.total_steps:,}",
        "tokens seen": f"{num_tokens:,}",
        "data": ", ".join(filter(None, data_paths)),
        **_last_metrics(metrics, step, config.objective.kind.unit_name),
    }
    dumped = config.model_dump(mode="json", exclude_defaults=True)
    settings = {name: dumped[name] for name in _SECTIONS if name in dumped}
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    return (
        f"---\n{yaml.safe_dump(front_matter, sort_keys=False)}---\n\n"
        f"Trained {'from ' + base if base else 'from random weights'} with bigtrain {__version__} "
        "(DeepSpeed), and its logits were compared with the trained model's on export.\n\n"
        f"| | |\n|---|---|\n{rows}\n## Settings\n\n"
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```\n"
    )


def _last_metrics(metrics: Path, step: int, unit: str) -> dict[str, str]:
    """Return texts of the losses, in nats per `unit`, and task metrics last logged until `step`, by
    name. metrics: the run's metrics.jsonl."""
    names = {"loss": "training loss", "held_out_loss": "held-out loss"}
    values: dict[str, str] = {}
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the first line may be partial
            continue
        if not isinstance(row, dict) or row.get("step", step + 1) > step:
            continue
        for key, name in names.items():
            if isinstance(row.get(key), float):
                values[name] = f"{row[key]:.4f} nats per {unit} (step {row['step']:,})"
        tasks = row.get("tasks")
        if not isinstance(tasks, dict):
            continue
        for name, value in tasks.items():
            if isinstance(value, float):
                values[f"{name} (lm-eval)"] = f"{value:.4f} (step {row['step']:,})"
    return values
