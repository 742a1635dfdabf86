"""A run that is one of several sites: rendezvous with the others, and the outer steps of its
loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.changed_settings import mathematics
from bigtrain.run.preflight import Inputs
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState
from bigtrain.sites.meeting.site_rendezvous import SiteRendezvous
from bigtrain.sites.meeting.start import Known, Places
from bigtrain.sites.metrics import OuterEvent, OuterStepMetrics
from bigtrain.sites.outer_step import OuterStep
from bigtrain.sites.server_step import ServerStep
from bigtrain.system.files import write_whole

_OWN_SETTING = "sites.index"
DOORS = "sites.json"
"""Where the main ranks of the other sites listened last, in the run directory."""

Meeting = SiteRendezvous | Mapping[str, Any]
"""The other sites, or what an outer server compares of them."""


def join_sites(session: Session, inputs: Inputs) -> Meeting | None:
    """Join the other sites, if the run has any; None without. Collective over all sites that begin;
    those of an outer server meet there, when there are weights (`OuterSteps.begin`).

    Raises LaunchError on every rank if a site does not join, or trains with other settings or data.
    """
    sites = session.run.config.sites
    if sites is None:
        return None
    facts = _facts(session, inputs)
    if sites.server is not None:
        return facts
    session.heartbeat.at("joining the other sites", slow=True)
    is_new = not checkpoints.steps(session.directory)
    known = Known(is_new, _read_doors(session.directory))
    rendezvous = SiteRendezvous.join(sites, session.world, facts, known)
    if sites.count > 1:
        others = ", ".join(str(site) for site in rendezvous.members if site != sites.index)
        place = f"site {sites.index} of {sites.count}, which meet at {sites.address}"
        session.say(f"{place}; it begins " + (f"with site {others}" if others else "by itself"))
    return rendezvous


def _read_doors(directory: Path) -> Places:
    """Where earlier launches have found the other sites."""
    try:
        tree = json.loads((directory / DOORS).read_text())
        return {int(site): (str(host), int(port)) for site, (host, port) in tree.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _facts(session: Session, inputs: Inputs) -> dict[str, Any]:
    """What has to be the same on all sites: settings and data."""
    settings = mathematics(session.run.config)
    del settings[_OWN_SETTING]
    return {**settings, "data": inputs.data_hash}


class OuterSteps:
    """The outer steps of a run; without sites there are none. Collective over this site."""

    def __init__(self, session: Session, engine: TrainEngine, meeting: Meeting | None) -> None:
        """Construct before anything is restored: checkpoints hold the global weights, too."""
        self._session = session
        self._step: OuterStep | ServerStep | None = None
        self._kept: Places = {}
        sites = session.run.config.sites
        if isinstance(meeting, SiteRendezvous):
            self._step = OuterStep(engine, meeting)
        elif meeting is not None:
            assert sites is not None
            allowed = session.run.config.checkpoint.allow_changes
            own = session.world.is_main
            run = checkpoints.make_run_id(session.directory) if own else ""
            self._step = ServerStep(engine, sites, session.world, meeting, allowed, run)

    def begin(self, state: TrainState) -> TrainState:
        """Begin at `state`, which the engine holds; returns where the run goes on, later where
        other sites are further. Raises LaunchError on every rank if other sites of a new run
        have other weights."""
        if self._step is None:
            return state
        self._session.heartbeat.at("comparing weights with the other sites", slow=True)
        self._step.begin(
            state.outer_steps,
            state.step,
            is_new=state.step == 0,
            under_way=state.outer_sent,
            seen=state.outer_tokens,
        )
        return self._moved(state)

    def is_due(self, state: TrainState) -> bool:
        """Whether there is something to do for outer steps before the next step of the run."""
        steps = self._session.run.config.train.steps
        return self._step is not None and self._step.is_due(state.step, steps)

    def make(self, state: TrainState) -> TrainState:
        """Make the outer steps that are due; returns the state after them. Raises LaunchError on
        every rank if this site can make none."""
        assert self._step is not None
        steps = self._session.run.config.train.steps
        self._log(state, self._step.after_step(state.step, steps))
        self._keep_doors()
        return self._moved(state)

    def settle(self, state: TrainState) -> TrainState:
        """Wait for the exchange that is under way, before a save. As `make`."""
        if self._step is None:
            return state
        self._log(state, self._step.settle())
        return self._moved(state)

    def _keep_doors(self) -> None:
        """For a later launch, should the site at ``sites.address`` be lost then."""
        places = self._step.places if isinstance(self._step, OuterStep) else {}
        if places != self._kept and self._session.metrics is not None:
            write_whole(self._session.directory / DOORS, json.dumps(places).encode())
            self._kept = places

    def _moved(self, state: TrainState) -> TrainState:
        """`state` after outer steps; shows what is noted of them."""
        assert self._step is not None
        while self._step.notes:
            self._session.say(self._step.notes.pop(0))
        self._log_events(state, self._step.events)
        state = replace(
            state,
            outer_steps=self._step.number,
            outer_tokens=self._step.seen,
            outer_sent=self._step.under_way,
        )
        if self._step.step is None or self._step.step <= state.step:
            return state
        plan, missed = self._session.run.plan, self._step.step - state.step
        steps = min(self._step.step, self._session.run.config.train.steps)
        return replace(
            state,
            step=steps,
            samples=state.samples + missed * plan.global_batch_size,
            tokens=state.tokens + missed * plan.tokens_per_step,
        )

    def _log(self, state: TrainState, found: Sequence[OuterStepMetrics]) -> None:
        metrics = self._session.metrics
        if metrics is None:
            return
        for figures in found:
            values = asdict(figures)
            number, sites = values.pop("number"), list(values.pop("sites"))
            metrics.log_outer_step(state.step, outer_step=number, sites=sites, **values)

    def _log_events(self, state: TrainState, events: list[OuterEvent]) -> None:
        """As events of the samples of the last step."""
        batch, metrics = self._session.run.plan.global_batch_size, self._session.metrics
        if metrics is None and self._session.world.is_main:
            return  # not open yet
        while events:
            event = asdict(events.pop(0))
            if metrics is not None:
                metrics.log_event(
                    event.pop("event"),
                    step=state.step,
                    first_sample=max(0, state.samples - batch),
                    num_samples=min(state.samples, batch),
                    **event,
                )

    def stop(self) -> None:
        """Before the run ends early, saved: others do not wait for this site then."""
        if isinstance(self._step, ServerStep):
            self.close()
        elif self._step is not None:
            self._step.stop()

    def close(self) -> None:
        """Leave, together with the other sites or from the server, after the last outer step."""
        if self._step is not None:
            self._session.heartbeat.at("leaving the other sites", slow=True)
            self._step.close()
            while self._step.notes:
                self._session.say(self._step.notes.pop(0))
