"""Rows as tables have them: models known by name, experts, words for engines and stages, gaps."""

from __future__ import annotations

import pytest

from bigtrain.errors import ConfigError
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.published.evaluation import error_table, predict, read_rows, summarize
from bigtrain.planner.published.known_models import known_figures
from bigtrain.planner.published.rows import run_of
from bigtrain.planner.published.words import engine_name
from bigtrain.planner.step_time import step_time
from bigtrain.planner.tables.hardware import find_device
from tests.support.worlds import ROOT
from tests.unit.planner.published.test_evaluation import ROW

OTHERS = ROOT / "benchmarks" / "planner_other_rows.csv"
NAMED = {
    **{name: "" for name in ROW},
    "source": "a table", "seq": "4096", "gpu": "H100", "num_gpus": "64", "precision": "bf16",
    "tokens_per_s_per_gpu": "1000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "billions", "experts"),
    [
        ("DeepSeek-V3", 671.0, 256),
        ("Kimi K2", 1026.4, 384),
        ("Qwen3-30B-A3B", 30.5, 128),
        ("GPT-OSS 20B", 20.9, 32),
        ("Mixtral-8x7B", 46.7, 8),
        ("DeepSeek-V2-Lite", 15.7, 64),
        ("LLAMA3.1-405B", 405.9, 1),
    ],
)
def test_a_name_is_a_shape(name: str, billions: float, experts: int) -> None:
    """Without any figure of the model; the number of parameters is the published one."""
    run = run_of({**NAMED, "model": name})
    assert run.model.num_parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert run.model.num_experts == experts
    assert known_figures(name)["source"]


def test_a_model_that_no_table_knows_has_the_experts_that_its_words_and_size_tell() -> None:
    shape = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336",
             "vocab": "32000"}  # fmt: skip
    known = run_of({**NAMED, "model": "Mixtral-8x7B"}).model
    words = run_of({**NAMED, **shape, "model": "our 8x7B llama"}).model
    sized = {**NAMED, **shape, "model": "a llama MoE", "params_b": "46.7", "ep": "8"}
    for model in (words, run_of(sized).model):
        assert model.num_parameters == known.num_parameters
        assert model.kinds == known.kinds
    top = run_of({**sized, "notes": "top-1 of 8 experts"}).model
    assert max(m.share for m in top.kinds[0].matmuls if m.num_groups > 1) == 1.0
    assert (
        run_of({**sized, "ep": "1", "model": "a llama", "params_b": "7.2"}).model.num_experts == 1
    )


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ("Megatron-Bridge, VP 8", "megatron_core"),
        ("Megatron-LM with FlashAttention", "megatron_core"),
        ("Megatron-LM", "megatron"),
        ("NeMo AutoModel", "automodel"),
        ("torchtitan, FSDP2 + compile", "fsdp_compiled"),
        ("TRL SFTTrainer, DeepSpeed ZeRO-3", "deepspeed"),
        ("", "deepspeed"),
    ],
)
def test_engines_by_the_words_of_a_page(words: str, engine: str) -> None:
    assert run_of({**NAMED, "model": "Llama-3.1-8B", "notes": words}).engine.name == engine


@pytest.mark.parametrize(
    ("zero", "notes", "stage"),
    [
        ("FULL_SHARD", "", 3),
        ("HYBRID_SHARD", "FSDP", 3),
        ("NO_SHARD", "FSDP", 0),
        ("ZeRO-2", "", 2),
        ("distributed optimizer", "Megatron-Core", 1),
        ("", "FSDP2", 3),
        ("", "DeepSpeed ZeRO-3", 3),
        ("", "Megatron-DeepSpeed", 0),
        ("n/a", "NeMo", 1),
    ],
)
def test_stages_by_their_names(zero: str, notes: str, stage: int) -> None:
    row = {**NAMED, "model": "Llama-3.1-8B", "zero": zero, "notes": notes}
    assert run_of(row).layout.zero_stage == stage


def test_fsdp_beside_a_pipeline_gathers_once() -> None:
    row = {**NAMED, "model": "Llama-3.1-70B", "notes": "FSDP2", "pp": "4", "micro_batch": "1"}
    assert run_of({**row, "global_batch": "128"}).layout.zero_stage == 1
    told = run_of({**row, "zero": "3", "global_batch": "128", "notes": "FSDP2 + compile"}).layout
    assert told.zero_stage == 1
    # As many micro-batches as the pipeline has stages, where none is told.
    layout = run_of({**row, "micro_batch": "", "global_batch": "128"}).layout
    assert (layout.micro_batch_size, layout.num_accumulation) == (2, 4)


