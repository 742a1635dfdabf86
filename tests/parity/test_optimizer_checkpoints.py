"""States of other optimizers than AdamW go from any topology to any other, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bigtrain.engine.optimizers.adamw_8bit import CODES, SCALES
from tests.parity.conftest import llama, run_config
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = 3, 5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"type": "muon", "muon": {"ns_dtype": "float32"}},
    "muon in bfloat16": {"type": "muon", "state_dtype": "bfloat16"},
    "lion": {"type": "lion"},
    "adafactor": {"type": "adafactor"},
    "adamw_8bit": {"type": "adamw_8bit"},
}
# Of 8-bit AdamW: matrices of 20.25 and 29.25 blocks, and smaller ones in float32.
MODELS = {"adamw_8bit": llama(hidden_size=72, intermediate_size=104)}
STATES = {
    "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "muon in bfloat16": {"momentum_buffer", "exp_avg", "exp_avg_sq"},
    "lion": {"exp_avg"},
    "adafactor": {"row_var", "col_var", "variance"},
    "adamw_8bit": {"exp_avg", "exp_avg_sq", *CODES, *SCALES},
}
LAYOUTS = [
    layout(1, "zero0"),
    layout(2, "zero3"),
    layout(2, "zero1", tensor=2),
    layout(2, "pipeline_zero1", pipeline=2),
]
# Each layout reads what the one before wrote, the first what the last wrote.
PAIRS = [
    Pair(replace(wrote, variant=name), replace(read, variant=name))
    for name in OPTIMIZERS
    for wrote, read in (*pairwise([LAYOUTS[-1], *LAYOUTS]), (LAYOUTS[1], LAYOUTS[1]))
]


@pytest.fixture(scope="module")
def resumes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        name = place.variant
        config = run_config(
            dataset,
            {"config": MODELS.get(name, llama())},
            micro_batch_size=4 // place.num_replicas,
            parallel=dict(place.degrees),
            optimizer={"lr": 3e-3, "clip_norm": 0.5}
            | ({} if name in ("lion", "adafactor") else {"eps": 1e-6})
            | OPTIMIZERS[name],
        )
        return {"config": config, "deepspeed_config": place.engine}

    return Resumes(tmp_path_factory.mktemp("optimizers"), PAIRS, job_of, stop=STOP, end=END)


@each_pair(PAIRS)
def test_goes_on_from_anywhere(pair: Pair, resumes: Resumes) -> None:
    name = pair.wrote.variant
    saved = resumes.check(pair, exact=None if "bfloat16" in name else 1e-5)
    assert {key.partition("/")[0] for key in saved} - {"buffer"} == STATES[name] | {"master"}
    assert all(key.startswith("buffer") or tensor.any() for key, tensor in saved.items())
