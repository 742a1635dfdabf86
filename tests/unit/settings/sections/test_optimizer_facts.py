"""The table of optimizers, and that a row of it is all that settings and planner ask for."""

from __future__ import annotations

import importlib.util

import pytest

from bigtrain.engine.optimizers.build import rule_class
from bigtrain.engine.optimizers.update_rule import UpdateRule
from bigtrain.errors import ConfigError
from bigtrain.parity.optimizers import PLAIN, PLAIN_OF_MATRICES, check_comparable
from bigtrain.planner.run_prediction import optimizer_costs
from bigtrain.settings.run_config import OptimizerSection
from bigtrain.settings.sections.optimizer import (
    OPTIMIZERS,
    AverageSection,
    check_optimizer_package,
)
from tests.parity import one_file_optimizer as one_file


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_row_has_a_rule_and_something_to_compare_it_with(name: str) -> None:
    assert issubclass(rule_class(name), UpdateRule)
    facts = OPTIMIZERS[name]
    assert name in (PLAIN if facts.beside is None else PLAIN_OF_MATRICES)
    assert facts.beside is None or OPTIMIZERS[facts.beside].beside is None
    section = OptimizerSection(type=name, lr=1e-3)
    assert section.facts is facts
    assert (section.own_settings is None) == (facts.settings is None)
    assert facts.unread.keys() | facts.defaults.keys() <= OptimizerSection.model_fields.keys()


def test_an_optimizer_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    some = {name: OPTIMIZERS[name] for name in ("adamw", "muon", "lion")}
    monkeypatch.setattr("bigtrain.settings.sections.optimizer.OPTIMIZERS", some)
    with pytest.raises(ValueError, match="Input should be 'adamw', 'muon' or 'lion'"):
        OptimizerSection(type="signum", lr=1e-3)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    section = OptimizerSection(type="adamw_8bit", lr=1e-3)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert check_optimizer_package(OptimizerSection(lr=1e-3)) == []
    (problem,) = check_optimizer_package(section)
    assert str(problem) == (
        "optimizer.type = 'adamw_8bit': bitsandbytes is not installed -> "
        "pip install 'bitsandbytes>=0.50.2,<0.51', or optimizer.type=adamw"
    )


def test_one_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trains with it: tests/parity/test_optimizers.py."""
    monkeypatch.setitem(OPTIMIZERS, one_file.NAME, one_file.FACTS)
    section = OptimizerSection(type="signum", lr=1e-3)
    assert section.betas == (0.9, 0.0)
    assert section.is_own
    with pytest.raises(ValueError, match="a sign is divided by nothing -> remove it"):
        OptimizerSection(type="signum", lr=1e-3, eps=1e-3)
    with pytest.raises(ValueError, match=r"optimizer.muon is set, and optimizer.type = signum"):
        OptimizerSection.model_validate({"type": "signum", "lr": 1e-3, "muon": {"momentum": 0.5}})
    assert rule_class("signum") is one_file.Signum
    halves = section.model_copy(update={"state_dtype": "bfloat16"})
    assert optimizer_costs(section).bytes_per_parameter(0.9) == 4
    assert optimizer_costs(halves).bytes_per_parameter(0.9) == 2
    averaged = section.model_copy(update={"ema": AverageSection()})
    assert optimizer_costs(averaged).bytes_per_parameter(0.9) == 8
    with pytest.raises(ConfigError, match=r"signum'?: has no plain optimizer"):
        check_comparable(section)
    monkeypatch.setitem(PLAIN, one_file.NAME, one_file.Plain)
    check_comparable(section)
