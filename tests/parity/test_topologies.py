"""A checkpoint of every topology goes on at every other one; frozen parameters at all of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import SEED, STEPS, llama, run_config, train_cases
from tests.parity.plain import plain_training

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

STOP = STEPS // 2
SAMPLES = 12  # of a global batch: 1, 2 and 3 replicas in two micro-batches
# Processes, parallel degrees, DeepSpeed JSON.
TOPOLOGIES: dict[str, tuple[int, dict[str, int], str]] = {
    "one": (1, {}, "zero0"),
    "zero1-dp2": (2, {}, "zero1"),
    "zero3-dp2": (2, {}, "zero3"),
    "tp2": (2, {"tensor": 2}, "zero0"),
    "pp2": (2, {"pipeline": 2}, "zero0"),
    "zero1-pp2": (2, {"pipeline": 2}, "zero1"),
    "zero2-dp3": (3, {}, "zero2"),
    "pp2-tp2": (4, {"pipeline": 2, "tensor": 2}, "zero0"),
    "zero1-pp2-tp2": (4, {"pipeline": 2, "tensor": 2}, "zero1"),
    "zero1-tp2-dp2": (4, {"tensor": 2}, "zero1"),
    "zero1-tp2": (2, {"tensor": 2}, "zero1"),
    "pp2-ep2": (4, {"pipeline": 2, "expert": 2}, "zero0"),
}
NOT_ASKED = ("zero1-pp2", "zero1-pp2-tp2", "zero1-tp2", "pp2-ep2")
"""Of further pairs only."""
# There ZeRO 0 with a pipeline is refused (`bigtrain.settings.compatibility.check`), and ZeRO 1
# takes its place.
IN_BFLOAT16 = [name for name in TOPOLOGIES if name not in ("pp2", "pp2-tp2", *NOT_ASKED[2:])]
ASKED = [name for name in TOPOLOGIES if name not in NOT_ASKED]


@dataclass(frozen=True)
class Variant:
    """A model, what of it is frozen (as a run says it and as a regular expression), and how exact
    other topologies are: None where dropout draws other masks there. `optimizer`: DeepSpeed's block
    for another one than a run may ask for; `states`: what it keeps of a parameter."""

    model: dict[str, Any]
    frozen: tuple[str, ...] = ()
    expression: str = "nothing"
    dtype: str = "float32"
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
    "bfloat16": Variant(
        llama(num_hidden_layers=4, attention_dropout=0.1), dtype="bfloat16", exact=None
    ),
    "untied in bfloat16": Variant(
        llama(num_hidden_layers=4, tie_word_embeddings=False),
        ("model.embed_tokens.weight", "model.layers.[01].*"),
        dtype="bfloat16",
    ),
    # The second of two tensor ranks counts none of what is trained.
    "norms in bfloat16": Variant(
        llama(num_hidden_layers=4), ("model.embed_tokens.weight", "*_proj.weight"), dtype="bfloat16"
    ),
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
Pair = tuple[str, str, str]  # variant, who wrote, who reads
SOME: list[Pair] = [
    ("tied", "one", "zero3-dp2"),
    ("tied", "zero3-dp2", "pp2"),
    ("tied", "pp2", "tp2"),
    ("tied", "tp2", "one"),
    ("untied", "pp2", "zero3-dp2"),
    ("bfloat16", "zero1-pp2", "zero3-dp2"),
    ("rmsprop", "zero1-dp2", "zero3-dp2"),
    ("experts", "pp2-ep2", "pp2-ep2"),
]
FROZEN: list[Pair] = [
    ("untied", "pp2", "pp2"),
    ("untied in bfloat16", "zero1-pp2", "zero1-pp2"),
    ("norms in bfloat16", "zero1-tp2", "zero1-tp2"),
]
"""Of two stages, in one nothing is trained, in the other nothing is frozen; of two tensor ranks one
has no gradient that counts."""
ALL: list[Pair] = [
    *(
        (variant, wrote, read)
        for variant in ("tied", "untied")
        for wrote in ASKED
        for read in ASKED
    ),
    *(("dropout", place, place) for place in ASKED),
    *(("bfloat16", place, place) for place in IN_BFLOAT16),
    ("rmsprop", "zero3-dp2", "pp2"),
    ("rmsprop", "tp2", "zero1-dp2"),
]


def name_of(pair: Pair) -> str:
    variant, wrote, read = pair
    return f"{variant}-{wrote}-to-{read}"


def case(data: Path, variant: str, topology: str, **steps: Any) -> dict[str, Any]:
    size, degrees, engine = TOPOLOGIES[topology]
    num_replicas = size // (degrees.get("tensor", 1) * degrees.get("pipeline", 1))
    chosen = VARIANTS[variant]
    config = run_config(
        data,
        {"config": chosen.model, "frozen": chosen.frozen},
        micro_batch_size=0,
        batch={
            "sequence_length": 16,
            "global_batch_size": SAMPLES,
            "micro_batch_size": SAMPLES // num_replicas // 2,
        },
        precision={"dtype": chosen.dtype},
        parallel=degrees,
    )
    job = {"config": config, "deepspeed_config": engine, **steps}
    return job if chosen.optimizer is None else job | {"optimizer": chosen.optimizer}


def write_and_read(
    data: Path, pairs: list[Pair], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Every writer to the end without a break, then every reader from STOP on."""
    root = tmp_path_factory.mktemp("topologies")
    results_by_case: dict[str, Any] = {}
    writers = dict.fromkeys((variant, wrote) for variant, wrote, _ in pairs)
    for size in sorted({TOPOLOGIES[wrote][0] for _, wrote in writers}):
        cases = {
            f"{variant}-{wrote}": case(
                data, variant, wrote, save_at=STOP, save_to=str(root / f"{variant}-{wrote}")
            )
            for variant, wrote in writers
            if TOPOLOGIES[wrote][0] == size
        }
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("write"))
    for size in sorted({TOPOLOGIES[read][0] for *_, read in pairs}):
        cases = {
            name_of((variant, wrote, read)): case(
                data,
                variant,
                read,
                first_step=STOP,
                restore_from=str(root / f"{variant}-{wrote}"),
                save_again_to=str(root / name_of((variant, wrote, read))),
            )
            for variant, wrote, read in pairs
            if TOPOLOGIES[read][0] == size
        }
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("read"))
    return root, results_by_case


