"""Every rule of the legality table refuses what it says, and nothing else."""

from __future__ import annotations

import pytest

from bigtrain.legality import RULES, Facts, check_legality

ZERO3 = {"zero_stage": 3}

# One violating example for each rule of the table, and the value its problem must show.
VIOLATIONS: dict[str, tuple[dict[str, object], str]] = {
    "secondary partition with tensor parallelism": (
        {**ZERO3, "tensor_size": 2, "world_size": 4, "partition_size": 2},
        "x.json: zero_optimization.zero_hpz_partition_size = 2",
    ),
    "quantized gradients with tensor parallelism": (
        {**ZERO3, "tensor_size": 2, "quantized_gradients": True},
        "x.json: zero_optimization.zero_quantized_gradients = True",
    ),
    "samples that do not divide": (
        {"sequence_size": 3, "sequence_length": 16},
        "batch.sequence_length = 16",
    ),
    "ZeRO 2 and 3 with pipeline": (
        {"pipeline_size": 2, "zero_stage": 2},
        "x.json: zero_optimization.stage = 2",
    ),
    "sequence parallelism with pipeline": (
        {"pipeline_size": 2, "sequence_size": 2},
        "parallel.sequence = 2",
    ),
    "16-bit pipeline with ZeRO 0": (
        {"pipeline_size": 2, "dtype": "bfloat16"},
        "x.json: zero_optimization.stage = 0",
    ),
    "overlapped reduction with pipeline": (
        {"pipeline_size": 2, "zero_stage": 1, "overlap_comm": True},
        "x.json: zero_optimization.overlap_comm = True",
    ),
    "pipeline block with settings": (
        {"pipeline_size": 2, "pipeline_block": True, "pipeline_settings": ("partition", "stages")},
        "x.json: pipeline = 'partition, stages'",
    ),
    "pipeline block without pipeline": ({"pipeline_block": True}, "x.json: pipeline"),
    "optimizer offload with ZeRO 0": (
        {"offload_optimizer": "cpu"},
        "x.json: zero_optimization.offload_optimizer.device = 'cpu'",
    ),
    "parameter offload below ZeRO 3": (
        {"zero_stage": 2, "offload_param": "cpu"},
        "x.json: zero_optimization.offload_param.device = 'cpu'",
    ),
    "NVMe optimizer below ZeRO 3": (
        {"zero_stage": 1, "offload_optimizer": "nvme", "offload_optimizer_nvme_path": "/disk"},
        "offload_optimizer.device = 'nvme'",
    ),
    "NVMe optimizer without a path": (
        {**ZERO3, "offload_optimizer": "nvme"},
        "offload_optimizer.nvme_path",
    ),
    "NVMe parameters without a path": (
        {**ZERO3, "offload_param": "nvme"},
        "offload_param.nvme_path",
    ),
    "partial optimizer offload": (
        {**ZERO3, "offload_optimizer": "cpu", "offload_optimizer_ratio": 0.5},
        "offload_optimizer.ratio = 0.5",
    ),
    "SuperOffload below ZeRO 3": (
        {"zero_stage": 2, "offload_optimizer": "cpu", "super_offload": True, "torch_adam": False},
        "offload_optimizer.super_offload = True",
    ),
    "SuperOffload with torch's Adam": (
        {**ZERO3, "offload_optimizer": "cpu", "super_offload": True},
        "offload_optimizer.super_offload = True",
    ),
    "SuperOffload on CPU": (
        {
            **ZERO3,
            "offload_optimizer": "cpu",
            "super_offload": True,
            "torch_adam": False,
            "device": "cpu",
        },
        "offload_optimizer.super_offload = True",
    ),
    "GPUDirect storage on CPU": ({"use_gds": True, "device": "cpu"}, "aio.use_gds = True"),
    "gradients of another dtype with ZeRO 0": (
        {"gradient_dtype": "float32"},
        "precision.gradient_dtype = 'float32'",
    ),
    "gradients in a foreign 16-bit dtype": (
        {"zero_stage": 1, "gradient_dtype": "float16"},
        "precision.gradient_dtype = 'float16'",
    ),
    "fp16 on CPU": ({"dtype": "float16", "device": "cpu"}, "precision.dtype = 'float16'"),
    "quantized weights below ZeRO 3": (
        {"zero_stage": 2, "quantized_weights": True},
        "zero_quantized_weights = True",
    ),
    "quantized gradients below ZeRO 3": (
        {"zero_stage": 2, "quantized_gradients": True},
        "zero_quantized_gradients = True",
    ),
    "quantized weights on CPU": (
        {**ZERO3, "quantized_weights": True, "device": "cpu"},
        "zero_quantized_weights = True",
    ),
    "quantized gradients on CPU": (
        {**ZERO3, "quantized_gradients": True, "device": "cpu"},
        "zero_quantized_gradients = True",
    ),
    "secondary partition below ZeRO 3": (
        {"zero_stage": 2, "partition_size": 2, "world_size": 4},
        "zero_hpz_partition_size = 2",
    ),
    "secondary partition that does not divide": (
        {**ZERO3, "partition_size": 8, "world_size": 12},
        "zero_hpz_partition_size = 8",
    ),
    "predivided gradients with reduce-scatter": (
        {**ZERO3, "gradient_predivide_factor": 2.0},
        "gradient_predivide_factor = 2.0",
    ),
    "prescaled gradients with reduce-scatter": (
        {**ZERO3, "prescale_gradients": True},
        "prescale_gradients = True",
    ),
    "no gradient norm": (
        {"zero_stage": 1, "compute_grad_norm": False},
        "compute_grad_norm = False",
    ),
    "flex attention on CPU": (
        {"attention": "flex_attention", "device": "cpu"},
        "model.attention = 'flex_attention'",
    ),
    "flash attention with documents in parts": (
        {"attention": "flash_attention_2", "isolates": True, "sequence_size": 2},
        "model.attention = 'flash_attention_2'",
    ),
    "Liger's loss on CPU": ({"loss": "liger", "device": "cpu"}, "model.loss = 'liger'"),
    "Liger's loss with tensor parallelism": (
        {"loss": "liger", "tensor_size": 2},
        "model.loss = 'liger'",
    ),
    "Liger's kernels on CPU": ({"kernels": "liger", "device": "cpu"}, "model.kernels = 'liger'"),
    "Liger's kernels in parts of a model": (
        {"kernels": "liger", "zero_stage": 1, "pipeline_size": 2},
        "model.kernels = 'liger'",
    ),
    "offloaded activations on CPU": (
        {"activation_offload": True, "device": "cpu"},
        "model.activation_offload = True",
    ),
    "compiled layers whose forward exchanges": (
        {**ZERO3, "compiles": "on"},
        "model.compile = 'on'",
    ),
}