@pytest.mark.parametrize(
    ("notes", "number"),
    [("1F1B", 1), ("Interleaved 1F1B", 2), ("interleaved 3", 3), ("VP 8", 8), ("VP n/a", 1),
     ("not interleaved", 1)],
)  # fmt: skip
def test_stages_of_interleaved_pipelines(notes: str, number: int) -> None:
    row = {**NAMED, "model": "Llama-3.1-70B", "notes": notes, "tp": "8", "pp": "4"}
    assert run_of(row).layout.num_virtual_stages == number


def test_what_later_releases_and_narrower_formats_do() -> None:
    row = {**NAMED, "model": "Llama-3.1-8B", "notes": "FSDP + compile", "source": "titan 2024-12"}
    old, new = run_of(row), run_of({**row, "source": "titan 2025-06"})
    assert (old.engine.logit_bytes_cut, new.engine.logit_bytes_cut) == (14, 4)
    gains = [
        run_of({**row, "gpu": "GB200", "precision": name}).gain for name in ("FP8", "NVFP4", "NF4")
    ]
    assert gains[1] == pytest.approx(1.7 * gains[0])
    assert gains[2] == 1
    packed = run_of({**row, "notes": "NeMo, SFT, packed"}).model.kinds[0].attention
    assert packed is not None
    assert packed.window == 256


def test_a_model_without_a_shape_has_the_size_that_its_flops_tell() -> None:
    row = {**NAMED, "model": "Nemotron_3_Nano", "tflops_per_gpu": "180", "notes": "NeMo"}
    model = run_of({**row, "tokens_per_s_per_gpu": "10000"}).model
    assert model.num_parameters == pytest.approx(3e9, rel=0.2)
    with pytest.raises(ValueError, match="layers is empty"):
        run_of({**row, "tflops_per_gpu": ""})


def test_gaps_are_filled_as_people_would() -> None:
    row = {**NAMED, "model": "Llama-3.1-8B", "notes": "FSDP FULL_SHARD", "recompute": "full"}
    layout = run_of(row).layout
    assert (layout.data_size, layout.num_accumulation) == (64, 1)
    # The largest power of two that fits, which with a batch has to divide it too.
    assert layout.micro_batch_size > 2
    assert run_of({**row, "global_batch": "128"}).layout.micro_batch_size == 2
    staged = run_of({**row, "tp": "2", "pp": "4", "micro_batch": "1"}).layout
    assert (staged.data_size, staged.num_accumulation) == (8, 16)
    assert staged.tensor_sequence


def test_what_could_not_have_fitted_was_recomputed_where_nothing_is_said() -> None:
    row = {**NAMED, "model": "Llama-3.1-8B", "notes": "FSDP", "micro_batch": "32"}
    assert run_of({**row, "recompute": ""}).layout.recompute == "full"
    assert run_of({**row, "recompute": "none"}).layout.recompute == "none"
    assert run_of({**row, "micro_batch": "1"}).layout.recompute == "none"


@pytest.mark.parametrize(
    ("changes", "replicas"),
    [
        ({"dp": "", "tp": "2", "pp": "4"}, 8),
        ({"dp": "8", "tp": "2", "pp": "2", "cp": "2"}, 8),
        ({"dp": "16", "tp": "2", "pp": "2", "cp": "2"}, 8),  # context-parallel ranks among them
        ({"dp": "8", "ep": "8"}, 64),  # expert-parallel ones not
        ({"dp": "8", "tp": "0", "pp": "0"}, 64),  # ranks of one copy of the states
    ],
)
def test_what_tables_call_data_parallel(changes: dict[str, str], replicas: int) -> None:
    assert run_of({**NAMED, "model": "Mixtral-8x7B", **changes}).layout.data_size == replicas


