from __future__ import annotations

from bigtrain.system.machine import CpuShare, cpu_share, local_world_size

HOST = range(16)
TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}


def test_how_many_processes_the_launcher_started_here() -> None:
    assert local_world_size({}) == 1
    assert local_world_size({"LOCAL_WORLD_SIZE": "8"}) == 8
    assert local_world_size({"LOCAL_SIZE": "4"}) == 4  # of deepspeed
    assert local_world_size({"LOCAL_WORLD_SIZE": "many"}) == 1


def test_a_users_number_of_threads_wins() -> None:
    environment = TORCHRUN | {"OMP_NUM_THREADS": "3"}
    assert cpu_share(environment, 0, HOST, 16, computes_on_cpu=True).num_threads is None
    one = {"LOCAL_WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}  # not torchrun's
    assert cpu_share(one, 0, HOST, 16, computes_on_cpu=True).num_threads is None
    assert cpu_share(TORCHRUN, 0, HOST, 16, computes_on_cpu=True, threads=1).num_threads == 1


def test_cores_are_divided_with_nothing_left_to_two() -> None:
    """torchrun's one thread is not enough for an optimizer in host memory."""
    shares = [cpu_share(TORCHRUN, rank, HOST, 16, computes_on_cpu=True) for rank in range(4)]
    assert shares[1] == CpuShare(4, frozenset({4, 5, 6, 7}))
    assert sorted(core for share in shares for core in share.cores or ()) == list(HOST)


def test_cores_stay_where_there_is_nothing_to_divide() -> None:
    assert cpu_share({}, 0, HOST, 16, computes_on_cpu=True) == CpuShare(16, None)
    # A process that only feeds its GPU is left alone.
    assert cpu_share(TORCHRUN, 1, HOST, 16, computes_on_cpu=False) == CpuShare()
    # Bound by DeepSpeed's --bind_cores_to_rank, numactl or Slurm.
    assert cpu_share(TORCHRUN, 0, range(4), 16, computes_on_cpu=True).cores is None
    assert cpu_share(TORCHRUN, 0, range(6), 6, computes_on_cpu=True).cores is None
    # Said by the run YAML.
    assert cpu_share(TORCHRUN, 0, HOST, 16, computes_on_cpu=True, bind=False).cores is None
    assert cpu_share(TORCHRUN, 3, HOST, 16, computes_on_cpu=False, bind=True).cores is not None
