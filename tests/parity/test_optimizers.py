"""Muon and Lion at every topology, against torch's own in one process.

Muon is of whole matrices: what a shard, or a part that ZeRO left, would give on its own is far
beyond the tolerance (`test_a_part_on_its_own_would_show`).
"""

from __future__ import annotations

from collections.abc import Callable
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
from tests.parity.cases import LOSS, WEIGHTS, Case, PlainRuns, assert_among
from tests.parity.conftest import ARCHITECTURES, VOCAB_SIZE, each_case, llama
from tests.parity.plain import Spread, divided, orders, root_mean_square

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(1200)]

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
    "muon states": {
        "type": "muon",
        "eps": 1e-6,
        "muon": {"ns_dtype": "float32"},
        "state_dtype": "bfloat16",
    },
    "adamw states": {"type": "adamw", "eps": 1e-6, "state_dtype": "bfloat16"},
    "lion states": {"type": "lion", "lr": 3e-4, "state_dtype": "bfloat16"},
    # As with eps above: or an element whose gradient is all rounding error moves as any other, by
    # its sign.
    "adafactor 16": {"type": "adafactor", "lr": 1e-2, "adafactor": {"eps1": 1e-4}},
    "lion": {"type": "lion", "lr": 3e-4},
    "adafactor": {"type": "adafactor", "lr": 1e-2},
    "signum": {"type": "signum", "lr": 3e-4},
}


def case(
    optimizer: str,
    world_size: int,
    engine: str,
    model: str = "llama",
    accumulation: int = 2,
    slow: bool = True,
    dtype: str = "float32",
    **degrees: int,
) -> Case:
    sections = {"optimizer": OPTIMIZERS[optimizer]}
    return Case(world_size, engine, model, accumulation, degrees, sections, dtype, slow)


CASES = [
    case("muon", 2, "zero3", slow=False),
    case("muon", 2, "zero0", tensor=2),
    case("lion", 2, "zero2", slow=False),
    case("signum", 2, "zero2", accumulation=1),
    case("adafactor", 2, "zero3", "qwen3_moe", slow=False, expert=2),
    case("muon original", 2, "zero1"),
    case("muon split", 2, "zero3_offload", "gpt_neox"),
    case("muon split", 2, "zero2", "gpt_neox", 4),
    case("muon", 2, "pipeline_zero1", pipeline=2),
    *(case("muon", 2, engine, "deepseek_v4") for engine in ("zero1", "zero3")),
    case("muon", 2, "zero1", sequence=2),
    case("muon", 2, "zero0", "qwen3_moe", 1, tensor=2),
    *(case("muon", 2, engine, "qwen3_moe", expert=2) for engine in ("zero1", "zero3")),
    case("muon", 4, "zero2", "qwen3_moe", tensor=2, expert=2),
    case("muon", 4, "zero2", "qwen3_moe", expert=4),
    case("muon original", 4, "zero3", tensor=2),
    case("muon", 4, "zero3", accumulation=1, sequence=2, tensor=2),
    case("muon", 2, "zero3", "llama4_text"),
    case("muon", 2, "zero1", "llama4_text", tensor=2),
    case("muon original", 4, "zero0", "qwen3_moe", 4, pipeline=2, expert=2),
    case("muon original", 4, "pipeline_zero1", accumulation=4, pipeline=2, tensor=2),
    case("muon", 2, "zero2_offload", accumulation=4, tensor=2),
    case("signum", 2, "zero3", tensor=2),
    case("adafactor", 2, "zero2"),
    case("adafactor", 2, "zero0", tensor=2),
    case("adafactor", 2, "pipeline_zero1", pipeline=2),
    case("adafactor", 2, "zero3_offload", accumulation=4, sequence=2),
    case("lion", 2, "zero3_offload", accumulation=4, tensor=2),
    case("lion", 2, "zero1", accumulation=4, sequence=2),
]
BFLOAT16 = case("muon bf16", 2, "zero2", accumulation=4)
# In bfloat16; and states in it, where all else is in float32.
IN_16_BIT = [
    *(case(name, 2, "zero1", dtype="bfloat16") for name in ("muon bf16", "lion")),
    case("muon bf16", 2, "zero1", dtype="bfloat16", tensor=2),
    case("lion", 2, "pipeline_zero1", dtype="bfloat16", pipeline=2),
    case("adafactor 16", 2, "zero2", dtype="bfloat16"),
    case("adafactor 16", 2, "zero3", dtype="bfloat16"),
    case("adamw states", 2, "zero1"),
    case("adamw states", 2, "pipeline_zero1", pipeline=2),
    case("muon states", 2, "zero3"),
    case("muon states", 2, "zero1", tensor=2),
    case("lion states", 2, "zero2"),
]


