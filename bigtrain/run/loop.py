"""Training loop: batch, step, advance or roll back, outer step, log, evaluate, save, stop. Its
arguments have the protocols below, so that it imports no data pipeline, checkpoints or sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from signal import Signals
from typing import Protocol

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.sample_stream import StreamPosition
from bigtrain.engine.experts import ExpertLoadStats
from bigtrain.engine.optimizers.skip_step import SkipPolicy
from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.train_engine import LossWindow, TrainEngine
from bigtrain.report.step_metrics import StepMetrics
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.out_of_memory import explained
from bigtrain.run.diagnostics.profiling import Profiler
from bigtrain.run.diagnostics.start_times import FIRST_STEP, StartTimes
from bigtrain.run.diagnostics.step_clock import StepClock, StepTimes
from bigtrain.run.diagnostics.step_guard import Guard
from bigtrain.run.diagnostics.stragglers import StragglerWatch
from bigtrain.run.health.stopping import Agreed, StopAgreement
from bigtrain.run.reporting.phase_memory import PhaseMemory
from bigtrain.run.run_log import RunLog
from bigtrain.run.state import TrainState, is_over
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.run_config import RunConfig


class Batches(Protocol):
    """Source of this rank's micro-batches for the optimizer step that begins at a global sample."""

    def step(self, first_sample: int) -> list[MicroBatch]: ...
    def restart(self, position: StreamPosition | None) -> None: ...


class Evaluator(Protocol):
    """See `bigtrain.run.evaluation.Evaluator`."""

    def is_due(self, state: TrainState) -> bool: ...
    def run(self, state: TrainState, *, last: bool) -> tuple[TrainState, dict[str, float]]: ...


class Saver(Protocol):
    """See `bigtrain.run.checkpointing.saver.Saver`."""

    def save(self, state: TrainState, evaluation: Mapping[str, float]) -> None: ...
    def wait(self) -> None: ...
    def report(self) -> None: ...


class MemorySaver(Protocol):
    """See `bigtrain.run.checkpointing.memory_saver.MemorySaver`."""

    def is_due(self, state: TrainState) -> bool: ...
    def save(self, state: TrainState, evaluation: Mapping[str, float]) -> None: ...
    def metrics(self) -> dict[str, float] | None: ...


class Replicas(Protocol):
    """See `bigtrain.run.diagnostics.replica_watch.ReplicaWatch`."""

    def policy(self, state: TrainState, policy: SkipPolicy | None) -> SkipPolicy | None: ...
    def compare(self, before: TrainState) -> TrainState | None: ...


class OuterSteps(Protocol):
    """See `bigtrain.run.outer_steps.OuterSteps`."""

    def is_due(self, state: TrainState) -> bool: ...
    def make(self, state: TrainState) -> TrainState: ...
    def settle(self, state: TrainState) -> TrainState: ...


def train(
    context: RunContext,
    log: RunLog,
    engine: TrainEngine,
    state: TrainState,
    *,
    batches: Batches,
    evaluator: Evaluator,
    saver: Saver,
    outer: OuterSteps,
    callbacks: Callbacks,
    roll_back: Callable[[TrainState], TrainState],
    memory: PhaseMemory,
    utilization: Callable[[float], float | None] = lambda _: None,
    start_times: StartTimes | None = None,
    memory_saver: MemorySaver | None = None,
    replicas: Replicas | None = None,
    until: int | None = None,
    with_position: Callable[[TrainState], TrainState] = lambda state: state,
) -> tuple[TrainState, Signals | None]:
    """Train until step `until` (default: ``train.steps``), early stopping, a callback's request or
    a signal; return the final state, which has been saved, and the signal. Collective.
    roll_back: restores the engine from before the bad steps that end at a state. utilization:
    model FLOPs utilization at tokens per second. start_times: of this launch, logged after its
    first step. memory_saver: of checkpoints in memory, if any. replicas: compares what ranks hold
    alike, if asked. with_position: adds to a state that is saved the position of its data."""
    config, plan, beat = context.config, context.plan, context.heartbeat
    until = until or config.train.total_steps
    clock = StepClock(context.device.type, engine.host_time, memory)
    losses, profiler = LossWindow(engine), Profiler(context, log)
    limit = config.watchdog.collective_timeout_seconds
    group = cpu_group(limit) if context.world.size > 1 else None
    stop = StopAgreement(
        context.signals,
        group,
        lambda: callbacks.failure or log.failure(),
        callbacks.take_requests if callbacks.may_request else None,
    )
    stragglers = StragglerWatch(context, log, engine, group, state)
    guard = Guard(config.guard, log)
    received: Signals | None = None
    beat.watch_layers(engine.module)
    engine.on_phase = clock.marking(beat.set_phase)
    with clock.running():
        while not is_over(config, state) and received is None and state.step < until:
            lr = learning_rate_at(
                state.step, config.optimizer.lr, config.schedule, config.train.total_steps
            )
            context.seed_step(state.step)
            beat.begin_step(state.step + 1)
            is_logged = _is_logged(config, state.step + 1, until)
            clock.begin_step(is_logged=is_logged)
            with stragglers.meter.waiting(), clock.part("data"):
                micro_batches = batches.step(state.samples)
            guard.begin(state)
            policy = guard.skip_policy
            if replicas is not None:
                policy = replicas.policy(state, policy)
            profiler.before(state.step + 1)
            with explained(context, engine), callbacks.recording():
                result = engine.train_step(micro_batches, lr, policy, observe=is_logged)
            clock.count_step()
            if replicas is not None and (restored := replicas.compare(state)) is not None:
                state = restored
                batches.restart(state.stream)
                losses.empty()
                engine.forget_mtp_loss()
                callbacks.forget()
                continue
            state = guard.end(state, state.after_step(plan))
            if start_times is not None:
                start_times.end(FIRST_STEP)
                log.to_file(start_times.text())
                start_times = None
            losses.add(result, updated=state.guard.streak == 0)
            if guard.rolls_back(state):
                beat.set_phase("rolling back", slow=True)
                saver.wait()
                state = roll_back(state)
                losses.empty()
                engine.forget_mtp_loss()
                callbacks.forget()
                continue
            if outer.is_due(state):
                beat.set_phase("outer step with the other sites", slow=True)
                with clock.paused("outer_step"):
                    state = outer.make(state)
            last = state.step == config.train.total_steps
            profiler.after(state.step, last=last)
            is_logged = _is_logged(config, state.step, until)  # outer steps may have moved the run
            measured = _measure(
                log, engine, losses, state, lr, clock, utilization, memory_saver, is_logged
            )
            callbacks.step(state, measured.row)
            # Before anything is written: it also detects a later launch that holds the directory.
            beat.set_phase("agreeing whether to stop")
            agreed = Agreed() if last else stop.agreed()
            if log.metrics is not None:
                log.metrics.advance(state.step)
            if measured.times is not None:
                beat.set_phase("logging")
                _write_row(log, measured.row, callbacks.recorded(group))
                stragglers.gather(state, measured.times)
            metrics: dict[str, float] = {}
            if last or agreed.ends or evaluator.is_due(state):
                beat.set_phase("evaluating")
                with clock.paused("evaluation"):
                    state, metrics = evaluator.run(state, last=last or agreed.ends)
                callbacks.evaluation(state, metrics)
                if callbacks.may_request and not last:
                    agreed |= stop.agreed()
            if agreed.ends:
                state = replace(state, stopped_steps=config.train.total_steps)
            last, received = is_over(config, state), agreed.signal
            if memory_saver is not None and memory_saver.is_due(state) and not (last or received):
                beat.set_phase("saving in memory")
                with clock.paused("save"):
                    memory_saver.save(with_position(state), metrics)
            is_due = agreed.saves or state.is_multiple_of(config.checkpoint.every_steps)
            if last or received or is_due or state.step == until:
                beat.set_phase("settling the exchange with the other sites", slow=True)
                with clock.paused("outer_step"):
                    state = outer.settle(state)
                with clock.paused("save"):
                    _save(context, saver, with_position(state), metrics)
            saver.report()
    beat.set_phase("finishing", slow=True)
    return state, received


