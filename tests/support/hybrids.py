"""Tiny models of attention and recurrent layers, one for each kind of layer."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
_DELTA_RULE: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_n_groups": 1,
}
_CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA_RULE,
    "qwen3_next": {**_DELTA_RULE, "num_experts": 0, "mlp_only_layers": [0, 1]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "mlp_layer_types": ["dense", "dense"],
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "kv_lora_rank": 16,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
        **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
    },
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA_2, "mamba_d_ssm": 64, "mamba_rms_norm": True, "head_dim": 8},
    "jamba": {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "recurrent_gemma": {"lru_width": 32, "head_dim": 8, "num_hidden_layers": 3},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    name: {"model_type": name, **_COMMON, **changes} for name, changes in _CHANGES.items()
}
"""Keys of ``model.config`` by model type."""


def hybrid_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return the configuration of a model of `HYBRIDS` with `changes`."""
    values = {**HYBRIDS[model_type], **changes}
    config: PreTrainedConfig = CONFIG_MAPPING[values.pop("model_type")](**values)
    return config
