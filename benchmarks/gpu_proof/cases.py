"""Runs that `make gpu-proof` traces: an optimizer step of a rank for each topology and feature."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096,
    "max_position_embeddings": 2048,
}  # fmt: skip
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
# Its routers have buffers, which ZeRO 3 must find on the GPU too.
GLM4_MOE = {
    **LLAMA, "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 768, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
# Half of the layers have a state: the gated delta rule, and Mamba 2.
QWEN3_5 = {
    **LLAMA, "model_type": "qwen3_5_text", "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,
}  # fmt: skip
BAMBA = {
    **LLAMA, "model_type": "bamba", "attn_layer_indices": [1, 3], "mamba_n_heads": 16,
    "mamba_d_head": 64, "mamba_d_state": 64, "mamba_chunk_size": 128,
}  # fmt: skip
# Rows that a rank sends to experts, as if the router were balanced: micro-batch x tokens x chosen.
EXPERT_ROWS = 2 * 1024 * MIXTRAL["num_experts_per_tok"]
_RUN: dict[str, Any] = {
    "model": {"config": LLAMA, "loss": "chunked"},
    "data": {"path": "unused"},
    "batch": {"sequence_length": 1024, "micro_batch_size": 2, "global_batch_size": 16},
    "train": {"steps": 3},
    "optimizer": {"lr": 1e-3, "clip_norm": 1.0},
    "precision": {"dtype": "bfloat16"},
    "output": {"directory": "unused"},
}


@dataclass(frozen=True)
class Case:
    """Run of `world_size` ranks, of which rank `rank` is traced. engine: a name in ds_configs/.
    changes: to the run's settings, by section. isolated: the samples hold several documents. base:
    the model is one with weights, in a folder made for the case. follows_memory: fake tensors free
    what real ones free. together: ranks that exchange values, all of which are traced, and their
    collectives compared."""

    name: str
    engine: str = "zero1"
    world_size: int = 4
    rank: int = 0
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    isolated: bool = False
    base: bool = False
    follows_memory: bool = True
    together: tuple[int, ...] = ()

    def run(self) -> dict[str, Any]:
        """Return the settings of the run, as a YAML file has them."""
        tree = deepcopy(_RUN)
        tree["engine"] = {"deepspeed_config": self.engine}
        for section, values in self.changes.items():
            tree[section] = {**tree.get(section, {}), **values}
        return tree


def _with(**sections: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return dict(sections)


NOT_FOLLOWED = {
    "memory under tensor parallelism": "fake tensors keep what is set to another's storage",
    "flex attention, torch.compile": "they compile kernels",
    "asynchronous save, generation": "they read values that do not exist",
    "other objectives than the cross-entropy": "no case has their samples",
    "numbers copied to the device with a kernel": "they are arguments of its launch",
    "a missing `Tensor.record_stream`": "no memory is used again, which it would protect",
    "copies without a wait from memory that is not pinned": "fake memory is of no kind",
    "on which stream a kernel or a copy is, and which stream or event another waits for": (
        "waits are counted; streams have no queues"
    ),
}
"""What fake tensors cannot follow, and why."""

CASES = (
    *(Case(f"zero {stage}", f"zero{stage}") for stage in range(4)),
    *(Case(f"zero {stage}, one GPU", f"zero{stage}", world_size=1) for stage in (0, 1)),
    # The planner counts a reduce bucket that so small a model does not fill.
    Case("zero 2, optimizer in host memory", "zero2_offload", follows_memory=False),
    Case("zero 3, optimizer and parameters in host memory", "zero3_offload"),
    Case("zero 1, float16", changes=_with(precision={"dtype": "float16"})),
    Case("zero 3, float32", "zero3", changes=_with(precision={"dtype": "float32"})),
    Case("zero 1, recomputed layers", changes=_with(model={"gradient_checkpointing": "full"})),
    Case("zero 3, recomputed layers", "zero3",
         changes=_with(model={"gradient_checkpointing": "full"})),
    Case("zero 1, plain loss", changes=_with(model={"loss": "plain"})),
    Case("zero 1, tensor 2", changes=_with(parallel={"tensor": 2}), follows_memory=False),
    Case("zero 3, tensor 2", "zero3", changes=_with(parallel={"tensor": 2}), follows_memory=False),
    Case("zero 1, sequence 2", changes=_with(parallel={"sequence": 2})),
    Case("zero 3, sequence 2", "zero3", changes=_with(parallel={"sequence": 2})),
    Case("zero 1, experts 2", changes=_with(model={"config": MIXTRAL}, parallel={"expert": 2})),
    Case("zero 3, experts not divided", "zero3", changes=_with(model={"config": MIXTRAL})),
    Case("zero 3, routers with buffers", "zero3", changes=_with(model={"config": GLM4_MOE})),
    Case("zero 1, LoRA", base=True, changes=_with(adapters={"rank": 8})),
    Case("zero 3, LoRA", "zero3", base=True, changes=_with(adapters={"rank": 8})),
    Case("zero 1, isolated documents", isolated=True),
    Case("zero 1, ring 2", changes=_with(parallel={"sequence": {"ring": 2}})),
    Case("zero 3, MLPs in tiles", "zero3",
         changes=_with(model={"gradient_checkpointing": "full", "tiled_mlp": 2})),
    Case("zero 1, activations in host memory", follows_memory=False,
         changes=_with(model={"gradient_checkpointing": "full", "activation_offload": True})),
    Case("zero 1, average of the weights", changes=_with(optimizer={"ema": {"decay": 0.99}})),
    Case("zero 1, Adafactor", changes=_with(optimizer={"type": "adafactor"})),
    Case("zero 1, Lion", changes=_with(optimizer={"type": "lion"})),
    Case("zero 1, AdamW in 8 bits", changes=_with(optimizer={"type": "adamw_8bit"})),
    Case("zero 1, float8", changes=_with(precision={"float8": "tensorwise"})),
    Case("zero 1, gated delta rule", changes=_with(model={"config": QWEN3_5})),
    Case("zero 3, gated delta rule, recomputed layers", "zero3",
         changes=_with(model={"config": QWEN3_5, "gradient_checkpointing": "full"})),
    Case("zero 1, gated delta rule, tensor 2", follows_memory=False,
         changes=_with(model={"config": QWEN3_5}, parallel={"tensor": 2})),
    Case("zero 1, gated delta rule, sequence 2",
         changes=_with(model={"config": QWEN3_5}, parallel={"sequence": 2})),
    Case("zero 1, Mamba 2, isolated documents", isolated=True,
         changes=_with(model={"config": BAMBA})),
    Case("zero 1, Mamba 2, tensor 2", follows_memory=False,
         changes=_with(model={"config": BAMBA}, parallel={"tensor": 2})),
    *(Case(f"zero 1, pipeline 2, {name} stage", rank=rank, together=(0, 1),
           changes=_with(parallel={"pipeline": 2})) for rank, name in enumerate(("first", "last"))),
    Case("zero 1, Muon", world_size=2, together=(0, 1),
         changes=_with(optimizer={"type": "muon"})),
    Case("zero 3, 512 ranks", "zero3", world_size=512,
         changes=_with(batch={"global_batch_size": 1024})),
)  # fmt: skip
