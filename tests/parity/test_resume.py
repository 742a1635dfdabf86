"""Stopped and gone on, on the same topology and on others: the same run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import STEPS, llama, run_config
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = STEPS // 4 + 1, STEPS // 2 + 1
LAYOUTS = [
    layout(1, "zero0"),
    layout(2, "zero0"),
    layout(2, "zero2"),
    layout(2, "zero3_offload"),
    layout(1, "zero3"),
    layout(2, "zero1"),
    layout(2, "zero2_offload"),
    layout(2, "zero3"),
]
ZERO3_16 = layout(2, "zero3", dtype="bfloat16")
PAIRS = [
    # Of other numbers of processes, stages and places of the optimizer; and one its own.
    Pair(layout(2, "zero3_offload"), layout(1, "zero0"), slow=False),
    Pair(layout(2, "zero1"), layout(2, "zero3")),
    Pair(layout(2, "zero3_offload"), layout(2, "zero2_offload")),
    Pair(ZERO3_16, ZERO3_16, slow=False),
    # Each reads what the one before wrote, the first what the last wrote; and its own.
    *(Pair(wrote, read) for wrote, read in pairwise([LAYOUTS[-1], *LAYOUTS])),
    *(Pair(place, place) for place in LAYOUTS),
    *(
        Pair(place, place)
        for place in (layout(2, f"zero{stage}", dtype="bfloat16") for stage in (0, 1, 2))
    ),
]


@pytest.fixture(scope="module")
def resumes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        is_tied = place.dtype == "float32"
        config = run_config(
            dataset,
            {"config": llama(attention_dropout=0.1, tie_word_embeddings=is_tied)},
            micro_batch_size=8 // place.world_size,
            precision={"dtype": place.dtype},
        )
        return {"config": config, "deepspeed_config": place.engine}

    return Resumes(tmp_path_factory.mktemp("resume"), PAIRS, job_of, stop=STOP, end=END)


@each_pair(PAIRS)
def test_goes_on(pair: Pair, resumes: Resumes) -> None:
    saved = resumes.check(pair, exact=None)  # dropout draws other masks
    assert any(key.startswith("exp_avg_sq/") for key in saved)
