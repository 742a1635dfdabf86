"""Experts divided among ranks, against plain transformers and torch's AdamW in one process.

The reference has all experts and computes with transformers' own forward methods. The router's
choices are compared as well: a token sent elsewhere would show in the losses only a little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.settings.run_config import ModelSection
from tests.parity.conftest import ARCHITECTURES, SEED, STEPS, llama, run_config, train_cases
from tests.parity.plain import Spread, divided, orders, plain_training, root_mean_square
from tests.parity.routing import Choices
from tests.parity.test_matrix import SPREADS
from tests.parity.test_zero_stages import LOSS, NORM

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

WEIGHTS = 1e-5
COEFFICIENT = 0.5  # so that it shows
OPTIMIZER = {"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6}  # see test_pipeline.optimizer_of
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": llama(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2) | ROUTED,
    "qwen3_moe": ARCHITECTURES["qwen3_moe"] | ROUTED,
    # Of four layers only the third has experts: the first of two stages has none.
    "some": ARCHITECTURES["qwen3_moe"]
    | ROUTED
    | {"num_hidden_layers": 4, "mlp_only_layers": [0, 1, 3], "intermediate_size": 32},
    "unrouted": ARCHITECTURES["qwen3_moe"]
    | {"num_hidden_layers": 4, "mlp_only_layers": [0, 1], "intermediate_size": 32},
    # Biases in experts and router, by which all tokens are sent to two experts of four, or to one.
    "gpt_oss": llama(
        model_type="gpt_oss",
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        tie_word_embeddings=False,
    ),
}
# Widths that grouped products do not take, in 16 bit or at all.
MODELS["odd"] = ARCHITECTURES["qwen3_moe"] | {"hidden_size": 34, "moe_intermediate_size": 10}
MODELS["gpt_oss odd"] = MODELS["gpt_oss"] | {"intermediate_size": 20}
# Shared experts, dense layers first, and biases by which tokens choose.
MODELS["deepseek_v3"] = llama(
    model_type="deepseek_v3",
    num_key_value_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    moe_intermediate_size=16,
    n_routed_experts=8,
    n_group=2,
    topk_group=1,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
MODELS["glm4_moe"] = llama(
    model_type="glm4_moe",
    head_dim=8,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
# Layers of Mamba and of attention, experts in both.
MODELS["granitemoehybrid"] = llama(
    model_type="granitemoehybrid",
    num_hidden_layers=2,
    layer_types=["mamba", "attention"],
    intermediate_size=16,
    shared_intermediate_size=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_expand=2,
    mamba_n_groups=1,
    mamba_chunk_size=8,
)
MODELS["jamba"] = llama(
    model_type="jamba",
    num_hidden_layers=4,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    num_experts_per_tok=2,
    mamba_d_state=8,
    mamba_expand=2,
    mamba_dt_rank=4,
    use_mamba_kernels=False,
)
BIASES = torch.tensor([0.1, -0.1, 0.05, 0.0, -0.05, 0.2, 0.0, -0.2])
MODELS["gpt_oss one"] = MODELS["gpt_oss"] | {"num_experts_per_tok": 1}
ROUTER_BIAS = [-50.0, -50.0, 50.0, 0.0]


@dataclass(frozen=True)
class Case:
    """One point: so many ranks, of which `expert` divide the experts."""

    world_size: int
    expert: int
    engine: str
    model: str = "mixtral"
    accumulation: int = 2
    sequence: int = 1
    pipeline: int = 1
    tensor: int = 1
    checkpointing: str = "none"
    slow: bool = False

    @property
    def name(self) -> str:
        degrees = f"ep{self.expert}-of-{self.world_size}"
        inner = {"sp": self.sequence, "pp": self.pipeline, "tp": self.tensor}
        more = "".join(f"-{name}{size}" for name, size in inner.items() if size > 1)
        recompute = "" if self.checkpointing == "none" else "-recompute"
        return f"{degrees}{more}{recompute}-{self.engine}-{self.model}-{self.accumulation}"

    @property
    def micro_batch_size(self) -> int:
        replicas = self.world_size // (self.sequence * self.pipeline * self.tensor)
        return 8 // (self.accumulation * replicas)


CASES = [
    Case(2, 2, "zero0"),
    Case(2, 2, "zero1", "qwen3_moe", 1),
    Case(2, 2, "zero3", "qwen3_moe", 4),
    Case(1, 1, "zero0", "odd", 1),
    Case(2, 2, "zero1", "odd"),
    Case(2, 1, "zero0", "odd", 1, tensor=2),
    Case(2, 2, "zero0", "gpt_oss one"),
    Case(2, 2, "zero3", "gpt_oss odd", 1, checkpointing="full"),
    Case(2, 2, "zero1", "deepseek_v3", 1),
    Case(4, 2, "zero2", sequence=2),
    Case(4, 4, "zero3", "gpt_oss", 1),
    Case(4, 2, "pipeline_zero1", "some", pipeline=2),
    Case(4, 2, "zero3", tensor=2),
    Case(2, 2, "zero2", checkpointing="full", slow=True),
    Case(2, 2, "zero3", "deepseek_v3", slow=True),
    Case(4, 2, "pipeline_zero1", "deepseek_v3", pipeline=2, slow=True),
    Case(4, 2, "zero1", "deepseek_v3", tensor=2, slow=True),
    *(Case(2, 2, f"zero{z}", "glm4_moe", slow=True) for z in (1, 3)),
    *(Case(2, 2, f"zero{z}", "granitemoehybrid", slow=True) for z in (1, 3)),
    Case(2, 2, "zero1", "jamba", slow=True),
    Case(2, 2, "zero1", "gpt_oss", slow=True),
    Case(2, 2, "zero2", "gpt_oss odd", slow=True),
    Case(2, 2, "zero3", sequence=2, slow=True),
    Case(4, 2, "pipeline_zero1", pipeline=2, accumulation=4, slow=True),
    Case(4, 2, "zero0", "some", pipeline=2, checkpointing="full", slow=True),
    *(Case(4, 2, f"zero{z}", "qwen3_moe", tensor=2, slow=True) for z in range(4)),
    *(Case(4, e, f"zero{z}", slow=True) for e in (2, 4) for z in range(4)),
    *(Case(4, 4, f"zero{z}", sequence=2, slow=True) for z in range(4)),
    *(Case(2, 2, f"zero{z}", "qwen3_moe", sequence=2, slow=True) for z in range(3)),
    *(Case(2, 2, f"zero{z}", "gpt_oss one", 1, slow=True) for z in (1, 2, 3)),
    Case(4, 4, "zero3", "gpt_oss one", 2, checkpointing="full", slow=True),
]


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directories[case.model]), "gradient_checkpointing": case.checkpointing},
        micro_batch_size=case.micro_batch_size,
        parallel={
            "expert": case.expert,
            "sequence": case.sequence,
            "pipeline": case.pipeline,
            "tensor": case.tensor,
        },
        optimizer=OPTIMIZER,
    )
    return config


def train(
    dataset: Path, directories: dict[str, Path], directory: Path, *, slow: bool
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size in sorted({case.world_size for case in CASES if case.slow == slow}):
        place = directory / f"world{world_size}"
        place.mkdir()
        jobs = {
            case.name: {
                "config": config_of(case, dataset, directories),
                "deepspeed_config": case.engine,
                "save_at": STEPS,
                "save_to": str(directory / case.name),
                "watch_routing": case.checkpointing == "none",
            }
            for case in CASES
            if case.slow == slow and case.world_size == world_size
        }
        found |= train_cases(world_size, jobs, place)
    return {"results": found, "directory": directory}


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return train(dataset, directories, tmp_path_factory.mktemp("experts"), slow=False)


@pytest.fixture(scope="module")
def slow_trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    return train(dataset, directories, tmp_path_factory.mktemp("experts_slow"), slow=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, values in MODELS.items():
        section = ModelSection(config=values)
        found[name] = tmp_path_factory.mktemp("hf") / name
        model: Any = build_model(section, load_hf_config(section), seed=SEED)
        for layer in model.model.layers if "gpt_oss" in name else ():
            layer.mlp.router.bias.data = torch.tensor(ROUTER_BIAS)
        for key, bias in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                bias.copy_(BIASES[: bias.numel()])
        model.save_pretrained(found[name])
    return found


def compare(
    case: Case, dataset: Path, directories: dict[str, Path], trained: dict[str, Any]
) -> None:
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    choices: list[Choices] = []
    expected = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size),
        aux_coefficient=COEFFICIENT if "output_router_logits" in MODELS[case.model] else 0.0,
        watch=lambda model: choices.append(Choices(model)),
        experts="eager" if case.model == "odd" else "grouped_mm",
    )
    result = trained["results"][case.name]
    assert result["accumulation"] == case.accumulation
    assert result["losses"] == pytest.approx(expected.losses, abs=LOSS["float32"])
    assert result["norms"] == pytest.approx(expected.norms, rel=NORM["float32"])
    if case.checkpointing == "none":  # which chooses twice
        assert result["choices"] == dict(choices[0].counts)
    if case.model == "gpt_oss one":
        assert {key.rpartition(": ")[2] for key in choices[0].counts} == {"2"}
    weights = read_full_masters(trained["directory"] / case.name / "tensors")
    biases = {name for name in weights if name.endswith("e_score_correction_bias")}
    assert weights.keys() - biases == expected.weights.keys()
    for name, tensor in expected.weights.items():
        assert float((tensor - weights[name]).abs().max()) <= WEIGHTS, name
    for name in biases:
        assert torch.equal(weights[name], BIASES[: weights[name].numel()])
    assert bool(biases) == (case.model in ("deepseek_v3", "glm4_moe"))


@pytest.mark.parametrize("case", [c for c in CASES if not c.slow], ids=lambda case: case.name)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: dict[str, Any]
) -> None:
    compare(case, dataset, directories, trained)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.slow], ids=lambda case: case.name)
def test_more_equal_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], slow_trained: dict[str, Any]
) -> None:
    compare(case, dataset, directories, slow_trained)


# Engine, processes, and degrees beside 2 for experts. The first of two stages has no experts.
IN_16_BIT: list[tuple[str, int, dict[str, int]]] = [
    ("zero1", 2, {}),
    ("zero2", 2, {}),
    ("zero3", 2, {}),
    ("pipeline_zero1", 4, {"pipeline": 2}),
    ("zero1", 4, {"tensor": 2}),
    ("zero3", 4, {"tensor": 2}),
]


@pytest.fixture(scope="module")
def in_16_bit(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    place = tmp_path_factory.mktemp("experts_16_bit")
    found: dict[str, Any] = {}
    for world_size in sorted({size for _, size, _ in IN_16_BIT}):
        jobs = {
            str(number): {
                "config": run_config(
                    dataset,
                    {"path": str(directories["unrouted"])},
                    micro_batch_size=2,
                    parallel={"expert": 2, **degrees},
                    precision={"dtype": "bfloat16"},
                    optimizer=OPTIMIZER,
                ),
                "deepspeed_config": engine,
                "weights": {str(STEPS): str(place / f"{number}.pt")},
            }
            for number, (engine, size, degrees) in enumerate(IN_16_BIT)
            if size == world_size
        }
        world = place / str(world_size)
        world.mkdir()
        found |= train_cases(world_size, jobs, world)
    return [
        found[str(n)] | {"weights": torch.load(place / f"{n}.pt")} for n in range(len(IN_16_BIT))
    ]


@pytest.fixture(scope="module")
def spread(dataset: Path, directories: dict[str, Path]) -> Spread:
    """Of plain runs in bfloat16 that divide the samples otherwise."""
    config = run_config(dataset, {}, micro_batch_size=8, optimizer=OPTIMIZER)
    runs = [
        plain_training(
            dataset, directories["unrouted"], config, chunks=chunks, dtype=torch.bfloat16
        )
        for chunks in orders()
    ]
    return Spread.of(runs)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(IN_16_BIT)))
def test_16_bit_is_among_plain_runs(
    number: int, spread: Spread, in_16_bit: list[dict[str, Any]]
) -> None:
    """Norms above all: each of DeepSpeed's optimizers adds those of experts up in its own way."""
    found = in_16_bit[number]
    losses = [abs(a - b) for a, b in zip(found["losses"], spread.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(found["norms"], spread.norms, strict=True)]
    assert max(losses) <= SPREADS * spread.loss
    assert max(norms) <= SPREADS * spread.norm < 0.1
    assert root_mean_square(found["weights"], spread.weights) <= SPREADS * spread.weight


# Engine, and what a run asks for besides.
BESIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "offload": ("zero2_offload", {}),
    "offload of parameters": ("zero3_offload", {}),
    "documents, chunked loss": (
        "zero3",
        {
            "model": {"loss": "chunked", "loss_chunk_tokens": 5},
            "data": {"document_boundaries": "isolate"},
        },
    ),
    "frozen experts": ("zero1", {"model": {"frozen": ("model.layers.2.mlp.experts.*",)}}),
    "frozen experts, ZeRO 3": ("zero3", {"model": {"frozen": ("model.layers.*.mlp.experts.*",)}}),
}
FROZEN = {
    "frozen experts": r"model\.layers\.2\.mlp\.experts",
    "frozen experts, ZeRO 3": r"model\.layers\.\d\.mlp\.experts",
}


