"""What keeps experts busy alike, against plain transformers and torch in one process.

The reference computes every term anew, from what transformers returns: counts by one-hot vectors of
its router logits, or of what its experts are given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from bigtrain.data.tokenizers.training import train_tokenizer
from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.settings.run_config import ModelSection
from tests.parity import cases
from tests.parity.cases import CHUNKS, EPS, LOSS, NORM, RECOMPUTE, WEIGHTS
from tests.parity.conftest import (
    ARCHITECTURES,
    STEPS,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
)
from tests.parity.expert_models import MODELS as EXPERT_MODELS
from tests.parity.expert_models import OPTIMIZER
from tests.parity.plain import Training, divided, plain_training
from tests.support.comparison import assert_same_steps, assert_same_tensors, assert_same_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

AUXILIARY, Z_LOSS, RATE = 0.5, 0.05, 0.02  # so that they show
SKIPPED = 2
UNTIED = {**llama(), "tie_word_embeddings": False, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
    | {"output_router_logits": True, "router_aux_loss_coef": AUXILIARY},
    # Whose configuration asks for no router logits.
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "deepseek_v3": EXPERT_MODELS["deepseek_v3"],
    "glm4_moe": EXPERT_MODELS["glm4_moe"],
    # Which does not itself say that its biases are to stay in float32.
    "minimax_m2": llama(
        model_type="minimax_m2",
        head_dim=8,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # Biases with another name, and parameters without a gradient: of two dimensions, or one.
    "lfm2_moe": {
        **UNTIED,
        "model_type": "lfm2_moe",
        "layer_types": ["conv", "full_attention", "full_attention"],
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "ernie4_5_moe": {
        **UNTIED,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 16,
        "moe_layer_start_index": 1,
    },
    "afmoe": {
        **UNTIED,
        "model_type": "afmoe",
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 8,
        "num_dense_layers": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 16,
    },
}
NAMES = {
    "lfm2_moe": "expert_bias",
    "afmoe": "expert_bias",
    "ernie4_5_moe": "gate.moe_statics.e_score_correction_bias",
}
"""Of biases in a block; of all others ``gate.e_score_correction_bias``."""
BIASES = r".*(e_score_correction|expert)_bias"
GLOBAL = {"auxiliary_loss": "global_batch"}
Z_ALONE = {"z_loss_coefficient": Z_LOSS}
BIAS = {"bias_update_rate": RATE}


STOP = 3


@dataclass(frozen=True)
class Case(cases.Case):
    """`moe`: what keeps its experts busy alike."""

    moe: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "-".join([super().name, *self.moe])


PARTS: dict[str, dict[str, Any]] = {"global": GLOBAL, "z": Z_ALONE, "bias": BIAS}


def case(
    world_size: int,
    engine: str,
    model: str,
    *moe: str,
    accumulation: int = 2,
    more: Mapping[str, Any] = EPS,
    slow: bool = True,
    **degrees: int,
) -> Case:
    section = {key: value for part in moe for key, value in PARTS[part].items()}
    sections = {**more, "moe": section}
    return Case(world_size, engine, model, accumulation, degrees, sections, slow=slow, moe=moe)


ANEW, CHUNKED = EPS | RECOMPUTE, EPS | CHUNKS
CASES = [
    case(2, "zero3", "mixtral", "global", "z", more=ANEW, expert=2),
    case(2, "zero1", "qwen3_moe", "z", more=CHUNKED, expert=2),
    case(2, "zero1", "deepseek_v3", "bias", slow=False, expert=2),
    case(2, "zero1", "mixtral", "global", accumulation=1),
    case(2, "zero3", "deepseek_v3", "bias", more=ANEW),
    case(2, "zero0", "lfm2_moe", "bias"),
    case(2, "zero3", "lfm2_moe", "bias", expert=2),
    case(2, "zero2", "ernie4_5_moe", "bias"),
    case(2, "zero1", "ernie4_5_moe", "bias", tensor=2),
    case(2, "zero3", "afmoe", "bias", expert=2),
    case(2, "pipeline_zero1", "afmoe", "bias", pipeline=2),
    case(1, "zero1", "mixtral", "global", "z", accumulation=4),
    case(4, "pipeline_zero1", "mixtral", "global", "z", accumulation=4, pipeline=2),
    case(2, "pipeline_zero1", "qwen3_moe", "z", more=CHUNKED, pipeline=2),
    case(2, "zero1", "mixtral", "global", "z", sequence=2, expert=2),
    case(4, "zero1", "mixtral", "global", tensor=2, expert=2),
    case(4, "zero2", "mixtral", "global", "z", more=CHUNKED, expert=4),
    case(2, "zero2", "glm4_moe", "bias", expert=2),
    case(4, "pipeline_zero1", "deepseek_v3", "bias", pipeline=2, expert=2),
    case(4, "zero3", "deepseek_v3", "bias", sequence=2, expert=4),
]
RESUMED = case(2, "zero3", "deepseek_v3", "bias")
IN_16_BIT = case(2, "zero3", "minimax_m2", "bias")


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    return case.config(data, {"path": str(directories[case.model])})


def more_jobs(data: Path, directories: dict[str, Path], place: Path) -> dict[str, Any]:
    """`RESUMED` in two parts with other degrees, and `IN_16_BIT`."""
    begin = replace(RESUMED, degrees={"expert": 2}, engine="zero1")
    rounded = config_of(IN_16_BIT, data, directories) | {"precision": {"dtype": "bfloat16"}}
    return {
        "begin": {
            "config": config_of(begin, data, directories),
            "deepspeed_config": begin.engine,
            "last_step": STOP,
            "save_at": STOP,
            "save_to": str(place / "begin"),
            "skipped": [SKIPPED],
        },
        "end": {
            "config": config_of(RESUMED, data, directories),
            "deepspeed_config": RESUMED.engine,
            "first_step": STOP,
            "restore_from": str(place / "begin"),
            "save_at": STEPS,
            "save_to": str(place / "end"),
        },
        "16 bit": {
            "config": rounded,
            "deepspeed_config": IN_16_BIT.engine,
            # After an even number of updates up and down they may all be zero.
            "last_step": 3,
            "save_at": 3,
            "save_to": str(place / "16 bit"),
        },
    }


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("balance"),
        CASES,
        lambda case: config_of(case, dataset, directories),
        lambda _: {"skipped": [SKIPPED], "observe": True},
        lambda place: {2: more_jobs(dataset, directories, place)},
    )


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(MODELS, tmp_path_factory.mktemp("hf"))


class Reference:
    """The terms and biases of a plain model under training."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.imbalance: list[dict[str, float]] = []
        self.biases: dict[str, torch.Tensor] = {}
        self._counts: dict[str, torch.Tensor] = {}
        self._chosen: list[torch.Tensor] = []
        self._num_parts = 0

    def watch(self, model: Any) -> None:
        model.config.output_router_logits = "bias" not in self.case.moe
        names = {module: name for name, module in model.named_modules()}
        for module in modules_of_experts(model):
            self._count(module, names[module])

    def _count(self, module: Any, name: str) -> None:
        def note(_module: Any, inputs: Any) -> None:
            chosen = F.one_hot(inputs[1].flatten(), module.num_experts).sum(0)
            self._counts[name] = self._counts.get(name, 0) + chosen

        module.register_forward_pre_hook(note)

    def added(self, part: int, outputs: Any) -> torch.Tensor:
        """To the loss of all ranks' micro-batches of this number."""
        total = torch.zeros(())
        if part == 0:
            self._chosen.clear()
        if "bias" in self.case.moe:
            return total
        logits = torch.cat(outputs.router_logits)
        if "global" in self.case.moe:
            chosen = logits.topk(2, -1).indices
            self._chosen.append(F.one_hot(chosen, logits.shape[-1]).sum(1).float())
            fractions, means = torch.cat(self._chosen).mean(0), logits.softmax(-1).mean(0)
            total = total + AUXILIARY * logits.shape[-1] * (fractions * means).sum()
        if "z" in self.case.moe:
            total = total + Z_LOSS * logits.exp().sum(-1).log().pow(2).mean()
        return total

    @torch.no_grad()
    def after_update(self, model: Any) -> None:
        modules = dict(model.named_modules())
        for name, counts in self._counts.items() if "bias" in self.case.moe else ():
            block = name.rpartition(".")[0]
            path = f"{block}.{NAMES.get(self.case.model, 'gate.e_score_correction_bias')}"
            owner, _, leaf = path.rpartition(".")
            bias = getattr(modules[owner], leaf)
            bias += (RATE * (counts.float().mean() - counts).sign()).view_as(bias)
            self.biases[path] = bias

    def end_step(self) -> None:
        self.imbalance.append(
            {name: float(c.max() / c.float().mean()) for name, c in self._counts.items()}
        )
        self._counts.clear()


