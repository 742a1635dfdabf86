"""Silent errors: ranks that should hold equal parameters hold different bits.

Every ``guard.compare_every_steps`` each rank computes checksums of the parameters just before an
update (`bigtrain.engine.replica_checksums`), after a complete forward and backward pass with them.
If a rank differs from the majority of replicas, the run goes back to the newest checkpoint up to
the step after which all replicas were last alike, and reads the samples after it again: no data was
at fault. If two replicas differ, it is unknown which is right."""

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
    these ranks are wrong; otherwise it is unknown which ranks of a group are wrong. alike_step: the
    step after which all replicas were last alike. repeated_hosts: hosts of `ranks` that have
    differed before in this launch."""

    ranks: tuple[int, ...]
    is_known: bool
    alike_step: int
    repeated_hosts: tuple[str, ...] = ()


class ReplicaWatch:
    """Comparison of the parameters of replicas. go_back: restores the engine from a checkpoint at
    which replicas were alike, and returns the state of the run. Collective to construct."""

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
        self._rank_checksums: ReplicaChecksums | None = None
        self._alike_step = state.step  # all ranks have read one checkpoint
        self._named_hosts: set[str] = set()

    def policy(self, state: TrainState, policy: SkipPolicy | None) -> SkipPolicy | None:
        """Return the policy for the step after `state`: `policy` itself, or, for a step at which
        parameters are compared, one that first computes their checksums."""
        self._rank_checksums = None
        if self._group is None or self._every_steps is None:
            return policy
        if (state.step + 1) % self._every_steps != 0:
            return policy

        def decide(stats: StepStats) -> bool:
            self._rank_checksums = replica_checksums(self._context.engine)
            return policy is None or policy(stats)

        return decide

    def compare(self, before: TrainState) -> TrainState | None:
        """Compare the parameters at `before`, if the step after it computed checksums. If some
        differ, go back and return the restored state; else return None. Collective; raises as
        `go_back` does."""
        if self._rank_checksums is None:  # all ranks have checksums, or none has
            return None
        checksums_by_rank = gather_on_main(self._rank_checksums, self._group)
        groups = groups_of(self._context.topology)
        replica_groups = groups["replicas"], groups["expert_replicas"]  # as in the checksums
        ranks, is_known = on_main_rank(
            lambda: differing_ranks(checksums_by_rank, replica_groups), self._group
        )
        if not ranks:
            self._alike_step = before.step
            return None
        hosts = {self._context.hosts[rank] for rank in ranks}
        repeated_hosts = tuple(sorted(hosts & self._named_hosts))
        self._named_hosts |= hosts
        after = self._go_back(before, Differing(ranks, is_known, self._alike_step, repeated_hosts))
        self._alike_step = after.step
        return after


def differing_ranks(
    checksums: Sequence[Sequence[int]], groups_by_kind: Sequence[Sequence[Sequence[int]]]
) -> tuple[tuple[int, ...], bool]:
    """Return the ranks whose checksum differs from the majority of their group, with all ranks of a
    group without a majority; and whether every group has a majority. Pure. checksums: for each
    rank, a checksum of each kind of parameters; groups_by_kind: for each kind, the groups of ranks
    that must agree."""
    differing: set[int] = set()
    have_majorities = True
    for kind_index, groups in enumerate(groups_by_kind):
        for group in groups:
            checksum_of = {rank: checksums[rank][kind_index] for rank in group}
            [(usual, num_usual)] = Counter(checksum_of.values()).most_common(1)
            if 2 * num_usual > len(group):
                differing |= {rank for rank in group if checksum_of[rank] != usual}
            else:
                differing |= set(group)
                have_majorities = False
    return tuple(sorted(differing)), have_majorities
