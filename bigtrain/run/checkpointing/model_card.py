"""Model card of an export: training data, settings and results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from bigtrain import __version__
from bigtrain.settings.run_config import RunConfig

_TAIL_BYTES = 1 << 22  # of a file that grows with the run
_SECTIONS = ("model", "adapters", "batch", "train", "optimizer", "schedule", "precision", "seed")


def model_card(
    config: RunConfig, step: int, metrics: Path, *, library: str = "transformers"
) -> str:
    """Return Markdown with the front matter that the Hugging Face Hub reads. `step`: of the
    checkpoint; `metrics`: the run's metrics.jsonl, whose last values up to that step are used;
    `library`: the Hub's name of the library that loads the export."""
    base = config.model.path
    front: dict[str, Any] = {"library_name": library, "tags": ["bigtrain"]}
    if base is not None and not Path(base).exists():
        front["base_model"] = base
    samples = config.batch.samples_per_step
    tokens = step * samples * config.batch.sequence_length
    sources = [config.data.path, *(source.path for source in config.data.sources)]
    figures = {
        "step": f"{step:,} of {config.train.steps:,}",
        "tokens seen": f"{tokens:,}",
        "data": ", ".join(filter(None, sources)),
        **_last_figures(metrics, step),
    }
    dumped = config.model_dump(mode="json", exclude_defaults=True)
    chosen = {name: dumped[name] for name in _SECTIONS if name in dumped}
    rows = "".join(f"| {name} | {value} |\n" for name, value in figures.items())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n"
        f"Trained {'from ' + base if base else 'from random weights'} with bigtrain {__version__} "
        "(DeepSpeed), and its logits were compared with the trained model's on export.\n\n"
        f"| | |\n|---|---|\n{rows}\n## Settings\n\n"
        f"```yaml\n{yaml.safe_dump(chosen, sort_keys=False)}```\n"
    )


def _last_figures(metrics: Path, step: int) -> dict[str, str]:
    """Return the last logged training and held-out loss in nats per token."""
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
        except ValueError:
            continue
        if not isinstance(row, dict) or row.get("step", step + 1) > step:
            continue
        for key, name in names.items():
            if isinstance(row.get(key), float):
                values[name] = f"{row[key]:.4f} nats per token (step {row['step']:,})"
        tasks = row.get("tasks")
        for name, value in tasks.items() if isinstance(tasks, dict) else ():
            if isinstance(value, float):
                values[f"{name} (lm-eval)"] = f"{value:.4f} (step {row['step']:,})"
    return values