@pytest.fixture(scope="module")
def runs(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    def plain_of(case: Case) -> dict[str, Any]:
        return {"chunks": divided(case.micro_batch_size()), "optimizer_of": plain_optimizer(case)}

    def job_of(case: Case) -> dict[str, Any]:
        is_own = case.sections["optimizer"]["type"] == one_file_optimizer.NAME
        return {"optimizer_module": one_file_optimizer.__name__} if is_own else {}

    return PlainRuns(
        tmp_path_factory.mktemp("optimizers"),
        dataset,
        MODELS,
        [*CASES, BFLOAT16, *IN_16_BIT],
        from_files=True,
        plain_of=plain_of,
        job_of=job_of,
        relative=WEIGHTS,
    )


def plain_optimizer(case: Case) -> Any:
    section = case.sections["optimizer"]
    name = section["type"]
    if "state_dtype" in section:
        return getattr(plain_optimizers, f"kept_{name}")
    owner = one_file_optimizer if name == one_file_optimizer.NAME else plain_optimizers
    make: Any = getattr(owner, name)
    if name == "muon" and case.model == "gpt_neox":
        heads = torch.arange(96).view(4, 3, 8)
        splits = {"attention.query_key_value.weight": [heads[:, n].flatten() for n in range(3)]}
        return partial(make, splits=splits)
    if name == "muon" and case.model == "deepseek_v4":
        groups = {"self_attn.o_a_proj.weight": [slice(0, 8), slice(8, 16)]}
        hidden = r".*layers\.\d+\.(.*_proj\.weight|mlp\.experts\.\w+)"
        return partial(make, splits=groups, matrices=hidden)
    return make


@each_case(CASES)
def test_equals_plain_training(case: Case, runs: PlainRuns) -> None:
    runs.check(case)


COUNTED = CASES[:2]


@pytest.mark.parametrize("case", COUNTED, ids=lambda case: case.name)
def test_counted_bytes_are_the_planners(case: Case, runs: PlainRuns) -> None:
    """The mean over ranks. Where ZeRO 1 and 2 cut the flat model in two, the formula's equal parts
    are a guess: nothing of a matrix may be at its owner, or all of it."""
    config = RunConfig.model_validate(runs.config_of(case))
    layout = layout_of(resolve_run(config, case.world_size, case.engine, "cpu"))
    costs, _ = model_costs(config)
    stages = stages_of(costs, layout.pipeline_size, True)
    expected = [stage.num_alike * sum(matrix_exchange(stage, costs, layout)) for stage in stages]
    counted = runs.trained(case)[0]["optimizer_sent_bytes"]
    assert counted == sum(expected) / layout.pipeline_size
    assert (counted > 0) == (case.world_size > layout.pipeline_size)


def test_a_part_on_its_own_would_show(runs: PlainRuns) -> None:
    """Half of the rows of a matrix, orthogonalized without the others, is another update: far
    beyond what the comparison allows, in the losses as in the weights."""
    whole = runs.plain(CASES[0])
    halves = {
        name.partition("layers.0.")[2]: [slice(0, len(tensor) // 2), slice(len(tensor) // 2, None)]
        for name, tensor in whole.weights.items()
        if "layers.0." in name and tensor.ndim == 2
    }
    make = partial(plain_optimizers.muon, splits=halves)
    parts = runs.plain(CASES[0], optimizer_of=make)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert float((whole.weights[name] - parts.weights[name]).abs().max()) > 100 * WEIGHTS
    distances = [abs(a - b) for a, b in zip(whole.losses, parts.losses, strict=True)]
    assert max(distances) > 100 * LOSS["float32"]


@pytest.mark.slow
def test_bfloat16_is_as_far_as_torch_is_from_itself(runs: PlainRuns) -> None:
    """torch's iteration in bfloat16 makes of a gradient's last bits the third digit of an update:
    torch's own runs that add up in other orders are as far apart as ours is from them."""
    spread = Spread.of([runs.plain(BFLOAT16, chunks=chunks) for chunks in orders()])
    result, place = runs.trained(BFLOAT16)
    weights = read_full_masters(place / "tensors")
    assert max(abs(a - b) for a, b in zip(result["losses"], spread.losses, strict=True)) <= (
        2 * spread.loss
    )
    assert root_mean_square(weights, spread.weights) <= 2 * spread.weight
    assert spread.loss < 100 * LOSS["float32"]


@pytest.fixture(scope="module")
def spread_of(runs: PlainRuns) -> Callable[[Case], Spread]:
    """Of plain runs in other orders, with halves as tensor-parallel processes round in 16 bit."""
    spreads: dict[Any, Spread] = {}

    def of(case: Case) -> Spread:
        is_kept = "state_dtype" in case.sections["optimizer"]
        halves = not is_kept and "tensor" in case.degrees
        key = repr(case.sections), case.dtype, halves
        if key not in spreads:
            options = {"dtype": getattr(torch, case.dtype), "halves": halves}
            # Lion's and Adafactor's runs are so near to each other that it would show.
            options["exact_masters"] = True
            spreads[key] = Spread.of(
                [runs.plain(case, chunks=chunks, **options) for chunks in orders()]
            )
        return spreads[key]

    return of


@each_case(IN_16_BIT)
def test_16_bit_is_among_plain_runs(
    case: Case, runs: PlainRuns, spread_of: Callable[[Case], Spread]
) -> None:
    """A moment that is rounded by chance parts runs as well."""
    result, place = runs.trained(case)
    assert_among(result, read_full_masters(place / "tensors"), spread_of(case))
