"""Which units a process begins with, by what launchers really set."""

from __future__ import annotations

import pytest

from bigtrain.data.tokenize_job.request import WorkerRank, find_worker_rank
from bigtrain.errors import LaunchError

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "7",
    "SLURM_ARRAY_TASK_MIN": "3",
    "SLURM_ARRAY_TASK_MAX": "9",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, WorkerRank(0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}, WorkerRank(2, 3)),
        ({"RANK": "2", "WORLD_SIZE": "3", **SLURM}, WorkerRank(2, 3)),
        (SLURM, WorkerRank(1, 4)),
        (ARRAY, WorkerRank(2, 4)),
        ({**ARRAY, **SLURM}, WorkerRank(9, 16)),
        ({"JOB_COMPLETION_INDEX": "5"}, WorkerRank(5, None)),
    ],
)
def test_launchers(environment: dict[str, str], share: WorkerRank) -> None:
    assert find_worker_rank(environment) == share
    assert find_worker_rank(environment, 1, 2) == WorkerRank(1, 2)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "3", "WORLD_SIZE": "3"}, r"rank 3 of 3 is not in 0\.\.2"),
        ({"RANK": "3"}, "WORLD_SIZE=None in the environment is not a number"),
        ({"SLURM_PROCID": "a"}, "SLURM_PROCID=a in the environment is not a number"),
    ],
)
def test_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        find_worker_rank(environment)


def test_half_of_a_pair() -> None:
    with pytest.raises(LaunchError, match="--rank and --world-size must be given together"):
        find_worker_rank({}, 1)


@pytest.mark.parametrize("size", [1, 3, 20])
def test_every_process_would_do_everything(size: int) -> None:
    items = list(range(10))
    orders = [WorkerRank(rank, size).order(items) for rank in range(size)]
    assert all(sorted(order) == items for order in orders)
    own = [order[: len(items[rank::size])] for rank, order in enumerate(orders)]
    assert sorted(item for part in own for item in part) == items


def test_workers_of_a_process_divide_its_share() -> None:
    shares = [WorkerRank(rank, 2).split(worker, 3) for rank in range(2) for worker in range(3)]
    assert shares == [WorkerRank(n, 6) for n in range(6)]


def test_processes_that_do_not_know_how_many_they_are_begin_apart() -> None:
    items = list(range(100))
    begins = [WorkerRank(rank, None).order(items)[0] for rank in range(8)]
    distances = [abs(a - b) for a in begins for b in begins if a != b]
    assert len(set(begins)) == 8
    assert min(distances) >= 8
    assert sorted(WorkerRank(3, None).order(items)) == items