def besides_config(name: str, data: Path, directory: Path) -> dict[str, Any]:
    _, sections = BESIDES[name]
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directory), **sections.get("model", {})},
        micro_batch_size=2,
        parallel={"expert": 2},
        optimizer=OPTIMIZER,
    )
    if "data" in sections:
        config["data"] = {"path": str(data), **sections["data"]}
    return config


@pytest.fixture(scope="module")
def besides(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("experts_besides")
    jobs = {
        name: {
            "config": besides_config(name, dataset, directories["unrouted"]),
            "deepspeed_config": engine,
            "weights": {str(STEPS): str(place / f"{name}.pt")},
        }
        for name, (engine, _) in BESIDES.items()
    }
    found = train_cases(2, jobs, place)
    return {name: found[name] | {"weights": torch.load(place / f"{name}.pt")} for name in BESIDES}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDES)
def test_equals_plain_training_besides(
    name: str, dataset: Path, directories: dict[str, Path], besides: dict[str, Any]
) -> None:
    directory = directories["unrouted"]
    config = besides_config(name, dataset, directory)
    expected = plain_training(dataset, directory, config, frozen=FROZEN.get(name, "nothing"))
    found = besides[name]
    assert found["losses"] == pytest.approx(expected.losses, abs=LOSS["float32"])
    assert found["norms"] == pytest.approx(expected.norms, rel=NORM["float32"])
    for key, tensor in expected.weights.items():
        assert float((found["weights"][key] - tensor).abs().max()) <= WEIGHTS, key
