"""Noise on embeddings (NEFTune) trains as transformers' own hook does in a plain loop, with the
random state of each rank; a resumed run draws the noise that it would have drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from bigtrain.run.context import step_seed
from bigtrain.settings.topology import Coordinates
from tests.parity.cases import LOSS, RECOMPUTE, Case, PlainRuns
from tests.parity.conftest import ARCHITECTURES, SEED, STEPS, each_case, llama, run_config
from tests.parity.plain import Samples, plain_training
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

ALPHA = 5.0
GEMMA = {**llama(), "model_type": "gemma", "head_dim": 8, "pad_token_id": 0}
"""Its embeddings are scaled by the layer that the noise is added before."""
MODELS = {**ARCHITECTURES, "gemma": GEMMA}
NOISE: dict[str, dict[str, Any]] = {"model": {"neftune_noise_alpha": ALPHA}}
SEQUENCE = {"sequence": 2}
CASES = [
    Case(2, "zero1", sections=NOISE, slow=False),
    Case(2, "zero3", "gpt2", 1, sections=NOISE),
    Case(2, "zero1", "llama", 1, SEQUENCE, NOISE),
    Case(2, "pipeline_zero1", degrees={"pipeline": 2}, sections=NOISE, slow=False),
    Case(1, "zero0", "gemma", sections=NOISE),
    Case(2, "zero2_offload", accumulation=1, sections=NOISE),
    Case(2, "zero3", sections={"model": {**NOISE["model"], **RECOMPUTE["model"]}}),
    Case(2, "zero0", degrees={"tensor": 2}, sections=NOISE),
    Case(2, "zero3", "qwen3_moe", degrees={"expert": 2}, sections=NOISE),
    Case(4, "zero3", "llama", 1, {"tensor": 2, "sequence": 2}, NOISE),
]


def by_rank(case: Case) -> Callable[[int], list[Samples]]:
    """The micro-batches of a step: of the first rank, then of the second."""
    size, ranks = case.micro_batch_size(), case.num_replicas
    parts = torch.arange(8).split(size)
    return lambda _step: [
        parts[number * ranks + rank] for rank in range(ranks) for number in range(case.accumulation)
    ]


def noisy(case: Case) -> Callable[[Any], Any]:
    """Return what adds transformers' noise to a plain model, whose micro-batches are `by_rank`."""
    num_parts, num_passes = case.degrees.get("sequence", 1), 0
    states: dict[tuple[int, int], torch.Tensor] = {}

    def add_noise(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_passes
        step, number = divmod(num_passes, case.num_replicas * case.accumulation)
        rank, first = divmod(number, case.accumulation)
        num_passes += 1
        outputs = []
        for part, embeddings in enumerate(output.chunk(num_parts, 1)):
            if first == 0:
                torch.manual_seed(step_seed(SEED, step, Coordinates(rank, 0, part, 0)))
            else:
                torch.set_rng_state(states[rank, part])
            # The hook's sqrt(T H) is of a part, the noise's of all tokens of a sample.
            module.neftune_noise_alpha = ALPHA / num_parts**0.5
            outputs.append(neftune_post_forward_hook(module, inputs, embeddings))
            states[rank, part] = torch.get_rng_state()
        return torch.cat(outputs, 1)

    def adapt(model: Any) -> Any:
        model.get_input_embeddings().register_forward_hook(add_noise)
        return model

    return adapt


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(tmp_path_factory.mktemp("noise"), dataset, MODELS, CASES)


@each_case(CASES)
def test_equals_transformers_hook(case: Case, runs: PlainRuns) -> None:
    runs.check(case, adapt=noisy(case), chunks=by_rank(case))


def test_noise_shows(dataset: Path, runs: PlainRuns) -> None:
    """Without noise, and with noise of other ranks, a plain loop trains to other losses."""
    case = CASES[0]
    options: dict[str, Any] = {"chunks": by_rank(case)}
    expected = runs.plain(case, adapt=noisy(case), **options)
    swapped = [*by_rank(case)(0)[case.accumulation :], *by_rank(case)(0)[: case.accumulation]]
    config, directory = runs.config_of(case), runs.directories["llama"]
    others = [
        plain_training(dataset, directory, config, **options),
        plain_training(dataset, directory, config, adapt=noisy(case), chunks=lambda _: swapped),
    ]
    for other in others:
        pairs = zip(other.losses, expected.losses, strict=True)
        assert max(abs(a - b) for a, b in pairs) > 10 * LOSS["float32"]


PLACES = [layout(1, "zero0"), layout(2, "zero3"), layout(2, "zero1", pipeline=2)]
PAIRS = [Pair(place, place) for place in PLACES]


@pytest.fixture(scope="module")
def resumes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        config = run_config(
            dataset,
            {"config": llama(), **NOISE["model"]},
            micro_batch_size=8 // place.num_replicas // 2,
            parallel=dict(place.degrees),
        )
        return {"config": config, "deepspeed_config": place.engine}

    directory = tmp_path_factory.mktemp("resume")
    return Resumes(directory, PAIRS, job_of, stop=STEPS // 4 + 1, end=STEPS // 2 + 1)


@each_pair(PAIRS)
def test_resumes_bit_for_bit(pair: Pair, resumes: Resumes) -> None:
    resumes.check(pair)
