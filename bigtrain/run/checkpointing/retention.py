"""Which checkpoints of a run are kept, and why. The main rank calls it; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bigtrain.errors import CheckpointError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.state import GuardState
from bigtrain.settings.run_config import CheckpointSection


def reasons_to_keep(
    held_out: Mapping[int, float | None],
    section: CheckpointSection,
    good_step: int | None = None,
) -> dict[int, list[str]]:
    """Why each checkpoint is kept, by step; those to be removed are not in it.

    Parameters: `held_out`, held-out loss in nats per token by step, of all complete checkpoints;
    None where none was measured, which is never among the best. `good_step`: `newest_good` of them.
    """
    reasons: dict[int, list[str]] = {}
    newest_first = sorted(held_out, reverse=True)
    for step in newest_first[: section.keep_last]:
        text = "newest" if step == newest_first[0] else f"one of the last {section.keep_last}"
        reasons.setdefault(step, []).append(text)
    if good_step is not None and good_step != newest_first[0]:
        reasons.setdefault(good_step, []).append("newest before bad steps")
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

    Later ones are removed: they are corrupt, or the run would have resumed from them. Corrupt ones
    do not count for ``keep_last``, so that many complete ones stay; those of ``keep_every_steps``
    stay even if they look corrupt, since a file may be missing for a moment only.
    """
    found = checkpoints.steps(run_directory)
    held_out = {
        step: held_out_loss(checkpoints.checkpoint_path(run_directory, step), section)
        for step in found
        if step <= saved_step
        and checkpoints.corruption(checkpoints.checkpoint_path(run_directory, step), "none") is None
    }
    kept = set(reasons_to_keep(held_out, section, newest_good(run_directory, held_out)))
    every = section.keep_every_steps
    for step in found:
        stays_for_good = every is not None and step % every == 0 and step <= saved_step
        if step not in kept and not stays_for_good:
            permit()
            checkpoints.remove(checkpoints.checkpoint_path(run_directory, step))
    permit()
    checkpoints.clear_garbage(run_directory)


def newest_good(run_directory: Path, steps: Iterable[int]) -> int | None:
    """The newest checkpoint of `steps` that follows no bad step: the run may roll back to it
    (`bigtrain.run.diagnostics.step_guard`). None without one."""
    for step in sorted(steps, reverse=True):
        try:
            document = checkpoints.read_state(checkpoints.checkpoint_path(run_directory, step))
        except CheckpointError:
            continue
        if GuardState.from_json(document.get("guard")).streak == 0:
            return step
    return None


def held_out_loss(directory: Path, section: CheckpointSection) -> float | None:
    """The held-out loss measured at a checkpoint; not looked up if nothing depends on it."""
    if section.keep_best == 0:
        return None
    try:
        loss = checkpoints.read_state(directory).get("held_out_loss")
    except CheckpointError:
        return None
    return loss if isinstance(loss, float) and math.isfinite(loss) else None