def reference_of(
    case: Case, dataset: Path, directories: dict[str, Path]
) -> tuple[Training, Reference]:
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    reference = Reference(case)
    trained = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size() * case.num_replicas),
        watch=reference.watch,
        added=reference.added,
        skipped=[SKIPPED],
        after_update=reference.after_update,
        after_step=reference.end_step,
        frozen=BIASES,
    )
    return trained, reference


@each_case(CASES)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    expected, reference = reference_of(case, dataset, directories)
    result, place = trained.of(case)
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    for load, imbalance in zip(result["loads"], reference.imbalance, strict=True):
        assert load["imbalance"] == pytest.approx(imbalance, rel=1e-12)
        is_divided = "expert" in case.degrees
        assert (load["sent_bytes"] is not None) == is_divided
        assert not is_divided or (load["sent_bytes"] > 0 and load["seconds"] > 0)
    weights = assert_same_weights(
        place,
        {**expected.weights, **reference.biases},
        limit=WEIGHTS,
    )
    assert bool(reference.biases) == ("bias" in case.moe)
    if reference.biases:
        assert_same_tensors(weights, reference.biases, limit=1e-6)


def test_biases_continue_at_another_degree(
    dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    expected, reference = reference_of(RESUMED, dataset, directories)
    result, place = trained.also("end")
    assert result["losses"] == pytest.approx(expected.losses[STOP:], abs=LOSS["float32"])
    assert_same_tensors(read_full_masters(place / "tensors"), reference.biases, limit=1e-6)


def biases_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: w for name, w in weights.items() if re.match(BIASES, name)}


