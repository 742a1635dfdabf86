"""Every DeepSpeed key that a run with adapters accepts trains as the run without it does, whose
numbers `tests/parity/test_adapters.py` compares with plain peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.errors import ConfigError
from bigtrain.settings.deepspeed.accepted import ROWS
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.parity.conftest import run_config, train_cases
from tests.parity.test_deepspeed_keys import ENGINES, Case, applies, keys_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]

NAMES = ("zero1", "zero3", "zero2_offload")
SUMMED_IN_BFLOAT16 = ("communication_data_type", '"bf16"')
LORA = {"type": "lora", "rank": 2, "targets": "all-linear"}
STEPS = 5


def config_of(path: Path, data: Path) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data, {"path": str(path)}, micro_batch_size=4, adapters=LORA
    )
    config["train"]["steps"] = STEPS
    return config


def cases_of(name: str) -> dict[str, Case]:
    """Every value of every key that the table calls trained and that an engine's stage reads, but
    what needs a process of its own, or rounds."""
    engine = ENGINES[name]
    cases = [
        Case(name, keys_of({**row.beside, row.key: value}))
        for row in ROWS
        if row.verdict == "trained" and not row.alone
        if name in row.engines or applies(row, engine)
        for value in (*row.examples, *row.together)
    ]
    return {case.name: case for case in cases if SUMMED_IN_BFLOAT16 not in case.keys}


def is_refused(case: Case, config: dict[str, Any], file: Path) -> bool:
    file.write_text(json.dumps(case.json))
    try:
        resolve_run(RunConfig.model_validate(config), 2, str(file), "cpu")
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", NAMES)
def test_keys_train_adapters_as_the_run_without_them(
    name: str,
    dataset: Path,
    hf_directories: dict[str, Path],
    tmp_path: Path,
) -> None:
    config = config_of(hf_directories["llama"], dataset)
    plain = Case(name, ())
    accepted, refused = [plain], []
    for case in cases_of(name).values():
        is_bad = is_refused(case, config, tmp_path / "tried.json")
        (refused if is_bad else accepted).append(case)
    jobs = {}
    for number, case in enumerate(accepted):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(case.json))
        jobs[case.name] = {
            "config": config,
            "deepspeed_config": str(file),
            "save_at": STEPS,
            "save_to": str(tmp_path / f"saved{number}"),
        }
    results = train_cases(2, jobs, tmp_path)
    expected = read_full_masters(tmp_path / "saved0" / "tensors")
    for number, case in enumerate(accepted):
        for kind in ("losses", "norms"):
            assert results[case.name][kind] == pytest.approx(results[plain.name][kind], rel=1e-5), (
                case.name
            )
        trained = read_full_masters(tmp_path / f"saved{number}" / "tensors")
        for weight in expected:
            torch.testing.assert_close(
                trained[weight], expected[weight], rtol=1e-5, atol=1e-5, msg=f"{case.name} {weight}"
            )
    no_prefetch = ("zero_optimization.stage3_prefetch_bucket_size", "0")
    assert any(no_prefetch in case.keys for case in refused) == (ENGINES[name].stage == 3)