# Neighbours of the violations that must pass.
LEGAL: list[dict[str, object]] = [
    {"attention": "flash_attention_2", "isolates": True, "tensor_size": 2, "device": "cuda"},
    {"loss": "liger", "kernels": "liger", "activation_offload": True, "device": "cuda"},
    {"zero_stage": 2, "compiles": "on", "device": "cpu"},
    {"zero_stage": 1, "pipeline_size": 2, "compiles": "on"},
    {**ZERO3, "compiles": "auto", "device": "cuda"},
    *({"zero_stage": stage} for stage in range(4)),
    {"pipeline_size": 4, "dtype": "float32"},
    {"zero_stage": 1, "pipeline_size": 4},
    {"zero_stage": 1, "pipeline_size": 1, "overlap_comm": True},
    {"zero_stage": 1, "pipeline_size": 2, "pipeline_block": True, "dtype": "float16"},
    {"zero_stage": 2, "offload_optimizer": "cpu", "device": "cpu"},
    {**ZERO3, "offload_optimizer": "cpu", "offload_param": "cpu", "device": "cpu"},
    {**ZERO3, "offload_optimizer": "nvme", "offload_optimizer_nvme_path": "/disk"},
    {**ZERO3, "offload_param": "nvme", "offload_param_nvme_path": "/disk"},
    {"dtype": "float16"},
    {"dtype": "float16", "device": "cuda"},
    {"zero_stage": 1, "gradient_dtype": "bfloat16"},
    {"zero_stage": 1, "gradient_dtype": "float32"},
    {"gradient_dtype": "bfloat16"},
    {"dtype": "float32", "gradient_dtype": "float32", "device": "cpu"},
    {**ZERO3, "quantized_weights": True, "quantized_gradients": True, "device": "cuda"},
    {**ZERO3, "quantized_weights": True},
    {**ZERO3, "partition_size": 8, "world_size": 16},
    {**ZERO3, "partition_size": 8, "world_size": 2},
    {**ZERO3, "prescale_gradients": True, "reduce_scatter": False},
]


def test_every_rule_has_a_violation() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(VIOLATIONS)


@pytest.mark.parametrize("name", VIOLATIONS)
def test_violation_is_refused_by_its_rule(name: str) -> None:
    facts_given, shown = VIOLATIONS[name]
    facts = Facts(**facts_given, source="x.json")  # type: ignore[arg-type]
    rule = next(rule for rule in RULES if rule.name == name)
    assert rule.violated(facts)
    problem = rule.problem(facts)
    assert problem in check_legality(facts)
    assert shown in str(problem)
    assert problem.rule
    assert problem.remedy


@pytest.mark.parametrize("facts", LEGAL, ids=str)
def test_legal_neighbours_pass(facts: dict[str, object]) -> None:
    assert check_legality(Facts(**facts)) == []  # type: ignore[arg-type]


def test_nearest_partition_divides() -> None:
    (problem,) = check_legality(Facts(zero_stage=3, partition_size=8, world_size=12))
    assert problem.remedy.startswith("6 for 12 processes")


def test_gradient_dtype_remedy_names_the_dtype_of_the_run() -> None:
    (problem,) = check_legality(Facts(zero_stage=0, dtype="bfloat16", gradient_dtype="float32"))
    assert problem.remedy == "precision.gradient_dtype=bfloat16, or ds_configs/zero1.json"
