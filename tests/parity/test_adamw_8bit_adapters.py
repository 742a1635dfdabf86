"""Adapters under AdamW with moments of 8 bits, against peft under bitsandbytes in one process:
as near to its runs as these are to each other (test_adamw_8bit.py has the reason)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer

from bigtrain.engine.checkpoint.io import read_full_masters
from tests.parity import plain_optimizers
from tests.parity.cases import SPREADS, Case, assert_among
from tests.parity.conftest import SavedModels, each_case, llama, train_cases
from tests.parity.plain import Spread, Training, orders, plain_training, root_mean_square
from tests.parity.test_adapters import PEFT, RATIO, loraplus, seed_of
from tests.support.tiers import STEPS

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

NUM_STEPS = max(12, STEPS)
# Matrices of 4,608 to 6,656 elements, 18 to 26 blocks; those of keys and values are in float32.
BASE = llama(hidden_size=72, intermediate_size=104, tie_word_embeddings=False)
RANK = 64
SECTIONS: dict[str, dict[str, Any]] = {
    "adapters": {"rank": RANK, "alpha": 64, "targets": "all-linear"},
    "optimizer": {"type": "adamw_8bit", "lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6},
    "train": {"steps": NUM_STEPS},
}
PLUS = {**SECTIONS, "adapters": {**SECTIONS["adapters"], RATIO: 4.0}}
CASES = [
    Case(1, "zero0", sections=SECTIONS),
    Case(2, "zero1", sections=SECTIONS),
    Case(2, "zero3", sections=PLUS),
    Case(2, "zero2_offload", sections=SECTIONS),
    Case(2, "zero1", degrees={"tensor": 2}, sections=SECTIONS),
    Case(2, "zero1", degrees={"pipeline": 2}, sections=SECTIONS),
    Case(2, "zero3", degrees={"sequence": 2}, sections=SECTIONS),
]


def adapted(model: Any) -> Any:
    config = replace(PEFT["llama"], r=RANK, lora_alpha=64)
    made: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    for layer, module in made.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            torch.manual_seed(seed_of(layer))
            module.reset_lora_parameters("default", True)
    return made


class Runs:
    """Trained cases by number of processes, and plain runs that only add up in other orders."""

    def __init__(self, root: Path, data: Path) -> None:
        self.root, self.data = root, data
        self.base = SavedModels({"base": BASE}, root / "hf")["base"]
        self._results: dict[str, dict[str, Any]] = {}
        self._spreads: dict[Any, Spread] = {}

    def of(self, case: Case) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        if case.name not in self._results:
            alike = [each for each in CASES if each.world_size == case.world_size]
            jobs = {
                each.name: {
                    "config": each.config(self.data, {"path": str(self.base)}),
                    "deepspeed_config": each.engine,
                    "save_at": NUM_STEPS,
                    "save_to": str(self.root / each.name),
                }
                for each in alike
            }
            world = self.root / f"world-{case.world_size}"
            world.mkdir()
            self._results |= train_cases(case.world_size, jobs, world)
        return self._results[case.name], read_full_masters(self.root / case.name / "tensors")

    def plain(self, case: Case, make: Callable[..., Any], **options: Any) -> Training:
        config = case.config(self.data, {"path": str(self.base)})
        training = plain_training(
            self.data,
            self.base,
            config,
            adapt=adapted,
            frozen=r"(?!.*\.lora_)",
            optimizer_of=lambda masters, section: loraplus(
                masters, section, case.sections["adapters"].get(RATIO), make
            ),
            **options,
        )
        weights = {n.removeprefix("base_model.model."): w for n, w in training.weights.items()}
        return Training(training.losses, training.norms, weights)

    def spread(self, case: Case) -> Spread:
        halves = case.degrees.get("tensor") == 2
        key = halves, case.sections["adapters"].get(RATIO)
        if key not in self._spreads:
            self._spreads[key] = Spread.of(
                [
                    self.plain(
                        case,
                        plain_optimizers._of_bitsandbytes,
                        chunks=chunks,
                        halves=halves,
                        halves_seed=seed,
                    )
                    for seed, chunks in enumerate(orders())
                ]
            )
        return self._spreads[key]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("adapters-8bit"), dataset)


@each_case(CASES)
def test_is_among_runs_of_bitsandbytes(case: Case, runs: Runs) -> None:
    result, weights = runs.of(case)
    assert_among(result, weights, runs.spread(case), largest_norm=math.inf)


def test_moments_of_32_bits_would_show(runs: Runs) -> None:
    """Plain AdamW is farther away than is allowed."""

    def adamw(groups: list[dict[str, Any]], section: dict[str, Any]) -> Any:
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=section["eps"])

    spread = runs.spread(CASES[0])
    trained = runs.plain(CASES[0], adamw)
    assert root_mean_square(trained.weights, spread.weights) > 5 * SPREADS * spread.weight