def test_adapters_and_number_formats() -> None:
    row = {**NAMED, "model": "Llama-3.1-8B", "num_gpus": "1", "micro_batch": "2"}
    tuned = run_of({**row, "notes": "LoRA rank 8"})
    assert tuned.model.is_frozen
    whole = run_of(row)
    assert not whole.model.is_frozen
    speed = [step_time(r.model, r.layout, r.device, r.engine).total for r in (tuned, whole)]
    assert speed[0] < 0.8 * speed[1]
    assert run_of({**row, "precision": "mxfp8"}).gain > 1
    single = run_of({**row, "gpu": "V100", "precision": "fp32"})
    assert single.model.element_bytes == single.layout.parameter_bytes == 4
    assert run_of({**row, "gpu": "V100-16GB", "precision": "fp8"}).gain == 1.0


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("H20", "H20-96GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("a100_40gb", "A100-40GB"),
        ("H100 80GB (700 W)", "H100-80GB"),
        ("DGX-GB300", "GB300-279GB"),
        ("p4d.24xlarge", "A100-40GB"),
        ("MI250", "MI250X-64GB"),
    ],
)
def test_devices_of_other_tables(name: str, device: str) -> None:
    assert find_device(name).name == device


def test_a_device_that_no_table_has_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError) as caught:
        find_device("MI100")
    assert "no such device" in str(caught.value)
    nearest = str(caught.value).split("nearest names: ")[1].split(";")[0].split(", ")
    assert len(nearest) == 3
    with pytest.raises(ConfigError, match="nearest names: H800-80GB, H200-141GB, H100-80GB; "):
        find_device("H300")
    for name in ("H1000", "NVIDIA H1000 80GB", "A1000-40GB", "H100X", "XH100-80GB"):
        with pytest.raises(ConfigError, match=r"no such device .* nearest names: "):
            find_device(name)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("planner_other_rows.csv", 0.15),
        ("planner_unfitted_rows.csv", 0.06),
        pytest.param("planner_unseen_rows.csv", 0.12, marks=pytest.mark.slow),
    ],
)
def test_other_published_rows_are_predicted_better_than_by_one_utilization(
    name: str, most: float
) -> None:
    """Mixtures of experts, LoRA, float8, B200, thousands of A100: none refused."""
    rows = read_rows(OTHERS.with_name(name))
    every = summarize(rows, [predict(row) for row in rows])
    assert error_table(every) in (ROOT / "docs" / "planner.md").read_text()
    errors = every[-1]
    assert errors.num_refused == 0
    assert errors.mean < most
    assert errors.mean < max(errors.baseline / 2, 0.06)


@pytest.mark.parametrize(
    ("source", "notes", "engine"),
    [
        ("NeMo performance summary", "torchtitan, compile", "fsdp_compiled"),
        ("torchtitan benchmarks", "Megatron-DeepSpeed on the same node", "megatron_deepspeed"),
        ("NeMo AutoModel", "FSDP2, TE", "automodel"),
        ("Megatron-Bridge", "Megatron FSDP", "megatron_core"),
        ("LLM Foundry", "ZeRO-3", "fsdp"),
        ("a table", "ZeRO-3", "deepspeed"),
    ],
)
def test_an_engine_in_the_notes_wins_over_a_word_in_the_source(
    source: str, notes: str, engine: str
) -> None:
    """Unless the note is how that engine divides states."""
    assert engine_name({**NAMED, "source": source, "notes": notes}) == engine


def test_offload_of_activations_and_a_loss_in_chunks_are_read() -> None:
    row = {**NAMED, "model": "Llama-3-8B", "zero": "3", "global_batch": "64", "micro_batch": "1",
           "recompute": "full"}  # fmt: skip
    plain = run_of(row).layout
    moved = run_of({**row, "notes": "activation offload, no optimizer offload"}).layout
    assert (moved.offload_activations, moved.offload_optimizer) == (True, False)
    both = run_of({**row, "notes": "cpu offload, offloaded activations"}).layout
    assert (both.offload_activations, both.offload_optimizer) == (True, True)
    assert (plain.loss_chunk_tokens, plain.loss_kernels) == (None, "operators")
    assert run_of({**row, "notes": "chunked loss"}).layout.loss_chunk_tokens == 4096 // 8
    four = run_of({**row, "notes": "chunked cross-entropy, 4 chunks"})
    assert four.layout.loss_chunk_tokens == 1024
    assert peak_memory(four.model, four.layout, four.engine).loss < (
        peak_memory(four.model, plain, four.engine).loss
    )
    fused = run_of({**row, "notes": "fused linear cross-entropy"})
    assert fused.layout.loss_kernels == "liger"
