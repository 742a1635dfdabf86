"""A run that is one of several sites: rendezvous with the others, and the outer steps of its
loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bigtrain.engine.sites.outer_step import OuterStep
from bigtrain.engine.sites.site_rendezvous import SiteRendezvous
from bigtrain.engine.train_engine import TrainEngine
from bigtrain.run.checkpointing.changed_settings import mathematics
from bigtrain.run.preflight import Inputs
from bigtrain.run.session import Session
from bigtrain.run.state import TrainState

_OWN_SETTING = "sites.index"


def join_sites(session: Session, inputs: Inputs) -> SiteRendezvous | None:
    """Join the other sites, if the run has any; None without. Collective over all sites.

    Raises LaunchError on every rank if a site does not join, or trains with other settings or data.
    """
    sites = session.run.config.sites
    if sites is None:
        return None
    session.heartbeat.at("joining the other sites", slow=True)
    rendezvous = SiteRendezvous.join(sites, session.world, _facts(session, inputs))
    if sites.count > 1:
        session.say(f"site {sites.index} of {sites.count}, which joined at {sites.address}")
    return rendezvous


def _facts(session: Session, inputs: Inputs) -> dict[str, Any]:
    """What has to be the same on all sites: settings, data, and the topology of ranks."""
    run = session.run
    settings = mathematics(run.config)
    del settings[_OWN_SETTING]
    return {
        **settings,
        "data": inputs.data_hash,
        "ranks": run.topology.describe() or "1 rank",
        "ZeRO stage": run.engine.deepspeed["zero_optimization"]["stage"],
    }


class OuterSteps:
    """The outer steps of a run; without sites there are none. Collective over all sites."""

    def __init__(
        self, session: Session, engine: TrainEngine, rendezvous: SiteRendezvous | None
    ) -> None:
        """Construct before anything is restored: checkpoints hold the global weights, too."""
        self._session = session
        self._step = None if rendezvous is None else OuterStep(engine, rendezvous)

    def begin(self, state: TrainState) -> None:
        """Begin at `state`, which the engine holds. Raises LaunchError on every rank if other sites
        are at another outer step or have other global weights."""
        if self._step is not None:
            self._step.begin(state.outer_steps, is_new=state.step == 0)

    def is_due(self, state: TrainState) -> bool:
        """Whether an outer step comes before the next step of the run."""
        config = self._session.run.config
        return config.sites is not None and config.sites.is_due(state.step, config.train.steps)

    def make(self, state: TrainState) -> TrainState:
        """Make an outer step; returns the state after it. Raises LaunchError on every rank if
        another site does not take part."""
        assert self._step is not None
        session, sites = self._session, self._step.sites
        figures = self._step.step()
        if session.metrics is not None:
            session.metrics.log_outer_step(
                state.step,
                outer_step=figures.number,
                sites=list(range(sites.count)),
                sent_bytes=figures.sent_bytes,
                seconds=figures.seconds,
                waited_seconds=figures.waited_seconds,
                change=figures.change,
                distance=figures.distance,
            )
        return replace(state, outer_steps=figures.number)

    def close(self) -> None:
        """Leave together with the other sites, after the last outer step."""
        if self._step is not None:
            self._session.heartbeat.at("leaving the other sites", slow=True)
            self._step.close()
