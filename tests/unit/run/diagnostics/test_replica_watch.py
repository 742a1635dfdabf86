"""Which ranks are named when parameters differ."""

from __future__ import annotations

import pytest

from bigtrain.run.diagnostics.replica_watch import differing_ranks

ALL, PAIRS = [[0, 1, 2, 3]], [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("parameters", "groups", "expected"),
    [
        ([5, 5, 5, 5], ALL, ((), True)),
        ([5, 5, -6, 5], ALL, ((2,), True)),
        ([7, 5, 6, 5], ALL, ((0, 1, 2, 3), False)),  # no majority
        ([7, 5, 5, 5, 6], [[0, 1, 2, 3, 4]], ((0, 4), True)),
        ([5, 6, 5, 6], PAIRS, ((), True)),  # those of other groups differ, as they should
        ([5, 6, 4, 6], PAIRS, ((0, 2), False)),
        ([1, 2, 3], [[0], [1], [2]], ((), True)),
    ],
)
def test_the_majority_of_replicas_is_right(
    parameters: list[int], groups: list[list[int]], expected: tuple[tuple[int, ...], bool]
) -> None:
    checksums = [(one, 0) for one in parameters]
    alone = [[rank] for rank in range(len(parameters))]
    assert differing_ranks(checksums, (groups, alone)) == expected
    of_experts = [(0, one) for one in parameters]
    assert differing_ranks(of_experts, (alone, groups)) == expected
    both = [(one, one) for one in parameters]
    assert differing_ranks(both, (groups, groups)) == expected  # each rank is named once
