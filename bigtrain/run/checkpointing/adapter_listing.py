"""Listing of the runs below a directory that trained adapters, by base model. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigtrain.errors import CheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.listing import table
from bigtrain.settings.sections.adapters import AdaptersSection

_COLUMNS = ("base", "run", "step", "held-out loss", "adapters")


@dataclass(frozen=True)
class _Adapters:
    """Adapters in `state.json` of a run's newest complete checkpoint. base: checksums of the base
    model's files."""

    run: Path
    base: dict[str, Any]
    base_path: str
    step: int
    loss: object
    section: AdaptersSection

    def kind(self) -> str:
        """Short description."""
        words = ["DoRA" if self.section.dora else "LoRA", f"rank {self.section.rank}"]
        words.append(f"alpha {self.section.alpha:g}")
        targets = self.section.targets
        words.append(targets if isinstance(targets, str) else " ".join(targets))
        words += [*self.section.target_parameters, *self.section.modules_to_save]
        if self.section.is_quantized:
            words.append(f"base in {self.section.quantization}")
        return ", ".join(words)


def describe_adapters(directory: Path) -> list[str]:
    """Return a table of the runs in `directory`, or one or two folders below, with adapters in a
    complete checkpoint.

    Runs whose base model has the same files (by checksum, regardless of path) share a letter and
    are listed together. Raises CheckpointError if there are none.
    """
    runs = [run for path in _runs(directory) if (run := _read(path)) is not None]
    if not runs:
        raise CheckpointError(f"{directory}: no run below it has adapters in a checkpoint")
    letters: dict[str, str] = {}
    for run in runs:
        letters.setdefault(_key(run), _letter(len(letters)))
    runs.sort(key=lambda run: (letters[_key(run)], str(run.run)))
    rows = [_COLUMNS]
    for run in runs:
        loss = f"{run.loss:.4f}" if isinstance(run.loss, float) else "-"
        name = str(run.run.relative_to(directory))
        rows.append((letters[_key(run)], name, str(run.step), loss, run.kind()))
    lines = table(rows)
    for letter in letters.values():
        paths = sorted({run.base_path for run in runs if letters[_key(run)] == letter})
        lines.append(f"base {letter}: {', '.join(paths)}")
    return lines


def _runs(directory: Path) -> list[Path]:
    paths = (path for depth in ("", "*/", "*/*/") for path in directory.glob(f"{depth}checkpoints"))
    return sorted(path.parent for path in paths if (path.parent / "config.json").is_file())


def _read(run: Path) -> _Adapters | None:
    """Read the adapters of `run`; None if it has none, or no complete checkpoint of any."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        section = config.get("adapters")
        if section is None:
            return None
        for step in reversed(checkpoints.steps(run)):
            path = checkpoints.checkpoint_path(run, step)
            if checkpoints.corruption(path) is None:
                state = checkpoints.read_state(path)
                return _Adapters(
                    run,
                    state.get("base", {}),
                    str(config["model"]["path"]),
                    step,
                    state.get("held_out_loss"),
                    AdaptersSection.model_validate(section),
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
        return None
    return None


def _key(run: _Adapters) -> str:
    return json.dumps(run.base, sort_keys=True)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number)
