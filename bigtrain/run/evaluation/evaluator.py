"""Evaluations of a run while it trains: held-out loss, samples from prompts, tasks of lm-eval."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bigtrain.data.loading.loader import HeldOutSource
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.evaluation.best import after_evaluation, has_stopped
from bigtrain.run.evaluation.held_out import HeldOutResult, measure
from bigtrain.run.evaluation.live_model import LiveModel
from bigtrain.run.evaluation.prompts import Prompts
from bigtrain.run.evaluation.tasks import TaskRunner
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.settings.sections.evaluation import TASKS


class Evaluator:
    """Evaluator of the model of `engine`. All methods except `is_due` are collective over all
    ranks.

    It does not change the state of training: neither weights nor random generators, which every
    step reseeds.
    """

    def __init__(
        self, session: Session, engine: TrainEngine, held_out: Sequence[HeldOutSource]
    ) -> None:
        """Tokenize prompts and load tasks. Raises ConfigError on every rank if that fails."""
        self._session = session
        self._engine = engine
        self._held_out = held_out
        self._section = session.run.config.evaluation
        model = LiveModel(engine)
        self._prompts = Prompts(session, model) if self._section.prompts else None
        self._tasks = TaskRunner(session, model) if self._section.tasks else None

    def is_due(self, state: TrainState) -> bool:
        """Return whether anything is evaluated after this step."""
        return _due(state, self._section.every_steps) or self._tasks_are_due(state)

    def _tasks_are_due(self, state: TrainState) -> bool:
        return self._tasks is not None and _due(state, self._section.tasks_every_steps)

    def run(self, state: TrainState, *, last: bool) -> tuple[TrainState, dict[str, float]]:
        """Run and log the evaluations due at `state`, all of them if the run ends here (`last`, or
        stopped early).

        Returns the state with the best evaluation so far, and the metrics by name.
        """
        config = self._session.run.config
        held_out: HeldOutResult | None = None
        figures: dict[str, float] = {}
        if last or _due(state, self._section.every_steps):
            held_out = measure(self._engine, self._held_out)
            figures |= {} if held_out is None else held_out.figures()
            if self._prompts is not None:
                self._prompts.log(state.step)
        tasks: dict[str, float] = {}
        by_tasks = self._section.best.is_of_tasks
        if last or self._tasks_are_due(state):
            tasks = self._run_tasks()
        evaluated = after_evaluation(config, state, figures | tasks)
        if self._tasks is not None and not (tasks or last or by_tasks):
            if has_stopped(config, evaluated):
                tasks = self._run_tasks()
        if self._session.metrics is not None and (held_out is not None or tasks):
            self._session.metrics.log_evaluation(
                state.step,
                None if held_out is None else held_out.whole,
                {} if held_out is None else held_out.sources,
                tasks,
            )
        stopping = self._section.early_stopping
        if stopping is not None and has_stopped(config, evaluated) and not last:
            best = evaluated.best
            self._session.say(
                f"step {state.step}: early stopping: {best.metric} has not improved by more than "
                f"{stopping.min_delta:g} for {best.num_since} evaluations; its best value is "
                f"{best.value:.6g}, at step {best.step}"
            )
        return evaluated, figures | tasks

    def _run_tasks(self) -> dict[str, float]:
        """Return the finite metrics of lm-eval's tasks, as ``tasks/TASK/METRIC``."""
        if self._tasks is None:
            return {}
        self._session.heartbeat.at("evaluating tasks", slow=True)
        metrics = self._tasks.figures()
        return {f"{TASKS}/{name}": value for name, value in metrics.items() if math.isfinite(value)}


def _due(state: TrainState, every: int | None) -> bool:
    return every is not None and state.step % every == 0