def _is_logged(config: RunConfig, step: int, until: int) -> bool:
    return step == until or step % config.logging.every_steps == 0


def _save(
    context: RunContext, saver: Saver, state: TrainState, metrics: Mapping[str, float]
) -> None:
    # Only the writing is slow; a copy takes no longer than other collectives.
    context.heartbeat.set_phase("waiting for the previous save", slow=True)
    saver.wait()
    context.heartbeat.set_phase("saving", slow=not context.config.checkpoint.asynchronous)
    saver.save(state, metrics)


@dataclass(frozen=True)
class _Measured:
    """Metrics of a logged step: number of steps since the last one and seconds of each, and the row
    on the main rank. All None of a step that is not logged."""

    times: StepTimes | None = None
    row: StepMetrics | None = None


def _measure(
    log: RunLog,
    engine: TrainEngine,
    losses: LossWindow,
    state: TrainState,
    lr: float,
    clock: StepClock,
    utilization: Callable[[float], float | None],
    memory_saver: MemorySaver | None,
    is_logged: bool,
) -> _Measured:
    """Return the metrics of a step, if it is logged. Collective then."""
    if not is_logged:
        return _Measured()
    # Apart from the guard, only this function waits for the device in the loop.
    loss, norm = losses.read(), engine.gradient_norm()
    load, sent_bytes = engine.expert_load.read(), engine.optimizer_sent_bytes()
    mtp_loss, times = engine.mtp_loss(), clock.read()
    if log.metrics is None:
        return _Measured(times)
    tokens_per_second = engine.plan.site_tokens_per_step / times.step_seconds
    row = StepMetrics(
        step=state.step,
        loss=loss,
        lr=lr,
        grad_norm=norm,
        tokens=state.tokens,
        samples=state.samples,
        tokens_per_second=tokens_per_second,
        step_seconds=times.step_seconds,
        model_flops_utilization=utilization(tokens_per_second),
        memory_gib=clock.memory.peak_gib(),
        breakdown=times.breakdown,
        peak_memory_gib_by_phase=clock.memory.by_phase_gib(),
        **_experts(load),
        mtp_loss=mtp_loss,
        optimizer_exchange=None if sent_bytes is None else {"sent_bytes": sent_bytes},
        memory_checkpoint=None if memory_saver is None else memory_saver.metrics(),
    )
    return _Measured(times, row)


def _write_row(log: RunLog, row: StepMetrics | None, recorded: Mapping[str, float] | None) -> None:
    if log.metrics is not None and row is not None:
        log.metrics.log_step(row if recorded is None else replace(row, recorded=recorded))


def _experts(load: ExpertLoadStats | None) -> dict[str, dict[str, float]]:
    """Return the fields of `StepMetrics` that only a mixture of experts has."""
    if load is None:
        return {}
    fields = {"expert_imbalance": load.imbalance}
    if load.sent_bytes is not None and load.seconds is not None:
        fields["expert_exchange"] = {"sent_bytes": load.sent_bytes, "seconds": load.seconds}
    return fields
