"""The training loop, top to bottom: batch, step, advance, maybe log, evaluate, save, stop."""

from __future__ import annotations

import math
import time
from signal import Signals
from typing import Protocol

from bigtrain.data.loader import MicroBatch
from bigtrain.engine.build import StepResult, TrainEngine
from bigtrain.run.evaluation import Evaluator
from bigtrain.run.metrics import StepMetrics, memory_gib
from bigtrain.run.out_of_memory import explained
from bigtrain.run.profiling import Profiler
from bigtrain.run.saving import Saver
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.run.stopping import StopAgreement
from bigtrain.schedule import learning_rate_at


class Batches(Protocol):
    """This process's micro-batches of the optimizer step that begins at a global sample."""

    def step(self, first_sample: int) -> list[MicroBatch]: ...


def train(
    session: Session,
    engine: TrainEngine,
    batches: Batches,
    evaluator: Evaluator,
    state: TrainState,
    saver: Saver,
) -> tuple[TrainState, Signals | None]:
    """Train until ``train.steps`` or a signal; returns the final state, which has been saved, and
    the signal. Collective."""
    config, plan = session.run.config, session.run.plan
    clock = _Clock()
    profiler = Profiler(session)
    stop = StopAgreement(session.signals, session.world.size, session.hold)
    received: Signals | None = None
    while state.step < config.train.steps and received is None:
        lr = learning_rate_at(state.step, config.optimizer.lr, config.schedule, config.train.steps)
        session.seed_step(state.step)
        micro_batches = batches.step(state.samples)
        profiler.before(state.step + 1)
        with explained(session, engine):
            result = engine.train_step(micro_batches, lr)
        state = state.after_step(plan)
        clock.count_step()
        last = state.step == config.train.steps
        profiler.after(state.step, last=last)
        # Before anything is written: it also finds that another start holds the directory.
        received = None if last else stop.agreed()
        if last or state.step % config.logging.every_steps == 0:
            _log(session, engine, result, state, lr, clock)
        held_out_loss = None
        if last or _due(state.step, config.evaluation.every_steps):
            with clock.paused():
                held_out_loss = evaluator.run(state)
        if last or received or _due(state.step, config.checkpoint.every_steps):
            with clock.paused():
                saver.save(state, held_out_loss)
        saver.report()
    return state, received


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _log(
    session: Session,
    engine: TrainEngine,
    result: StepResult,
    state: TrainState,
    lr: float,
    clock: _Clock,
) -> None:
    # The only place of the loop that waits for the device.
    loss, norm = engine.step_loss(result), engine.gradient_norm()
    step_seconds = clock.seconds_per_step()
    if session.metrics is None:
        return
    tokens_per_second = session.run.plan.tokens_per_step / step_seconds
    session.metrics.log_step(
        StepMetrics(
            step=state.step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=state.tokens,
            samples=state.samples,
            tokens_per_second=tokens_per_second,
            step_seconds=step_seconds,
            model_flops_utilization=session.utilization(tokens_per_second),
            memory_gib=memory_gib(session.device.type),
        )
    )


class _Clock:
    """Wall time per optimizer step since the last reading, pauses left out."""

    def __init__(self) -> None:
        self._steps = 0
        self._since = time.perf_counter()

    def count_step(self) -> None:
        self._steps += 1

    def seconds_per_step(self) -> float:
        now = time.perf_counter()
        seconds = (now - self._since) / max(1, self._steps)
        self._steps, self._since = 0, now
        return max(seconds, math.ulp(1.0))

    def paused(self) -> _Pause:
        return _Pause(self)


class _Pause:
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._clock._since += time.perf_counter() - self._begun
