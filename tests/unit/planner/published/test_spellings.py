"""Rows as tables that nobody has seen yet may write them: each is a number, none is refused."""

from __future__ import annotations

import math

import pytest

from bigtrain.planner.published.evaluation import predict
from bigtrain.planner.published.rows import run_of
from bigtrain.planner.published.words import number, recompute
from tests.unit.planner.published.test_evaluation import ROW

EMPTY = {**{name: "" for name in ROW}, "source": "a table", "tokens_per_s_per_gpu": "1000"}

ROWS: dict[str, dict[str, str]] = {
    "Megatron-LM, distributed optimizer": {
        "model": "GPT 462B", "seq": "4k", "gpu": "NVIDIA H100 80GB HBM3", "num_gpus": "6,144",
        "tp": "8", "pp": "16", "global_batch": "6144", "recompute": "no",
        "zero": "distributed optimizer", "precision": "BF16", "notes": "Megatron-LM; VPP 2",
    },
    "MaxText": {
        "model": "Llama2-70B", "seq": "4096", "gpu": "8x H100", "num_gpus": "64", "dp": "64",
        "zero": "fsdp", "micro_batch": "4", "recompute": "minimal", "precision": "bf16",
        "notes": "MaxText (JAX)",
    },
    "Hugging Face, ZeRO-3 with offload": {
        "model": "meta-llama/Llama-2-7b-hf", "seq": "2048", "gpu": "A100-PCIE-40GB",
        "num_gpus": "4", "dp": "4", "zero": "Stage 3", "micro_batch": "8",
        "recompute": "activation checkpointing", "precision": "bf16 mixed (fp32 master)",
        "notes": "HF Trainer, DeepSpeed, CPU offload",
    },
    "a model of which only the size is known": {
        "model": "our 13B", "seq": "2048", "gpu": "A100 80GB SXM4", "num_gpus": "64",
        "zero": "ZeRO-1", "global_batch": "1024", "precision": "fp16", "notes": "DeepSpeed",
    },
    "a micro-batch that does not divide": {
        "model": "Mistral 7B", "seq": "4096", "gpu": "H100-SXM", "num_gpus": "8", "dp": "8",
        "zero": "zero_3", "micro_batch": "5", "global_batch": "96", "precision": "bf16-mixed",
    },
    "a batch in tokens": {
        "model": "Llama 2 13B", "seq": "4096", "gpu": "A100-SXM4-80GB", "num_gpus": "64",
        "zero": "3", "micro_batch": "2", "global_batch": "4M", "precision": "bf16",
        "notes": "FSDP",
    },
    "a hidden size that the heads do not divide": {
        "model": "a dense one", "layers": "46", "hidden": "4608", "heads": "40", "kv_heads": "20",
        "ffn": "36864", "vocab": "256k", "seq": "4096", "gpu": "H200", "num_gpus": "16",
        "zero": "HSDP", "micro_batch": "1", "precision": "bf16",
    },
    "degrees as words": {
        "model": "Llama-2-70b", "seq": "4,096", "gpu": "h100", "num_gpus": "64 GPUs", "dp": "n/a",
        "tp": "8 (intra-node)", "pp": "x2", "cp": "-", "ep": "no", "zero": "none",
        "micro_batch": "1.0", "global_batch": "128", "recompute": "every 2 layers",
        "precision": "16-mixed",
    },
    "no length and no number of devices": {
        "model": "Llama-2-7b", "gpu": "A100-80GB", "dp": "4", "tp": "2", "zero": "2",
        "precision": "bf16", "notes": "seq length 4096",
    },
    "GPT-NeoX": {
        "model": "GPT-NeoX-20B", "layers": "44", "hidden": "6144", "seq": "2048",
        "gpu": "A100-40GB", "num_gpus": "96", "tp": "2", "pp": "4", "zero": "1",
        "micro_batch": "4", "recompute": "checkpoint-activations", "precision": "fp16",
        "notes": "GPT-NeoX",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_it_is_a_number(name: str) -> None:
    prediction = predict({**EMPTY, **ROWS[name]})
    assert prediction.refused == ""
    assert prediction.tokens_per_second is not None
    assert prediction.peak_gib is not None
    # Between a 100th and all of what the device could do for a model of this size.
    run = run_of({**EMPTY, **ROWS[name]})
    active = sum(run.model.kinds[k].num_active_parameters for k in run.model.layers)
    spent = 6 * (active + run.model.vocabulary_size * run.model.hidden_size)
    share = spent * prediction.tokens_per_second / run.device.peak_flops
    assert math.isfinite(prediction.peak_gib)
    assert 0.01 < share < 1.6  # of 8-bit products twice as many are done


@pytest.mark.parametrize("text", ["1e999k", "-4", "0.3", "k", "8 or so"])
def test_a_text_that_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"num_gpus = {text} is not a count"):
        number({"num_gpus": text}, "num_gpus")


def test_what_the_words_mean() -> None:
    run = run_of({**EMPTY, **ROWS["Hugging Face, ZeRO-3 with offload"]})
    assert run.layout.recompute == "full"
    assert run.layout.parameter_bytes == 2
    assert run.layout.offload_optimizer
    assert run.device.name == "A100-40GB"
    words = run_of({**EMPTY, **ROWS["degrees as words"]})
    assert (words.layout.tensor_size, words.layout.pipeline_size) == (8, 2)
    assert (words.layout.data_size, words.layout.recompute_every) == (4, 2)
    assert words.engine.name == "megatron_core"
    tokens = run_of({**EMPTY, **ROWS["a batch in tokens"]})
    assert tokens.layout.global_batch_size == 1024
    uneven = run_of({**EMPTY, **ROWS["a micro-batch that does not divide"]})
    assert (uneven.layout.micro_batch_size, uneven.layout.num_accumulation) == (4, 3)
    size = run_of({**EMPTY, **ROWS["a model of which only the size is known"]})
    assert size.model.num_parameters / 1e9 == pytest.approx(13, rel=0.06)
    assert run_of({**EMPTY, **ROWS["no length and no number of devices"]}).layout.world_size == 8
    assert run_of({**EMPTY, **ROWS["MaxText"]}).engine.name == "fsdp_compiled"
    assert run_of({**EMPTY, **ROWS["GPT-NeoX"]}).engine.name == "megatron_deepspeed"


@pytest.mark.parametrize(
    ("text", "engine", "recomputed"),
    [
        ("", "fsdp", ("none", 1)),
        ("no recompute", "megatron_core", ("none", 1)),
        ("Full AC", "fsdp", ("full", 1)),
        ("block 10", "megatron_core", ("full", 1)),
        ("every 2 layers", "fsdp", ("full", 2)),
        ("1/4", "fsdp", ("full", 4)),
        ("2", "fsdp", ("full", 2)),
        ("selective", "megatron_core", ("attention", 1)),
        ("selective", "fsdp", ("operators", 1)),
        ("core_attn", "megatron_core", ("attention", 1)),
        ("moe_act, layernorm", "megatron_core", ("none", 1)),
    ],
)
def test_what_is_recomputed(text: str, engine: str, recomputed: tuple[str, int]) -> None:
    assert recompute({"recompute": text}, engine) == recomputed
