"""Evaluations of a run while it trains: which are due, and the held-out loss. Samples from prompts
and tasks of lm-eval: `bigtrain.run.live_model`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bigtrain.data.loading.loader import HeldOutSource
from bigtrain.errors import ExtensionError
from bigtrain.metrics.recording import Recorded, joined
from bigtrain.run.reporting.metrics import HeldOutLoss
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import TrainState, after_evaluation, has_stopped
from bigtrain.settings.sections.evaluation import TASKS

if TYPE_CHECKING:
    from bigtrain.run.live_model import Prompts, TaskRunner


class Evaluator:
    """Evaluator of the model in training. All methods except `is_due` are collective over all
    ranks, and leave the state of training as it is: every step reseeds the random generators.
    held_out: the sets that it measures."""

    def __init__(self, context: SegmentContext, held_out: Sequence[HeldOutSource]) -> None:
        """Tokenize prompts and load tasks. Raises ConfigError on every rank if that fails."""
        self._context = context
        self.held_out = held_out
        self._section = context.config.evaluation
        self._prompts: Prompts | None = None
        self._tasks: TaskRunner | None = None
        if self._section.prompts or self._section.tasks:
            from bigtrain.run.live_model import LiveModel, Prompts, TaskRunner

            model = LiveModel(context.engine)
            if self._section.prompts:
                self._prompts = Prompts(context, model)
            if self._section.tasks:
                self._tasks = TaskRunner(context, model)

    def is_due(self, state: TrainState) -> bool:
        """Return whether anything is evaluated after this step."""
        return state.is_multiple_of(self._section.every_steps) or self._tasks_are_due(state)

    def _tasks_are_due(self, state: TrainState) -> bool:
        return self._tasks is not None and state.is_multiple_of(self._section.tasks_every_steps)

    def run(self, state: TrainState, *, last: bool) -> tuple[TrainState, dict[str, float]]:
        """Run and log the evaluations due at `state`; every evaluation at the end of the run
        (`last`, or early stopping). Returns the state with the best evaluation so far, and the
        metrics by name."""
        config, stopping = self._context.config, self._section.early_stopping
        # Held-out loss and samples.
        held_out: HeldOutResult | None = None
        metrics: dict[str, float] = {}
        if last or state.is_multiple_of(self._section.every_steps):
            held_out = measure(self._context, self.held_out)
            if held_out is not None:
                metrics |= held_out.metrics()
                # Every rank refuses that settings depend on a metric which nothing recorded.
                metric = self._section.best.metric
                depends = config.checkpoint.keep_best > 0 or stopping is not None
                if depends and config.best_held_out is not None and metric not in metrics:
                    raise ExtensionError(
                        f"evaluation.best.metric = {metric!r}: nothing recorded it in the "
                        f"evaluation -> one of {', '.join(sorted(metrics))}"
                    )
            if self._prompts is not None:
                self._prompts.log(state.step)

        # Tasks: also if the held-out loss now stops the run, whose last evaluation is complete.
        task_metrics: dict[str, float] = {}
        best_is_of_tasks = self._section.best.is_of_tasks
        if last or self._tasks_are_due(state):
            task_metrics = self._run_tasks()
        evaluated = after_evaluation(config, state, metrics | task_metrics)
        if self._tasks is not None and not (task_metrics or last or best_is_of_tasks):
            if has_stopped(config, evaluated):
                task_metrics = self._run_tasks()
        if self._context.log.metrics is not None and (held_out is not None or task_metrics):
            self._context.log.metrics.log_evaluation(
                state.step,
                None if held_out is None else held_out.mean_loss,
                {} if held_out is None else held_out.sources,
                task_metrics,
            )
        if stopping is not None and has_stopped(config, evaluated) and not last:
            best = evaluated.best
            self._context.log.info(
                f"step {state.step}: early stopping: {best.metric} has not improved by more than "
                f"{stopping.min_delta:g} for {best.num_since} evaluations; its best value is "
                f"{best.value:.6g}, at step {best.step}"
            )
        return evaluated, metrics | task_metrics

    def _run_tasks(self) -> dict[str, float]:
        """Return the finite metrics of lm-eval's tasks, as ``tasks/TASK/METRIC``."""
        if self._tasks is None:
            return {}
        self._context.heartbeat.set_activity("evaluating tasks", slow=True)
        metrics = self._tasks.metrics()
        return {f"{TASKS}/{name}": value for name, value in metrics.items() if math.isfinite(value)}


