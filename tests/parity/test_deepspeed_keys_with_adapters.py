"""Every DeepSpeed key that a run with adapters accepts trains as the run without it does, whose
numbers `tests/parity/test_adapters.py` compares with plain peft."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import ConfigError
from bigtrain.settings.deepspeed.accepted import ROWS, Row
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.parity.conftest import run_config, train_cases
from tests.parity.test_deepspeed_keys import ENGINES, Case, keys_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

NAMES = ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
SUMMED_IN_BFLOAT16 = ("communication_data_type", '"bf16"')
LORA = {"type": "lora", "rank": 2, "targets": "all-linear"}
STEPS = 5


def config_of(path: Path, data: Path) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data, {"path": str(path)}, micro_batch_size=4, adapters=LORA
    )
    config["train"]["steps"] = STEPS
    return config


def cases_of(row: Row) -> Iterator[Case]:
    """Each value of a row with each engine that it names, of those with adapters."""
    for value in (*row.examples, *row.together):
        for engine in set(row.engines) & set(NAMES):
            case = Case(engine, keys_of({**row.beside, row.key: value}))
            if SUMMED_IN_BFLOAT16 not in case.keys and not row.alone:
                yield case


def is_refused(case: Case, config: dict[str, Any], file: Path) -> bool:
    file.write_text(json.dumps(case.json))
    try:
        resolve_run(RunConfig.model_validate(config), 2, str(file), "cpu")
    except ConfigError:
        return True
    return False


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_keys_train_adapters_as_the_run_without_them(
    name: str, dataset: Path, hf_directories: dict[str, Path], tmp_path: Path
) -> None:
    config = config_of(hf_directories["llama"], dataset)
    plain = Case(name, ())
    accepted, refused = [plain], []
    cases = {case.name: case for row in ROWS for case in cases_of(row) if case.engine == name}
    for case in cases.values():
        (refused if is_refused(case, config, tmp_path / "tried.json") else accepted).append(case)
    jobs = {}
    for number, case in enumerate(accepted):
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps(case.json))
        jobs[case.name] = {"config": config, "deepspeed_config": str(file)}
    results = train_cases(2, jobs, tmp_path)
    for case in accepted:
        for kind in ("losses", "norms"):
            assert results[case.name][kind] == pytest.approx(results[plain.name][kind], rel=1e-5), (
                case.name
            )
    no_prefetch = ("zero_optimization.stage3_prefetch_bucket_size", "0")
    assert any(no_prefetch in case.keys for case in refused) == (ENGINES[name].stage == 3)
