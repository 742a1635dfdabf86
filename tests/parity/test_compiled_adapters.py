"""Adapters of compiled layers at every topology, against plain peft in one process.

All layers with adapters of the same shapes share their graphs, however many layers there are, and
nothing is compiled after the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.export.adapters import adapter_state
from bigtrain.models.layers.adapters import STACKS
from tests.parity.cases import EPS, RECOMPUTE, Case
from tests.parity.conftest import ARCHITECTURES, SavedModels, each_case
from tests.parity.test_adapters import (
    ALL,
    COPIED,
    DORA,
    DROPOUT,
    MODELS,
    PLUS,
    SAVED,
    SEQUENCE,
    STAGES,
    TENSOR,
    Results,
    config_of,
    pytestmark,
    results_of,
)
from tests.parity.test_adapters import test_equals_plain_peft as assert_equals_plain_peft
from tests.parity.test_compiled_topologies import (
    ATTENTION,
    COUNTS,
    FAST_BACKEND,
    MLP,
    TILES,
    Compiled,
)
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

__all__ = ["pytestmark"]


def compiled(*sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {"model": {"compile": "on"}}
    for name, section in (item for each in sections for item in each.items()):
        merged[name] = {**merged.get(name, {}), **section}
    return merged


ROUTED: dict[str, Any] = {"graphs": 3, "breaks": (STACKS,)}
MODEL_TILES = {"model": TILES}
BY_INDUCTOR = Compiled(1, "zero1", accumulation=1, sections=compiled(DORA, EPS), graphs=2)
CASES = [
    BY_INDUCTOR,
    # The first layer has graphs of its own: frozen embeddings need no gradient.
    Compiled(1, "zero1", "deep", 1, sections=compiled(EPS), graphs=2),
    Compiled(1, "zero3", "deep", 1, sections=compiled(DORA, RECOMPUTE, EPS), slow=False),
    Compiled(2, "zero1", "deep", 1, TENSOR, compiled(DORA, EPS), graphs=2),
    # Every kind of adapters with stages of ZeRO.
    Compiled(1, "zero0", accumulation=1, sections=compiled(PLUS, RECOMPUTE)),
    Compiled(1, "zero2_offload", "gpt2", 4, sections=compiled(), graphs=2),
    Compiled(1, "zero3_offload", "odd", 1, sections=compiled(SAVED), graphs=2),
    Compiled(2, "zero3", "odd", sections=compiled(DORA), graphs=2),
    Compiled(1, "zero3", accumulation=1, sections=compiled(DROPOUT, RECOMPUTE)),
    # One more: a layer whose copy of o_proj is trained is another one.
    Compiled(1, "zero1", "odd", 1, sections=compiled(COPIED), graphs=3),
    # Experts with adapters are called between two graphs, of others the tokens are counted there.
    Compiled(1, "zero1", "qwen3_moe", 1, sections=compiled(), **ROUTED),
    Compiled(1, "zero3", "qwen3_moe", 1, sections=compiled(RECOMPUTE), **(ROUTED | {"graphs": 2})),
    Compiled(1, "zero2", "dense_of_moe", 1, sections=compiled(), graphs=3, breaks=COUNTS),
    # With divided matrices, samples and layers.
    Compiled(2, "zero3", "odd", 1, TENSOR, compiled(ALL), graphs=3),
    Compiled(2, "zero1", "phi3", 1, TENSOR, compiled(RECOMPUTE)),
    Compiled(2, "zero2", "odd_moe", 2, TENSOR, compiled(), **ROUTED),
    Compiled(2, "zero3", "llama", 2, SEQUENCE, compiled(RECOMPUTE), graphs=2, breaks=ATTENTION),
    Compiled(2, "zero1", "odd", 2, SEQUENCE, compiled(DORA), graphs=4, breaks=ATTENTION),
    Compiled(2, "zero1", "llama", 2, STAGES, compiled(), graphs=4),
    # With tiles.
    Compiled(
        1, "zero3", accumulation=1, sections=compiled(RECOMPUTE, MODEL_TILES), graphs=6, breaks=MLP
    ),
]


SAME_NUMBERS = "aot_eager"


def backend_of(case: Case) -> str:
    """Dropout is compared in graphs whose operators are not decomposed, since these draw the random
    numbers of uncompiled layers."""
    if case is BY_INDUCTOR:
        return "inductor"
    return SAME_NUMBERS if "dropout" in case.sections.get("adapters", {}) else FAST_BACKEND


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(ARCHITECTURES | MODELS, tmp_path_factory.mktemp("bases"))


@pytest.fixture(scope="module")
def results(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    place = tmp_path_factory.mktemp("results")
    results_by_backend = {
        backend: results_of(
            [case for case in CASES if backend_of(case) == backend],
            *(dataset, bases, place),
            compile_backend=backend,
        )
        for backend in (FAST_BACKEND, SAME_NUMBERS, "inductor")
    }
    return lambda case: results_by_backend[backend_of(case)](case)


@each_case(CASES)
def test_equals_plain_peft(
    case: Compiled, dataset: Path, bases: dict[str, Path], results: Results
) -> None:
    result = results(case)
    assert_equals_plain_peft(case, dataset, bases, results)
    assert result["graphs"] == case.graphs_after_each_step
    # The first layer and the rest break their graphs by themselves.
    reasons = result["graph_breaks"]
    assert all(any(text in reason for text in case.breaks) for reason in reasons)
    assert all(any(text in reason for reason in reasons) for text in case.breaks)


ON, OFF = "on", "off"
PAIRS = [
    Pair(layout(2, "zero3", ON), layout(1, "zero0", OFF)),
    Pair(layout(2, "zero1", OFF, pipeline=2), layout(2, "zero3", ON, tensor=2)),
]


@pytest.fixture(scope="module")
def resumes(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        sections = {"adapters": DORA["adapters"], "model": {"compile": place.variant}}
        case = Compiled(
            place.world_size, place.engine, "odd", 2, dict(place.degrees), sections, slow=False
        )
        return {
            "config": config_of(case, dataset, bases["odd"]),
            "deepspeed_config": place.engine,
            "compile_backend": FAST_BACKEND,
        }

    return Resumes(tmp_path_factory.mktemp("checkpoints"), PAIRS, job_of, stop=3, end=4)


@each_pair(PAIRS)
def test_checkpoints_and_files_are_those_of_uncompiled_layers(pair: Pair, resumes: Resumes) -> None:
    """Names and values are the same, of peft's files too, and a run continues with or without
    compiled layers."""
    saved = resumes.check(pair)
    assert all(".lora_" in key for key in saved)
    places = [resumes.directory_of(pair, resumed=is_again) for is_again in (False, True)]
    files = [save(adapter_state(open_weights(p / "tensors"), "float32")) for p in places]
    assert files[0] == files[1]