@dataclass(frozen=True)
class HeldOutResult:
    """Evaluation: the loss over all sets, and the loss of each set by its name."""

    mean_loss: HeldOutLoss
    sources: dict[str, HeldOutLoss]

    def metrics(self) -> dict[str, float]:
        """Return metrics by the names that ``evaluation.best.metric`` takes: of the mean, and of
        each set as ``METRIC/SET`` if there are several."""
        metrics = _named_metrics(self.mean_loss, "")
        if len(self.sources) > 1:
            for name, loss in self.sources.items():
                metrics |= _named_metrics(loss, f"/{name}")
        return metrics


def _named_metrics(loss: HeldOutLoss, suffix: str) -> dict[str, float]:
    metrics = {f"held_out_loss{suffix}": loss.loss}
    metrics |= {f"held_out_{name}{suffix}": value for name, value in loss.metrics.items()}
    if loss.is_entropy:
        metrics[f"held_out_perplexity{suffix}"] = loss.perplexity
    if loss.bits_per_byte is not None:
        metrics[f"held_out_bits_per_byte{suffix}"] = loss.bits_per_byte
    return metrics


def measure(context: SegmentContext, held_out: Sequence[HeldOutSource]) -> HeldOutResult | None:
    """Return the loss on the held-out samples, which never change, in nats per token, and the
    metrics that the objective records; None without samples, or if the loss is not finite. The loss
    and the metrics of a mixture are the mean over its sources by their training weights, without
    sources of weight 0. Collective. Raises ExtensionError on every rank if ranks record a name in
    two ways."""
    if not held_out:
        return None
    engine, objective = context.engine, context.config.objective.kind
    sources = {}
    for source in held_out:
        evaluation = engine.evaluate(source.batches)
        metrics: dict[str, float] = {}
        if context.config.records_metrics:
            recorded = partial(dict[str, Recorded], evaluation.recorded)
            try:
                metrics = joined(context.long_work.on_every_rank(recorded))
            except ValueError as error:
                raise ExtensionError(f"{error} -> use one reduction") from error
            metrics |= objective.derived_metrics(metrics)
        sources[source.name] = HeldOutLoss(
            evaluation.loss,
            evaluation.num_units,
            bits_per_byte(evaluation.loss, source) if engine.computes_entropy else None,
            engine.computes_entropy,
            objective.unit,
            metrics,
        )
    # Mean over sources, by weight w: loss = sum_i w_i loss_i / sum_i w_i.
    total_weight = sum(source.weight for source in held_out)
    shares = {source.name: source.weight / total_weight for source in held_out if source.weight}
    loss = sum(sources[name].loss * share for name, share in shares.items())
    if not math.isfinite(loss):
        return None
    bits_and_shares = [(sources[name].bits_per_byte, share) for name, share in shares.items()]
    weighted_bits = [bits * share for bits, share in bits_and_shares if bits is not None]
    all_have_bits = len(weighted_bits) == len(shares)
    common_metrics = set.intersection(*(set(sources[name].metrics) for name in shares))
    mean_loss = HeldOutLoss(
        loss,
        sum(sources[name].num_units for name in shares),
        sum(weighted_bits) if all_have_bits else None,
        engine.computes_entropy,
        objective.unit,
        {
            metric: sum(sources[name].metrics[metric] * share for name, share in shares.items())
            for metric in sorted(common_metrics)
        },
    )
    return HeldOutResult(mean_loss, sources)


def bits_per_byte(loss: float, source: HeldOutSource) -> float | None:
    """Convert `loss` from nats per token to bits per byte of text."""
    if source.tokens_per_byte is None:
        return None
    return loss / math.log(2) * source.tokens_per_byte
