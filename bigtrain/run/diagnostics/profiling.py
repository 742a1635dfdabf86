"""Torch profiler trace of some optimizer steps, written by chosen ranks, in Chrome's format:
``RUN/profile/rank_R_steps_A-B.json`` (open it in https://ui.perfetto.dev)."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bigtrain.run.context import RunContext

DIRECTORY = "profile"
NUM_TOP_OPS = 10


class Profiler:
    """Recorder of the steps that ``profile`` selects. No collective."""

    def __init__(self, context: RunContext) -> None:
        section = context.config.profile
        is_profiled = context.world.rank in section.ranks
        self._context = context
        self._steps = section.steps if is_profiled else None
        self._running: profile | None = None
        self._begun_at = 0

    def before(self, step: int) -> None:
        """Call before optimizer step `step`, counted from 1."""
        if self._running is not None or self._steps is None:
            return
        first_step, last_step = self._steps
        # Not only before the first step: a run may resume in the middle.
        if first_step <= step <= last_step:
            activities = [ProfilerActivity.CPU]
            if self._context.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            # Without `acc_events`, torch 2.11 warns that events of earlier cycles are cleared.
            self._running = profile(activities=activities, record_shapes=True, acc_events=True)
            self._begun_at = step
            self._running.start()

    def after(self, step: int, *, last: bool) -> None:
        """Call after optimizer step `step`; write the trace if it is the last one."""
        if self._running is None or self._steps is None:
            return
        _, last_step = self._steps
        if step < last_step and not last:
            return
        running, self._running = self._running, None
        if self._context.device.type == "cuda":
            torch.cuda.synchronize(self._context.device)
        running.stop()
        directory = self._context.directory / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        rank = self._context.world.rank
        path = directory / f"rank_{rank}_steps_{self._begun_at}-{step}.json"
        running.export_chrome_trace(str(path))
        self._context.log.info(f"profile of steps {self._begun_at} to {step}: {path}")
        for line in top_ops(running, self._context.device.type):
            self._context.log.info(line)


def top_ops(recorded: profile, device_type: str) -> list[str]:
    """Return the operations with the largest self time, as lines of a table, the largest first.
    Device time on CUDA, CPU time otherwise; shares are of all operations."""
    attribute = "self_device_time_total" if device_type == "cuda" else "self_cpu_time_total"

    def microseconds(operation: Any) -> float:
        return float(getattr(operation, attribute))

    operations: list[Any] = sorted(recorded.key_averages(), key=microseconds, reverse=True)
    total = sum(map(microseconds, operations)) or 1.0
    lines = [f"{'ms':>10} {'share':>6} {'calls':>7}  operation"]
    for operation in operations[:NUM_TOP_OPS]:
        own_time = microseconds(operation)
        milliseconds, share = own_time / 1e3, own_time / total
        lines.append(f"{milliseconds:>10.2f} {share:>6.1%} {operation.count:>7}  {operation.key}")
    return lines
