"""Muon and Lion at every topology, against torch's own in one process.

Muon is of whole matrices: what a shard, or a part that ZeRO left, would give on its own is far
beyond the tolerance (`test_a_part_on_its_own_would_show`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bigtrain.engine.checkpoint.io import read_full_masters
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.run_prediction import layout_of
from bigtrain.planner.stages import matrix_exchange, stages_of
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.parity import one_file_optimizer, plain_optimizers
from tests.parity.conftest import (
    ARCHITECTURES,
    VOCAB_SIZE,
    SavedModels,
    TrainedCases,
    each_case,
    grid,
    llama,
    run_config,
)
from tests.parity.plain import (
    Spread,
    divided,
    orders,
    plain_training,
    root_mean_square,
)
from tests.support.comparison import assert_same_steps, assert_same_weights

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

LOSS = 1e-5
NORM = 1e-4
WEIGHTS = 1e-5
MODELS: dict[str, dict[str, Any]] = {
    "llama": llama(),
    "qwen3_moe": ARCHITECTURES["qwen3_moe"],
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    # Experts that transformers has not marked as such.
    "llama4_text": {
        **{k: v for k, v in llama().items() if k != "tie_word_embeddings"},
        "model_type": "llama4_text",
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "head_dim": 8,
        "pad_token_id": None,
    },
    # Its output projection has two groups of inputs, and a matrix for each.
    "deepseek_v4": {
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "max_position_embeddings": 64,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"],
        "mlp_layer_types": ["moe", "moe"],
        "hc_mult": 2,
        "sliding_window": 8,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "qk_rope_head_dim": 4,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"type": "muon", "eps": 1e-6, "muon": {"ns_dtype": "float32"}},
    "muon bf16": {"type": "muon", "eps": 1e-6},
    "muon original": {
        "type": "muon",
        "eps": 1e-6,
        "muon": {
            "adjust_lr": "original",
            "lr": 2e-2,
            "weight_decay": 0.01,
            "nesterov": False,
            "ns_dtype": "float32",
        },
    },
    # Rounds of one matrix, and parts of heads: 4 heads x (query, key, value) x 8.
    "muon split": {
        "type": "muon",
        "eps": 1e-6,
        "muon": {
            "split": {"*.query_key_value.weight": {"parts": 3, "interleaved": 4}},
            "ns_dtype": "float32",
        },
    },
    "lion": {"type": "lion", "lr": 3e-4},
    "adafactor": {"type": "adafactor", "lr": 1e-2},
    "signum": {"type": "signum", "lr": 3e-4},
}


@dataclass(frozen=True)
class Case:
    world_size: int
    engine: str
    optimizer: str = "muon"
    model: str = "llama"
    accumulation: int = 2
    degrees: dict[str, int] = field(default_factory=dict)
    slow: bool = False

    @property
    def name(self) -> str:
        degrees = "-".join(f"{axis}{size}" for axis, size in self.degrees.items())
        return (
            f"{self.optimizer}-{self.model}-{self.engine}-of-{self.world_size}-{degrees or 'data'}"
            f"-accumulation{self.accumulation}"
        )

    @property
    def micro_batch_size(self) -> int:
        inner = 1
        for axis, size in self.degrees.items():
            inner *= 1 if axis == "expert" else size
        return 8 // (self.accumulation * (self.world_size // inner))


CASES = [
    Case(1, "zero0", slow=True),
    Case(2, "zero0", accumulation=1, slow=True),
    Case(2, "zero1", "muon original", slow=True),
    Case(2, "zero3"),
    Case(2, "zero3_offload", "muon split", "gpt_neox", slow=True),
    Case(2, "zero0", degrees={"tensor": 2}),
    Case(2, "pipeline_zero1", degrees={"pipeline": 2}, slow=True),
    *(
        Case(2, engine, model="deepseek_v4", slow=True)
        for engine in ("zero1", "zero3", "zero2_offload")
    ),
    Case(2, "zero2", "lion"),
    Case(2, "zero2", accumulation=4, slow=True),
    Case(2, "zero2", "signum", accumulation=1),
    Case(2, "zero2", "signum", accumulation=4, slow=True),
    Case(2, "zero3", "signum", degrees={"tensor": 2}, slow=True),
    Case(2, "zero1", degrees={"sequence": 2}, slow=True),
    Case(1, "zero0", "adafactor", slow=True),
    Case(2, "zero2", "adafactor", slow=True),
    Case(2, "zero3", "adafactor", "qwen3_moe", degrees={"expert": 2}),
    Case(2, "zero0", "adafactor", degrees={"tensor": 2}, slow=True),
    Case(2, "pipeline_zero1", "adafactor", degrees={"pipeline": 2}, slow=True),
    Case(4, "zero3", "muon original", degrees={"tensor": 2}, slow=True),
    Case(4, "zero2", model="qwen3_moe", degrees={"tensor": 2, "expert": 2}, slow=True),
    *(
        Case(size, f"zero{zero}", "muon", model, accumulation, degrees, slow=True)
        for zero in range(4)
        for size, model, accumulation, degrees in (
            (1, "llama", 4, {}),
            (2, "llama", 1, {}),
            (2, "gpt_neox", 4, {}),
            (2, "llama", 4, {"sequence": 2}),
            (2, "qwen3_moe", 1, {"tensor": 2}),
            (2, "qwen3_moe", 2, {"expert": 2}),
            (4, "llama", 4, {"tensor": 2}),
            (4, "llama", 1, {"sequence": 2, "tensor": 2}),
            (4, "qwen3_moe", 2, {"expert": 4}),
        )
    ),
    *(
        Case(2, engine, model="llama4_text", degrees=degrees, slow=True)
        for engine, degrees in (("zero1", {}), ("zero3", {}), ("zero1", {"tensor": 2}))
    ),
    *(
        Case(4, engine, "muon original", model, 4, {"pipeline": 2, **degrees}, slow=True)
        for engine in ("zero0", "pipeline_zero1")
        for model, degrees in (
            ("llama", {}),
            ("llama", {"tensor": 2}),
            ("qwen3_moe", {"expert": 2}),
        )
    ),
    *(
        Case(2, engine, optimizer, accumulation=4, degrees=degrees, slow=True)
        for optimizer in ("lion", "adafactor", "muon")
        for engine in ("zero2_offload", "zero3_offload", "zero1")
        for degrees in ({}, {"tensor": 2}, {"sequence": 2})
    ),
]
CASES += [
    case
    for case in (Case(size, e, "muon", "llama", a, d, slow=True) for size, e, a, d in grid())
    if case.name not in {known.name for known in CASES}
]


ONE_FILE = {"optimizer_module": one_file_optimizer.__name__}
BFLOAT16 = Case(2, "zero2", "muon bf16", accumulation=4, slow=True)


def config_of(case: Case, data: Path, directories: dict[str, Path]) -> dict[str, Any]:
    config: dict[str, Any] = run_config(
        data,
        {"path": str(directories[case.model])},
        micro_batch_size=case.micro_batch_size,
        parallel=case.degrees,
        optimizer={"lr": 3e-3, "clip_norm": 0.5} | OPTIMIZERS[case.optimizer],
    )
    return config


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return SavedModels(MODELS, tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def trained(
    dataset: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> TrainedCases[Case]:
    return TrainedCases(
        tmp_path_factory.mktemp("optimizers"),
        [*CASES, BFLOAT16],
        lambda case: config_of(case, dataset, directories),
        lambda case: ONE_FILE if case.optimizer == one_file_optimizer.NAME else {},
    )


def expected_of(case: Case, dataset: Path, directories: dict[str, Path], **options: Any) -> Any:
    config = config_of(case, dataset, directories)
    owner = one_file_optimizer if case.optimizer == one_file_optimizer.NAME else plain_optimizers
    make: Any = getattr(owner, case.optimizer.partition(" ")[0])
    if make is plain_optimizers.muon:
        heads = torch.arange(96).view(4, 3, 8)
        splits = {"attention.query_key_value.weight": [heads[:, n].flatten() for n in range(3)]}
        make = partial(plain_optimizers.muon, splits=splits if "split" in case.optimizer else None)
        if case.model == "deepseek_v4":
            groups = {"self_attn.o_a_proj.weight": [slice(0, 8), slice(8, 16)]}
            hidden = r".*layers\.\d+\.(.*_proj\.weight|mlp\.experts\.\w+)"
            make = partial(make, splits=groups, matrices=hidden)
    return plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size),
        optimizer_of=make,
        **options,
    )


@each_case(CASES)
def test_equals_plain_training(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    expected = expected_of(case, dataset, directories)
    result, place = trained.of(case)
    assert result["accumulation"] == case.accumulation
    assert_same_steps(result, expected, loss=LOSS, norm=NORM)
    bias = "e_score_correction_bias"
    assert_same_weights(place, expected.weights, limit=WEIGHTS, relative=WEIGHTS, buffers=bias)


COUNTED = [
    case
    for case in CASES
    if not case.slow and case.optimizer.startswith("muon") and case.model == "llama"
]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_counted_bytes_are_the_planners(
    case: Case, dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    """The mean over ranks. Where ZeRO 1 and 2 cut the flat model in two, the formula's equal parts
    are a guess: nothing of a matrix may be at its owner, or all of it."""
    config = RunConfig.model_validate(config_of(case, dataset, directories))
    layout = layout_of(resolve_run(config, case.world_size, case.engine, "cpu"))
    costs, _ = model_costs(config)
    stages = stages_of(costs, layout.pipeline_size, True)
    expected = [stage.num_alike * sum(matrix_exchange(stage, costs, layout)) for stage in stages]
    counted = trained.of(case)[0]["optimizer_sent_bytes"]
    mean = sum(expected) / layout.pipeline_size
    if layout.zero_stage in (1, 2) and layout.partition_size > 1:
        assert 0 <= counted <= 2 * mean
    else:
        assert counted == mean
    assert (counted > 0) == (case.world_size > layout.pipeline_size)


def test_a_part_on_its_own_would_show(dataset: Path, directories: dict[str, Path]) -> None:
    """Half of the rows of a matrix, orthogonalized without the others, is another update: far
    beyond what the comparison allows, in the losses as in the weights."""
    case = Case(2, "zero2")
    whole = expected_of(case, dataset, directories)
    config = config_of(case, dataset, directories)
    halves = {
        name.partition("layers.0.")[2]: [slice(0, len(tensor) // 2), slice(len(tensor) // 2, None)]
        for name, tensor in whole.weights.items()
        if "layers.0." in name and tensor.ndim == 2
    }
    parts = plain_training(
        dataset,
        directories[case.model],
        config,
        chunks=divided(case.micro_batch_size),
        optimizer_of=partial(plain_optimizers.muon, splits=halves),
    )
    name = "model.layers.0.self_attn.q_proj.weight"
    assert float((whole.weights[name] - parts.weights[name]).abs().max()) > 100 * WEIGHTS
    assert max(abs(a - b) for a, b in zip(whole.losses, parts.losses, strict=True)) > 100 * LOSS


@pytest.mark.slow
def test_bfloat16_is_as_far_as_torch_is_from_itself(
    dataset: Path, directories: dict[str, Path], trained: TrainedCases[Case]
) -> None:
    """torch's iteration in bfloat16 makes of a gradient's last bits the third digit of an update:
    torch's own runs that add up in other orders are as far apart as ours is from them."""
    case = BFLOAT16
    config = config_of(case, dataset, directories)
    runs = [
        plain_training(
            dataset,
            directories[case.model],
            config,
            chunks=chunks,
            optimizer_of=plain_optimizers.muon,
        )
        for chunks in orders()
    ]
    spread = Spread.of(runs)
    result, place = trained.of(case)
    weights = read_full_masters(place / "tensors")
    assert max(abs(a - b) for a, b in zip(result["losses"], spread.losses, strict=True)) <= (
        2 * spread.loss
    )
    assert root_mean_square(weights, spread.weights) <= 2 * spread.weight
    assert spread.loss < 100 * LOSS
