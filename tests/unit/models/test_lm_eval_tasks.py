from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigtrain.models import lm_eval_tasks
from bigtrain.models.lm_eval_tasks import check_tasks, figures_of
from bigtrain.settings.run_config import EvaluationSection


def section_of(**values: Any) -> EvaluationSection:
    return EvaluationSection.model_validate({"tasks": ["arc_easy"], **values})


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (problem,) = check_tasks(section_of())
    assert "needs the package lm-eval, which is not installed" in str(problem)
    assert "pip install 'lm-eval" in str(problem)
    assert check_tasks(EvaluationSection()) == []


def test_a_missing_directory(tmp_path: Path) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    (problem,) = check_tasks(section_of(tasks_directory=str(tmp_path / "none")))
    assert str(problem).startswith("evaluation.tasks_directory = ")


def test_figures_are_named_by_task_and_metric() -> None:
    results = {
        "results": {
            "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": "N/A", "sample_len": 4},
            "gsm": {"exact_match,strict-match": 1, "exact_match_stderr,strict-match": 0.1},
        }
    }
    assert figures_of(results) == {"arc/acc": 0.5, "gsm/exact_match@strict-match": 1.0}


def test_random_generators_are_as_before() -> None:
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with lm_eval_tasks._lm_eval_seeds():
        inside = random.random(), np.random.rand(), float(torch.rand(()))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    with lm_eval_tasks._lm_eval_seeds():
        assert (random.random(), np.random.rand(), float(torch.rand(()))) == inside


@pytest.mark.slow
def test_lm_eval_calls_a_model_in_these_methods() -> None:
    """If this fails, an upgrade has moved where lm-eval's `HFLM` calls its model."""
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("lm-eval is not installed")
    code = "from lm_eval.models.huggingface import HFLM; import inspect; "
    code += "print(list(inspect.signature(HFLM._loglikelihood_tokens).parameters), "
    code += "list(inspect.signature(HFLM._model_generate).parameters))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    scoring = ["self", "requests", "disable_tqdm", "override_bs"]
    generating = ["self", "context", "max_length", "stop", "generation_kwargs"]
    assert completed.stdout.splitlines()[-1] == f"{scoring} {generating}"
