"""Adapters that begin as principal components of the weights (PiSSA) at every topology, against
plain peft in one process; their export fits the base's own weights, as peft converts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bigtrain.engine.checkpoint.lazy import open_weights
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.adapters import _write_config, adapter_state, merged_weights
from bigtrain.models.layers.adapter_names import base_name
from bigtrain.models.layers.principal_adapters import INITIAL
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.parity.cases import LOSS, NORM, WEIGHTS, Case
from tests.parity.conftest import ARCHITECTURES, STEPS, SavedModels, each_case, train_cases
from tests.parity.plain import Training, plain_training
from tests.parity.test_adapters import LORA, MODELS, PEFT, config_of
from tests.support.comparison import assert_same_steps
from tests.support.resumes import Layout, Pair, Resumes, each_pair, layout

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

PISSA: dict[str, dict[str, Any]] = {"adapters": {"init": "pissa"}, "optimizer": {"lr": 2e-3}}
SAVED = {**PISSA, "adapters": {"init": "pissa", "modules_to_save": ["lm_head"]}}
PROBE = [[5, 6, 7, 8, 9, 10]]
CASES = [
    Case(2, "zero3", "gpt2", sections=PISSA, slow=False),
    Case(2, "zero1", "odd", 1, {"tensor": 2}, PISSA),
    Case(2, "zero1", degrees={"pipeline": 2}, sections=PISSA, slow=False),
    Case(1, "zero0", sections=PISSA),
    Case(2, "zero2_offload", "odd", 4, sections=SAVED),
    Case(2, "zero3", "odd", degrees={"sequence": 2}, sections=PISSA),
    Case(4, "zero3", "odd", 2, {"tensor": 2}, PISSA),
]


def adapted(model: Any, case: Case) -> Any:
    saved = case.sections["adapters"].get("modules_to_save")
    config = replace(PEFT[case.model], init_lora_weights="pissa", modules_to_save=saved)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(ARCHITECTURES | MODELS, tmp_path_factory.mktemp("bases"))


class Runs:
    """Results of the cases of a tier, trained when the first is asked for."""

    def __init__(self, root: Path, data: Path, bases: dict[str, Path]) -> None:
        self.root, self.data, self.bases = root, data, bases
        self._results: dict[str, dict[str, Any]] = {}

    def of(self, case: Case) -> dict[str, Any]:
        if case.name not in self._results:
            alike = [c for c in CASES if (c.slow, c.world_size) == (case.slow, case.world_size)]
            world = self.root / f"world-{len(self._results)}"
            world.mkdir()
            jobs = {
                each.name: {
                    "config": config_of(each, self.data, self.bases[each.model]),
                    "deepspeed_config": each.engine,
                    "weights": {"0": str(self.place(each)) + ".pt"},
                    "save_at": STEPS,
                    "save_to": str(self.place(each)),
                    "probe": PROBE,
                }
                for each in alike
            }
            self._results |= train_cases(case.world_size, jobs, world)
        return self._results[case.name]

    def place(self, case: Case) -> Path:
        return self.root / case.name

    def section(self, case: Case) -> AdaptersSection:
        return AdaptersSection.model_validate(LORA[case.model] | case.sections["adapters"])


@pytest.fixture(scope="module")
def runs(dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("pissa"), dataset, bases)


def plain(case: Case, runs: Runs, **options: Any) -> Training:
    base = runs.bases[case.model]
    training = plain_training(
        runs.data,
        base,
        config_of(case, runs.data, base),
        frozen=r"(?!.*\.(lora_|modules_to_save\.))",
        **options,
    )
    weights = {n.removeprefix("base_model.model."): w for n, w in training.weights.items()}
    return Training(training.losses, training.norms, weights)


@each_case(CASES)
def test_equals_plain_peft(case: Case, runs: Runs) -> None:
    models: list[Any] = []

    def adapt(model: Any) -> Any:
        models.append(adapted(model, case))
        return models[-1]

    result, expected = runs.of(case), plain(case, runs, adapt=adapt)
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    trained = open_weights(runs.place(case) / "tensors")
    for name, weight in expected.weights.items():
        assert torch.allclose(trained[name].read(), weight, rtol=0, atol=WEIGHTS), name

    # The frozen weights are those without principal components.
    frozen = {n.removeprefix("base_model.model."): p for n, p in models[0].named_parameters()}
    begun = torch.load(f"{runs.place(case)}.pt")
    files = AutoModelForCausalLM.from_pretrained(runs.bases[case.model]).state_dict()
    residuals = [name for name in begun if name.endswith(".base_layer.weight")]
    assert residuals
    for name in residuals:
        assert torch.allclose(begun[name], frozen[name], rtol=0, atol=1e-6), name
        assert not torch.allclose(begun[name], files[base_name(name)], rtol=0, atol=1e-3), name


@each_case(CASES)
def test_export_fits_the_base_itself(case: Case, runs: Runs, tmp_path: Path) -> None:
    result, base, section = runs.of(case), runs.bases[case.model], runs.section(case)
    hf_config = load_hf_config(ModelSection(path=str(base)))
    weights = open_weights(runs.place(case) / "tensors")
    state = adapter_state(weights, "float32")
    _write_config(tmp_path, section, str(base), hf_config)
    save_file(state, tmp_path / "adapter_model.safetensors")
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (written["r"], written["init_lora_weights"]) == (2 * section.rank, True)
    logits = torch.tensor(result["logits"])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, str(tmp_path)).eval()
        assert torch.allclose(model(torch.tensor(PROBE)).logits, logits, rtol=0, atol=1e-4)
        merged = merged_weights(weights, section, find_weights(str(base), hf_config), hf_config)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        read = {n: t.read() if hasattr(t, "read") else t for n, t in merged.items()}
        model.load_state_dict(read, strict=False)
        assert torch.allclose(model(torch.tensor(PROBE)).logits, logits, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:PiSSA changes the base weights:UserWarning")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_conversion_is_that_of_peft(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """The files that peft's `path_initial_model_for_weight_conversion` writes."""
    case = Case(1, "zero0", name, sections=PISSA)
    base = AutoModelForCausalLM.from_pretrained(bases[name], dtype=torch.float32)
    model = adapted(base, case)
    model.peft_config["default"].init_lora_weights = True  # they are loaded without a second one
    model.save_pretrained(tmp_path / "initial")
    begun = load_file(tmp_path / "initial/adapter_model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn_like(parameter))
    weights = {
        parameter_name.removeprefix("base_model.model."): p.detach()
        for parameter_name, p in model.named_parameters()
        if p.requires_grad
    }
    for file_name, values in begun.items():
        layer, matrix = file_name.removeprefix("base_model.model.").split(".lora_")
        weights[f"{layer}.{INITIAL[f'lora_{matrix[0]}']}"] = values.view(torch.int32)
    model.peft_config["default"].init_lora_weights = "pissa"
    model.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    expected = load_file(tmp_path / "converted/adapter_model.safetensors")
    state = adapter_state(weights, "float32")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)
    section = AdaptersSection.model_validate(LORA[name] | PISSA["adapters"])
    hf_config = load_hf_config(ModelSection(path=str(bases[name])))
    (tmp_path / "ours").mkdir()
    _write_config(tmp_path / "ours", section, str(bases[name]), hf_config)
    ours, theirs = (
        json.loads((tmp_path / folder / "adapter_config.json").read_text())
        for folder in ("ours", "converted")
    )
    for key in ("r", "lora_alpha", "use_rslora", "init_lora_weights"):
        assert ours[key] == theirs[key], key


PLACES = [layout(1, "zero0"), layout(2, "zero3"), layout(2, "zero1", tensor=2)]
PAIRS = [
    Pair(layout(2, "zero3"), layout(2, "zero3")),
    *(Pair(PLACES[0], place) for place in PLACES),
    Pair(layout(2, "zero1", pipeline=2), PLACES[0]),
]


@pytest.fixture(scope="module")
def resumes(
    dataset: Path, bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Resumes:
    def job_of(place: Layout) -> dict[str, Any]:
        case = Case(place.world_size, place.engine, "odd", 2, dict(place.degrees), PISSA)
        config = config_of(case, dataset, bases["odd"])
        return {"config": config, "deepspeed_config": place.engine}

    return Resumes(tmp_path_factory.mktemp("resume"), PAIRS, job_of, stop=3, end=5)


@each_pair(PAIRS)
def test_resumes_bit_for_bit(pair: Pair, resumes: Resumes) -> None:
    saved = resumes.check(pair)
    assert any(key.endswith(tuple(INITIAL.values())) for key in saved)
