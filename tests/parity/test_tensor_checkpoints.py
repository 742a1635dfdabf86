"""A checkpoint written at one tensor-parallel degree is read at every other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full, read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, llama, run_config, train_cases
from tests.support.datasets import write_dataset

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

STOP, END = 3, 5
# Nothing divides: padded vocabulary, uneven widths, shared key-value heads, packed experts.
MODELS: dict[str, dict[str, Any]] = {
    "odd": llama(intermediate_size=63, attention_bias=True, attention_dropout=0.1),
    "moe": ARCHITECTURES["qwen3_moe"] | {"moe_intermediate_size": 24},
}
# (processes, tensor-parallel size, DeepSpeed JSON, model, dtype)
Point = tuple[int, int, str, str, str]
WRITERS: list[Point] = [
    (1, 1, "zero0", "odd", "float32"),
    (2, 2, "zero1", "odd", "float32"),
    (2, 2, "zero3", "moe", "float32"),
    (2, 2, "zero0", "odd", "bfloat16"),
    (4, 2, "zero2", "moe", "bfloat16"),
    (4, 4, "zero1", "odd", "float32"),
]
READERS: dict[Point, list[tuple[int, int, str]]] = {
    WRITERS[0]: [(2, 2, "zero3"), (4, 4, "zero2")],
    WRITERS[1]: [(1, 1, "zero0"), (2, 1, "zero3"), (2, 2, "zero2"), (4, 2, "zero3")],
    WRITERS[2]: [(1, 1, "zero2"), (4, 2, "zero1")],
    WRITERS[3]: [(1, 1, "zero3")],
    WRITERS[4]: [(2, 2, "zero3"), (1, 1, "zero1")],
    WRITERS[5]: [(2, 2, "zero0"), (1, 1, "zero1")],
}


def pairs() -> list[tuple[Point, Point]]:
    """Every writer with itself, and with each of its readers."""
    pairs_of_points = []
    for wrote, readers in READERS.items():
        pairs_of_points += [
            (wrote, wrote),
            *((wrote, (*read, wrote[3], wrote[4])) for read in readers),
        ]
    return pairs_of_points


SMALL = [pair for pair in pairs() if max(point[0] for point in pair) <= 2]
LARGE = [pair for pair in pairs() if pair not in SMALL]


def name_of(*points: Point) -> str:
    return "-to-".join("-".join(map(str, point)) for point in points)


def case(data: Path, point: Point, **steps: Any) -> dict[str, Any]:
    size, tensor, engine, model, dtype = point
    config = run_config(
        data,
        {"config": MODELS[model]},
        micro_batch_size=8 * tensor // size,
        precision={"dtype": dtype},
        parallel={"tensor": tensor},
    )
    return {"config": config, "deepspeed_config": engine, **steps}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("tokens") / "shards", vocab_size=97)


@pytest.fixture(scope="module")
def runs(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What at most two processes write and read."""
    return write_and_read(tokens, SMALL, tmp_path_factory)


@pytest.fixture(scope="module")
def runs_with_four(
    tokens: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    return write_and_read(tokens, LARGE, tmp_path_factory)


def write_and_read(
    tokens: Path, chosen: list[tuple[Point, Point]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """Every writer to END without a break, then every reader from STOP on."""
    root = tmp_path_factory.mktemp("tensor-checkpoints")
    results_by_case: dict[str, Any] = {}
    for size in sorted({wrote[0] for wrote, _ in chosen}):
        cases = {
            name_of(point): case(
                tokens, point, last_step=END, save_at=STOP, save_to=str(root / name_of(point))
            )
            for point in dict.fromkeys(wrote for wrote, _ in chosen)
            if point[0] == size
        }
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("write"))
    for size in sorted({read[0] for _, read in chosen}):
        cases = {
            name_of(wrote, read): case(
                tokens,
                read,
                first_step=STOP,
                last_step=END,
                restore_from=str(root / name_of(wrote)),
                save_again_to=str(root / name_of(wrote, read)),
            )
            for wrote, read in chosen
            if read[0] == size
        }
        results_by_case |= train_cases(size, cases, tmp_path_factory.mktemp("read"))
    return root, results_by_case


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "read"), SMALL, ids=str)
def test_goes_on(wrote: Point, read: Point, runs: tuple[Path, dict[str, Any]]) -> None:
    assert_goes_on(wrote, read, *runs)


@pytest.mark.slow
@pytest.mark.parametrize(("wrote", "read"), LARGE, ids=str)
def test_goes_on_with_four(
    wrote: Point, read: Point, runs_with_four: tuple[Path, dict[str, Any]]
) -> None:
    assert_goes_on(wrote, read, *runs_with_four)


def assert_goes_on(wrote: Point, read: Point, root: Path, results_by_case: dict[str, Any]) -> None:
    saved = read_full(root / name_of(wrote) / "tensors")
    again = read_full(root / name_of(wrote, read) / "tensors")
    assert saved.keys() == again.keys()
    assert any(key.startswith("exp_avg_sq/") for key in saved)
    for key, tensor in saved.items():
        assert torch.equal(tensor, again[key]), key
    uninterrupted, resumed = results_by_case[name_of(wrote)], results_by_case[name_of(wrote, read)]
    if wrote == read:
        assert resumed["losses"] == uninterrupted["losses"][STOP:]
        assert resumed["norms"] == uninterrupted["norms"][STOP:]
    elif wrote[3:] == ("moe", "float32"):  # "odd" has dropout, which differs with the data rank
        assert resumed["losses"] == pytest.approx(uninterrupted["losses"][STOP:], abs=1e-5)
        assert resumed["norms"] == pytest.approx(uninterrupted["norms"][STOP:], rel=1e-4)


@pytest.mark.slow
def test_export_does_not_know_the_degree(runs: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root, _ = runs
    tokenizer = tmp_path / "tokenizer"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    wrote = WRITERS[2]
    read = (1, 1, "zero2", *wrote[3:])
    outputs = []
    for number, name in enumerate((name_of(wrote), name_of(wrote, read))):
        weights = read_full_masters(root / name / "tensors")
        hf_config = load_hf_config(ModelSection(config=MODELS[wrote[3]]))
        model = AutoModelForCausalLM.from_config(hf_config)
        model.load_state_dict(weights, strict=False)
        ids = Probe.make_input(97, 16)
        with torch.no_grad():
            probe = Probe(ids, model.eval()(input_ids=ids).logits, "float32")
        outputs.append(tmp_path / str(number))
        export_model(
            weights,
            hf_config,
            Destination(outputs[-1], tokenizer, "float32"),
            probe=probe,
        )
    files = sorted(path.name for path in outputs[0].iterdir())
    assert "model.safetensors" in files
    for file in files:
        assert (outputs[0] / file).read_bytes() == (outputs[1] / file).read_bytes(), file
