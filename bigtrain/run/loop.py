"""Training loop: batch, step, advance or roll back, outer step, log, evaluate, save, stop."""

from __future__ import annotations

from collections.abc import Mapping
from signal import Signals
from typing import Protocol

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.engine.experts import ExpertLoadStats
from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.train_engine import LossWindow, TrainEngine
from bigtrain.report.step_metrics import StepMetrics
from bigtrain.run.checkpointing.resume import roll_back
from bigtrain.run.checkpointing.saver import Saver
from bigtrain.run.diagnostics.out_of_memory import explained
from bigtrain.run.diagnostics.profiling import Profiler
from bigtrain.run.diagnostics.step_clock import StepClock
from bigtrain.run.diagnostics.step_guard import Guard
from bigtrain.run.diagnostics.stragglers import StragglerWatch
from bigtrain.run.evaluation.evaluator import Evaluator, is_over
from bigtrain.run.health.stopping import StopAgreement
from bigtrain.run.outer_steps import OuterSteps
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.settings.lr_schedule import learning_rate_at


class Batches(Protocol):
    """Source of this rank's micro-batches for the optimizer step that begins at a global sample."""

    def step(self, first_sample: int) -> list[MicroBatch]: ...


def train(
    session: Session,
    engine: TrainEngine,
    batches: Batches,
    evaluator: Evaluator,
    state: TrainState,
    saver: Saver,
    outer: OuterSteps,
) -> tuple[TrainState, Signals | None]:
    """Train until ``train.steps``, early stopping or a signal; return the final state, which has
    been saved, and the signal. Collective."""
    config, plan = session.run.config, session.run.plan
    clock = StepClock(session.device.type, engine.host_time, session.memory)
    losses, profiler = LossWindow(engine), Profiler(session)
    limit = config.watchdog.collective_timeout_seconds
    group = cpu_group(limit) if session.world.size > 1 else None
    stop = StopAgreement(session.signals, group, session.write_failure)
    stragglers = StragglerWatch(session, engine, group, state)
    guard = Guard(session)
    received: Signals | None = None
    beat = session.heartbeat
    beat.watch_layers(engine.module)
    engine.on_phase = clock.marking(beat.set_phase)
    with clock.running():
        while not is_over(config, state) and received is None:
            lr = learning_rate_at(
                state.step, config.optimizer.lr, config.schedule, config.train.steps
            )
            session.seed_step(state.step)
            beat.begin_step(state.step + 1)
            is_logged = _is_logged(session, state.step + 1)
            clock.begin_step(is_logged=is_logged)
            with stragglers.meter.waiting(), clock.part("data"):
                micro_batches = batches.step(state.samples)
            guard.begin(state)
            profiler.before(state.step + 1)
            with explained(session, engine):
                result = engine.train_step(micro_batches, lr, guard.skip_policy, observe=is_logged)
            clock.count_step()
            state = guard.end(state, state.after_step(plan))
            losses.add(result, updated=state.guard.streak == 0)
            if guard.rolls_back(state):
                beat.set_phase("rolling back", slow=True)
                saver.wait()
                state = roll_back(session, engine, state)
                losses.empty()
                continue
            if outer.is_due(state):
                beat.set_phase("outer step with the other sites", slow=True)
                with clock.paused("outer_step"):
                    state = outer.make(state)
            last = state.step == config.train.steps
            profiler.after(state.step, last=last)
            # Before anything is written: it also detects a later launch that holds the directory.
            beat.set_phase("agreeing whether to stop")
            received = None if last else stop.agreed()
            if session.metrics is not None:
                session.metrics.advance(state.step)
            if _is_logged(session, state.step):
                beat.set_phase("logging")
                num_steps, step_seconds = _log(session, engine, losses, state, lr, clock)
                stragglers.gather(state, num_steps, step_seconds)
            figures: dict[str, float] = {}
            if last or evaluator.is_due(state):
                beat.set_phase("evaluating")
                with clock.paused("evaluation"):
                    state, figures = evaluator.run(state, last=last)
                last = is_over(config, state)
            if last or received or _due(state.step, config.checkpoint.every_steps):
                beat.set_phase("settling the exchange with the other sites", slow=True)
                with clock.paused("outer_step"):
                    state = outer.settle(state)
                with clock.paused("save"):
                    _save(session, saver, state, figures)
            saver.report()
    beat.set_phase("finishing", slow=True)
    return state, received


def _is_logged(session: Session, step: int) -> bool:
    config = session.run.config
    return step == config.train.steps or step % config.logging.every_steps == 0


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _save(session: Session, saver: Saver, state: TrainState, figures: Mapping[str, float]) -> None:
    # Only the writing is slow; a copy takes no longer than other collectives.
    session.heartbeat.set_phase("waiting for the previous save", slow=True)
    saver.wait()
    session.heartbeat.set_phase("saving", slow=not session.run.config.checkpoint.asynchronous)
    saver.save(state, figures)


def _log(
    session: Session,
    engine: TrainEngine,
    losses: LossWindow,
    state: TrainState,
    lr: float,
    clock: StepClock,
) -> tuple[int, float]:
    """Log a step; return the number of steps since the last logged one, and seconds of each."""
    # Apart from the guard, only this function waits for the device in the loop.
    loss, norm = losses.read(), engine.gradient_norm()
    load, sent_bytes = engine.expert_load.read(), engine.optimizer_sent_bytes()
    times = clock.read()
    if session.metrics is None:
        return times.num_steps, times.step_seconds
    tokens_per_second = session.run.plan.site_tokens_per_step / times.step_seconds
    session.metrics.log_step(
        StepMetrics(
            step=state.step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=state.tokens,
            samples=state.samples,
            tokens_per_second=tokens_per_second,
            step_seconds=times.step_seconds,
            model_flops_utilization=session.utilization(tokens_per_second),
            memory_gib=session.memory.peak_gib(),
            breakdown=times.breakdown,
            peak_memory_gib_by_phase=session.memory.by_phase_gib(),
            **_experts(load),
            optimizer_exchange=None if sent_bytes is None else {"sent_bytes": sent_bytes},
        )
    )
    return times.num_steps, times.step_seconds


def _experts(load: ExpertLoadStats | None) -> dict[str, dict[str, float]]:
    """Return the fields of `StepMetrics` that only a mixture of experts has."""
    if load is None:
        return {}
    fields = {"expert_imbalance": load.imbalance}
    if load.sent_bytes is not None and load.seconds is not None:
        fields["expert_exchange"] = {"sent_bytes": load.sent_bytes, "seconds": load.seconds}
    return fields
