"""Learning rate as a pure function of the step."""

from __future__ import annotations

import math

from bigtrain.settings.extensions import import_named, schedule_factor
from bigtrain.settings.run_config import ScheduleSection
from bigtrain.settings.sections.extensions import is_imported


def learning_rate_at(step: int, peak: float, schedule: ScheduleSection, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0-based: the rate the step itself uses).

    Warm-up is linear, ``peak * (step + 1) / warmup_steps``, and reaches the peak at its last step;
    its length may be a ratio of `total_steps`. After it, with t the fraction of the decay that is
    over:

    * ``constant``: the peak.
    * ``linear``: ``peak * (1 - (1 - r) t)``.
    * ``cosine``: ``peak * (r + (1 - r) (1 + cos(pi u)) / 2)`` (Loshchilov and Hutter 2017,
      arXiv 1608.03983), with u = t, or with restarts u the fraction of the current cycle that is
      over, ``cycles * t`` less the cycles before it.
    * ``wsd``: the peak until `decay_steps` before the end, then linear (warm-up, stable, decay; Hu
      et al. 2024, arXiv 2404.06395).

    where r is ``min_lr_ratio``. Past the end of the decay the rate stays at ``r * peak``. A
    function of the user (``package.module:function``) returns the factor of the peak for all steps.
    """
    if is_imported(schedule.type):
        function = import_named("schedule.type", schedule.type)
        return peak * schedule_factor(function, step, total_steps, schedule.settings)
    warmup_steps = schedule.count_warmup_steps(total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule.type == "constant":
        return peak
    floor = schedule.min_lr_ratio
    if schedule.type == "wsd":
        length = schedule.decay_steps or max(1, total_steps // 10)
        start = max(warmup_steps, total_steps - length)
    else:
        start = warmup_steps
        length = schedule.decay_steps or max(1, total_steps - start)
    # step + 1: the last step of the run uses the floor itself, and the first step of the decay
    # is already below the peak, so that no step of the decay is spent at the peak.
    t = min(1.0, max(0.0, (step + 1 - start) / length))
    if schedule.type == "cosine":
        # In integers, so that the last step of each cycle uses the floor (u = 1) exactly.
        scaled_steps = schedule.cycles * min(step + 1 - start, length)  # `length` in each cycle
        u = (scaled_steps - (scaled_steps - 1) // length * length) / length
        return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * u)))
    return peak * (1 - (1 - floor) * t)
