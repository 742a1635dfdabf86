"""Ranks that wait for one that works for longer than a collective may last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.conftest import Inputs
from tests.support.worlds import run_world

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

COMMON = """\
import os, sys, time
from datetime import timedelta
from bigtrain.engine.startup import process_group
from bigtrain.errors import BigtrainError, ConfigError, LaunchError, Problem
from bigtrain.system.world import read_world

world = read_world(os.environ)
"""
HELPER = """\
process_group.PROCESS_GROUP_TIMEOUT = timedelta(seconds=3)

def busy(result):
    time.sleep(4)  # what an export of hundreds of gigabytes does with half an hour
    return result

def wrong():
    raise ConfigError(Problem("a.b", 1, "is wrong"), "x.yaml")

def bug():
    return {}["no key"]

def interrupted():
    raise KeyboardInterrupt

def told(work):
    try:
        work()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"

with process_group.process_group(world) as joined:
    work = joined.long_work
    assert work.on_main_rank(lambda: busy([world.rank, "done"])) == [0, "done"]
    every = work.on_every_rank(lambda: busy(world.rank) if world.rank == 1 else world.rank)
    assert every == [0, 1], every
    refusal = told(wrong)
    assert told(lambda: work.on_main_rank(wrong)) == refusal
    assert told(lambda: work.on_every_rank(lambda: world.rank and wrong())) == refusal
    message = told(lambda: work.on_main_rank(bug))
    there = "LaunchError: another rank failed: KeyError('no key')"
    assert message == ("KeyError: 'no key'" if world.is_main else there)
    message = told(lambda: work.on_main_rank(interrupted))
    there = "LaunchError: another rank failed: KeyboardInterrupt()"
    assert message == ("KeyboardInterrupt: " if world.is_main else there), message
    # It waits no longer than the main process lives.
    end = told(lambda: work.on_main_rank(lambda: os._exit(0)))
    assert end.startswith("LaunchError: the main rank ended while rank 1 waited for it"), end
    os._exit(0)
"""
RUN = """\
import bigtrain.run.finish as finish
import bigtrain.data.shards.verification as verification
from bigtrain.system.processes import exit_process
from bigtrain.train import main

process_group.PROCESS_GROUP_TIMEOUT = timedelta(seconds=15)
export_run, naps = finish.export_run, iter([20 * world.rank])

def slow_export(*args, **kwargs):
    time.sleep(20)
    return export_run(*args, **kwargs)

class SlowShards(verification.ListedShards):
    def __getitem__(self, number):
        time.sleep(next(naps, 0))
        return super().__getitem__(number)

finish.export_run, verification.ListedShards = slow_export, SlowShards
exit_process(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_may_work_for_longer_than_a_collective() -> None:
    run_world(2, ["-c", COMMON + HELPER])


@pytest.mark.slow
def test_a_run_waits_for_verification_and_export(inputs: Inputs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--config", str(inputs.run_yaml), f"output.directory={run}", "data.verify=contents"]
    run_world(2, ["-c", COMMON + RUN, *words])
    assert (run / "hf" / "model.safetensors").exists()
