"""Retention of checkpoints, with reasons. The main rank calls it; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bigtrain.errors import CheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.state import GuardState
from bigtrain.settings.run_config import BestSection, CheckpointSection

_BEST = BestSection()
_LOSS = "held_out_loss"


def reasons_to_keep(
    measured: Mapping[int, float | None],
    section: CheckpointSection,
    good_step: int | None = None,
    best: BestSection = _BEST,
) -> dict[int, list[str]]:
    """Return the reasons to keep checkpoints, by step; checkpoints without a reason are absent.
    `measured`: the metric of `best` by step, of all complete checkpoints, None if not measured.
    `good_step`: from `newest_good`."""
    reasons: dict[int, list[str]] = {}
    newest_first = sorted(measured, reverse=True)
    for step in newest_first[: section.keep_last]:
        text = "newest" if step == newest_first[0] else f"one of the last {section.keep_last}"
        reasons.setdefault(step, []).append(text)
    if good_step is not None and good_step != newest_first[0]:
        reasons.setdefault(good_step, []).append("newest before bad steps")
    every = section.keep_every_steps
    for step in newest_first:
        if every is not None and step % every == 0:
            reasons.setdefault(step, []).append(f"every {every} steps")
    # The best first; with `mode` "max" that is the largest value.
    sign = 1 if best.mode == "min" else -1
    ranked = sorted((sign * value, step) for step, value in measured.items() if value is not None)
    name = "held-out loss" if best.metric == _LOSS else best.metric
    for signed_value, step in ranked[: section.keep_best]:
        reasons.setdefault(step, []).append(f"{name} {sign * signed_value:.4f}")
    return reasons


def retain(
    run_directory: Path,
    saved_step: int,
    section: CheckpointSection,
    permit: Callable[[], None] = lambda: None,
    best: BestSection = _BEST,
) -> None:
    """Remove checkpoints that `section` does not keep, after the checkpoint of `saved_step` was
    committed. `permit`: called before every removal; may raise."""
    for step in superfluous(run_directory, saved_step, section, best):
        permit()
        checkpoints.remove(checkpoints.checkpoint_path(run_directory, step))
    permit()
    checkpoints.clear_garbage(run_directory)


def superfluous(
    run_directory: Path, saved_step: int, section: CheckpointSection, best: BestSection = _BEST
) -> list[int]:
    """Return steps of the checkpoints that `section` does not keep in addition to `saved_step`.

    Includes later checkpoints: they are corrupt, or the run would have resumed from them. A corrupt
    checkpoint does not count for ``keep_last``; checkpoints of ``keep_every_steps`` are kept even
    if they look corrupt, since a file may be missing temporarily.
    """
    steps = checkpoints.list_steps(run_directory)
    steps_until_saved = [step for step in steps if step <= saved_step]
    measured: dict[int, float | None] = {}
    for step in steps_until_saved:
        directory = checkpoints.checkpoint_path(run_directory, step)
        if checkpoints.find_corruption(directory, "none") is None:
            measured[step] = best_value(directory, section, best)
    good_step = newest_good(run_directory, measured)
    steps_to_keep = set(reasons_to_keep(measured, section, good_step, best))
    every = section.keep_every_steps
    if every is not None:
        steps_to_keep |= {step for step in steps_until_saved if step % every == 0}
    return [step for step in steps if step not in steps_to_keep]


def newest_good(run_directory: Path, steps: Iterable[int]) -> int | None:
    """Return the newest checkpoint of `steps` without a bad step before it: the run may roll back
    to it (`bigtrain.run.diagnostics.step_guard`). None if there is none."""
    for step in sorted(steps, reverse=True):
        try:
            document = checkpoints.read_state(checkpoints.checkpoint_path(run_directory, step))
        except CheckpointError:
            continue
        if GuardState.from_json(document.get("guard")).streak == 0:
            return step
    return None


def best_value(
    directory: Path, section: CheckpointSection, best: BestSection = _BEST
) -> float | None:
    """Return the metric of `best` at a checkpoint; None if it was not measured, and, to save a
    read, without ``keep_best``."""
    if section.keep_best == 0:
        return None
    try:
        document = checkpoints.read_state(directory)
    except CheckpointError:
        return None
    metrics = document.get("evaluation")
    if not isinstance(metrics, dict):  # an older release wrote only the loss
        metrics = {_LOSS: document.get(_LOSS)}
    value = metrics.get(best.metric)
    return value if isinstance(value, float) and math.isfinite(value) else None
