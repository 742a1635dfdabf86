"""Human-readable lists of a run's checkpoints, and of runs with adapters. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bigtrain.errors import CheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.retention import best_value, newest_good, reasons_to_keep
from bigtrain.settings.degrees import MODEL_DEGREES
from bigtrain.settings.run_config import BestSection, CheckpointSection, RunConfig
from bigtrain.settings.sections.adapters import AdaptersSection
from bigtrain.settings.sections.sites import ONE_SITE

_COLUMNS = ("step", "size", "state", "held-out loss", "written by", "kept")


@dataclass(frozen=True)
class ListedCheckpoint:
    """Checkpoint of a run. corruption: why it cannot be used; None if it is complete. kept:
    reasons why the next save does not remove it."""

    step: int
    directory: Path
    num_bytes: int
    corruption: str | None
    held_out_loss: float | None
    written_by: str
    kept: tuple[str, ...]


def listed_checkpoints(run_directory: Path) -> list[ListedCheckpoint]:
    """Return the checkpoints of a run, oldest first; compare sizes of files, and contents of small
    ones. Raises CheckpointError if there is none."""
    steps = _steps(run_directory)
    section, best = _sections(run_directory)
    corruption_by_step = {
        step: checkpoints.find_corruption(checkpoints.checkpoint_path(run_directory, step))
        for step in steps
    }
    # Reasons for which the next save keeps checkpoints, from their evaluations.
    complete_steps = [step for step, reason in corruption_by_step.items() if reason is None]
    values = {
        step: best_value(checkpoints.checkpoint_path(run_directory, step), section, best)
        for step in complete_steps
    }
    newest = newest_good(run_directory, complete_steps)
    reasons_by_step = reasons_to_keep(values, section, newest, best)

    # A corrupt checkpoint is listed with what can be read.
    listed = []
    for step, corruption in corruption_by_step.items():
        directory = checkpoints.checkpoint_path(run_directory, step)
        try:
            document = checkpoints.read_state(directory)
        except CheckpointError:
            document = {}
        loss = document.get("held_out_loss")
        listed.append(
            ListedCheckpoint(
                step,
                directory,
                sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()),
                corruption,
                loss if isinstance(loss, float) else None,
                _topology(document),
                tuple(reasons_by_step.get(step, ())),
            )
        )
    return listed


def describe_checkpoints(run_directory: Path) -> list[str]:
    """Return `listed_checkpoints` as a table."""
    rows = [_COLUMNS]
    for checkpoint in listed_checkpoints(run_directory):
        reasons = ", ".join(checkpoint.kept) or "until the next save"
        rows.append(
            (
                str(checkpoint.step),
                _size(checkpoint.num_bytes),
                "complete" if checkpoint.corruption is None else "corrupt",
                "-" if checkpoint.held_out_loss is None else f"{checkpoint.held_out_loss:.4f}",
                checkpoint.written_by,
                checkpoint.corruption or reasons,
            )
        )
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with columns of minimum width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def verify_checkpoints(run_directory: Path, step: int | None) -> Iterator[tuple[int, str | None]]:
    """Yield the step of each checkpoint and why it is corrupt (None if complete); reads every byte.
    Raises CheckpointError if there is none, or none of `step`."""
    steps = _steps(run_directory)
    if step is not None and step not in steps:
        listed_steps = ", ".join(map(str, steps))
        raise CheckpointError(
            f"{run_directory}: no checkpoint of step {step}; steps: {listed_steps}"
        )
    verified_steps = steps if step is None else [step]
    for number in verified_steps:
        directory = checkpoints.checkpoint_path(run_directory, number)
        yield number, checkpoints.find_corruption(directory, "all")


def one_site_note(state: Mapping[str, Any]) -> str:
    """Return a text that names the site of a checkpoint, if other sites have other weights; empty
    for the weights with which the run ended on all sites. state: `checkpoints.read_state`."""
    sites = state.get("config", {}).get("sites")
    if sites is None or sites["count"] == 1:
        return ""
    if state["outer_ended"] >= RunConfig.model_validate(state["config"]).train.total_steps:
        return ""
    step = state["step"]
    return f"weights of site {sites['index']} of {sites['count']} after step {step}, {ONE_SITE}"


def best_step(run_directory: Path) -> int:
    """Return the step of the complete checkpoint that is best by the run's ``evaluation.best``.
    Raises CheckpointError if none was measured."""
    section, best = _sections(run_directory)
    section = section.model_copy(update={"keep_best": 1})  # without it `best_value` reads nothing
    sort_keys = {}  # smaller is better
    for step in _steps(run_directory):
        directory = checkpoints.checkpoint_path(run_directory, step)
        value = best_value(directory, section, best)
        if value is not None and checkpoints.find_corruption(directory) is None:
            sort_keys[step] = value if best.mode == "min" else -value
    if not sort_keys:
        raise CheckpointError(
            f"{run_directory}: {best.metric} was never measured at a checkpoint -> name one: --step"
        )
    return min(sort_keys, key=lambda step: (sort_keys[step], step))


def _steps(run_directory: Path) -> list[int]:
    steps = checkpoints.list_steps(run_directory)
    if not steps:
        raise CheckpointError(checkpoints.without_checkpoint(run_directory, "has no checkpoint"))
    return steps


def _sections(run_directory: Path) -> tuple[CheckpointSection, BestSection]:
    """Return the sections ``checkpoint`` and ``evaluation.best`` of the run's last launch."""
    path = run_directory / "config.json"
    try:
        tree = json.loads(path.read_text())
        return (
            CheckpointSection.model_validate(tree["checkpoint"]),
            BestSection.model_validate(tree["evaluation"]["best"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise CheckpointError(f"{path}: unreadable ({error})") from error


def _topology(document: dict[str, Any]) -> str:
    """Return ranks, ZeRO stage and parallel degrees above 1 of the engine that wrote a checkpoint
    with the ``state.json`` `document`."""
    try:
        topology = document["environment"]["topology"]
        stage = document["deepspeed"]["zero_optimization"]["stage"]
        num_ranks = topology["world_size"]
        words = [f"{num_ranks} rank{'s' if num_ranks != 1 else ''}", f"ZeRO {stage}"]
        for name in MODEL_DEGREES:
            degree = topology.get(name, 1)  # older checkpoints lack the newest degrees
            if degree > 1:
                words.append(f"{name.removesuffix('_size')} {degree}")
    except (KeyError, TypeError):
        return "?"
    return ", ".join(words)


def _size(num_bytes: int) -> str:
    """Format a size, like 1.5 MiB."""
    size = float(num_bytes)
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.{0 if units[0] == 'B' else 1}f} {units[0]}"


_ADAPTER_COLUMNS = ("base", "run", "step", "held-out loss", "adapters")


@dataclass(frozen=True)
class _Adapters:
    """Adapters of a run's newest complete checkpoint. base_sums: checksums of the base's files, as
    JSON."""

    run: Path
    base_sums: str
    base_path: str
    step: int
    loss: object
    section: AdaptersSection

    def describe(self) -> str:
        """Return a short description."""
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
    complete checkpoint. Runs whose base models have equal files share a letter. Raises
    CheckpointError if there are none."""
    folders = sorted(
        path.parent
        for pattern in ("checkpoints", "*/checkpoints", "*/*/checkpoints")
        for path in directory.glob(pattern)
        if (path.parent / "config.json").is_file()
    )
    runs = [run for run in map(_read_adapters, folders) if run is not None]
    if not runs:
        raise CheckpointError(f"{directory}: no run below it has adapters in a checkpoint")
    letters: dict[str, str] = {}  # by the checksums of the base
    for run in runs:
        number = len(letters)
        letters.setdefault(run.base_sums, chr(ord("A") + number) if number < 26 else str(number))
    runs.sort(key=lambda run: (letters[run.base_sums], str(run.run)))
    rows = [_ADAPTER_COLUMNS]
    for run in runs:
        loss = f"{run.loss:.4f}" if isinstance(run.loss, float) else "-"
        name = str(run.run.relative_to(directory))
        rows.append((letters[run.base_sums], name, str(run.step), loss, run.describe()))
    lines = table(rows)
    for letter in letters.values():
        paths = sorted({run.base_path for run in runs if letters[run.base_sums] == letter})
        lines.append(f"base {letter}: {', '.join(paths)}")
    return lines


def _read_adapters(run: Path) -> _Adapters | None:
    """Read the adapters of `run`; None if it has none, or no complete checkpoint."""
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        section = config.get("adapters")
        if section is None:
            return None
        for step in reversed(checkpoints.list_steps(run)):
            path = checkpoints.checkpoint_path(run, step)
            if checkpoints.find_corruption(path) is None:
                state = checkpoints.read_state(path)
                return _Adapters(
                    run,
                    json.dumps(state.get("base", {}), sort_keys=True),
                    str(config["model"]["path"]),
                    step,
                    state.get("held_out_loss"),
                    AdaptersSection.model_validate(section),
                )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError):
        return None
    return None
