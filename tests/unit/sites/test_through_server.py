"""Outer steps of two sites through a real server: what an integer codec rounds off comes later."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigtrain.engine.optimizers.masters import MasterPart
from bigtrain.errors import LaunchError
from bigtrain.models.parallel.sharding import Shard
from bigtrain.settings.sections.sites import SitesSection
from bigtrain.sites import outer_state
from bigtrain.sites.outer_step import OuterStep
from bigtrain.system.world import World
from tests.support.outer_servers import outer_server

NUM_STEPS = 12
SMALL = torch.tensor([[0.0, 0.4, -0.3, 0.2], [0.0, 0.1, -0.2, 0.2]])
"""Changes of each site before every outer step, in codes of a block whose largest is 1: they round
to 0 each time."""


@pytest.fixture(autouse=True)
def parts_of_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for DeepSpeed's engine, which needs a process group; all else is a site's own."""
    monkeypatch.setattr(outer_state, "_trained_parts", lambda engine: engine.parts)


def site_of(
    index: int, codec: str, reach: dict[str, Any], size: int = 4, last_step: int = NUM_STEPS
) -> tuple[OuterStep, torch.Tensor]:
    """A site of one rank, and its masters."""
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros(size)))
    masters = torch.zeros(size)
    engine: Any = SimpleNamespace(
        module=module,
        parts=[
            MasterPart(masters, 0, size, 0, name="weight", shard=Shard((size,), primary=True)),
        ],
        added_states={"weight": {}},
        mesh=SimpleNamespace(replicas=None),
        device=torch.device("cpu"),
        plan=SimpleNamespace(site_tokens_per_step=10),
        refresh_parameters=lambda: None,
    )
    settings = {"count": 2, "index": index, "inner_steps": 1, "codec": codec, **reach}
    sites = SitesSection.model_validate({**settings, "outer": {"type": "average"}})
    world = World(0, 1, 0)
    return OuterStep(engine, sites, world, {}, last_step=last_step, run=f"{index:032x}"), masters


def test_what_is_rounded_off_is_sent_later(tmp_path: Path) -> None:
    levels = 127
    changes = SMALL / levels + torch.tensor([[1.0, 0, 0, 0], [0.5, 0, 0, 0]])
    with outer_server(tmp_path, window_seconds=60.0) as reach:

        def train(index: int) -> torch.Tensor:
            site, masters = site_of(index, "int8", reach)
            site.begin(0, 0, is_new=True)
            for step in range(1, NUM_STEPS + 1):
                masters += changes[index]
                site._merge(site._complete(0, step), 0.0)
            assert site.record.number == NUM_STEPS
            site.close()
            return masters

        with ThreadPoolExecutor(2) as threads:
            first, second = threads.map(train, range(2))
    assert torch.equal(first, second)
    # What is not sent yet: half a code of each site's last change, and of the server's last update.
    assert (first - NUM_STEPS * changes.mean(0)).abs().max() <= 1.5 / levels


@pytest.mark.parametrize("exchange", ["server", "direct"])
def test_another_model_with_the_same_settings_is_refused_and_logged(
    exchange: str, tmp_path: Path
) -> None:
    with outer_server(tmp_path, window_seconds=1.0) as reach:
        reach |= {"exchange": exchange, "timeout_seconds": 20.0}
        first, _ = site_of(0, "float32", reach)
        second, _ = site_of(1, "float32", reach, size=5)
        reason = r"parameters: \[\['weight', \[4\]\]\] there, \[\['weight', \[5\]\]\] here"
        first._exchange.begin({**first._join_fields, "number": 0, "is_new": True})
        with pytest.raises(LaunchError, match=reason):
            second.begin(0, 0, is_new=True)
        first.close()
    log = (tmp_path / "server.log").read_text()
    (line,) = [line for line in log.splitlines() if "refused join of site 1: " in line]
    assert re.search(reason, line)
    assert "site 1 joined" not in log
