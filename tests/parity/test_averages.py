"""Moving averages of the weights (``optimizer.ema``) at every topology, against torch's
`AveragedModel` over a plain training in one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bigtrain.engine.checkpoint.io import read_full, read_full_masters
from tests.parity import cases, plain_optimizers
from tests.parity.conftest import TrainedCases, each_case, train_cases
from tests.parity.plain import Training, divided, plain_training
from tests.support.comparison import assert_same_tensors, assert_same_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

DECAY = 0.8
STOP, END = 3, 6
SKIPPED = (0, 4)
LIMIT = 1e-5
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 3e-3, "eps": 1e-6},
    "muon": {"lr": 3e-3, "eps": 1e-6, "type": "muon", "muon": {"ns_dtype": "float32"}},
    "adafactor": {"lr": 1e-2, "type": "adafactor"},
}


@dataclass(frozen=True)
class Case(cases.Case):
    """A run with averages, from the start or from the checkpoint of another one."""

    resumes: bool = False

    @property
    def name(self) -> str:
        return super().name + ("-resumed" if self.resumes else "")


def case(
    world_size: int,
    engine: str,
    optimizer: str = "adamw",
    model: str = "llama",
    resumes: bool = False,
    slow: bool = True,
    **degrees: int,
) -> Case:
    section = {"ema": {"decay": DECAY}, **OPTIMIZERS[optimizer]}
    sections = {"optimizer": section, "train": {"steps": END}}
    return Case(world_size, engine, model, 2, degrees, sections, slow=slow, resumes=resumes)


ZERO3 = case(2, "zero3", slow=False)
RESUMED = case(2, "zero3", resumes=True, slow=False)
CASES = [
    ZERO3,
    RESUMED,
    case(2, "zero1", resumes=True, tensor=2),
    case(2, "zero0"),
    case(2, "zero2_offload"),
    case(4, "zero3", tensor=2),
    case(2, "zero1", sequence=2),
    case(2, "zero1", model="qwen3_moe", expert=2),
    case(2, "zero2", "muon"),
    case(2, "zero3", "adafactor"),
    case(1, "zero0", resumes=True),
    case(2, "pipeline_zero1", resumes=True, pipeline=2),
]


WRITER, WITHOUT, BEGUN = "writer", "writer without averages", "averages begin at a resume"


def config_of(
    case: Case, dataset: Path, hf_directories: dict[str, Path], **sections: Any
) -> dict[str, Any]:
    return case.config(dataset, {"path": str(hf_directories[case.model])}) | sections


def writers(dataset: Path, hf_directories: dict[str, Path], place: Path) -> dict[str, Any]:
    """Jobs in the world of two: checkpoints of `STOP` with and without averages, and a run that
    has averages from there on."""
    config = config_of(ZERO3, dataset, hf_directories)
    optimizer = {"clip_norm": 0.5, **OPTIMIZERS["adamw"]}
    plain = config_of(ZERO3, dataset, hf_directories, optimizer=optimizer)
    common = {"deepspeed_config": "zero3", "skipped": SKIPPED}
    stopped = {**common, "last_step": STOP, "save_at": STOP}
    return {
        WRITER: {**stopped, "config": config, "save_to": str(place / WRITER)},
        WITHOUT: {**stopped, "config": plain, "save_to": str(place / WITHOUT)},
        BEGUN: {
            **common,
            "config": config,
            "first_step": STOP,
            "restore_from": str(place / WITHOUT),
            "save_again_to": str(place / f"{BEGUN} at once"),
            "last_step": STOP + 1,
            "save_at": STOP + 1,
            "save_to": str(place / BEGUN),
        },
        "averages end at a resume": {
            **common,
            "config": plain,
            "first_step": STOP,
            "last_step": STOP,
            "restore_from": str(place / WRITER),
            "save_again_to": str(place / "ended"),
        },
    }


@pytest.fixture(scope="module")
def trained(
    dataset: Path, hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    directory = tmp_path_factory.mktemp("averages")

    def job_of(case: Case) -> dict[str, Any]:
        job: dict[str, Any] = {"save_at": END, "skipped": SKIPPED}
        if case.resumes:
            job |= {"first_step": STOP, "restore_from": str(directory / "fast" / WRITER)}
        return job

    trained = TrainedCases(
        directory,
        CASES,
        lambda case: config_of(case, dataset, hf_directories),
        job_of,
        lambda place: {2: writers(dataset, hf_directories, place)},
    )
    trained.results(slow=False)  # which the slow cases resume from
    return trained


def plain_averages(
    case: Case, dataset: Path, hf_directories: dict[str, Path]
) -> tuple[Training, dict[str, torch.Tensor]]:
    """Return a plain training, and the averages that torch makes of its weights."""
    averaged: list[AveragedModel] = []

    def watch(model: Any) -> None:
        averaged.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)))

    name = case.sections["optimizer"].get("type")
    make = getattr(plain_optimizers, name) if name else None
    training = plain_training(
        dataset,
        hf_directories[case.model],
        config_of(case, dataset, hf_directories),
        chunks=divided(case.micro_batch_size()),
        optimizer_of=make,
        skipped=SKIPPED,
        watch=watch,
        after_update=lambda model: averaged[0].update_parameters(model),
    )
    named = averaged[0].module.named_parameters()
    return training, {name: tensor.detach() for name, tensor in named}


@each_case(CASES)
def test_equals_averaged_model(
    case: Case, dataset: Path, hf_directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    expected, averages = plain_averages(case, dataset, hf_directories)
    result, place = trained.of(case)
    begin = STOP if case.resumes else 0
    assert result["losses"] == pytest.approx(expected.losses[begin:], abs=LIMIT)
    assert_same_weights(place, expected.weights, limit=LIMIT, relative=LIMIT)
    saved = averages_in(place)
    assert saved.keys() == averages.keys()
    assert_same_tensors(saved, averages, limit=LIMIT, relative=LIMIT)
    distances = [float((averages[n] - expected.weights[n]).abs().max()) for n in saved]
    assert min(distances) > 10 * LIMIT  # an average of no or one update would show


def averages_in(place: Path) -> dict[str, torch.Tensor]:
    tensors = read_full(place / "tensors", ("ema",))
    return {key.removeprefix("ema/"): tensor for key, tensor in tensors.items()}


def test_a_resumed_run_has_the_same_bits(trained: TrainedCases[Case]) -> None:
    (whole, straight), (rest, resumed) = trained.of(ZERO3), trained.of(RESUMED)
    assert rest["losses"] == whole["losses"][STOP:]
    first, second = (read_full(place / "tensors") for place in (straight, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


def test_averages_begin_with_the_weights_of_a_checkpoint_without(
    trained: TrainedCases[Case],
) -> None:
    _, place = trained.also(BEGUN)
    before = read_full_masters(place.with_name(WITHOUT) / "tensors")
    after = read_full_masters(place / "tensors")
    at_once, averages = averages_in(place.with_name(f"{BEGUN} at once")), averages_in(place)
    assert at_once.keys() == averages.keys() == before.keys()
    for name, weights in before.items():
        assert torch.equal(at_once[name], weights)
        assert torch.equal(averages[name], weights.lerp(after[name], 1 - DECAY))


def test_averages_end_where_a_run_without_resumes(trained: TrainedCases[Case]) -> None:
    _, place = trained.also("averages end at a resume")
    before, after = (read_full(place.with_name(name) / "tensors") for name in (WRITER, "ended"))
    assert {key for key in before if not key.startswith("ema/")} == after.keys()
    assert all(torch.equal(before[key], tensor) for key, tensor in after.items())


@pytest.mark.slow
def test_averages_are_of_the_float32_masters(
    dataset: Path, hf_directories: dict[str, Path], tmp_path: Path
) -> None:
    """Bit for bit, in bfloat16, from the masters after each step."""
    jobs, files = {}, {}
    for engine in ("zero0", "zero2", "zero3"):
        files[engine] = [str(tmp_path / f"{engine}-{step}.pt") for step in range(1, END + 1)]
        config = config_of(
            case(2, engine), dataset, hf_directories, precision={"dtype": "bfloat16"}
        )
        jobs[engine] = {
            "config": config,
            "deepspeed_config": engine,
            "skipped": SKIPPED,
            "save_at": END,
            "save_to": str(tmp_path / engine),
            "weights": dict(enumerate(files[engine], 1)),
        }
    train_cases(2, jobs, tmp_path)
    for engine, paths in files.items():
        history = [torch.load(path) for step, path in enumerate(paths) if step not in SKIPPED]
        averages = history[0]
        for masters in history[1:]:
            averages = {
                name: average.lerp(masters[name], 1 - DECAY) for name, average in averages.items()
            }
        saved = averages_in(tmp_path / engine)
        assert saved.keys() == averages.keys()
        for name, tensor in averages.items():
            assert torch.equal(saved[name], tensor), (engine, name)
