"""Bytes of live tensors that the planner predicts, against what running processes allocate.

    python benchmarks/planner_memory.py [--world-size 2] [--only llama]
    python benchmarks/planner_memory.py --world-size 4 --lengths 16384,65536,262144
    python benchmarks/planner_memory.py --world-size 4 --lengths 16384,32768,65536 --model qwen3_5

Small models of eight architectures in real processes on CPUs, ZeRO 0 to 3, every kind of
parallelism, recomputation, chunked loss, offload (to the memory where the rest is too), 16 and 32
bit: for each the fullest rank's peak in a step, by torch's profile of every allocation
(`benchmarks/support/memory_worker.py`). With `--lengths`: one sample of each of these lengths,
divided among the ranks in every kind of sequence parallelism (hours for 262144 on two cores), or
computed by one rank, and the seconds of a step. The seconds of a rank's processor hardly depend on
other work of the machine, but waiting for other ranks counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bigtrain.models.tracing.meta_trace import trace_model
from bigtrain.planner.memory import peak_memory
from bigtrain.planner.run_prediction import auto_loss_chunk, fast_path_elsewhere, layout_of
from bigtrain.planner.tables.engines import engine_named
from bigtrain.settings.deepspeed.engine_config import find_deepspeed_config, read_deepspeed_config
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.local_world import run_local_world

MIB = 2**20
COMMON = {"vocab_size": 2048, "num_hidden_layers": 4, "max_position_embeddings": 256}
GATED = {**COMMON, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4,
         "num_key_value_heads": 2}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **GATED},
    "qwen3": {"model_type": "qwen3", **GATED, "head_dim": 32},
    "gpt2": {"model_type": "gpt2", "vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4,
             "n_positions": 256, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {"model_type": "gpt_neox", **COMMON, "hidden_size": 128, "intermediate_size": 512,
                 "num_attention_heads": 4},
    "olmo2": {"model_type": "olmo2", **GATED},
    "phi3": {"model_type": "phi3", **GATED, "pad_token_id": 0},
    "qwen3_moe": {"model_type": "qwen3_moe", **GATED, "head_dim": 32, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "mistral": {"model_type": "mistral", **GATED, "sliding_window": None},
}  # fmt: skip
PAIRS = {"objective": {"type": "preference", "loss": "sigmoid"}}
CHUNKS = {"loss": "chunked", "loss_chunk_tokens": 64}
TILES = {"tiled_mlp": 8, **CHUNKS}
COMPILED = {"compile": "on", "loss": "auto", "loss_chunk_tokens": 128}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero0": ("zero0", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "zero1 recompute": ("zero1", {"model": {"gradient_checkpointing": "full"}}),
    "zero3 recompute": ("zero3", {"model": {"gradient_checkpointing": "full"}}),
    "zero1 chunked": ("zero1", {"model": CHUNKS}),
    "zero1 pairs": ("zero1", PAIRS),
    "zero3 pairs chunked": ("zero3", {**PAIRS, "model": CHUNKS}),
    "zero1 tiles": ("zero1", {"model": TILES}),
    "zero3 tiles": ("zero3", {"model": TILES}),
    "zero3 recompute tiles": ("zero3", {"model": {**TILES, "gradient_checkpointing": "full"}}),
    "zero1 bf16 tiles": ("zero1", {"model": TILES, "precision": {"dtype": "bfloat16"}}),
    "zero1 tp2 tiles": ("zero1", {"model": TILES, "parallel": {"tensor": 2}}),
    "zero1 ep2 tiles": ("zero1", {"model": TILES, "parallel": {"expert": 2}}),
    "zero1 bf16": ("zero1", {"precision": {"dtype": "bfloat16"}}),
    "zero0 bf16": ("zero0", {"precision": {"dtype": "bfloat16"}}),
    "zero2 bf16": ("zero2", {"precision": {"dtype": "bfloat16"}}),
    "zero3 bf16": ("zero3", {"precision": {"dtype": "bfloat16"}}),
    "zero1 compiled": ("zero1", {"model": COMPILED}),
    "zero1 bf16 compiled": ("zero1", {"model": COMPILED, "precision": {"dtype": "bfloat16"}}),
    "zero1 bf16 compiled, one chunk": (
        "zero1",
        {
            "model": {**COMPILED, "loss_chunk_tokens": 100_000},
            "precision": {"dtype": "bfloat16"},
        },
    ),
    "zero1 tp2": ("zero1", {"parallel": {"tensor": 2}}),
    "zero1 pp2": ("zero1", {"parallel": {"pipeline": 2}}),
    "zero1 sp2": ("zero1", {"parallel": {"sequence": 2}}),
    "zero1 offload": ("zero1_offload", {}),
    "zero2 offload": ("zero2_offload", {}),
    "zero3 offload": ("zero3_offload", {}),
    "zero3 offload optimizer": ("zero3_offload_optimizer", {}),
    "zero0 frozen": ("zero0", {"model": {"frozen": ["*embed*", "*layers.[01].*"]}}),
    "zero1 frozen": ("zero1", {"model": {"frozen": ["*embed*", "*layers.[01].*"]}}),
    "zero2 frozen": ("zero2", {"model": {"frozen": ["*self_attn*", "*lm_head*"]}}),
    "zero3 frozen": ("zero3", {"model": {"frozen": ["*self_attn*", "*lm_head*"]}}),
    "zero1 bf16 frozen": (
        "zero1",
        {"model": {"frozen": ["*mlp*"], **CHUNKS}, "precision": {"dtype": "bfloat16"}},
    ),
    "zero1 frozen recompute": (
        "zero1",
        {"model": {"frozen": ["*embed*", "*layers.[01].*"], "gradient_checkpointing": "full"}},
    ),
    "zero1 ep2": ("zero1", {"parallel": {"expert": 2}}),
    "zero2 ep2": ("zero2", {"parallel": {"expert": 2}}),
    "zero3 ep2": ("zero3", {"parallel": {"expert": 2}}),
    "zero1 ep2 bf16": ("zero1", {"parallel": {"expert": 2}, "precision": {"dtype": "bfloat16"}}),
}
# Settings measured for all models, and for some.
USUAL = ("zero0", "zero1", "zero2", "zero3", "zero1 recompute", "zero1 bf16")
EXPERTS = tuple(title for title in LAYOUTS if " ep2" in title)
CUT = ("zero1 chunked", "zero1 tiles", "zero1 tp2 tiles", "zero1 tp2", "zero1 pp2", "zero1 sp2")
MORE: dict[str, tuple[str, ...]] = {
    "llama": tuple(title for title in LAYOUTS if title not in EXPERTS),
    "qwen3": tuple(title for title in LAYOUTS if title not in EXPERTS),
    "gpt_neox": (*USUAL, "zero1 chunked", "zero1 tp2", "zero1 pp2", "zero2 offload"),
    "olmo2": (*USUAL, *CUT, "zero3 offload"),
    "phi3": (*USUAL, *CUT),
    "qwen3_moe": (*USUAL, *CUT, *EXPERTS, "zero2 offload", "zero3 offload"),
    "mistral": (*USUAL, *CUT, "zero3 offload"),
}

# Models whose attention at 262,144 tokens two cores compute in minutes.
LONG: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 2048, "hidden_size": 64,
              "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 16},
}  # fmt: skip
LONG["qwen3_5"] = LONG["llama"] | {
    "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
LONG["bamba"] = LONG["llama"] | {
    "model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_d_state": 16, "mamba_chunk_size": 64,
}  # fmt: skip
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Makes glibc return each large tensor to the system. Otherwise the profile's records, which stay,
end up between freed tensors, and the processes take gigabytes for megabytes of live tensors."""
KINDS: dict[str, dict[str, int]] = {
    "ulysses 4": {"ulysses": 4},
    "ring 4": {"ring": 4},
    "ulysses 2, ring 2": {"ulysses": 2, "ring": 2},
}
ONE_RANK = {"one rank": {"ulysses": 1}}


