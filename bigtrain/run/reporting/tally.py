"""Totals over a launch's logged steps, for the closing summary and the time left."""

from __future__ import annotations

import math
import time

from bigtrain.metrics.step_metrics import MeanBreakdown, StepMetrics
from bigtrain.run.reporting.progress import format_duration, format_rate


class Tally:
    """Sums over the logged steps of a launch. held_out: step and loss, as text, of the last
    evaluation."""

    def __init__(self, resume_step: int, first_loss: float | None) -> None:
        self._resume_step = resume_step
        self._begun_at = time.perf_counter()
        self._logged_step = resume_step
        self._seconds = self._tokens = 0.0
        self._first_loss = first_loss
        self._last: StepMetrics | None = None
        self.memory_gib = 0.0
        self._breakdown = MeanBreakdown()
        self.held_out: tuple[int, str] | None = None

    def add(self, metrics: StepMetrics) -> None:
        """Count a logged step."""
        if self._first_loss is None and self._last is None:
            self._first_loss = metrics.loss
        num_steps = metrics.step - self._logged_step
        seconds = metrics.step_seconds * num_steps
        self._seconds += seconds
        self._tokens += seconds * metrics.tokens_per_second
        self.memory_gib = max(self.memory_gib, metrics.memory_gib)
        if metrics.breakdown is not None:
            self._breakdown.add(metrics.breakdown, num_steps)
        self._logged_step, self._last = metrics.step, metrics

    def roll_back(self, step: int) -> None:
        """Continue from `step`."""
        self._logged_step = step

    def seconds_of_a_step(self, step: int) -> float:
        """Return the mean seconds of a logged step of this launch; before the first one, estimate
        them from the time since training began."""
        if self._last is not None:
            return self._seconds / max(1, self._logged_step - self._resume_step)
        return (time.perf_counter() - self._begun_at) / max(1, step - self._resume_step)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second over all logged steps of this launch."""
        return self._tokens / max(self._seconds, 1e-9)

    def lines(self, total_steps: int) -> list[str]:
        """Return the summary."""
        last = self._last
        if last is None:
            return [f"no step after {self._resume_step} of {total_steps} was logged"]
        rate = format_rate(self.tokens_per_second)
        elapsed = format_duration(time.perf_counter() - self._begun_at)
        since = f" since step {self._resume_step}" if self._resume_step else ""
        time_line = f"time      {elapsed}{since}, {rate} tokens/s"
        if last.model_flops_utilization is not None:
            time_line += f", {last.model_flops_utilization:.1%} of peak FLOP/s"
        lines = [
            f"steps     {last.step}/{total_steps}, {last.tokens:,} tokens, "
            f"{last.samples:,} samples",
            time_line,
        ]
        breakdown = self._breakdown.mean()
        if breakdown is not None:
            lines.append(f"step      {breakdown.describe()}")
        lines.append(f"loss      {_number_text(self._first_loss)} -> {_number_text(last.loss)}")
        if self.held_out is not None:
            step, text = self.held_out
            lines.append(f"held out  {text} at step {step}")
        lines.append(f"memory    {self.memory_gib:.2f} GiB at most on the main rank")
        return lines


def loss_text(loss: float) -> str:
    """Format a loss in nats, and its perplexity."""
    perplexity = math.exp(loss) if loss < 100 else math.inf  # exp overflows above 709
    return f"loss {loss:.4f} perplexity {perplexity:,.2f}"


def _number_text(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float | int) else "not finite"
