"""Which checkpoints of a run stay, and why. The main process calls it; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from bigtrain.config import CheckpointSection
from bigtrain.errors import CheckpointError
from bigtrain.run import checkpoints


def reasons_to_keep(
    held_out: Mapping[int, float | None], section: CheckpointSection
) -> dict[int, list[str]]:
    """Why each checkpoint stays, by step; those that go are not in it.

    Parameters: `held_out`, held-out loss in nats per token by step, of all whole checkpoints; None
    where none was measured, which is never among the best.
    """
    reasons: dict[int, list[str]] = {}
    newest_first = sorted(held_out, reverse=True)
    for step in newest_first[: section.keep_last]:
        text = "newest" if step == newest_first[0] else f"one of the last {section.keep_last}"
        reasons.setdefault(step, []).append(text)
    every = section.keep_every_steps
    for step in newest_first:
        if every is not None and step % every == 0:
            reasons.setdefault(step, []).append(f"every {every} steps")
    ranked = sorted((loss, step) for step, loss in held_out.items() if loss is not None)
    for loss, step in ranked[: section.keep_best]:
        reasons.setdefault(step, []).append(f"held-out loss {loss:.4f}")
    return reasons


def retain(
    run_directory: Path,
    saved_step: int,
    section: CheckpointSection,
    permit: Callable[[], None] = lambda: None,
) -> None:
    """Remove what `section` does not keep, after the checkpoint of `saved_step` was committed.

    `permit` is called before every removal, and may raise.

    Later ones go: they were damaged and passed over, or the run would stand there. Damaged ones do
    not count among the last, so that as many whole ones stay as were asked for; those that are to
    stay for good do, since a file may be missing for a moment only.
    """
    found = checkpoints.steps(run_directory)
    held_out = {
        step: held_out_loss(checkpoints.checkpoint_path(run_directory, step), section)
        for step in found
        if step <= saved_step
        and checkpoints.damage(checkpoints.checkpoint_path(run_directory, step), "none") is None
    }
    kept = set(reasons_to_keep(held_out, section))
    every = section.keep_every_steps
    for step in found:
        stays_for_good = every is not None and step % every == 0 and step <= saved_step
        if step not in kept and not stays_for_good:
            permit()
            checkpoints.remove(checkpoints.checkpoint_path(run_directory, step))
    permit()
    checkpoints.clear_garbage(run_directory)


def held_out_loss(directory: Path, section: CheckpointSection) -> float | None:
    """The held-out loss measured at a checkpoint; not looked up where nothing depends on it."""
    if section.keep_best == 0:
        return None
    try:
        loss = checkpoints.read_state(directory).get("held_out_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
