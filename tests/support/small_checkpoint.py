"""A checkpoint directory with one tensor of four bytes: for what looks at settings and steps."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bigtrain.data.samples.phases import SourcePhase, first_phase
from bigtrain.engine.checkpoint.tensor_file import NewPart, SaveIdentity, write_parts
from bigtrain.run.checkpointing import checkpoints
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.boxes import Box

RUN_ID = "0123456789abcdef"
SHARDS = SourcePhase(path="shards", hash="h", num_tokens=1001)


def write_small_checkpoint(run: Path, step: int, config: dict[str, Any]) -> Path:
    """Write a checkpoint of that step, committed, in the directory of a run that reads `SHARDS`."""
    partial = checkpoints.partial_path(run, step, "0123abcd")
    checkpoints.prepare(partial)
    settings = RunConfig.model_validate(config)
    state = {
        "run": RUN_ID,
        "step": step,
        "samples": 12,
        "config": settings.model_dump(mode="json"),
        "parameters": {"decaying": [], "matrices": [], "frozen": []},
        "phases": [asdict(first_phase(settings, (SHARDS,)))],
    }
    (partial / checkpoints.STATE).write_text(json.dumps(state))
    identity = SaveIdentity(RUN_ID, step, "0123abcd")
    part = NewPart("m/a", (4,), Box.full((4,)), "U8", lambda: memoryview(b"mean"))
    name = "rank-00000.safetensors"
    written = {name: write_parts(partial / checkpoints.TENSORS / name, identity, 0, [part])}
    return checkpoints.commit(partial, written, identity)