def test_biases_are_float32_in_a_run_in_16_bit(trained: TrainedCases[Case]) -> None:
    _, place = trained.also("16 bit")
    biases = biases_of(read_full_masters(place / "tensors"))
    assert len(biases) == 3
    for bias in biases.values():
        updates = bias / RATE
        assert bias.dtype == torch.float32
        assert updates.any()
        assert float((updates - updates.round()).abs().max()) < 1e-4


def test_biases_are_exported_in_float32(
    directories: dict[str, Path], trained: TrainedCases[Case], tmp_path: Path
) -> None:
    _, place = trained.also("end")
    weights = read_full_masters(place / "tensors")
    biases = biases_of(weights)
    hf_config = load_hf_config(ModelSection(path=str(directories["deepseek_v3"])))
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    ids = Probe.make_input(97, 16)
    with torch.no_grad():
        probe = Probe(ids, model.eval()(input_ids=ids).logits, "float32")
    tokenizer, output = tmp_path / "tokenizer", tmp_path / "hf"
    train_tokenizer(iter([["the theme of the thesis"]]), 260).save(tokenizer)
    export_model(weights, hf_config, Destination(output, tokenizer, "bfloat16"), probe=probe)
    exported = load_file(output / "model.safetensors")
    assert len(biases) == 2
    for name in biases:
        assert torch.equal(exported[name], weights[name]), name
