"""Metrics of a run: metrics.jsonl, the trackers, the log and the terminal.

``metrics.jsonl`` contains one JSON object per line, of four kinds. Every logged step is a line of
`bigtrain.metrics.step_metrics.StepMetrics`; trackers receive entries of its objects as
``FIELD/ENTRY`` (``breakdown/data_seconds``), those of "peak_memory_gib_by_phase" as
``peak_memory_gib/PHASE``. Every evaluation::

    {"step", "held_out_loss", "held_out_perplexity", "held_out_tokens",
     "held_out_bits_per_byte", "held_out_metrics", "held_out_sources", "tasks"}

where "held_out_bits_per_byte" is omitted for conversations, in which only some tokens have a loss.
An objective other than next_token has neither "held_out_bits_per_byte" nor "held_out_perplexity",
and "held_out_pairs" or "held_out_rows" instead of "held_out_tokens" if it counts pairs or rows.
"held_out_metrics" are the metrics that the objective records, such as "rewards/accuracies", for the
held-out samples; trackers receive them as ``held_out_METRIC``. "held_out_sources" exists if there
are several sources: by name, "loss", "perplexity", "tokens", "bits_per_byte" and "metrics" of the
source; "held_out_loss" and every metric are then the mean by the weights of the mixture.
Trackers receive them as ``held_out_loss/NAME`` and ``held_out_METRIC/NAME``. "tasks" has the
metrics of lm-eval's tasks by ``TASK/METRIC``, after the steps in which they were run, without the
other fields if only tasks were run; trackers receive them as ``tasks/TASK/METRIC``.

Every outer step of a run with several sites::

    {"step", "outer_step", "fragment", "sites", "sent_bytes", "link_bytes", "seconds",
     "waited_seconds", "change", "distance"}

with the "fragment" of the model that was exchanged, the sites that took part, "sent_bytes" of all
ranks of this site, "link_bytes" from the rank that sent most to one other site, the root mean
square "change" of the global weights since the last outer step, and the "distance" of this site's
weights to the mean of all sites. Trackers receive the numbers as ``outer_step/NAME``.

And every event, with the samples of the run that it concerns::

    {"step", "event": "skipped", "first_sample", "num_samples", "reason", "loss",
     "grad_norm", "consecutive"}
    {"step", "event": "rolled_back", "first_sample", "num_samples", "to_step"}
    {"step", "event": "replicas_differed", "first_sample", "num_samples", "to_step",
     "ranks", "is_known"}
    {"step", "event": "straggler", "first_sample", "num_samples", "rank", "host",
     "work_seconds", "median_seconds"}
    {"step", "event": "site_alone" | "site_left_out" | "site_returned" | "message_refused",
     "first_sample", "num_samples", "who", "reason", "outer_step", "count"}

The events with "who" are from sites with an outer server, after the step in which this site was
notified: a site trained alone, its update was excluded from an outer step, it joined or rejoined,
or the server rejected a message (corrupted, forged, replayed). "who" is the site, or the host of a
message.

Unknown values (the utilization of a CPU) and non-finite ones (a loss that overflowed) are null.
Every step appears once, also after a resume; events of samples that are not read again are kept.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from bigtrain.errors import OutputError, without_secrets
from bigtrain.metrics.step_metrics import StepMetrics
from bigtrain.run.reporting.metrics_lines import cut_lines
from bigtrain.run.reporting.progress import (
    OUTPUT_REMEDY,
    Progress,
    close_written,
    format_duration,
    format_lr,
    format_rate,
    write_line,
)
from bigtrain.run.reporting.tally import Tally, loss_text
from bigtrain.run.reporting.trackers import Trackers, check_trackers
from bigtrain.system.files import writing
from bigtrain.system.units import GIB

__all__ = ["HeldOutLoss", "MetricsWriter", "StepMetrics", "check_trackers", "memory_gib"]


class MetricsWriter:
    """Writer of the metrics of a run. For its main rank only; calls no collective.

    directory: of the run; must exist. run_config: resolved and nested, for the trackers.
    resume_step, resume_samples: lines of ``metrics.jsonl`` about later steps, and one truncated by
    a kill, are dropped first; 0 starts with an empty file. is_stale: whether a later launch holds
    the run, so that this one stops writing. terminal: a progress bar (True) or plain lines (False);
    None: whether standard error is a tty. Raises LaunchError if a tracker does not start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        total_steps: int,
        trackers: Sequence[str],
        project: str,
        run_config: Mapping[str, object],
        resume_step: int = 0,
        resume_samples: int = 0,
        terminal: bool | None = None,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_stale = is_stale
        self._total_steps = total_steps
        self._shown = ""  # metrics of the last logged step, for the terminal
        self._failure: OutputError | None = None
        self._progress = Progress(
            directory / "log.txt",
            total_steps=total_steps,
            first_step=resume_step,
            terminal=terminal,
        )
        try:
            self._trackers = Trackers(
                trackers,
                directory=directory,
                project=project,
                run_config=run_config,
                resume_step=resume_step,
                report=self.info,
            )
        except BaseException:
            self._progress.close()
            raise
        # Drop lines last, so that none is dropped if a tracker does not start.
        self._samples = directory / "samples.jsonl"
        cut_lines(self._samples, resume_step, resume_samples)
        self._path = directory / "metrics.jsonl"
        first_loss, num_dropped = cut_lines(self._path, resume_step, resume_samples)
        if num_dropped:
            self.info(
                f"metrics.jsonl: dropped {num_dropped} lines of steps after {resume_step}, "
                f"which are trained again"
            )
        self._tally = Tally(resume_step, first_loss)
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def log_step(self, metrics: StepMetrics) -> None:
        """Write one step's metrics everywhere. The line is on its way to disk on return."""
        self._write(metrics.line())
        self._tally.add(metrics)
        self._shown = (
            f"loss {metrics.loss:.4g} lr {format_lr(metrics.lr)} "
            f"grad_norm {metrics.grad_norm:.3g} "
            f"tokens/s {format_rate(metrics.tokens_per_second)} "
        )
        status = self._shown + self._time_left(metrics.step)
        line = f"step {metrics.step}/{self._total_steps} {status}"
        self._progress.step(metrics.step, line, status)
        self._trackers.log(metrics.tracked(), metrics.step)

    def advance(self, step: int) -> None:
        """Show progress at `step` on a terminal, logged or not; elsewhere do nothing."""
        if self._progress.is_live:
            self._progress.advance(step, self._shown + self._time_left(step))

    def _time_left(self, step: int) -> str:
        seconds = (self._total_steps - step) * self._tally.seconds_of_a_step(step)
        return f"left {format_duration(seconds)}"

    def log_evaluation(
        self,
        step: int,
        held_out: HeldOutLoss | None = None,
        sources: Mapping[str, HeldOutLoss] = MappingProxyType({}),
        tasks: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Write an evaluation: the held-out loss over all sets and by set, and metrics of tasks."""
        line: dict[str, Any] = {"step": step}
        tracked: dict[str, float] = {}
        begin = f"step {step}/{self._total_steps}"
        # The log shows the losses; the line of metrics.jsonl and the trackers have all metrics.
        if held_out is not None:
            metrics = {f"held_out_{key}": value for key, value in held_out.losses().items()}
            line |= metrics
            tracked |= metrics
            if held_out.metrics:
                line["held_out_metrics"] = dict(held_out.metrics)
                tracked |= {f"held_out_{key}": value for key, value in held_out.metrics.items()}
            if held_out.is_entropy:
                shown_loss = loss_text(held_out.loss)
            else:
                shown_loss = f"loss {held_out.loss:.4f}"
            self._tally.held_out = (step, shown_loss)
            text = f"{begin} held-out {shown_loss}"
            if held_out.bits_per_byte is not None:
                text += f" bits/byte {held_out.bits_per_byte:.4f}"
            if len(sources) > 1:
                line["held_out_sources"] = {key: loss.entry() for key, loss in sources.items()}
                for key, loss in sources.items():
                    tracked[f"held_out_loss/{key}"] = loss.loss
                    for name, value in loss.metrics.items():
                        tracked[f"held_out_{name}/{key}"] = value
                losses = ", ".join(f"{key} {loss.loss:.4f}" for key, loss in sources.items())
                text += f" ({losses})"
            for name, value in held_out.metrics.items():
                text += f" {name} {value:.4g}"
            self.info(text)
        if tasks:
            values = {name.removeprefix("tasks/"): value for name, value in tasks.items()}
            line["tasks"] = values
            tracked |= tasks
            values_text = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            self.info(f"{begin} tasks {values_text}")
        self._write(line)
        self._trackers.log(tracked, step)

    def log_samples(self, step: int, samples: Sequence[tuple[str, str]]) -> None:
        """Append (prompt, continuation) pairs to samples.jsonl, and send them to the trackers."""
        lines = [
            json.dumps({"step": step, "prompt": prompt, "text": text}, ensure_ascii=False)
            for prompt, text in samples
        ]
        if not self._is_stale():
            with writing(self._samples, OUTPUT_REMEDY):
                with self._samples.open("a", encoding="utf-8") as file:
                    file.writelines(f"{line}\n" for line in lines)
        for prompt, text in samples:
            self.info(f"step {step}/{self._total_steps} {prompt!r} -> {text!r}")
        self._trackers.log_samples(samples, step)

    def log_outer_step(self, step: int, **values: Any) -> None:
        """Write an outer step after optimizer step `step`, in this module's format."""
        self._write({"step": step, **values})
        text = (
            f"step {step}/{self._total_steps} outer step {values['outer_step']} with "
            f"{len(values['sites'])} sites in {values['seconds']:.2f} s, "
            f"{values['sent_bytes']:,} bytes sent"
        )
        if values["distance"] is not None:
            text += f", distance {values['distance']:.3g}"
        self.info(text)
        names = ("sent_bytes", "link_bytes", "seconds", "waited_seconds", "change", "distance")
        tracked = {name: values[name] for name in names if values[name] is not None}
        self._trackers.log({f"outer_step/{name}": value for name, value in tracked.items()}, step)

    def log_event(self, event: str, *, step: int, **details: object) -> None:
        """Write an event of `step`, in the format at the top of this file; not to trackers."""
        self._write({"step": step, "event": event, **details})

    def roll_back(self, step: int, samples: int) -> None:
        """Continue from `step`, with `samples` read: drop lines of later steps, but keep events.
        Trackers receive the steps that are trained again twice."""
        if self._is_stale():
            return
        self._failure = close_written(self._file, self._path, self._failure)
        with writing(self._path, OUTPUT_REMEDY):
            cut_lines(self._samples, step, samples)
            cut_lines(self._path, step, samples)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._tally.roll_back(step)

    @property
    def failure(self) -> OutputError | None:
        """Error after which metrics or log can no longer be written; None while they can."""
        return self._failure or self._progress.failure

    def info(self, text: str) -> None:
        """Show `text` and append it to log.txt; addresses without a password or a signature."""
        self._progress.say(without_secrets(text))

    def note(self, text: str) -> None:
        """Append `text` to log.txt only."""
        self._progress.note(without_secrets(text))

    def summary(self) -> list[str]:
        """Return a summary of the run from the metrics logged so far; pass it to `close`."""
        return self._tally.lines(self._total_steps)

    def achieved(self) -> tuple[float, float]:
        """Return tokens per second over all logged steps of this launch, and peak memory in GiB."""
        return self._tally.tokens_per_second, self._tally.memory_gib

    def close(self, lines: Sequence[str] = ()) -> None:
        """Show `lines`, then close files and trackers. Does nothing when called again."""
        if self._file.closed:
            return
        self._failure = close_written(self._file, self._path, self._failure)
        for line in lines:
            self.info(line)
        self._trackers.finish()
        self._progress.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, values: Mapping[str, object]) -> None:
        """Append a line to metrics.jsonl, unless the file belongs to a later launch."""
        if self._is_stale():
            return
        line = without_secrets(json.dumps(_finite(values), allow_nan=False))
        self._failure = self._failure or write_line(self._file, self._path, line)


