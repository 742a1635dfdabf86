"""Adapters beside a base in 4 bits (QLoRA), against plain peft and bitsandbytes in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import BitsAndBytesConfig

from bigtrain.engine.checkpoint.io import read_full
from tests.parity.cases import LOSS, NORM, RECOMPUTE, WEIGHTS, Case, assert_among
from tests.parity.conftest import STEPS, each_case, train_cases
from tests.parity.plain import Spread, Training, orders, plain_training
from tests.parity.test_adapters import (
    BFLOAT16,
    PEFT,
    TILES,
    TILES_ANEW,
    config_of,
    seed_of,
)
from tests.parity.test_compiled_topologies import FAST_BACKEND

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1200),
    # peft 0.21 asks transformers 5.23 by an old name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]


def nf4(**more: Any) -> dict[str, dict[str, Any]]:
    return {"adapters": {"quantization": "nf4", **more}}


def fp4(**more: Any) -> dict[str, dict[str, Any]]:
    return {"adapters": {"quantization": "fp4", "double_quantization": False, **more}}


def int8(**more: Any) -> dict[str, dict[str, Any]]:
    return {"adapters": {"quantization": "int8", **more}}


# In the graph of a layer, bitsandbytes' products are operators.
COMPILED: dict[str, dict[str, Any]] = {"model": {"compile": "on"}}
RESTORED = Case(1, "zero0", accumulation=1, sections=nf4() | RECOMPUTE, slow=False)
SAVED = Case(2, "zero2", accumulation=2, sections=nf4() | RECOMPUTE, slow=False)
CASES = [
    RESTORED,
    SAVED,
    Case(2, "zero1", "gpt2", sections=fp4()),
    Case(2, "zero0", degrees={"sequence": 2}, sections=nf4(dora=True)),
    Case(2, "zero1", degrees={"pipeline": 2}, sections=nf4()),
    Case(2, "zero2", sections=nf4() | TILES),
    Case(1, "zero1", sections=nf4(dora=True) | TILES_ANEW),
    Case(2, "zero0", "llama", 1, sections=nf4(rslora=True)),
    Case(2, "zero1", "llama", 2, {"sequence": 2}, nf4(rslora=True)),
    Case(1, "zero2", "llama", 4, sections=fp4(dora=True)),
    Case(2, "zero2_offload", "llama", 1, sections=fp4(dora=True)),
    Case(2, "zero2", "gpt2", 2, {"sequence": 2}, nf4(double_quantization=False)),
    Case(1, "zero2_offload", "gpt2", 4, sections=nf4(double_quantization=False)),
    Case(2, "zero2", sections=int8() | RECOMPUTE, slow=False),
    Case(1, "zero0", "gpt2", 4, sections=int8(rslora=True)),
    Case(2, "zero2_offload", "llama", 1, sections=int8(loraplus_lr_ratio=1.0)),
    Case(2, "zero1", "gpt2", 2, {"pipeline": 2}, int8()),
    Case(2, "zero1", "llama", 2, {"sequence": 2}, int8(llm_int8_threshold=0.0)),
    Case(1, "zero0", accumulation=1, sections=nf4(dora=True) | COMPILED),
    Case(1, "zero2", "gpt2", 1, sections=fp4() | COMPILED),
    *(
        Case(4, "zero1", model, 2, {"pipeline": 2}, nf4() | RECOMPUTE)
        for model in ("gpt2", "first")
    ),
]


def adapted(model: Any, case: Case) -> Any:
    """Plain peft's model beside a quantized base, each layer's values from a stream of its own."""
    asked = case.sections["adapters"]
    config = replace(
        PEFT[case.model],
        use_dora=asked.get("dora", False),
        use_rslora=asked.get("rslora", PEFT[case.model].use_rslora),
    )
    made = get_peft_model(model, config, autocast_adapter_dtype=False)
    for layer, module in made.base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            torch.manual_seed(seed_of(layer))
            module.float().reset_lora_parameters("default", True)
    for name, parameter in made.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.to(model.dtype)
    return made


def plain_run(case: Case, data: Path, base: Path, **options: Any) -> Training:
    asked = case.sections["adapters"]
    dtype = options.get("dtype", torch.float32)
    training = plain_training(
        data,
        base,
        config_of(case, data, base),
        adapt=lambda model: adapted(model, case),
        frozen=r"(?!.*\.lora_)",
        quantization=BitsAndBytesConfig(load_in_8bit=True)
        if asked["quantization"] == "int8"
        else BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=asked["quantization"],
            bnb_4bit_use_double_quant=asked.get("double_quantization", True),
            bnb_4bit_compute_dtype=asked.get("compute_dtype", dtype),
        ),
        **options,
    )
    weights = {n.removeprefix("base_model.model."): w for n, w in training.weights.items()}
    return Training(training.losses, training.norms, weights)


@pytest.fixture(scope="module")
def bases(
    hf_directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    directories = ("gpt2", "llama")
    return {**{n: hf_directories[n] for n in directories}, "first": hf_directories["llama"]}


def run_cases(
    cases: list[Case], data: Path, bases: dict[str, Path], root: Path
) -> dict[str, dict[str, Any]]:
    """Each case; the state of `SAVED` after three steps, and what `RESTORED` saves of it again."""
    results_by_case: dict[str, dict[str, Any]] = {}
    for size in sorted({case.world_size for case in cases}, reverse=True):
        asked: dict[str, dict[str, Any]] = {
            case.name: {
                "config": config_of(case, data, bases[case.model]),
                "deepspeed_config": case.engine,
                "weights": {str(STEPS): str(root / f"{case.name}.pt")},
                "compile_backend": FAST_BACKEND,
            }
            for case in cases
            if case.world_size == size
        }
        if SAVED.name in asked:
            asked[SAVED.name] |= {"save_at": 3, "save_to": str(root / "saved")}
        if RESTORED.name in asked:
            asked["again"] = asked[RESTORED.name] | {
                "config": config_of(replace(SAVED, world_size=1), data, bases[SAVED.model]),
                "first_step": 3,
                "restore_from": str(root / "saved"),
                "save_again_to": str(root / "again"),
                "weights": {str(STEPS): str(root / "again.pt")},
            }
        place = root / str(size)
        place.mkdir()
        results_by_case |= train_cases(size, asked, place)
    return results_by_case


@pytest.fixture(scope="module")
def results(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("few")
    cases = [case for case in CASES if not case.slow]
    return {"root": root, **run_cases(cases, dataset, bases, root)}


@pytest.fixture(scope="module")
def slow_results(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("slow")
    cases = [case for case in CASES if case.slow]
    return {"root": root, **run_cases(cases, dataset, bases, root)}


@each_case(CASES)
def test_equals_plain_peft(
    case: Case, dataset: Path, bases: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    results_by_case = request.getfixturevalue("slow_results" if case.slow else "results")
    expected = plain_run(case, dataset, bases[case.model])
    if "compile" in case.sections.get("model", {}):
        # The first layer has graphs of its own: its input needs no gradient.
        result = results_by_case[case.name]
        assert (result["graphs"], result["graph_breaks"]) == ([2] * STEPS, {})
    assert results_by_case[case.name]["losses"] == pytest.approx(
        expected.losses, abs=LOSS["float32"]
    )
    assert results_by_case[case.name]["norms"] == pytest.approx(expected.norms, rel=NORM["float32"])
    trained = torch.load(results_by_case["root"] / f"{case.name}.pt")
    assert expected.weights.keys() <= trained.keys()
    # No weight in 4 bits is taken for one that has a master.
    assert not any(".base_layer.weight" in name for name in trained)
    for name, weight in expected.weights.items():
        assert torch.allclose(trained[name], weight, rtol=0, atol=WEIGHTS), name


def test_goes_on_with_another_number_of_processes(
    dataset: Path, bases: dict[str, Path], results: dict[str, Any]
) -> None:
    """States are the same to the last bit, and nothing of the base is among them."""
    first, again = (read_full(results["root"] / name / "tensors") for name in ("saved", "again"))
    assert first.keys() == again.keys()
    assert {key.partition("/")[0] for key in first} == {"master", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in key for key in first)
    for key, tensor in first.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(again[key], tensor), key
    expected = plain_run(SAVED, dataset, bases[SAVED.model])
    assert results["again"]["losses"] == pytest.approx(expected.losses[3:], abs=LOSS["float32"])
    trained = torch.load(results["root"] / "again.pt")
    for name, weight in expected.weights.items():
        assert torch.allclose(trained[name], weight, rtol=0, atol=WEIGHTS), name


IN_16_BIT = [
    Case(size, engine, sections=nf4(dora=dora) | BFLOAT16)
    for engine, size, dora in (("zero0", 1, False), ("zero1", 2, True), ("zero2", 2, False))
]
# Float32 that is rounded in each product: where gradients differ by rounding, they then do by more.
IN_16_BIT.append(Case(2, "zero1", sections=nf4(compute_dtype="bfloat16")))


@pytest.fixture(scope="module")
def in_16_bit(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("16-bit")
    return {"root": root, **run_cases(IN_16_BIT, dataset, bases, root)}


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_16_BIT, ids=lambda case: case.name)
def test_16_bit_is_among_plain_runs(
    case: Case, dataset: Path, bases: dict[str, Path], in_16_bit: dict[str, Any]
) -> None:
    dtype = torch.bfloat16 if "precision" in case.sections else torch.float32
    options = {"dtype": dtype, "sum_dtype": dtype if case.engine == "zero0" else torch.float32}
    runs = [plain_run(case, dataset, bases["llama"], chunks=c, **options) for c in orders()]
    trained = torch.load(in_16_bit["root"] / f"{case.name}.pt")
    assert_among(in_16_bit[case.name], trained, Spread.of(runs))
