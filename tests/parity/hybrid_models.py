"""Small models of every family with recurrent layers, by family: what tests of hybrid models
train."""

from __future__ import annotations

from typing import Any

from tests.parity import expert_models
from tests.parity.conftest import VOCAB_SIZE
from tests.support.hybrids import HYBRIDS

_SPECIAL_TOKENS = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))}
MODELS: dict[str, dict[str, Any]] = {
    name: HYBRIDS[model_type] | {"vocab_size": VOCAB_SIZE}
    for name, model_type in {
        "qwen3_5": "qwen3_5_text",
        **{name: name for name in ("bamba", "jamba", "lfm2", "kimi_linear", "recurrent_gemma")},
        "falcon_h1": "falcon_h1",
    }.items()
}
MODELS |= {
    name: expert_models.MODELS[name] for name in ("qwen3_next", "granitemoehybrid", "nemotron_h")
}
MODELS["olmo_hybrid"] = MODELS["qwen3_5"] | {"model_type": "olmo_hybrid", **_SPECIAL_TOKENS}
MODELS["mamba2"] = {
    "model_type": "mamba2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
}
# A module is called for each document: unequally often on ranks with other samples.
MODELS["xlstm"] = {
    "model_type": "xlstm",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "embedding_dim": 32,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "chunk_size": 16,
}
# Two layers share the weights of attention and MLP.
MODELS["zamba2"] = {
    "model_type": "zamba2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_mamba_heads": 4,
    "mamba_ngroups": 2,
    "mamba_d_state": 8,
    "chunk_size": 8,
}
MODELS["zamba"] = {
    "model_type": "zamba",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "attention_head_dim": 16,
    "n_mamba_heads": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
}
for _name in ("mamba", "falcon_mamba"):
    MODELS[_name] = {
        "model_type": _name,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "time_step_rank": 4,
    }
_ATTENTION = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS["minimax"] = _ATTENTION | {
    "model_type": "minimax",
    "head_dim": 8,
    "intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "block_size": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
MODELS["lfm2_moe"] = _ATTENTION | {
    "model_type": "lfm2_moe",
    "intermediate_size": 32,
    "layer_types": ["conv", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_dense_layers": 1,
}
MODELS["lfm3"] = _ATTENTION | {
    "model_type": "lfm3",
    "intermediate_size": 32,
    "layer_types": ["conv", "full_attention"],
    **_SPECIAL_TOKENS,
}
MODELS["rwkv"] = {
    "model_type": "rwkv",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "attention_hidden_size": 32,
    "intermediate_size": 64,
}
MODELS["zaya"] = _ATTENTION | {
    "model_type": "zaya",
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "router_hidden_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 1,
    **_SPECIAL_TOKENS,
}
MODELS["bailing_hybrid"] = _ATTENTION | {
    "model_type": "bailing_hybrid",
    "num_key_value_heads": 4,
    "intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    **_SPECIAL_TOKENS,
}
MODELS["qwen3_5_moe"] = expert_models.MODELS["qwen3_5_moe"]
MODELS["jamba_moe"] = expert_models.MODELS["jamba"]