@pytest.fixture(scope="module")
def some(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, SOME, tmp_path_factory)


@pytest.fixture(scope="module")
def everything(
    dataset: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """All pairs of a variant, made when the first of them is asked for."""

    @cache
    def of(variant: str) -> tuple[Path, dict[str, Any]]:
        pairs = [pair for pair in ALL if pair[0] == variant]
        return write_and_read(dataset, pairs, tmp_path_factory)

    return of


def test_ranks_with_all_or_nothing_frozen_go_on(
    dataset: Path, initial: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = write_and_read(dataset, FROZEN, tmp_path_factory)
    for pair in FROZEN:
        assert_goes_on(pair, *made)
    assert_frozen("untied", {FROZEN[0][:2]}, *made, initial, dataset)


@pytest.mark.slow
@pytest.mark.parametrize("pair", SOME, ids=name_of)
def test_goes_on(pair: Pair, some: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(pair, *some)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ALL, ids=name_of)
def test_goes_on_from_each_at_each(
    pair: Pair, everything: Callable[[str], tuple[Path, dict[str, Any]]]
) -> None:
    assert_goes_on(pair, *everything(pair[0]))


def assert_goes_on(pair: Pair, root: Path, results_by_case: dict[str, Any]) -> None:
    variant, wrote, read = pair
    saved = read_full(root / f"{variant}-{wrote}" / "tensors")
    again = read_full(root / name_of(pair) / "tensors")
    states = {key.partition("/")[0] for key in saved} - {"master", "buffer"}
    assert states == VARIANTS[variant].states
    assert saved.keys() == again.keys()
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
    uninterrupted, resumed = results_by_case[f"{variant}-{wrote}"], results_by_case[name_of(pair)]
    assert len(resumed["losses"]) == STEPS - STOP
    assert resumed["samples"] == uninterrupted["samples"][STOP:]
    if wrote == read:
        assert resumed["losses"] == uninterrupted["losses"][STOP:]
        assert resumed["norms"] == uninterrupted["norms"][STOP:]
    elif VARIANTS[variant].exact is not None:
        expected = pytest.approx(uninterrupted["losses"][STOP:], abs=VARIANTS[variant].exact)
        assert resumed["losses"] == expected


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models that all of them start from."""
    directories_by_variant = {}
    for variant in ("tied", "untied"):
        section = ModelSection(config=VARIANTS[variant].model)
        directories_by_variant[variant] = tmp_path_factory.mktemp("initial") / variant
        model = build_model(section, load_hf_config(section), seed=SEED)
        model.save_pretrained(directories_by_variant[variant])
    return directories_by_variant


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_frozen_parameters_are_as_in_plain_training(
    variant: str, some: tuple[Path, dict[str, Any]], initial: dict[str, Path], dataset: Path
) -> None:
    assert_frozen(variant, {(v, w) for v, w, _ in SOME if v == variant}, *some, initial, dataset)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_frozen_parameters_are_as_in_plain_training_everywhere(
    variant: str,
    everything: Callable[[str], tuple[Path, dict[str, Any]]],
    initial: dict[str, Path],
    dataset: Path,
) -> None:
    writers = {(variant, wrote) for wrote in ASKED}
    assert_frozen(variant, writers, *everything(variant), initial, dataset)


def assert_frozen(
    variant: str,
    writers: set[tuple[str, str]],
    root: Path,
    results_by_case: dict[str, Any],
    initial: dict[str, Path],
    dataset: Path,
) -> None:
    chosen = VARIANTS[variant]
    config = case(dataset, variant, "one")["config"]
    plain = plain_training(dataset, initial[variant], config, frozen=chosen.expression)
    section = ModelSection(path=str(initial[variant]))
    before = dict(build_model(section, load_hf_config(section), seed=0).named_parameters())
    for _, wrote in sorted(writers):
        result = results_by_case[f"{variant}-{wrote}"]
        assert result["losses"] == pytest.approx(plain.losses, abs=1e-5), wrote
        assert result["norms"] == pytest.approx(plain.norms, rel=1e-4), wrote
        saved = read_full(root / f"{variant}-{wrote}" / "tensors")
        for name, parameter in before.items():
            is_frozen = re.match(chosen.expression, name) is not None
            assert torch.equal(saved[f"master/{name}"], parameter) == is_frozen, name
            assert (f"exp_avg/{name}" not in saved) == is_frozen, name
