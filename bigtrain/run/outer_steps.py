"""The outer steps of a run that is one of several sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bigtrain.errors import LaunchError
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.changed_settings import mathematics
from bigtrain.run.context import RunContext
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import TrainState

if TYPE_CHECKING:
    from bigtrain.sites.metrics import OuterStepMetrics
    from bigtrain.sites.outer_step import OuterStep

_SITE_SETTING = "sites.index"
_SERVER_DIRECTORY = "outer_server"


def _shared_settings(context: RunContext, data_hash: str) -> dict[str, Any]:
    """Return the settings and the hash of the data, which must be equal on all sites."""
    settings = mathematics(context.config)
    del settings[_SITE_SETTING]
    return {**settings, "data": data_hash}


def refuse_other_run(context: RunContext, data_hash: str) -> None:
    """Raise LaunchError on every rank if the outer server has a run with other settings or data.
    This is called before the model is built; the server compares the settings and the data again
    when this site joins. Collective over this site."""
    sites, allowed = context.config.sites, context.config.checkpoint.allow_changes
    if sites is None or sites.server is None or (sites.start_server and sites.index == 0):
        return  # no server, or this site starts it later

    def compare() -> None:
        run = checkpoints.make_run_id(context.directory)
        from bigtrain.sites.membership import Membership

        Membership(sites, run).compare(_shared_settings(context, data_hash), allowed)

    context.long_work.on_main_rank(compare)


class OuterSteps:
    """Outer steps of a run; none without sites. All methods are collective over this site."""

    def __init__(self, context: SegmentContext) -> None:
        """Construct before a checkpoint is restored: the global weights of the sites are restored
        with it."""
        self._context = context
        self._step: OuterStep | None = None
        config = context.config
        if config.sites is not None:
            run = checkpoints.make_run_id(context.directory) if context.world.is_main else ""
            facts = _shared_settings(context, context.inputs.data_hash)
            heartbeat = context.heartbeat
            from bigtrain.sites.outer_step import OuterStep

            self._step = OuterStep(
                context.engine,
                config.sites,
                context.world,
                facts,
                last_step=config.train.total_steps,
                allowed=config.checkpoint.allow_changes,
                run=run,
                # Other sites may be far from their next outer step: not a hang of this one.
                on_wait=lambda: heartbeat.set_activity("waiting for the other sites", slow=True),
            )

    def begin(self, state: TrainState) -> TrainState:
        """Begin at `state`, which the engine holds; return where the run continues, later if other
        sites are ahead. Raises LaunchError on every rank if sites of a new run have other
        weights."""
        if self._has_final_weights(state):
            self._step = None  # nothing is left to exchange
        if self._step is None:
            return state
        self._context.heartbeat.set_activity("joining the other sites", slow=True)
        sites = self._step.sites
        if sites.start_server and sites.index == 0:
            directory = self._context.directory / _SERVER_DIRECTORY
            from bigtrain.sites.own_server import start_own_server

            on_main_rank = self._context.long_work.on_main_rank
            self._context.log.info(on_main_rank(lambda: start_own_server(sites, directory)))
        if sites.count > 1:
            self._context.log.info(f"site {sites.index} of {sites.count}, server {sites.server}")
        self._step.begin(
            state.outer_steps,
            state.step,
            is_new=state.step == 0,
            pending_fragment=state.outer_sent,
            tokens_seen=state.outer_tokens,
        )
        return self._after_outer_steps(state)

    def is_due(self, state: TrainState) -> bool:
        """Return whether outer steps are due before the next step of the run."""
        return self._step is not None and self._step.is_due(state.step)

    def make(self, state: TrainState) -> TrainState:
        """Make the due outer steps; return the state after them. Raises LaunchError on every rank
        if this site can make none."""
        assert self._step is not None
        self._log_steps(state, self._step.after_step(state.step))
        return self._after_outer_steps(state)

    def settle(self, state: TrainState) -> TrainState:
        """Wait for the exchange in progress, before a save. As `make`."""
        if self._step is None:
            return state
        self._log_steps(state, self._step.settle())
        return self._after_outer_steps(state)

    def _after_outer_steps(self, state: TrainState) -> TrainState:
        """Return `state` after outer steps; log their notes."""
        assert self._step is not None
        while self._step.notes:
            self._context.log.info(self._step.notes.pop(0))
        # Events are about the samples of the last step. The main rank keeps them until its log is
        # open; ranks without a log drop them.
        plan, metrics = self._context.plan, self._context.log.metrics
        keeps_events = metrics is None and self._context.world.is_main
        while self._step.events and not keeps_events:
            event = asdict(self._step.events.pop(0))
            if metrics is not None:
                first_sample = max(0, state.samples - plan.global_batch_size)
                self._context.log.event(
                    event.pop("event"), state, first_sample=first_sample, **event
                )
        # A record without sites says nothing about the sites of a known outer step.
        record = self._step.record
        sites = record.sites
        if not sites and record.number == state.outer_steps:
            sites = state.outer_sites
        state = replace(
            state,
            outer_steps=record.number,
            outer_tokens=record.tokens_seen,
            outer_ended=record.ended_step,
            outer_sites=sites,
            outer_sent=self._step.pending_fragment,
        )
        # Sites that are ahead have trained the steps that this site skips.
        if self._step.continue_at is None or self._step.continue_at <= state.step:
            return state
        num_skipped = self._step.continue_at - state.step
        return replace(
            state,
            step=min(self._step.continue_at, self._context.config.train.total_steps),
            samples=state.samples + num_skipped * plan.global_batch_size,
            tokens=state.tokens + num_skipped * plan.tokens_per_step,
        )

    def _log_steps(self, state: TrainState, outer_steps: Sequence[OuterStepMetrics]) -> None:
        metrics = self._context.log.metrics
        if metrics is None:
            return
        for step_metrics in outer_steps:
            values = asdict(step_metrics)
            number, sites = values.pop("number"), list(values.pop("sites"))
            metrics.log_outer_step(state.step, outer_step=number, sites=sites, **values)

    def _has_final_weights(self, state: TrainState) -> bool:
        """Return whether `state` has the final weights of the run: this site took part in the outer
        step that ended the run, or received the weights after that outer step."""
        return state.outer_ended >= self._context.config.train.total_steps

    def make_last(self, state: TrainState) -> TrainState:
        """Make the outer step that ends the run, if this site is restarted after its last step and
        was detached from the other sites at that step. As `make`."""
        if self._step is None or self._has_final_weights(state) or not self.is_due(state):
            return state
        self._context.heartbeat.set_activity("outer step with the other sites", slow=True)
        return self.make(state)

    def final_record(self, state: TrainState) -> dict[str, Any]:
        """Return, and log, the outer step that made the weights at the end of the run, and its
        sites; empty without other sites. Raises LaunchError on every rank if this site lacks the
        weights of that outer step: all sites that export have equal weights."""
        sites, total_steps = self._context.config.sites, self._context.config.train.total_steps
        if sites is None or sites.count == 1:
            return {}
        # Between two outer steps the sites have different weights.
        if not self._has_final_weights(state):
            reason = f"this site lacks the outer step after step {total_steps}, "
            reason += "with which the run ends"
            fix = (
                "start this site again with the server reachable: it makes that outer step, or "
                "takes the weights of the sites that made it"
            )
            if self._step is not None and self._step.detach_reason:
                reason = self._step.detach_reason
            elif state.step < total_steps:
                reason = f"a callback ended it after step {state.step} of {total_steps}"
                fix = (
                    f"train.steps={state.step} and checkpoint.allow_changes=[train.steps] on all "
                    "sites: they exchange their weights after that step"
                )
            raise LaunchError(
                f"site {sites.index} ended apart from the other sites, after outer step "
                f"{state.outer_steps} ({reason}): its weights are saved and are not those of the "
                f"run, so they are not exported -> {fix}"
            )
        made_by = list(state.outer_sites)
        self._context.log.info(
            f"the weights are those of outer step {state.outer_steps}, with which the run ended, "
            f"made by site {', '.join(map(str, made_by))} of {sites.count}"
        )
        return {"outer_step": state.outer_steps, "sites": made_by}

    def close(self) -> None:
        """Leave the other sites, which then do not wait for this one."""
        if self._step is not None:
            self._context.heartbeat.set_activity("leaving the other sites", slow=True)
            self._step.close()
            while self._step.notes:
                self._context.log.info(self._step.notes.pop(0))
