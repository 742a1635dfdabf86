"""Silent errors: ranks that should hold equal parameters hold different bits.

Every ``guard.compare_every_steps`` each rank computes checksums of the parameters just before an
update (`bigtrain.engine.replica_checksums`): they have been used by a complete forward and backward
pass since the last one. Where a rank differs from the majority of replicas, the run goes back to
the newest checkpoint from before the step at which all were last alike, and reads its samples
again: no data was at fault. Of two replicas that differ, nobody knows which is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bigtrain.engine.optimizers.skip_step import SkipPolicy, StepStats
from bigtrain.engine.replica_checksums import ReplicaChecksums, replica_checksums
from bigtrain.engine.startup.cpu_collectives import cpu_group, gather_on_main
from bigtrain.engine.startup.long_work import on_main_rank
from bigtrain.engine.startup.mesh import groups_of
from bigtrain.run.segment_context import SegmentContext
from bigtrain.run.state import TrainState


@dataclass(frozen=True)
class Differing:
    """Ranks whose parameters differ from the parameters of replicas. is_known: whether exactly
    these ranks are wrong; otherwise one rank is, unknown which. alike_step: after which all were
    last alike. repeated_hosts: hosts of `ranks` that were also named before in this launch."""

    ranks: tuple[int, ...]
    is_known: bool
    alike_step: int
    repeated_hosts: tuple[str, ...] = ()


class ReplicaWatch:
    """Comparison of parameters that ranks hold alike. go_back: restores the engine and returns its
    state, from before the step at which replicas were last alike. Collective to construct."""

    def __init__(
        self,
        context: SegmentContext,
        state: TrainState,
        go_back: Callable[[TrainState, Differing], TrainState],
    ) -> None:
        self._every_steps = context.config.guard.compare_every_steps
        self._context, self._go_back = context, go_back
        limit = context.config.watchdog.collective_timeout_seconds
        self._group = cpu_group(limit) if self._every_steps and context.world.size > 1 else None
        self._own: ReplicaChecksums | None = None
        self._alike_step = state.step  # all ranks have read one checkpoint
        self._named: set[str] = set()

    def policy(self, state: TrainState, policy: SkipPolicy | None) -> SkipPolicy | None:
        """Return `policy` for the step from `state` on; where parameters are compared, it computes
        their checksums before it decides."""
        self._own = None
        if self._group is None or (state.step + 1) % (self._every_steps or 1):
            return policy

        def decide(stats: StepStats) -> bool:
            self._own = replica_checksums(self._context.engine)
            return policy is None or policy(stats)

        return decide

    def compare(self, before: TrainState) -> TrainState | None:
        """Compare the parameters at `before`, if the step since then computed their checksums. If
        some differ, go back and return that state. Collective; raises as `go_back` does."""
        if self._own is None:  # on all ranks, like the update
            return None
        checksums = gather_on_main(self._own, self._group)
        groups = groups_of(self._context.topology)
        groups_by_kind = groups["replicas"], groups["expert_replicas"]
        ranks, is_known = on_main_rank(
            lambda: differing_ranks(checksums, groups_by_kind), self._group
        )
        if not ranks:
            self._alike_step = before.step
            return None
        hosts = {self._context.hosts[rank] for rank in ranks}
        repeated_hosts = tuple(sorted(hosts & self._named))
        self._named |= hosts
        after = self._go_back(before, Differing(ranks, is_known, self._alike_step, repeated_hosts))
        self._alike_step = after.step
        return after


def differing_ranks(
    checksums: Sequence[Sequence[int]], groups_by_kind: Sequence[Sequence[Sequence[int]]]
) -> tuple[tuple[int, ...], bool]:
    """Return the ranks whose checksum differs from the majority of their group, and whether every
    group has a majority; of a group without one, all ranks. Pure. checksums: by rank, one of each
    kind; groups_by_kind: for each kind, the groups of ranks that must agree."""
    differing: set[int] = set()
    have_majorities = True
    for kind_index, groups in enumerate(groups_by_kind):
        for group in groups:
            counts = Counter(checksums[rank][kind_index] for rank in group)
            usual, count = counts.most_common(1)[0]
            if 2 * count > len(group):
                differing |= {rank for rank in group if checksums[rank][kind_index] != usual}
            else:
                differing |= set(group)
                have_majorities = False
    return tuple(sorted(differing)), have_majorities
