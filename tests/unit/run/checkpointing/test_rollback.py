"""When a run cannot roll back one site only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bigtrain.errors import TrainingError
from bigtrain.run.checkpointing.resume import Recovery
from bigtrain.run.state import GuardState, TrainState
from bigtrain.settings.run_config import GuardSection, SitesSection


def test_a_site_does_not_go_back_alone() -> None:
    meet = {"server": "http://10.0.0.1:29700", "token_file": "token"}
    sites = SitesSection.model_validate({"count": 2, "inner_steps": 5} | meet)
    config = SimpleNamespace(guard=GuardSection(), sites=sites)
    context: Any = SimpleNamespace(config=config)
    state = TrainState(step=7, guard=GuardState(streak=10))
    with pytest.raises(
        TrainingError, match=r"10 bad steps in a row .* cannot roll back one site only"
    ):
        Recovery(context, None, None, 0).roll_back(state)  # type: ignore[arg-type]
