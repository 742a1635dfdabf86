"""A run that is one of several sites: rendezvous with the others, and the outer steps of its
loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from bigtrain.engine.sites.figures import OuterEvent, OuterFigures
from bigtrain.engine.sites.outer_step import OuterStep
from bigtrain.engine.sites.server_step import ServerStep
from bigtrain.engine.sites.site_rendezvous import SiteRendezvous
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.checkpointing.changed_settings import mathematics
from bigtrain.run.preflight import Inputs
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState

_OWN_SETTING = "sites.index"

Meeting = SiteRendezvous | Mapping[str, Any]
"""The other sites, or what an outer server compares of them."""


def join_sites(session: Session, inputs: Inputs) -> Meeting | None:
    """Join the other sites, if the run has any; None without. Collective over all sites; those of
    an outer server meet there, when there are weights (`OuterSteps.begin`).

    Raises LaunchError on every rank if a site does not join, or trains with other settings or data.
    """
    sites = session.run.config.sites
    if sites is None:
        return None
    facts = _facts(session, inputs)
    if sites.server is not None:
        return facts
    session.heartbeat.at("joining the other sites", slow=True)
    rendezvous = SiteRendezvous.join(sites, session.world, facts)
    if sites.count > 1:
        session.say(f"site {sites.index} of {sites.count}, which joined at {sites.address}")
    return rendezvous


def _facts(session: Session, inputs: Inputs) -> dict[str, Any]:
    """What has to be the same on all sites: settings and data."""
    settings = mathematics(session.run.config)
    del settings[_OWN_SETTING]
    return {**settings, "data": inputs.data_hash}


class OuterSteps:
    """The outer steps of a run; without sites there are none. Collective over all sites, or over
    this one with an outer server."""

    def __init__(self, session: Session, engine: TrainEngine, meeting: Meeting | None) -> None:
        """Construct before anything is restored: checkpoints hold the global weights, too."""
        self._session = session
        self._step: OuterStep | ServerStep | None = None
        sites = session.run.config.sites
        if isinstance(meeting, SiteRendezvous):
            self._step = OuterStep(engine, meeting)
        elif meeting is not None:
            assert sites is not None
            allowed = session.run.config.checkpoint.allow_changes
            self._step = ServerStep(engine, sites, session.world, meeting, allowed)

    def begin(self, state: TrainState) -> TrainState:
        """Begin at `state`, which the engine holds; returns where the run goes on, later where
        other sites are further. Raises LaunchError on every rank if other sites are at another
        outer step or have other global weights."""
        if self._step is None:
            return state
        self._session.heartbeat.at("comparing weights with the other sites", slow=True)
        self._step.begin(
            state.outer_steps,
            state.step,
            is_new=state.step == 0,
            under_way=state.outer_sent,
        )
        return self._moved(state)

    def is_due(self, state: TrainState) -> bool:
        """Whether there is something to do for outer steps before the next step of the run."""
        steps = self._session.run.config.train.steps
        return self._step is not None and self._step.is_due(state.step, steps)

    def make(self, state: TrainState) -> TrainState:
        """Make the outer steps that are due; returns the state after them. Raises LaunchError on
        every rank if another site does not take part where all have to."""
        assert self._step is not None
        steps = self._session.run.config.train.steps
        self._log(state, self._step.after_step(state.step, steps))
        return self._moved(state)

    def settle(self, state: TrainState) -> None:
        """Wait for the exchange that is under way, before a save. Raises as `make`."""
        if self._step is not None:
            self._log(state, self._step.settle())

    def _moved(self, state: TrainState) -> TrainState:
        """`state` after outer steps; shows what is noted of them."""
        assert self._step is not None
        while self._step.notes:
            self._session.say(self._step.notes.pop(0))
        self._log_events(state, self._step.events)
        state = replace(state, outer_steps=self._step.number, outer_sent=self._step.under_way)
        if self._step.step is None:
            return state
        plan, missed = self._session.run.plan, self._step.step - state.step
        steps = min(self._step.step, self._session.run.config.train.steps)
        return replace(
            state,
            step=steps,
            samples=state.samples + missed * plan.global_batch_size,
            tokens=state.tokens + missed * plan.tokens_per_step,
        )

    def _log(self, state: TrainState, found: Sequence[OuterFigures]) -> None:
        metrics = self._session.metrics
        if metrics is None:
            return
        for figures in found:
            values = asdict(figures)
            number, sites = values.pop("number"), list(values.pop("sites"))
            metrics.log_outer_step(state.step, outer_step=number, sites=sites, **values)

    def _log_events(self, state: TrainState, events: list[OuterEvent]) -> None:
        """As events of the samples of the last step."""
        batch = self._session.run.plan.global_batch_size
        while events:
            event = asdict(events.pop(0))
            if self._session.metrics is not None:
                self._session.metrics.log_event(
                    event.pop("event"),
                    step=state.step,
                    first_sample=max(0, state.samples - batch),
                    num_samples=min(state.samples, batch),
                    **event,
                )

    def stop(self) -> None:
        """Before the run ends early, saved: an outer server does not wait for this site then."""
        if isinstance(self._step, ServerStep):
            self.close()

    def close(self) -> None:
        """Leave, together with the other sites or from the server, after the last outer step."""
        if self._step is not None:
            self._session.heartbeat.at("leaving the other sites", slow=True)
            self._step.close()
            while self._step.notes:
                self._session.say(self._step.notes.pop(0))
