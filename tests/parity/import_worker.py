"""One process of a world that builds models from files, and watches what memory that takes.

Arguments: a JSON file with the cases, and a file to which each process writes what it saw, with its
rank as suffix.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bigtrain.engine import build
from bigtrain.engine.checkpoint.fragments import MASTER, owned_fragments
from bigtrain.engine.checkpoint.snapshot import read_weights, save_engine
from bigtrain.engine.pipeline import build as pipeline
from bigtrain.engine.startup.mesh import open_mesh
from bigtrain.engine.startup.process_group import process_group
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import require_model_plan
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.world import World, read_world


class Memory:
    """How far the memory of this process rose above what it was when it was last asked."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what there is now
        self._before = _status("VmRSS")

    def risen_bytes(self) -> int:
        return _status("VmHWM") - self._before


def _status(key: str) -> int:
    [line] = [t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith(key)]
    return int(line.split()[1]) * 1024


def measure(case: dict[str, Any], world: World, device: torch.device) -> dict[str, int]:
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world.size, case["deepspeed_config"], device.type)
    mesh = open_mesh(run.topology, world.rank)
    hf_config = load_hf_config(config.model)
    model_plan = require_model_plan(config, hf_config, run.plan)
    memory, seen = Memory(), {}

    def watched(*args: Any, **kwargs: Any) -> Any:
        memory.begin()
        model = build_model(*args, **kwargs)
        seen["built"] = memory.risen_bytes()
        return model

    build.build_model = pipeline.build_model = watched
    weights = find_weights(str(config.model.path), hf_config)
    engine = build.build_engine(config, run.engine, run.plan, hf_config, device, mesh, model_plan)
    memory.begin()
    read_weights(engine, weights)
    seen["read"] = memory.risen_bytes()
    fragments = owned_fragments(engine.engine, engine.module)
    seen["shard"] = sum(f.tensors[MASTER].numel() for f in fragments) * 4
    if "save_to" in case:
        save_engine(engine, Path(case["save_to"]))
    engine.close()
    return seen


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    world = read_world(os.environ)
    with process_group(world) as joined:
        sizes_by_case = {name: measure(case, world, joined.device) for name, case in cases.items()}
    Path(f"{sys.argv[2]}.{world.rank}").write_text(json.dumps(sizes_by_case))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
