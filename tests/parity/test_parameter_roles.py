"""Which parameters decay, and which are left alone, against torch.optim with groups named here.

Biases of experts, states of recurrent layers and a vision tower that text does not reach have
several dimensions, and plain PyTorch decays what it is told to and nothing without a gradient.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.engine.checkpoint.io import open_tensors, read_full_masters
from tests.parity import plain_optimizers
from tests.parity.conftest import (
    COMPOSITE,
    SEED,
    VOCAB_SIZE,
    SavedModels,
    TrainedCases,
    each_case,
    llama,
    run_config,
)
from tests.parity.plain import Training, adamw, divided, plain_training
from tests.support.comparison import assert_same_steps, assert_same_tensors

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

LOSS = 1e-5
NORM = 1e-4
WEIGHTS = 1e-5

TEXT = {name: value for name, value in llama().items() if name != "tie_word_embeddings"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        **TEXT,
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "pad_token_id": None,
    },
    "mamba": {
        "model_type": "mamba",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "use_mambapy": False,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gemma3": COMPOSITE,
    # As many experts as key and value projections have rows, and as shared experts have.
    "qwen3_next": {
        **TEXT,
        "model_type": "qwen3_next",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "pad_token_id": None,
    },
}
# A router and a bias that stay in float32 in a model of 16 bit.
MODELS["ernie4_5_moe"] = {
    **TEXT,
    "model_type": "ernie4_5_moe",
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "pad_token_id": 0,
}
NOT_DECAYED = {
    "gpt_oss": r"norm|bias|sinks",
    "mamba": r"norm|bias|\.A_log$|\.D$",
    "gemma3": r"norm",
    "qwen3_next": r"norm|bias|A_log",
    "ernie4_5_moe": r"norm|bias",
}
UNTOUCHED = {
    "gemma3": r"model\.(vision_tower|multi_modal_projector)\.",
    "ernie4_5_moe": r".*e_score_correction_bias",
}
"""Names of parameters that text gives no gradient."""
BY_MUON = {
    "qwen3_next": r".*layers\.\d+\.((self_attn\.[qkvo]_proj|linear_attn\.(in_proj_\w+|out_proj)"
    r"|mlp\.shared_expert\.\w+_proj)\.weight|mlp\.experts\.(gate_up|down)_proj)",
    "gemma3": r".*language_model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight",
}


@dataclass(frozen=True)
class Case:
    model: str
    engine: str
    optimizer: str = "adamw"
    world_size: int = 2
    accumulation: int = 1
    degrees: dict[str, int] = field(default_factory=dict)
    slow: bool = True

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items())
        return (
            f"{self.model}-{self.engine}-{self.optimizer}-{degrees or 'data'}"
            f"-accumulation{self.accumulation}"
        )

    @property
    def micro_batch_size(self) -> int:
        shared = self.degrees.get("pipeline", 1) * self.degrees.get("tensor", 1)
        return 8 // (self.accumulation * (self.world_size // shared))


CASES = [
    Case("gpt_oss", "zero1"),
    Case("mamba", "zero3"),
    Case("gemma3", "zero2"),
    Case("gemma3", "zero3", slow=False),
    Case("qwen3_next", "zero1", "muon"),
    *(
        Case(model, engine)
        for model in MODELS
        for engine in ("zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
    ),
    *(
        Case("gemma3", engine, optimizer)
        for engine in ("zero0", "zero1", "zero3")
        for optimizer in ("lion", "adafactor", "muon")
    ),
    *(
        Case(model, "pipeline_zero1", accumulation=2, degrees={"pipeline": 2})
        for model in ("gpt_oss", "gemma3")
    ),
    Case("gemma3", "pipeline_zero1", "muon", accumulation=2, degrees={"pipeline": 2}),
    Case("gpt_oss", "zero3", degrees={"expert": 2}),
    Case("qwen3_next", "zero3", "muon"),
    Case("gemma3", "zero1", degrees={"tensor": 2}),
]
CASES = list({case.name: case for case in reversed(CASES)}.values())
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lion": {"type": "lion", "lr": 3e-4},
    "adafactor": {"type": "adafactor", "lr": 1e-2},
    "muon": {"type": "muon", "eps": 1e-6, "muon": {"ns_dtype": "float32"}},
}


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directories[case.model])},
        micro_batch_size=case.micro_batch_size,
        parallel=case.degrees,
        optimizer={"lr": 3e-3, "clip_norm": 0.5, "weight_decay": 0.3} | OPTIMIZERS[case.optimizer],
    )
    return config


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def change(name: str, model: Any) -> None:
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():  # what is zero or one would hide a decay
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
            for key, parameter in model.named_parameters():
                if key.endswith("e_score_correction_bias"):
                    parameter.add_(10)

    return SavedModels(MODELS, tmp_path_factory.mktemp("hf"), change)


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("roles"),
        CASES,
        lambda case: config_of(case, dataset, directories),
    )


def expected_of(
    case: Case, dataset: Path, directories: dict[str, Path], **options: Any
) -> Training:
    """Of plain PyTorch, with the groups that are named above."""

    def optimizer_of(masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
        exempt = [p for name, p in masters.items() if re.search(NOT_DECAYED[case.model], name)]
        if case.optimizer == "adamw":
            return adamw(list(masters.values()), section, exempt)
        make: Any = getattr(plain_optimizers, case.optimizer)
        more = {"matrices": BY_MUON[case.model]} if case.optimizer == "muon" else {}
        return make(masters, section, exempt=exempt, **more)

    return plain_training(
        dataset,
        directories[case.model],
        config_of(case, dataset, directories),
        chunks=divided(case.micro_batch_size),
        optimizer_of=optimizer_of,
        **options,
    )


@each_case(CASES)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    expected = expected_of(case, dataset, directories)
    result, place = trained.of(case)
    weights = read_full_masters(place / "tensors")
    assert_same_steps(result, expected, loss=LOSS, norm=NORM)
    written = AutoModelForCausalLM.from_pretrained(directories[case.model]).state_dict()
    untouched = 0
    for name in expected.weights:
        if re.match(UNTOUCHED.get(case.model, "nothing"), name):
            assert torch.equal(weights[name], written[name]), name
            untouched += 1
    assert_same_tensors(weights, expected.weights, limit=WEIGHTS, relative=WEIGHTS)
    assert untouched == {"gemma3": 34, "ernie4_5_moe": 2}.get(case.model, 0)
    tensors = open_tensors(place / "tensors")
    states = {
        key.partition("/")[2] for key in tensors if not key.startswith(("master/", "buffer/"))
    }
    assert not any(re.match(UNTOUCHED.get(case.model, "nothing"), name) for name in states)
    assert states


# --- bfloat16 ---

IN_16_BIT = [
    Case("ernie4_5_moe", "zero3", slow=False),
    Case("ernie4_5_moe", "zero1"),
    *(
        Case("ernie4_5_moe", engine, accumulation=accumulation)
        for engine in ("zero0", "zero2", "zero2_offload", "zero3_offload")
        for accumulation in (1, 2)
    ),
    Case("ernie4_5_moe", "zero3", degrees={"expert": 2}),
    Case("ernie4_5_moe", "zero1", degrees={"tensor": 2}),
    Case("ernie4_5_moe", "pipeline_zero1", accumulation=2, degrees={"pipeline": 2}),
]
BFLOAT16 = {"precision": {"dtype": "bfloat16"}}
LOSS_16, NORM_16, WEIGHTS_16 = 2e-3, 1e-2, 5e-3


@pytest.fixture(scope="module")
def trained_in_16_bit(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("roles16"),
        IN_16_BIT,
        lambda case: config_of(case, dataset, directories) | BFLOAT16,
    )


@each_case(IN_16_BIT)
def test_what_is_kept_in_float32_equals_plain_training(
    case: Case,
    dataset: Path,
    directories: dict[str, Path],
    trained_in_16_bit: TrainedCases[Case],
) -> None:
    """With plain transformers in bfloat16, which keeps the router in float32."""
    expected = expected_of(case, dataset, directories, dtype=torch.bfloat16, exact_masters=True)
    result, place = trained_in_16_bit.of(case)
    weights = read_full_masters(place / "tensors")
    assert result["losses"] == pytest.approx(expected.losses, abs=LOSS_16)
    assert result["norms"] == pytest.approx(expected.norms, rel=NORM_16)
    for name, tensor in expected.weights.items():
        if re.match(UNTOUCHED[case.model], name):
            assert torch.equal(weights[name], tensor), name
        apart = float((weights[name] - tensor).square().mean().sqrt())
        assert apart < WEIGHTS_16, name
