"""State of a run as its callbacks see it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigtrain.settings.run_config import RunConfig


@dataclass
class Requests:
    """Requests that callbacks of this rank made since they were last read."""

    stop: str | None = None
    save: bool = False


@dataclass(frozen=True)
class RunView:
    """State of a run as a callback sees it; nothing in it can be changed.

    step, samples, tokens: trained so far. metrics: the last logged step, as a line of
    ``metrics.jsonl``; evaluation: the metrics of the last evaluation of this launch; both are empty
    before the first one, and metrics on all ranks but the main one. directory: of the run. config:
    its settings. checkpoint: at the point `checkpoint`, the directory that was written. stopped_by:
    at the point `end`, the name of the signal that stopped the run, or None. error: at the point
    `close`, the text of the error that ends the launch on this rank, or None.
    """

    step: int
    samples: int
    tokens: int
    metrics: Mapping[str, Any]
    evaluation: Mapping[str, float]
    directory: Path
    config: RunConfig
    rank: int
    world_size: int
    checkpoint: Path | None = None
    stopped_by: str | None = None
    error: str | None = None
    _requests: Requests = field(default_factory=Requests, repr=False)

    def request_stop(self, reason: str = "") -> None:
        """Ask to end the run here: it evaluates, saves and exports as after its last step. From
        `step` and `evaluation` it takes effect at once; from other points, after the next step."""
        if self.config.sites is not None:
            raise ValueError("one of several sites cannot end the run: the others would wait")
        self._requests.stop = str(reason)

    def request_save(self) -> None:
        """Ask for a checkpoint of this step; from `start` and `checkpoint`, of the next one."""
        self._requests.save = True
