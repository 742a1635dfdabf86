"""A checkpoint written at one expert-parallel degree is read at every other, bit for bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full, read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, run_config, train_cases

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = 2, 4
MODEL = ARCHITECTURES["qwen3_moe"]


class Point(NamedTuple):
    """Who writes or reads."""

    world_size: int
    expert: int
    engine: str
    dtype: str = "float32"
    tensor: int = 1
    pipeline: int = 1

    @property
    def name(self) -> str:
        inner = {"tp": self.tensor, "pp": self.pipeline}
        more = "".join(f"-{name}{size}" for name, size in inner.items() if size > 1)
        return f"ep{self.expert}-of-{self.world_size}{more}-{self.engine}-{self.dtype}"


Pair = tuple[Point, Point]
PAIRS: dict[Point, list[Point]] = {
    Point(2, 2, "zero3"): [Point(2, 2, "zero3"), Point(1, 1, "zero0")],
    Point(1, 1, "zero1"): [Point(2, 2, "zero2")],
    Point(2, 2, "zero1", "bfloat16"): [Point(2, 2, "zero3", "bfloat16")],
}
OTHER_PAIRS: dict[Point, list[Point]] = {
    Point(2, 2, "zero3"): [Point(2, 2, "zero1")],
    Point(1, 1, "zero1"): [Point(2, 2, "zero0")],
    Point(2, 2, "zero0"): [Point(2, 2, "zero3"), Point(2, 1, "zero3")],
    Point(2, 2, "zero1", "bfloat16"): [
        Point(2, 2, "zero1", "bfloat16"),
        Point(1, 1, "zero3", "bfloat16"),
    ],
}
# Where a rank has no replica that holds the same experts, and where it has one; in 16 bit.
MORE_PAIRS: dict[Point, list[Point]] = {
    Point(4, 2, "zero3"): [
        Point(4, 2, "zero3"),
        Point(4, 4, "zero1"),
        Point(2, 2, "zero0"),
        Point(1, 1, "zero2"),
    ],
    Point(4, 2, "zero0"): [Point(4, 4, "zero3"), Point(4, 1, "zero1")],
    Point(4, 2, "zero3", tensor=2): [Point(4, 4, "zero2")],
    Point(4, 4, "zero1"): [Point(4, 2, "pipeline_zero1", pipeline=2)],
    Point(4, 2, "zero0", pipeline=2): [Point(4, 2, "zero2", tensor=2), Point(1, 1, "zero0")],
    Point(4, 2, "zero2", "bfloat16"): [
        Point(4, 2, "zero2", "bfloat16"),
        Point(4, 4, "zero3", "bfloat16"),
        Point(4, 1, "zero1", "bfloat16"),
    ],
    Point(4, 2, "pipeline_zero1", "bfloat16", pipeline=2): [
        Point(4, 2, "pipeline_zero1", "bfloat16", pipeline=2),
        Point(4, 2, "zero3", "bfloat16", tensor=2),
        Point(4, 4, "zero1", "bfloat16"),
    ],
}
# Every degree of experts with every one of tensor parallelism and pipeline stages, with the fewest
# processes that have it; 4 x 2 x 2 needs sixteen. Each of them writes for each, itself as well.
LAYOUTS = [
    Point(1, 1, "zero0"),
    Point(2, 1, "zero3", tensor=2),
    Point(2, 1, "pipeline_zero1", pipeline=2),
    Point(4, 1, "zero0", tensor=2, pipeline=2),
    Point(2, 2, "zero2"),
    Point(4, 2, "zero1", tensor=2),
    Point(4, 2, "pipeline_zero1", pipeline=2),
    Point(8, 2, "pipeline_zero1", tensor=2, pipeline=2),
    Point(4, 4, "zero3"),
    Point(8, 4, "zero2", tensor=2),
    Point(8, 4, "zero0", pipeline=2),
]
FEW = [(wrote, read) for wrote, readers in PAIRS.items() for read in readers]
OTHERS = [(wrote, read) for wrote, readers in OTHER_PAIRS.items() for read in readers]
MORE = [(wrote, read) for wrote, readers in MORE_PAIRS.items() for read in readers]
EVERY = [pair for pair in product(LAYOUTS, LAYOUTS) if pair not in MORE]


def name_of(pair: Pair) -> str:
    return "-to-".join(point.name for point in pair)


def case(data: Path, point: Point, **steps: Any) -> dict[str, Any]:
    config = run_config(
        data,
        {"config": MODEL},
        # Of two micro-batches, which fill two stages.
        micro_batch_size=4 * point.tensor * point.pipeline // point.world_size,
        precision={"dtype": point.dtype},
        parallel={
            "expert": point.expert,
            "tensor": point.tensor,
            "pipeline": point.pipeline,
        },
    )
    return {"config": config, "deepspeed_config": point.engine, **steps}


def write_and_read(
    data: Path, pairs: list[Pair], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Every writer to END without a break, then every reader from STOP on, in as few worlds."""
    root = tmp_path_factory.mktemp("expert-checkpoints")
    results_by_case: dict[str, Any] = {}
    writers = dict.fromkeys(wrote for wrote, _ in pairs)
    sizes = sorted({wrote.world_size for wrote in writers})

    def of_readers(size: int) -> dict[str, Any]:
        return {
            name_of((wrote, read)): case(
                data,
                read,
                first_step=STOP,
                last_step=END,
                restore_from=str(root / wrote.name),
                save_again_to=str(root / name_of((wrote, read))),
            )
            for wrote, read in pairs
            if read.world_size == size
        }

    for size in sizes:
        cases = {
            wrote.name: case(
                data, wrote, last_step=END, save_at=STOP, save_to=str(root / wrote.name)
            )
            for wrote in writers
            if wrote.world_size == size
        }
        if size == sizes[-1]:
            cases |= of_readers(size)
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("write"))
    for size in sorted({read.world_size for _, read in pairs} - {sizes[-1]}):
        results_by_case |= train_cases(size, of_readers(size), tmp_path_factory.mktemp("read"))
    return root, results_by_case


