"""Which parameters decay, and which are left alone, against torch.optim with groups named here.

Biases of experts, states of recurrent layers and a vision tower that text does not reach have
several dimensions, and plain PyTorch decays what it is told to and nothing without a gradient.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.engine.checkpoint.lazy import open_tensors
from tests.parity import plain_optimizers
from tests.parity.cases import LOSS, NORM, WEIGHTS, Case, PlainRuns
from tests.parity.conftest import COMPOSITE, SEED, VOCAB_SIZE, SavedModels, each_case, llama
from tests.parity.plain import adamw, divided
from tests.support.comparison import assert_same_steps, assert_same_tensors

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]


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


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "lion": {"type": "lion", "lr": 3e-4},
    "adafactor": {"type": "adafactor", "lr": 1e-2},
    "muon": {"type": "muon", "eps": 1e-6, "muon": {"ns_dtype": "float32"}},
}


def case(
    model: str,
    engine: str,
    optimizer: str = "adamw",
    accumulation: int = 1,
    slow: bool = True,
    dtype: str = "float32",
    **degrees: int,
) -> Case:
    sections = {"optimizer": {"weight_decay": 0.3, **OPTIMIZERS[optimizer]}}
    return Case(2, engine, model, accumulation, degrees, sections, dtype, slow)


CASES = [
    case("gemma3", "zero3", slow=False),
    *(case("gemma3", engine) for engine in ("zero0", "zero2_offload")),
    *(case("gpt_oss", engine) for engine in ("zero1", "zero3_offload")),
    *(case("mamba", engine) for engine in ("zero0", "zero2", "zero3")),
    *(case("qwen3_next", engine) for engine in ("zero1", "zero3")),
    case("ernie4_5_moe", "zero2"),
    case("qwen3_next", "zero1", "muon"),
    case("qwen3_next", "zero3", "muon"),
    case("gemma3", "zero1", "lion"),
    case("gemma3", "zero3", "adafactor"),
    case("gemma3", "zero0", "muon"),
    case("gpt_oss", "pipeline_zero1", accumulation=2, pipeline=2),
    case("gemma3", "pipeline_zero1", "muon", 2, pipeline=2),
    case("gpt_oss", "zero3", expert=2),
    case("gemma3", "zero1", tensor=2),
]
IN_16_BIT = [
    case("ernie4_5_moe", "zero3", slow=False, dtype="bfloat16"),
    case("ernie4_5_moe", "zero0", accumulation=2, dtype="bfloat16"),
    case("ernie4_5_moe", "zero1", dtype="bfloat16", tensor=2),
    case("ernie4_5_moe", "zero2_offload", accumulation=2, dtype="bfloat16"),
    case("ernie4_5_moe", "zero3", dtype="bfloat16", expert=2),
    case("ernie4_5_moe", "pipeline_zero1", accumulation=2, dtype="bfloat16", pipeline=2),
]
WEIGHTS_16 = 5e-3


def plain_optimizer(case: Case, masters: dict[str, torch.Tensor], section: dict[str, Any]) -> Any:
    """With the groups that are named above."""
    exempt = [p for name, p in masters.items() if re.search(NOT_DECAYED[case.model], name)]
    name = section.get("type", "adamw")
    if name == "adamw":
        return adamw(list(masters.values()), section, exempt)
    make: Any = getattr(plain_optimizers, name)
    more = {"matrices": BY_MUON[case.model]} if name == "muon" else {}
    return make(masters, section, exempt=exempt, **more)


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def change(name: str, model: Any) -> None:
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():  # what is zero or one would hide a decay
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
            for key, parameter in model.named_parameters():
                if key.endswith("e_score_correction_bias"):
                    parameter.add_(10)

    def plain_of(case: Case) -> dict[str, Any]:
        optimizer_of = partial(plain_optimizer, case)
        return {"chunks": divided(case.micro_batch_size()), "optimizer_of": optimizer_of}

    return PlainRuns(
        tmp_path_factory.mktemp("roles"),
        dataset,
        MODELS,
        [*CASES, *IN_16_BIT],
        directories=SavedModels(MODELS, tmp_path_factory.mktemp("hf"), change),
        from_files=True,
        plain_of=plain_of,
    )


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    expected, (result, place) = runs.plain(case), runs.trained(case)
    weights = read_full_masters(place / "tensors")
    assert_same_steps(result, expected, loss=LOSS["float32"], norm=NORM["float32"])
    written = AutoModelForCausalLM.from_pretrained(runs.directories[case.model]).state_dict()
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


@each_case(IN_16_BIT)
def test_what_is_kept_in_float32_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    """With plain transformers in bfloat16, which keeps the router in float32."""
    expected = runs.plain(case, dtype=torch.bfloat16, exact_masters=True)
    result, place = runs.trained(case)
    weights = read_full_masters(place / "tensors")
    assert_same_steps(result, expected, loss=LOSS["bfloat16"], norm=NORM["bfloat16"])
    for name, tensor in expected.weights.items():
        if re.match(UNTOUCHED[case.model], name):
            assert torch.equal(weights[name], tensor), name
        apart = float((weights[name] - tensor).square().mean().sqrt())
        assert apart < WEIGHTS_16, name