def _finite(value: object) -> object:
    """Return `value` with None for non-finite numbers, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def memory_gib(device_type: str) -> float:
    """Return the peak memory of this rank so far in GiB: allocated on its device (`device_type`
    cuda), or resident in main memory. Does not wait for the device."""
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GIB
    try:
        # The peak of this program (VmHWM, proc(5)); on Linux `ru_maxrss` also counts the process
        # that started it.
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:", 1)[1].split(None, 1)[0]) / 2**20
    except (OSError, IndexError, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (GIB if sys.platform == "darwin" else 2**20)


@dataclass(frozen=True)
class HeldOutLoss:
    """Mean `loss` in nats over `num_units` held-out units of the objective; `bits_per_byte` if
    known. unit: "tokens" (targets), "rows" or "pairs". is_entropy: whether the loss is a
    cross-entropy, which has a perplexity. metrics: recorded by the objective, by name."""

    loss: float
    num_units: int
    bits_per_byte: float | None = None
    is_entropy: bool = True
    unit: str = "tokens"
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """Exponential of the loss; infinite if too large for a float."""
        return math.exp(self.loss) if self.loss < math.log(sys.float_info.max) else math.inf

    def losses(self) -> dict[str, float]:
        """Return the loss and its conversions by name, and the number of units."""
        metrics: dict[str, float] = {"loss": self.loss}
        if self.is_entropy:
            metrics["perplexity"] = self.perplexity
        metrics[self.unit] = self.num_units
        if self.bits_per_byte is not None:
            metrics["bits_per_byte"] = self.bits_per_byte
        return metrics

    def entry(self) -> dict[str, Any]:
        """Return the entry of a set in "held_out_sources" of metrics.jsonl."""
        entry: dict[str, Any] = self.losses()
        if self.metrics:
            entry["metrics"] = dict(self.metrics)
        return entry
