"""A checkpoint of every topology goes on at every other one; frozen parameters at all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import STEPS, SavedModels, llama, run_config
from tests.parity.plain import plain_training
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

STOP = STEPS // 2
SAMPLES = 12  # of a global batch: 1, 2 and 3 replicas in two micro-batches
ONE, TENSOR = layout(1, "zero0"), layout(2, "zero0", tensor=2)
STAGES, ZERO1_STAGES = (layout(2, engine, pipeline=2) for engine in ("zero0", "zero1"))
ZERO1, ZERO2, ZERO3 = layout(2, "zero1"), layout(3, "zero2"), layout(2, "zero3")
BOTH, ZERO1_BOTH = (layout(4, engine, pipeline=2, tensor=2) for engine in ("zero0", "zero1"))
ZERO1_TENSOR, ZERO1_TWO = (layout(size, "zero1", tensor=2) for size in (4, 2))
EXPERT_STAGES = layout(4, "zero0", pipeline=2, expert=2)
TOPOLOGIES = [ONE, ZERO1, ZERO3, TENSOR, STAGES, ZERO2, BOTH, ZERO1_TENSOR]


@dataclass(frozen=True)
class Variant:
    """A model, what of it is frozen (as a run says it and as a regular expression), and how exact
    other topologies are: None where dropout draws other masks there. `optimizer`: DeepSpeed's block
    for another one than a run may ask for; `states`: what it keeps of a parameter."""

    model: dict[str, Any]
    frozen: tuple[str, ...] = ()
    expression: str = "nothing"
    exact: float | None = 1e-5
    optimizer: dict[str, Any] | None = None
    states: frozenset[str] = frozenset({"exp_avg", "exp_avg_sq"})


VARIANTS = {
    "tied": Variant(
        llama(num_hidden_layers=4),
        ("model.layers.1.mlp.*", "model.norm.weight"),
        r"model\.layers\.1\.mlp\.|model\.norm\.weight",
    ),
    # The first of two stages has nothing to train.
    "untied": Variant(
        llama(num_hidden_layers=4, tie_word_embeddings=False),
        ("model.embed_tokens.weight", "model.layers.[01].*"),
        r"model\.embed_tokens|model\.layers\.[01]\.",
    ),
    "dropout": Variant(llama(num_hidden_layers=4, attention_dropout=0.1), exact=None),
    # The second of two tensor ranks counts none of what is trained.
    "norms": Variant(llama(num_hidden_layers=4), ("model.embed_tokens.weight", "*_proj.weight")),
    "experts": Variant(
        {
            **llama(num_hidden_layers=4, tie_word_embeddings=False, head_dim=8),
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        ("model.embed_tokens.weight", "model.layers.[01].*"),
    ),
    # Three states of the parameter's shape and a scalar, none of which AdamW has but the scalar.
    "rmsprop": Variant(
        llama(num_hidden_layers=4),
        optimizer={"type": "RMSprop", "params": {"lr": 1e-3, "momentum": 0.9, "centered": True}},
        states=frozenset({"square_avg", "momentum_buffer", "grad_avg"}),
    ),
}


def pair(
    variant: str, wrote: Layout, read: Layout, dtype: str = "float32", slow: bool = True
) -> Pair:
    wrote, read = (replace(place, variant=variant, dtype=dtype) for place in (wrote, read))
    return Pair(wrote, read, slow)


FROZEN_STAGES = pair("untied", STAGES, STAGES, slow=False)
PAIRS = [
    # Of two stages, in one nothing is trained, in the other nothing is frozen; of two tensor ranks
    # one has no gradient that counts.
    FROZEN_STAGES,
    pair("untied", ZERO1_STAGES, ZERO1_STAGES, "bfloat16"),
    pair("norms", ZERO1_TWO, ZERO1_TWO, "bfloat16"),
    *(pair("tied", wrote, read) for wrote in TOPOLOGIES for read in TOPOLOGIES),
    *(pair("untied", wrote, read) for wrote, read in pairwise([*TOPOLOGIES, ONE])),
    pair("tied", layout(2, "zero1", sequence=2), ONE, slow=False),
    pair("tied", ONE, layout(2, "zero1", sequence=2)),
    *(pair("dropout", place, place) for place in (ONE, ZERO3, ZERO2, BOTH, ZERO1_TENSOR)),
    # ZeRO 0 with a pipeline is refused in 16 bit.
    *(
        pair("dropout", place, place, "bfloat16")
        for place in (ZERO1, TENSOR, ZERO2, ZERO1_TENSOR, ZERO1_STAGES, ZERO1_BOTH)
    ),
    pair("dropout", ZERO1_STAGES, ZERO3, "bfloat16"),
    pair("experts", EXPERT_STAGES, EXPERT_STAGES),
    *(pair("rmsprop", *places) for places in ((ZERO1, ZERO3), (ZERO3, STAGES), (TENSOR, ZERO1))),
]


def job_of(data: Path, place: Layout) -> dict[str, Any]:
    chosen = VARIANTS[place.variant]
    config = run_config(
        data,
        {"config": chosen.model, "frozen": chosen.frozen},
        micro_batch_size=0,
        batch={
            "sequence_length": 16,
            "global_batch_size": SAMPLES,
            "micro_batch_size": SAMPLES // place.num_replicas // 2,
        },
        precision={"dtype": place.dtype},
        parallel=dict(place.degrees),
    )
    job = {"config": config, "deepspeed_config": place.engine}
    return job if chosen.optimizer is None else job | {"optimizer": chosen.optimizer}


@pytest.fixture(scope="module")
def resumes(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumes:
    directory = tmp_path_factory.mktemp("topologies")
    return Resumes(directory, PAIRS, lambda place: job_of(dataset, place), stop=STOP, end=STEPS)


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models that all of them start from."""
    models = {name: variant.model for name, variant in VARIANTS.items()}
    return SavedModels(models, tmp_path_factory.mktemp("initial"))


@each_pair(PAIRS)
def test_goes_on(pair: Pair, resumes: Resumes) -> None:
    variant = VARIANTS[pair.wrote.variant]
    saved = resumes.check(pair, exact=variant.exact)
    states = {key.partition("/")[0] for key in saved} - {"master", "buffer"}
    assert states == variant.states


@pytest.mark.parametrize(
    "pair",
    [
        FROZEN_STAGES,
        *(
            pytest.param(PAIRS[number], marks=pytest.mark.slow, id=PAIRS[number].name)
            for number, each in enumerate(PAIRS)
            if each.slow and each.wrote == each.read and each.wrote.variant == "tied"
        ),
    ],
)
def test_frozen_parameters_are_as_in_plain_training(
    pair: Pair, resumes: Resumes, initial: dict[str, Path], dataset: Path
) -> None:
    chosen, base = VARIANTS[pair.wrote.variant], initial[pair.wrote.variant]
    config = job_of(dataset, pair.wrote)["config"]
    plain = plain_training(dataset, base, config, frozen=chosen.expression)
    result, saved = resumes.results_of(pair)[pair.wrote.name], resumes.check(pair)
    assert result["losses"] == pytest.approx(plain.losses, abs=1e-5)
    assert result["norms"] == pytest.approx(plain.norms, rel=1e-4)
    section = ModelSection(path=str(base))
    for name, parameter in build_model(section, load_hf_config(section), seed=0).named_parameters():
        is_frozen = re.match(chosen.expression, name) is not None
        assert torch.equal(saved[f"master/{name}"], parameter) == is_frozen, name
        assert (f"exp_avg/{name}" not in saved) == is_frozen, name
