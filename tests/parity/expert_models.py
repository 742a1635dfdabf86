"""Small mixtures of experts of every kind: what tests of divided experts train."""

from __future__ import annotations

from typing import Any

import torch

from tests.parity.conftest import ARCHITECTURES, VOCAB_SIZE, llama
from tests.support.hybrids import HYBRIDS

OPTIMIZER = {"lr": 3e-3, "clip_norm": 0.5, "eps": 1e-6}  # see cases.EPS
COEFFICIENT = 0.5  # so that it shows
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
# Experts and shared experts after the gated delta rule, and after Mamba 2 with groups.
_QWEN = {
    "vocab_size": VOCAB_SIZE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
MODELS["qwen3_next"] = HYBRIDS["qwen3_next"] | _QWEN | {"mlp_only_layers": []}
MODELS["qwen3_5_moe"] = HYBRIDS["qwen3_5_text"] | _QWEN | {"model_type": "qwen3_5_moe_text"}
MODELS["nemotron_h"] = {
    "model_type": "nemotron_h",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 32,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
# No expert-parallel plan, and experts below each other in two dimensions.
MODELS["dbrx"] = {
    "model_type": "dbrx",
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
}
BIASES = torch.tensor([0.1, -0.1, 0.05, 0.0, -0.05, 0.2, 0.0, -0.2])
MODELS["gpt_oss one"] = MODELS["gpt_oss"] | {"num_experts_per_tok": 1}
ROUTER_BIAS = [-50.0, -50.0, 50.0, 0.0]


def set_biases(name: str, model: Any) -> None:
    """Set the biases by which the tokens of one of `MODELS` choose."""
    for layer in model.model.layers if "gpt_oss" in name else ():
        layer.mlp.router.bias.data = torch.tensor(ROUTER_BIAS)
    for key, bias in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            bias.copy_(BIASES[: bias.numel()])
