"""Every family with recurrent layers trains under every layout of ranks as plain transformers does
that passes each document separately, or is refused by the rule that the table names.

Run all of it: ``python -m pytest tests/parity/test_hybrid_grid.py``. Cells begin with random
weights or with the weights of a directory, and chains of layouts continue each other's runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigtrain.settings.run_config import RunConfig
from tests.parity.cases import LOSS, NORM, WEIGHTS
from tests.parity.conftest import each_case, train_cases
from tests.parity.hybrid_grid import (
    FAMILIES,
    LAYOUTS,
    NUM_STEPS,
    Cell,
    cells_of,
    chain_of,
    expected_refusal,
    make_cell,
    refusal,
    run_of,
)
from tests.parity.hybrid_models import MODELS
from tests.parity.hybrid_plain import Distances, FamilyRuns
from tests.support.comparison import assert_same_steps
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

GRADIENT = 1e-6
"""Of every element of the mean gradient, which is clipped to a norm of 0.5."""
CELLS = [
    cell
    for family in FAMILIES
    for imported in (False, True)
    for cell in cells_of(family, imported=imported)
]
MUTATED = {
    "convolution not reset": ("lfm2", "zero1"),
    "state not reset": ("qwen3_5", "zero1"),
    "state handed to the wrong rank": ("mamba2", "ulysses4"),
    "state without a gradient": ("bamba", "ulysses2"),
    "gradient of shared groups of one rank": ("bamba", "tp2"),
    "decay on recurrent states": ("mamba", "zero1"),
}
"""Faults of `mutated_worker.py`, and the cell that each is trained in."""
MUTATED_WORKER = Path(__file__).with_name("mutated_worker.py")
OfFamily = Callable[..., FamilyRuns]
Mutated = dict[str, tuple[dict[str, Any], Path]]


@pytest.fixture(scope="module")
def of_family(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> OfFamily:
    directory = tmp_path_factory.mktemp("grid")
    made: dict[tuple[str, bool], FamilyRuns] = {}

    def runs_of(family: str, *, imported: bool) -> FamilyRuns:
        key = family, imported
        if key not in made:
            place = directory / f"{family}-{'imported' if imported else 'random'}"
            made[key] = FamilyRuns(place, dataset, family, imported=imported)
        return made[key]

    return runs_of


def beyond(distances: Distances, runs: FamilyRuns) -> dict[str, float]:
    """Return the weights and gradients that are farther from the plain loop than the limits (NaN
    is), and farther than plain loops that only round otherwise."""
    found: dict[str, float] = {}
    for kind, limit in (("weights", WEIGHTS), ("gradients", GRADIENT)):
        far = {name: size for name, size in getattr(distances, kind).items() if not size <= limit}
        if far:
            floor = getattr(runs.floor, kind)
            found |= {f"{kind} {n}": size for n, size in far.items() if not size <= floor[n]}
    return found


def check(cell: Cell, result: dict[str, Any], place: Path, runs: FamilyRuns) -> None:
    """Compare a trained cell with the plain loop."""
    distances = Distances.of(result, place, runs.plain)
    far = beyond(distances, runs)
    figures = {
        "cell": cell.name,
        "loss": distances.loss,
        "norm": distances.norm,
        "weight": max(distances.weights.values()),
        "gradient": max(distances.gradients.values()),
    }
    print(json.dumps(figures))  # pytest -rP
    assert min(runs.plain.training.norms) > 0.5, "clipping does not bite"
    assert_same_steps(result, runs.plain.training, loss=LOSS["float32"], norm=NORM["float32"])
    assert far == {}


@each_case(CELLS)
def test_equals_plain_training(case: Cell, of_family: OfFamily) -> None:
    runs = of_family(case.model, imported=case.imported)
    result, place = runs.runs.trained(case)
    assert result["accumulation"] == case.accumulation
    check(case, result, place, runs)


@pytest.mark.slow
@pytest.mark.parametrize("imported", [False, True], ids=["random", "imported"])
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_continue_each_other(family: str, imported: bool, of_family: OfFamily) -> None:
    """Each layout trains a step from what the layout before saved: together the run that nothing
    interrupts."""
    runs = of_family(family, imported=imported)
    chain = chain_of(family, imported=imported)
    assert len(chain) == NUM_STEPS
    places = [runs.directory / f"link-{number}" for number in range(NUM_STEPS)]
    jobs: dict[str, Any] = {}
    for number, cell in enumerate(chain):
        steps = {"first_step": number, "last_step": number + 1, "save_at": number + 1}
        before = {"restore_from": str(places[number - 1])} if number else {}
        run = {"config": runs.runs.config_of(cell), "deepspeed_config": cell.engine}
        jobs[cell.name] = {**run, **steps, **before, "save_to": str(places[number])}
    (world_size,) = {cell.world_size for cell in chain}
    world = runs.directory / "chain"
    world.mkdir()
    results = train_cases(world_size, jobs, world)
    joined = {
        key: [value for cell in chain for value in results[cell.name][key]]
        for key in ("losses", "norms")
    }
    check(chain[-1], joined, places[-1], runs)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_refused(family: str, dataset: Path) -> None:
    """Exactly what the table says, with its rule: a cell is neither newly refused nor newly
    legal."""
    for name, layout in LAYOUTS.items():
        run = run_of(make_cell(family, name), {"config": MODELS[family]}, dataset)
        said = refusal(RunConfig.model_validate(run), layout)
        expected = expected_refusal(family, name)
        assert (said is None) == (expected is None), f"{name}: {said}"
        assert expected is None or expected in (said or ""), name


@pytest.fixture(scope="module")
def mutated(of_family: OfFamily) -> Mutated:
    """Train every mutated cell; return its result and the directory of its state, by mutation."""
    jobs: dict[int, dict[str, Any]] = {}
    places: dict[str, Path] = {}
    for mutation, (family, name) in MUTATED.items():
        cell, runs = make_cell(family, name), of_family(family, imported=False)
        places[mutation] = runs.directory / mutation.replace(" ", "-")
        jobs.setdefault(cell.world_size, {})[mutation] = {
            "config": runs.runs.config_of(cell),
            "deepspeed_config": cell.engine,
            "mutation": mutation,
            "save_at": NUM_STEPS,
            "save_to": str(places[mutation]),
        }
    results: dict[str, Any] = {}
    for world_size, cases in jobs.items():
        world = runs.directory / f"mutated-{world_size}"
        world.mkdir()
        results |= train_cases(world_size, cases, world, MUTATED_WORKER)
    return {mutation: (results[mutation], place) for mutation, place in places.items()}


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATED)
def test_faults_are_told_apart(mutation: str, mutated: Mutated, of_family: OfFamily) -> None:
    """By weights that are a hundred times as far from the plain loop as the limit, at least."""
    family, _ = MUTATED[mutation]
    runs, (result, place) = of_family(family, imported=False), mutated[mutation]
    distances = Distances.of(result, place, runs.plain)
    print(json.dumps({"mutation": mutation, "weight": max(distances.weights.values())}))
    assert beyond(distances, runs)
    assert max(distances.weights.values()) > 100 * WEIGHTS


def test_the_page_counts_the_cells() -> None:
    """Every pair of a family and a layout trains or is refused."""
    num_pairs = len(FAMILIES) * len(LAYOUTS)
    num_imported = sum(cell.imported for cell in CELLS)
    num_trained = len(CELLS) - num_imported
    text = " ".join((ROOT / "docs/howto/hybrid.md").read_text(encoding="utf-8").split())
    assert (
        f"compares {len(FAMILIES)} families under {len(LAYOUTS)} layouts of two and four ranks "
        f"with plain transformers: {num_trained} pairs train, and {num_pairs - num_trained} are "
        "refused"
    ) in text
    assert f"{num_imported} cells begin with the weights of a directory" in text
