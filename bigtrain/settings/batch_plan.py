"""How a global batch is cut into micro-batches: accumulation, micro-batch size, samples of a step.
Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bigtrain.errors import Problem
from bigtrain.settings.compatibility.facts import largest_divisor
from bigtrain.settings.run_config import BatchSection


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's samples are divided.

    Sample ``global_batch_size * step + (micro_step * data_size + data_rank) * micro_batch_size +
    j`` is row ``j`` of the micro-batch, so the samples of a step never depend on the division.
    """

    global_batch_size: int
    micro_batch_size: int
    data_size: int
    accumulation: int
    sequence_length: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def equation(self) -> str:
        """The arithmetic as one human-readable line."""
        return (
            f"{self.global_batch_size} samples per step = {self.micro_batch_size} per micro-batch "
            f"x {self.data_size} data-parallel x {self.accumulation} accumulation; "
            f"{self.tokens_per_step} tokens per step = {self.global_batch_size} samples x "
            f"{self.sequence_length} tokens"
        )


def plan_batch(batch: BatchSection, data_size: int) -> tuple[BatchPlan | None, list[Problem]]:
    """Derive accumulation from the global batch, or say which batch would divide."""
    samples = batch.samples_per_step
    per_pass = batch.micro_batch_size * data_size
    if samples % per_pass:
        below = samples // per_pass * per_pass
        nearest = f"{below} or {below + per_pass}" if below else str(per_pass)
        key, unit = "batch.global_batch_size", 1
        if batch.global_tokens is not None:
            key, unit = "batch.global_tokens", batch.sequence_length
            nearest = " or ".join(str(int(n) * unit) for n in nearest.split(" or "))
        rule = (
            f"must be a multiple of batch.micro_batch_size x data-parallel size = "
            f"{batch.micro_batch_size} x {data_size} = {per_pass}"
            + (f" samples = {per_pass * unit} tokens" if unit > 1 else "")
        )
        fitting = (
            largest_divisor(samples // data_size, batch.micro_batch_size)
            if (samples % data_size == 0)
            else None
        )
        remedy = f"nearest: {nearest}" + (
            f", or batch.micro_batch_size: {fitting}" if fitting else ""
        )
        return None, [Problem(key, samples * unit, rule, remedy)]
    plan = BatchPlan(
        samples, batch.micro_batch_size, data_size, samples // per_pass, batch.sequence_length
    )
    return plan, []
