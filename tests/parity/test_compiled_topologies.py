"""Compiled layers train as a plain loop under every topology, from graphs that are compiled in the
first step only.

Fast cases are compiled for aot_eager, which traces and divides the passes as Inductor does; the
slow cases by Inductor, in C++.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import CHUNKS, EPS, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, STEPS, each_case, llama

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1800)]

_SMALL = {"num_hidden_layers": 2}
MODELS: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    "llama": llama(**_SMALL),
}

FROZEN = ["model.embed_tokens.weight", "*.1.*"]


@dataclass(frozen=True)
class Compiled(Case):
    """A case with compiled layers, which all share `graphs` graphs. breaks: reasons for which a
    layer is not one graph, by a part of their text."""

    graphs: int = 1
    breaks: tuple[str, ...] = ()


def compiled(**model: Any) -> Mapping[str, Mapping[str, Any]]:
    return {**EPS, "model": {"compile": "on", **model}}


CASES = [
    # ZeRO 3 gathers a layer's parameters before the layer is called.
    Compiled(2, "zero3", sections=compiled(), slow=False),
    Compiled(2, "zero3", sections=compiled(gradient_checkpointing="full", **CHUNKS["model"])),
    Compiled(2, "zero3", "gpt2", sections=compiled()),
    Compiled(2, "zero3", "qwen3_moe", sections=compiled(gradient_checkpointing="full")),
    # Of frozen layers the backward pass is another one.
    Compiled(2, "zero3_offload", sections=compiled(frozen=FROZEN), graphs=2),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def job_of(case: Case) -> dict[str, Any]:
        return {"compile_backend": "inductor" if case.slow else "aot_eager_decomp_partition"}

    def plain_of(case: Case) -> dict[str, Any]:
        is_frozen = "frozen" in case.sections["model"]
        return {"frozen": r"model\.embed_tokens|.*\.1\."} if is_frozen else {}

    directory = tmp_path_factory.mktemp("compiled")
    return PlainRuns(directory, dataset, MODELS, CASES, plain_of=plain_of, job_of=job_of)


@each_case(CASES)
def test_equals_plain_training(case: Compiled, runs: PlainRuns) -> None:
    result, _ = runs.check(case)
    assert result["graphs"] == [case.graphs] * STEPS
    assert len(result["graph_breaks"]) == len(case.breaks)
    for text, reason in zip(case.breaks, sorted(result["graph_breaks"]), strict=True):
        assert text in reason
