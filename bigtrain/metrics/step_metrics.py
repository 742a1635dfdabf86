"""Metrics of a logged optimizer step: one row each, read by the run, the report and the docs.

A new metric is a `number` in `StepMetrics` and its value in `bigtrain.run.loop.Loop._measure`. From
the row follow its place in ``metrics.jsonl``, the trackers, a separate chart on the report
(unless `bigtrain.report.charts` draws it with others) and `docs/reference/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any, Literal

Kind = Literal["position", "number", "entries"]


def position(meaning: str) -> Any:
    """Declare a count that can be the x axis of a chart; always known."""
    return field(metadata={"kind": "position", "meaning": meaning})


def number(meaning: str, unit: str = "", *, is_optional: bool = False) -> Any:
    """Declare a number, drawn as a curve in `unit`.

    is_optional: omitted from the lines of runs that do not have it; others write null if unknown.
    """
    metadata = {"kind": "number", "meaning": meaning, "unit": unit, "optional": is_optional}
    return field(default=None, metadata=metadata) if is_optional else field(metadata=metadata)


def entries(meaning: str, tracker: str | None = None) -> Any:
    """Declare an object of numbers, omitted if unknown; each entry is a curve.

    tracker: name that trackers get the entries under, as ``TRACKER/ENTRY``; default: the field's.
    """
    return field(default=None, metadata={"kind": "entries", "meaning": meaning, "tracker": tracker})


@dataclass(frozen=True)
class Breakdown:
    """Seconds of an optimizer step on the main rank, means since the last logged step, whose sum
    without `communication_seconds` is `step_seconds`, which excludes evaluations and saves.
    """

    data_seconds: float = number("waiting for the batch; on CUDA as far as the device waits too")
    forward_seconds: float | None = number(
        "forward passes of all micro-batches, without DeepSpeed's hooks on a CPU; on CUDA the "
        "device's time, which may include waiting for the host; null in a pipeline"
    )
    backward_seconds: float | None = number("backward passes, likewise; null in a pipeline")
    compute_seconds: float | None = number(
        "both passes in a pipeline, where they alternate, including exchanges with the other "
        "stages and waiting for them; else null"
    )
    optimizer_seconds: float = number(
        "gradient norm, clipping, update, and gathering the updated weights"
    )
    communication_seconds: float | None = number(
        "time that the training thread waits for collectives and messages, contained in the other "
        "parts; on CUDA the time that the compute stream waits for them or runs them itself "
        "(exposed communication), of the logged step only"
    )
    engine_seconds: float = number(
        "on a CPU DeepSpeed's hooks and reductions inside the passes, without waiting, and the "
        "rest of the step; on CUDA only the rest, since hooks run while the device computes. "
        "Modules with DeepSpeed's own ZeRO-3 hooks (leaf modules, NVMe) have them in the passes"
    )

    def describe(self) -> str:
        """Return the known parts, in milliseconds, as one line."""
        parts = [
            f"{name.removesuffix('_seconds')} {_milliseconds(seconds)}"
            for name, seconds in asdict(self).items()
            if seconds is not None and name != "communication_seconds"
        ]
        text, waited_seconds = f"{', '.join(parts)} ms", self.communication_seconds
        if waited_seconds is not None:
            text += f", of them {_milliseconds(waited_seconds)} ms waiting for other ranks"
        return text


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1.0 else f"{1e3 * seconds:,.0f}"


class MeanBreakdown:
    """Mean of breakdowns over the steps of a run."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._num_steps = 0

    def add(self, breakdown: Breakdown, num_steps: int) -> None:
        """Add `num_steps` steps, of which `breakdown` is the mean."""
        self._num_steps += num_steps
        for name, seconds in asdict(breakdown).items():
            if seconds is not None:
                self._sums[name] = self._sums.get(name, 0.0) + seconds * num_steps

    def mean(self) -> Breakdown | None:
        """Return the mean; None without steps."""
        if self._num_steps <= 0:
            return None
        means: dict[str, Any] = {field.name: None for field in fields(Breakdown)}
        means |= {name: seconds / self._num_steps for name, seconds in self._sums.items()}
        return Breakdown(**means)


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of a logged optimizer step, in the order of a line of ``metrics.jsonl``."""

    step: int = position("optimizer steps done, from 1")
    loss: float = number(
        "mean over the target tokens (rows or pairs, if these are the objective's unit) of the "
        "steps since the last logged one, or since the run resumed from a checkpoint, without "
        "skipped updates",
        "nats per token",
    )
    lr: float = number("learning rate of this step")
    grad_norm: float = number("norm of the gradient before clipping")
    tokens: int = position("tokens trained on since the beginning of the run, including padding")
    samples: int = position("samples trained on since the beginning of the run")
    tokens_per_second: float = number(
        "tokens of all ranks (of this site, if there are several) per second, including padding, "
        "mean since the last logged step",
        "tokens/s",
    )
    step_seconds: float = number(
        "wall time of an optimizer step, mean since the last logged step", "s"
    )
    model_flops_utilization: float | None = number(
        "model FLOPs per second over the devices' peak, between 0 and 1; null if the peak is "
        "unknown"
    )
    memory_gib: float = number(
        "peak memory of the main rank so far: allocated on its CUDA device, or resident in main "
        "memory on a CPU",
        "GiB",
    )
    breakdown: Breakdown | None = entries(  # noqa: RUF009 - makes a field
        "seconds of a step on the main rank by part, see below"
    )
    peak_memory_gib_by_phase: Mapping[str, float] | None = entries(
        "peak GiB allocated on the main rank's CUDA device so far in forward, backward (compute "
        "for both in a pipeline), optimizer, save and evaluation; measured in the first two steps "
        "of a launch, in logged steps, and in all saves and evaluations; omitted on a CPU, where "
        "phases cannot be separated",
        tracker="peak_memory_gib",
    )
    expert_imbalance: Mapping[str, float] | None = entries(
        "by name of a layer's experts, tokens of the global batch that chose the busiest expert "
        "over the mean of all, of the logged step only: 1 if all have as many; omitted without "
        "experts and for compiled layers"
    )
    expert_exchange: Mapping[str, float] | None = entries(
        "with expert parallelism, `sent_bytes` that a rank sent in the exchanges of tokens and "
        "gradients, and the `seconds` these took, including waiting; of the logged step only, "
        "means over all ranks"
    )
    mtp_loss: float | None = number(
        "with objective.mtp_weight, loss of the layers for multi-token prediction since the last "
        "logged step, or since the run resumed: mean over the targets of each, and over the layers",
        "nats per token",
        is_optional=True,
    )
    optimizer_exchange: Mapping[str, float] | None = entries(
        "with Muon, `sent_bytes` that a rank sent to gather matrices and return their updates, of "
        "the logged step only (0 if its update was skipped), mean over all ranks"
    )

    recorded: Mapping[str, float] | None = entries(
        "by name, the metrics that the objective or code of yours recorded (`bigtrain.record`) "
        "since the last logged step, joined over these steps and all ranks by the reduction of "
        "each: mean, sum, max or min"
    )
    memory_checkpoint: Mapping[str, float] | None = entries(
        "with checkpoint.memory, since the last logged step: `blocked_seconds` that training "
        "waited for the copies, and how many checkpoints in memory were `saved` and `skipped` "
        "(because the one before was still being written, or by a failure)"
    )

    def line(self) -> dict[str, Any]:
        """Return the line of ``metrics.jsonl``, without optional metrics that are unknown."""
        return {
            row.name: value
            for row, value in zip(fields(self), asdict(self).values(), strict=True)
            if value is not None or not is_optional(row)
        }

    def tracked(self) -> dict[str, Any]:
        """Return the known numbers by the names that trackers get, without the step."""
        values: dict[str, Any] = {}
        for row, value in zip(fields(self), asdict(self).values(), strict=True):
            if value is None or row.name == "step":
                continue
            if row.metadata["kind"] == "entries":
                prefix = row.metadata["tracker"] or row.name
                values |= {f"{prefix}/{key}": entry for key, entry in value.items()}
            else:
                values[row.name] = value
        return values


def is_optional(row: Field[Any]) -> bool:
    """Return whether a metric is omitted from a line if it is unknown."""
    return row.metadata["kind"] == "entries" or bool(row.metadata.get("optional"))


def names_of_kind(metric_kind: Kind) -> tuple[str, ...]:
    """Return the metrics of a step that were declared by `position`, `number` or `entries`."""
    return tuple(row.name for row in fields(StepMetrics) if row.metadata["kind"] == metric_kind)
