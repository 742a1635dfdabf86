"""One of several ranks that gather values of unequal length and agree on the largest, in groups
that connect at once or when they first talk."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from bigtrain.engine.startup import process_group as module
from bigtrain.engine.startup.cpu_collectives import cpu_group, gather_on_main, maximum_of_all
from bigtrain.engine.startup.process_group import process_group
from bigtrain.system.world import read_world

if __name__ == "__main__":
    world = read_world(os.environ)
    if sys.argv[2] == "lazy":
        module._MANY_RANKS = 2
    with process_group(world):
        assert (os.environ.get("TORCH_GLOO_LAZY_INIT") == "1") == (sys.argv[2] == "lazy")
        if sys.argv[2] == "lazy":
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            assert soft == hard
        group = cpu_group()
        for number in range(3):
            values = [(rank, "x" * (10 ** ((rank + number) % 5))) for rank in range(world.size)]
            gathered = gather_on_main(values[world.rank], group)
            assert gathered == (values if world.rank == 0 else [])
        for number in range(3):
            of_ranks = [torch.tensor([(r * 7 + number) % 5, -r]) for r in range(world.size)]
            values = of_ranks[world.rank].clone()
            maximum_of_all(values, group)
            assert torch.equal(values, torch.stack(of_ranks).amax(0))
        dist.barrier(group)
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ
    Path(sys.argv[1], f"{world.rank}.done").touch()
