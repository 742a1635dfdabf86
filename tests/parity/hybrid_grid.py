"""The grid of families with recurrent layers and layouts of ranks: which cells there are, and which
of them bigtrain refuses by which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from bigtrain.errors import ConfigError, ModelError
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.equivalence.model_plan import try_model
from bigtrain.models.equivalence.tensor_parallel import check_tensor_size
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.parity.cases import EPS, KEPT_APART, RECOMPUTE, Case, document_config
from tests.parity.hybrid_models import MODELS

NUM_STEPS, NUM_SAMPLES, NUM_TOKENS = 3, 4, 48
"""Of a cell: steps, samples of a step and tokens of a sample, which documents share."""
FAMILIES = [name for name in MODELS if name != "jamba"]
"""A Jamba without experts trains in `test_hybrid.py`."""
DIVIDED_GRADIENTS = "divided gradients"


@dataclass(frozen=True)
class Layout:
    """Ranks, an engine and degrees. Ranks that no degree takes have other samples."""

    world_size: int
    engine: str
    degrees: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    recomputes: bool = False

    @property
    def axes(self) -> set[str]:
        """Return the degrees by name, and `DIVIDED_GRADIENTS` where ZeRO divides them."""
        stages = {DIVIDED_GRADIENTS} if self.engine in ("zero2", "zero3") else set()
        return {*self.degrees, *stages}


TENSOR, STAGES = {"tensor": 2}, {"pipeline": 2}
ULYSSES, RING = {"sequence": 2}, {"sequence": {"ulysses": 1, "ring": 2}}
LAYOUTS = {
    "zero0": Layout(2, "zero0", accumulation=2),
    "zero1": Layout(2, "zero1"),
    "zero2": Layout(2, "zero2", recomputes=True),
    "zero3": Layout(2, "zero3", accumulation=2),
    "tp2": Layout(2, "zero1", TENSOR),
    "tp2-zero3": Layout(2, "zero3", TENSOR, recomputes=True),
    "pp2": Layout(2, "zero1", STAGES, accumulation=2),
    "pp2-zero2": Layout(2, "zero2", STAGES, accumulation=2),
    "pp2-zero3": Layout(2, "zero3", STAGES, accumulation=2),
    "ulysses2": Layout(2, "zero2", ULYSSES, accumulation=2),
    "ring2": Layout(2, "zero3", RING, recomputes=True),
    "ulysses4": Layout(4, "zero1", {"sequence": 4}, recomputes=True),
    "ring4": Layout(4, "zero2", {"sequence": {"ulysses": 1, "ring": 4}}),
    "ulysses2-ring2": Layout(4, "zero3", {"sequence": {"ulysses": 2, "ring": 2}}),
    "tp2-pp2": Layout(4, "zero1", TENSOR | STAGES, accumulation=2),
    "tp2-ulysses2": Layout(4, "zero3", TENSOR | ULYSSES),
    "tp2-ring2": Layout(4, "zero1", TENSOR | RING, recomputes=True),
    "tp2-data2": Layout(4, "zero3", TENSOR),
    "pp2-data2": Layout(4, "zero0", STAGES, accumulation=2, recomputes=True),
    "pp2-ulysses2": Layout(4, "zero1", STAGES | ULYSSES, accumulation=2),
    "ulysses2-data2": Layout(4, "zero3", ULYSSES, accumulation=2),
    "ring2-data2": Layout(4, "zero1", RING),
}
IMPORTED = ("zero3", "tp2", "pp2", "ulysses2")
"""Layouts that train from an imported directory too."""
_CHAIN = ("tp2-zero3", "pp2", "ring2", "zero3", "zero1")
"""Layouts that continue each other's runs, where they are legal: a step each, so `NUM_STEPS` of
them."""


@dataclass(frozen=True)
class Cell(Case):
    """A family and a layout by name. imported: it begins with the weights of a directory."""

    layout: str = ""
    imported: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-{self.layout}{'-imported' if self.imported else ''}"


def make_cell(family: str, layout_name: str, *, imported: bool = False) -> Cell:
    layout = LAYOUTS[layout_name]
    sections = {"data": {"path": KEPT_APART}, **EPS, **(RECOMPUTE if layout.recomputes else {})}
    return Cell(
        layout.world_size,
        layout.engine,
        family,
        layout.accumulation,
        layout.degrees,
        sections,
        layout=layout_name,
        imported=imported,
    )


@cache
def cells_of(family: str, *, imported: bool) -> tuple[Cell, ...]:
    """Return the cells of a family that train; the same objects in every call, by which tests that
    are deselected are told (`tests.parity.conftest.is_deselected`)."""
    names = [name for name in LAYOUTS if name in IMPORTED or not imported]
    return tuple(
        make_cell(family, name, imported=imported)
        for name in names
        if expected_refusal(family, name) is None
    )


def chain_of(family: str, *, imported: bool) -> list[Cell]:
    """Return the cells that continue the run of the cell before, a step each."""
    legal = [name for name in _CHAIN if expected_refusal(family, name) is None]
    return [make_cell(family, name, imported=imported) for name in legal[:NUM_STEPS]]


def run_of(case: Case, model: Mapping[str, Any], data: Path) -> dict[str, Any]:
    """Return the run of a cell: `NUM_STEPS` steps with full learning rate from shards `data`."""
    config = document_config(case, model, data, num_samples=NUM_SAMPLES, num_tokens=NUM_TOKENS)
    config["train"] = {"steps": NUM_STEPS}
    config["schedule"] = {"type": "constant"}
    return config


_RULES: list[tuple[set[str], str]] = [
    ({"pipeline", DIVIDED_GRADIENTS}, "pipeline stages need unpartitioned gradients"),
    ({"pipeline", "sequence"}, "pipeline stages exchange full samples"),
]
"""Of every family: axes that a layout has all of, and what the rule says."""
_NO_PLAN = "transformers has no tensor-parallel plan for the layers of this architecture"
_WHOLE_LAYERS = "needs the tokens before them, which are on another rank"
_SHARED = "layers of different stages share the parameter"
_REFUSED: dict[str, dict[str, str]] = {
    "minimax": {"sequence": f"MiniMaxLightningAttention {_WHOLE_LAYERS}"},
    "xlstm": {"tensor": _NO_PLAN, "sequence": f"xLSTMLayer {_WHOLE_LAYERS}"},
    "zaya": {"tensor": _NO_PLAN, "sequence": f"ZayaCCAProjection {_WHOLE_LAYERS}"},
    "rwkv": {"tensor": _NO_PLAN, "sequence": "rwkv: its attention cannot be replaced"},
    "zamba": {"tensor": _NO_PLAN, "pipeline": _SHARED},
    "zamba2": {"pipeline": _SHARED},
}
"""By family and degree, in the order in which bigtrain looks at degrees: what the rule says."""


def expected_refusal(family: str, layout_name: str) -> str | None:
    """Return what the rule says that refuses a cell; None if the cell trains."""
    axes = LAYOUTS[layout_name].axes
    rules = [rule for together, rule in _RULES if together <= axes]
    rules += [rule for axis, rule in _REFUSED.get(family, {}).items() if axis in axes]
    return next(iter(rules), None)


def refusal(config: RunConfig, layout: Layout) -> str | None:
    """Return the rules by which bigtrain refuses a run before it begins; None if it does not."""
    try:
        resolve_run(config, layout.world_size, layout.engine, "cpu")
        hf_config = load_hf_config(config.model)
        problems = check_tensor_size(hf_config, config.parallel.tensor)
        problems = problems or try_model(config, hf_config)[0]
    except ConfigError as error:
        problems = list(error.problems)
    except ModelError as error:
        return str(error)
    return "; ".join(problem.rule for problem in problems) or None
