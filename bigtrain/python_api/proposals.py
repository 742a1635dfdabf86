"""Changes of a run with which it fits without offload, for a plan that finds no layout, or only
layouts with offload: smaller optimizer states, and adapters of a frozen base.

The changes alter the mathematics, so a plan shows them but never takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigtrain.errors import ConfigError, ModelError
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.units import GIB

if TYPE_CHECKING:
    from bigtrain.planner.legal_layouts import SearchSpace
    from bigtrain.planner.search import Candidate, Cluster
    from bigtrain.planner.tables.engines import Engine

STATES = (
    ("optimizer.type=adamw_8bit", "AdamW with moments in 8 bits"),
    ("optimizer.state_dtype=bfloat16", "AdamW with moments in bfloat16"),
)
ADAPTERS = (
    ("adapters={rank: 16, targets: all-linear}", "LoRA: adapters of a frozen base"),
    (
        "adapters={rank: 16, targets: all-linear, quantization: nf4}",
        "QLoRA: adapters of a base in 4 bits",
    ),
)
"""Overrides, each with its meaning for the mathematics."""


SMALL_CHUNKS = "model.loss_chunk_tokens=256"
"""Override for a run in which the default chunks of the loss, which are faster, do not fit."""


@dataclass(frozen=True)
class Proposal:
    """The fastest layout of a run with `override`, which changes the mathematics to `meaning`."""

    override: str
    meaning: str
    candidate: Candidate

    def line(self, num_devices: int) -> str:
        """Return the override, its meaning, and the layout with its costs."""
        best = self.candidate
        rate = best.tokens_per_second / num_devices
        return (
            f"{self.override}: {self.meaning}; {best.describe()}, "
            f"{best.memory.total / GIB:.1f} GiB, {rate:,.0f} tokens/s/GPU"
        )


def proposals(
    config: RunConfig,
    cluster: Cluster,
    engine: Engine,
    request_of: Callable[[RunConfig], SearchSpace],
) -> list[Proposal]:
    """Return the changes of `config` with which a layout fits that is neither tight nor offloads,
    smallest change first. request_of: returns the search space of a changed run. A change that the
    run's other settings do not allow is omitted."""
    from bigtrain.planner.search import search

    changes: Sequence[tuple[str, str]] = STATES if config.optimizer.type == "adamw" else ()
    if config.adapters is None and config.model.path is not None:
        changes = (*changes, *ADAPTERS)
    tree = config.model_dump(mode="json", exclude_unset=True)
    fitting_proposals = []
    for change, meaning in changes:
        for overrides in ((change,), (change, SMALL_CHUNKS)):
            try:
                request = request_of(parse_run_config(tree, overrides))
            except (ConfigError, ModelError):
                break
            fitting = search(request, cluster, engine).fitting
            roomy = (c for c in fitting if not offloads(c) and not c.is_tight(cluster))
            best = next(roomy, None)  # the fastest
            if best is not None:
                fitting_proposals.append(Proposal(" ".join(overrides), meaning, best))
                break
    return fitting_proposals


def offloads(candidate: Candidate) -> bool:
    """Return whether a layout has states or parameters in main memory."""
    return candidate.layout.offload_optimizer or candidate.layout.offload_parameters


def proposal_lines(fitting_proposals: Sequence[Proposal], num_devices: int) -> list[str]:
    """Return lines on the proposals, and on why a plan does not take them; no lines without
    proposals."""
    if not fitting_proposals:
        return []
    head = "without offload this fits, and trains something else, so that no plan takes it:"
    return [head, *(f"  {proposal.line(num_devices)}" for proposal in fitting_proposals)]
