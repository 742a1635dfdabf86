"""Training loop: batch, step, advance or roll back, outer step, log, evaluate, save, stop. Its
parts have the protocols below, so that it imports no data pipeline, checkpoints or sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from signal import Signals
from typing import Protocol

import torch

from bigtrain.data.loading.micro_batch import MicroBatch
from bigtrain.data.samples.sample_stream import StreamPosition
from bigtrain.engine.optimizers.skip_step import SkipPolicy
from bigtrain.engine.startup.cpu_collectives import cpu_group
from bigtrain.engine.train_engine import RecentLosses, StepResult, TrainEngine
from bigtrain.errors import LaunchError
from bigtrain.metrics.step_metrics import StepMetrics
from bigtrain.models.torch_patches import compiler_error
from bigtrain.run.callbacks import Callbacks
from bigtrain.run.context import RunContext
from bigtrain.run.diagnostics.profiling import Profiler
from bigtrain.run.diagnostics.start_times import FIRST_STEP, StartTimes
from bigtrain.run.diagnostics.step_clock import PartMemory, StepClock, StepTimes
from bigtrain.run.diagnostics.step_guard import Guard
from bigtrain.run.diagnostics.stragglers import StragglerWatch
from bigtrain.run.health.stopping import Agreed, StopAgreement
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


class ReplicaWatch(Protocol):
    """See `bigtrain.run.diagnostics.replica_watch.ReplicaWatch`."""

    def policy(self, state: TrainState, policy: SkipPolicy | None) -> SkipPolicy | None: ...
    def compare(self, before: TrainState) -> TrainState | None: ...


class OuterSteps(Protocol):
    """See `bigtrain.run.outer_steps.OuterSteps`."""

    def is_due(self, state: TrainState) -> bool: ...
    def make(self, state: TrainState) -> TrainState: ...
    def settle(self, state: TrainState) -> TrainState: ...


@dataclass
class Loop:
    """Steps of a run, and what is due after each. Every method is collective.

    roll_back: restores the engine from before the bad steps that end at a state. utilization: model
    FLOPs utilization at tokens per second. start_times: of this launch, logged after its first
    step. memory_saver: of checkpoints in memory, if any. replica_watch: compares what ranks hold
    alike, if asked. with_position: adds the position of the data to a state that is saved."""

    context: RunContext
    engine: TrainEngine
    batches: Batches
    evaluator: Evaluator
    saver: Saver
    outer: OuterSteps
    callbacks: Callbacks
    roll_back: Callable[[TrainState], TrainState]
    memory: PartMemory
    utilization: Callable[[float], float | None] = lambda _: None
    start_times: StartTimes | None = None
    memory_saver: MemorySaver | None = None
    replica_watch: ReplicaWatch | None = None
    with_position: Callable[[TrainState], TrainState] = lambda state: state

    def __post_init__(self) -> None:
        context, callbacks, log = self.context, self.callbacks, self.context.log
        self._config, self._beat = context.config, context.heartbeat
        self._clock = StepClock(context.device.type, self.engine.host_time, self.memory)
        self._losses, self._profiler = RecentLosses(self.engine), Profiler(context)
        limit = self._config.watchdog.collective_timeout_seconds
        self._group = cpu_group(limit) if context.world.size > 1 else None
        self._stop = StopAgreement(
            context.signals,
            self._group,
            lambda: callbacks.failure or log.failure(),
            callbacks.take_requests if callbacks.may_request else None,
        )
        self._guard = Guard(self._config.guard, log)

    def run(self, state: TrainState, until: int | None = None) -> tuple[TrainState, Signals | None]:
        """Train until step `until` (default: ``train.steps``), early stopping, a callback's request
        or a signal; return the final state, which has been saved, and the signal."""
        config, total = self._config, self._config.train.total_steps
        until = until or total
        received: Signals | None = None
        self._stragglers = StragglerWatch(self.context, self.engine, self._group, state)
        self._beat.watch_layers(self.engine.module)
        self.engine.on_phase = self._clock.marking(self._beat.set_activity)
        with self._clock.running():
            while not is_over(config, state) and received is None and state.step < until:
                # Train one step; its update may be skipped.
                lr = learning_rate_at(state.step, config.optimizer.lr, config.schedule, total)
                result = self._train(state, lr, until)
                # Silent errors of the hardware: go back to a state at which all replicas agreed.
                if self.replica_watch is not None:
                    restored = self.replica_watch.compare(state)
                    if restored is not None:
                        state = restored
                        self.batches.restart(state.stream)
                        self._forget_measurements()
                        continue
                # Advance, or roll back after several bad steps in a row.
                state = self._guard.end(state, state.after_step(self.context.plan))
                if self.start_times is not None:
                    self.start_times.end(FIRST_STEP)
                    self.context.log.to_file(self.start_times.text())
                    self.start_times = None
                was_skipped = state.guard.streak > 0
                self._losses.add(result, updated=not was_skipped)
                if self._guard.rolls_back(state):
                    self._beat.set_activity("rolling back", slow=True)
                    self.saver.wait()  # the checkpoint to restore may still be written
                    state = self.roll_back(state)
                    self._forget_measurements()
                    continue
                # Exchange weights with other sites before anything at this step is measured.
                if self.outer.is_due(state):
                    self._beat.set_activity("outer step with the other sites", slow=True)
                    with self._clock.paused("outer_step"):
                        state = self.outer.make(state)
                # Log, evaluate, save: in this order, since a save contains the best evaluation.
                last = state.step == total
                self._profiler.after(state.step, last=last)
                agreed = self._log(state, lr, until, last=last)
                state, metrics, agreed = self._evaluate(state, agreed, last=last)
                if agreed.ends:
                    state = replace(state, stopped_steps=total)
                received = agreed.signal
                ends = is_over(config, state) or received is not None
                is_due = agreed.saves or state.step == until
                state = self._save(state, metrics, ends=ends, is_due=is_due)
        self._beat.set_activity("finishing", slow=True)
        return state, received

    def _train(self, state: TrainState, lr: float, until: int) -> StepResult:
        """Train the step after `state`."""
        step = state.step + 1
        self.context.seed_step(state.step)
        self._beat.begin_step(step)
        is_logged = _is_logged(self._config, step, until)
        self._clock.begin_step(is_logged=is_logged)
        with self._stragglers.meter.waiting(), self._clock.part("data"):
            micro_batches = self.batches.step(state.samples)
        self._guard.begin(state)
        policy = self._guard.skip_policy
        if self.replica_watch is not None:
            policy = self.replica_watch.policy(state, policy)
        self._profiler.before(step)
        try:
            with (
                self.callbacks.recording(),
                self.engine.first_gradients.compared(self.context.log.info),
            ):
                result = self.engine.train_step(micro_batches, lr, policy, observe=is_logged)
        except torch.OutOfMemoryError as error:
            from bigtrain.run.diagnostics.out_of_memory import explained

            raise explained(error, self.context, self.engine) from error
        except RuntimeError as error:
            if not (reason := compiler_error(error)):
                raise
            raise LaunchError(
                f"rank {self.context.world.rank}: layers could not be compiled ({reason}) -> "
                "model.compile=off"
            ) from error
        self._clock.count_step()
        return result

    def _forget_measurements(self) -> None:
        """Drop the measurements of the steps that are undone, after a rollback."""
        self._losses.empty()
        self.engine.forget_mtp_loss()
        self.callbacks.forget()

    def _log(self, state: TrainState, lr: float, until: int, *, last: bool) -> Agreed:
        """Log a step, if it is due; return whether the ranks agree to stop or to save."""
        # Not the value of `_train`: an outer step after this step may have changed `state.step`.
        is_logged = _is_logged(self._config, state.step, until)
        measured = self._measure(state, lr, is_logged=is_logged)
        self.callbacks.step(state, measured.row)
        # Agree before anything is written: this also detects a later launch that holds the run.
        self._beat.set_activity("agreeing whether to stop")
        agreed = Agreed() if last else self._stop.agreed()
        if self.context.log.metrics is not None:
            self.context.log.metrics.advance(state.step)
        if measured.times is not None:
            self._beat.set_activity("logging")
            row, recorded = measured.row, self.callbacks.recorded(self._group)
            if self.context.log.metrics is not None and row is not None:
                if recorded is not None:
                    row = replace(row, recorded=recorded)
                self.context.log.metrics.log_step(row)
            self._stragglers.gather(state, measured.times)
        return agreed

    def _measure(self, state: TrainState, lr: float, *, is_logged: bool) -> _Measured:
        """Return the metrics of a step, if it is logged. Collective for a logged step."""
        if not is_logged:
            return _Measured()
        # These reads wait for the device; in the loop only this function and the guard wait.
        engine, clock = self.engine, self._clock
        loss, norm = self._losses.read(), engine.gradient_norm()
        load, sent_bytes = engine.expert_load.read(), engine.optimizer_sent_bytes()
        mtp_loss, times = engine.mtp_loss(), clock.read()
        if self.context.log.metrics is None:
            return _Measured(times)
        tokens_per_second = engine.plan.site_tokens_per_step / times.step_seconds
        memory_saver = self.memory_saver
        # Fields that only a mixture of experts has.
        expert_fields: dict[str, dict[str, float]] = {}
        if load is not None:
            expert_fields["expert_imbalance"] = load.imbalance
            if load.sent_bytes is not None and load.seconds is not None:
                expert_fields["expert_exchange"] = {
                    "sent_bytes": load.sent_bytes,
                    "seconds": load.seconds,
                }
        row = StepMetrics(
            step=state.step,
            loss=loss,
            lr=lr,
            grad_norm=norm,
            tokens=state.tokens,
            samples=state.samples,
            tokens_per_second=tokens_per_second,
            step_seconds=times.step_seconds,
            model_flops_utilization=self.utilization(tokens_per_second),
            memory_gib=clock.memory.peak_gib(),
            breakdown=times.breakdown,
            peak_memory_gib_by_phase=clock.memory.by_part_gib(),
            **expert_fields,
            mtp_loss=mtp_loss,
            optimizer_exchange=None if sent_bytes is None else {"sent_bytes": sent_bytes},
            memory_checkpoint=None if memory_saver is None else memory_saver.metrics(),
        )
        return _Measured(times, row)

    def _evaluate(
        self, state: TrainState, agreed: Agreed, *, last: bool
    ) -> tuple[TrainState, dict[str, float], Agreed]:
        """Evaluate, if it is due; return the state, its metrics, and whether to stop or to save."""
        if not (last or agreed.ends or self.evaluator.is_due(state)):
            return state, {}, agreed
        self._beat.set_activity("evaluating")
        with self._clock.paused("evaluation"):
            state, metrics = self.evaluator.run(state, last=last or agreed.ends)
        self.callbacks.evaluation(state, metrics)
        if self.callbacks.may_request and not last:
            agreed |= self._stop.agreed()
        return state, metrics, agreed

    def _save(
        self, state: TrainState, metrics: Mapping[str, float], *, ends: bool, is_due: bool
    ) -> TrainState:
        """Save in memory and on disk, if it is due; return the state that was saved. `ends`: no
        step follows in this launch; `is_due`: save on disk, also between the regular saves."""
        memory_saver = self.memory_saver
        if memory_saver is not None and memory_saver.is_due(state) and not ends:
            self._beat.set_activity("saving in memory")
            with self._clock.paused("save"):
                memory_saver.save(self.with_position(state), metrics)
        is_regular = state.is_multiple_of(self._config.checkpoint.every_steps)
        if ends or is_due or is_regular:
            self._beat.set_activity("settling the exchange with the other sites", slow=True)
            with self._clock.paused("outer_step"):
                state = self.outer.settle(state)
            with self._clock.paused("save"):
                self._beat.set_activity("waiting for the previous save", slow=True)
                self.saver.wait()
                # Writing is slow; an asynchronous save only copies, as fast as other collectives.
                is_slow = not self._config.checkpoint.asynchronous
                self._beat.set_activity("saving", slow=is_slow)
                self.saver.save(self.with_position(state), metrics)
        self.saver.report()
        return state


def _is_logged(config: RunConfig, step: int, last_step: int) -> bool:
    return step == last_step or step % config.logging.every_steps == 0


@dataclass(frozen=True)
class _Measured:
    """Metrics of a logged step: its times, and the row of metrics.jsonl on the main rank. Both are
    None for a step that is not logged."""

    times: StepTimes | None = None
    row: StepMetrics | None = None