@pytest.fixture(scope="module")
def few(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, FEW, tmp_path_factory)


@pytest.fixture(scope="module")
def others(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, OTHERS, tmp_path_factory)


@pytest.fixture(scope="module")
def more(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, MORE, tmp_path_factory)


@pytest.fixture(scope="module")
def every(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return write_and_read(dataset, EVERY, tmp_path_factory)


@pytest.mark.parametrize("pair", FEW, ids=name_of)
def test_goes_on(pair: Pair, few: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(pair, *few)


@pytest.mark.slow
@pytest.mark.parametrize("pair", OTHERS, ids=name_of)
def test_others_go_on(pair: Pair, others: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(pair, *others)


@pytest.mark.slow
@pytest.mark.parametrize("pair", MORE, ids=name_of)
def test_goes_on_with_four(pair: Pair, more: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(pair, *more)


@pytest.mark.slow
@pytest.mark.parametrize("pair", EVERY, ids=name_of)
def test_every_layout_goes_on_from_every_other(
    pair: Pair, every: tuple[Path, dict[str, Any]]
) -> None:
    assert_goes_on(pair, *every)


def assert_goes_on(pair: Pair, root: Path, results_by_case: dict[str, Any]) -> None:
    wrote, read = pair
    saved = read_full(root / wrote.name / "tensors")
    again = read_full(root / name_of(pair) / "tensors")
    assert saved.keys() == again.keys()
    assert "exp_avg_sq/model.layers.0.mlp.experts.down_proj" in saved
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
    uninterrupted, resumed = results_by_case[wrote.name], results_by_case[name_of(pair)]
    if wrote == read:
        assert resumed["losses"] == uninterrupted["losses"][STOP:]
        assert resumed["norms"] == uninterrupted["norms"][STOP:]
    elif wrote.dtype == "float32":
        assert resumed["losses"] == pytest.approx(uninterrupted["losses"][STOP:], abs=1e-5)
        assert resumed["norms"] == pytest.approx(uninterrupted["norms"][STOP:], rel=1e-4)


def test_initial_weights_do_not_depend_on_the_degree(few: tuple[Path, dict[str, Any]]) -> None:
    """All begin with random weights and train the same samples."""
    _, results_by_case = few
    expected = results_by_case[Point(1, 1, "zero1").name]["losses"]
    for wrote in PAIRS:
        if wrote.dtype == "float32":
            assert results_by_case[wrote.name]["losses"] == pytest.approx(expected, abs=1e-5), wrote


def test_export_does_not_know_the_degree(few: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = few
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    wrote, read = Point(2, 2, "zero3"), Point(1, 1, "zero0")
    outputs = []
    for number, name in enumerate((wrote.name, name_of((wrote, read)))):
        weights = read_full_masters(root / name / "tensors")
        hf_config = load_hf_config(ModelSection(config=MODEL))
        model = AutoModelForCausalLM.from_config(hf_config)
        model.load_state_dict(weights, strict=False)
        ids = Probe.make_input(97, 16)
        with torch.no_grad():
            probe = Probe(ids, model.eval()(input_ids=ids).logits, "float32")
        outputs.append(tmp_path / str(number))
        destination = Destination(outputs[-1], tokenizer, "float32")
        export_model(weights, hf_config, destination, probe=probe)
    files = sorted(path.name for path in outputs[0].iterdir())
    assert "model.safetensors" in files
    for file in files:
        assert (outputs[0] / file).read_bytes() == (outputs[1] / file).read_bytes(), file
