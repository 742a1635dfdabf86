"""A world trains the same where another launcher's variables are left in its environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parity.conftest import ARCHITECTURES, WORKER, run_config
from tests.support.lives import run_forked_world

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LEFT = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MV2_COMM_WORLD_LOCAL_RANK": "3",
    "LOCAL_SIZE": "many",
    "CROSS_SIZE": "9",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "4",
    "PMI_RANK": "4",
    "AZUREML_EXPERIMENT_ID": "x",
    "SM_TRAINING_ENV": "{}",
    "DLTS_JOB_ID": "x",
    "ROLE_RANK": "0",
    "ROLE_WORLD_SIZE": "8",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_it_trains_the_same(dataset: Path, tmp_path: Path) -> None:
    config = run_config(dataset, {"config": ARCHITECTURES["llama"]}, micro_batch_size=4)
    config["train"]["steps"] = 4
    cases = tmp_path / "cases.json"
    case = {"config": config, "deepspeed_config": "zero2", "last_step": 2}
    cases.write_text(json.dumps({"zero2": case}))
    results: list[dict[str, Any]] = []
    for number, environment in enumerate(({}, LEFT)):
        output = tmp_path / f"{number}.json"
        run_forked_world(2, [str(WORKER), str(cases), str(output)], environment, 120)
        results.append(json.loads(output.read_text())["zero2"])
    assert results[0]["losses"] == results[1]["losses"]
    assert results[0]["norms"] == results[1]["norms"]