def long_cases(
    directory: Path, args: argparse.Namespace, kinds: Mapping[str, Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Return a case of each length and kind that the heads allow, the models written below
    `directory`."""
    specs: list[dict[str, Any]] = []
    engine = _with_bucket(directory, "zero3", args.bucket)
    only, lengths, num_heads = args.only, args.lengths, args.heads
    for length in lengths:
        where = directory / f"long{length}"
        heads: dict[str, Any] = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
        config = AutoConfig.for_model(**LONG[args.model], **heads, max_position_embeddings=length)
        AutoModelForCausalLM.from_config(config).save_pretrained(where)
        for name, kind in kinds.items():
            title = f"{length} {name}"
            if only in title and num_heads % kind.get("ulysses", 1) == 0:
                model = {"path": str(where), "attention": "sdpa", "loss": "chunked",
                         "loss_chunk_tokens": 128, "gradient_checkpointing": "full",
                         "tiled_mlp": 16}  # fmt: skip
                run = {
                    "model": model,
                    "data": {"path": "unused"},
                    "batch": {"sequence_length": length, "global_batch_size": 1,
                              "micro_batch_size": 1},
                    "train": {"steps": 3},
                    "optimizer": {"lr": 1e-3},
                    "precision": {"dtype": "float32"},
                    "parallel": {"sequence": kind},
                    "output": {"directory": "unused"},
                }  # fmt: skip
                specs.append({"title": title, "config": run, "engine": engine, "warm_up": 1,
                              "output": str(directory / f"{len(specs)}")})  # fmt: skip
    return specs


def cases(directory: Path, only: str, bucket: int) -> list[dict[str, Any]]:
    """Return every case, with its model written below `directory`."""
    specs = []
    for name, values in MODELS.items():
        where = directory / name
        config = AutoConfig.for_model(**values)
        AutoModelForCausalLM.from_config(config).save_pretrained(where)
        for title in MORE.get(name, USUAL):
            engine, changes = LAYOUTS[title]
            if only in f"{name} {title}":
                run = {
                    "model": {"path": str(where), "attention": "sdpa", "loss": "plain"},
                    "data": {"path": "unused"},
                    "batch": {"sequence_length": 256, "global_batch_size": 16,
                              "micro_batch_size": 2},
                    "train": {"steps": 3},
                    "optimizer": {"lr": 1e-3},
                    "precision": {"dtype": "float32"},
                    "output": {"directory": "unused"},
                }  # fmt: skip
                for section, values_of in changes.items():
                    run[section] = {**run.get(section, {}), **values_of}
                engine = _with_bucket(directory, engine, bucket)
                specs.append({"title": f"{name} {title}", "config": run, "engine": engine,
                              "output": str(directory / f"{len(specs)}")})  # fmt: skip
    return specs


def _with_bucket(directory: Path, name: str, bucket: int) -> str:
    """Return a shipped DeepSpeed JSON with other buckets: its own are larger than these models."""
    shipped = {"zero1_offload": "zero2_offload", "zero3_offload_optimizer": "zero3_offload"}
    tree = read_deepspeed_config(find_deepspeed_config(shipped.get(name, name)))
    zero = tree["zero_optimization"]
    if name == "zero1_offload":
        zero["stage"] = 1
    if name == "zero3_offload_optimizer":
        del zero["offload_param"]
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if key in zero:
            zero[key] = bucket
    path = directory / f"{name}.json"
    path.write_text(json.dumps(tree))
    return str(path)


def predicted(case: dict[str, Any], world_size: int) -> dict[str, float]:
    """Return bytes by term, and in all."""
    config = RunConfig.model_validate(case["config"])
    run = resolve_run(config, world_size, case["engine"], "cpu")
    hf_config = AutoConfig.from_pretrained(config.model.path)
    dtype = getattr(torch, config.precision.dtype)
    model = trace_model(hf_config, dtype, frozen=config.model.frozen)
    layout = layout_of(run, fast_path=fast_path_elsewhere(run, is_cpu=True))
    num_tokens = layout.tokens_per_micro_batch
    loss_chunk_tokens = auto_loss_chunk(config.model, model, num_tokens, layout.loss_kernels)
    layout = replace(layout, loss_chunk_tokens=loss_chunk_tokens)
    use = peak_memory(model, layout, engine_named("deepspeed"))
    # Here the device's memory and main memory are the same.
    return {"total": use.allocated + use.host_offload, **use.terms(), "offload": use.host_offload}


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split(",")]


def main() -> None:
    """Measure and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument(
        "--bucket", type=int, default=200_000, help="elements of DeepSpeed's buckets"
    )
    parser.add_argument("--lengths", type=_numbers, default=[], help="tokens of long samples")
    parser.add_argument("--model", choices=LONG, default="llama", help="for long samples")
    parser.add_argument("--heads", type=int, default=4, help="of the model for long samples")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.lengths:
            kinds = KINDS if args.world_size > 1 else ONE_RANK
            todo = long_cases(Path(name), args, kinds)
        else:
            todo = cases(Path(name), args.only, args.bucket)
        (Path(name) / "cases.json").write_text(json.dumps(todo))
        worker = str(Path(__file__).parent / "support" / "memory_worker.py")
        run_local_world(args.world_size, [worker, str(Path(name) / "cases.json")], ALLOCATOR)
        errors = []
        for case in todo:
            ranks = [
                json.loads(Path(f"{case['output']}.{rank}").read_text())
                for rank in range(args.world_size)
            ]
            measured = max(rank["peak"] for rank in ranks)
            told = predicted(case, args.world_size)
            errors.append(told["total"] / measured - 1)
            terms = ", ".join(f"{k} {v / MIB:.2f}" for k, v in told.items() if v and k != "context")
            print(
                f"{case['title']:22} measured {measured / MIB:7.2f} MiB (resting "
                f"{ranks[0]['resting'] / MIB:.2f}), {ranks[0]['seconds']:.1f} s a step, "
                f"{max(rank['cpu_seconds'] for rank in ranks):.1f} s of its processor, predicted "
                f"{errors[-1]:+6.1%}: {terms}"
            )
    mean, worst = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
    print(f"{len(errors)} layouts: mean error {mean:.1%}, worst {worst:.1%}")


if __name__ == "__main__":
    main()
