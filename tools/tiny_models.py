"""A tiny configuration of any causal LM of transformers, for sweeps over all architectures.

Multipliers are not 1, layers of different kinds alternate unevenly and nothing is random, so that
a mistake in how an architecture is handled shows in the numbers.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 4
VOCABULARY = 256
_MAX_PARAMETERS = 10_000_000

# By meaning: every configuration takes those that it has.
_SIZES: dict[tuple[str, ...], Any] = {
    ("hidden_size", "d_model", "n_embd"): 64,
    ("intermediate_size", "ffn_dim", "ffn_hidden_size"): 128,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"): LAYERS,
    ("num_attention_heads", "n_head", "num_heads"): 4,
    ("num_key_value_heads",): 2,
    ("head_dim",): 16,
    ("vocab_size", "vocab_size_per_layer_input"): VOCABULARY,
    ("max_position_embeddings", "n_positions"): 128,
    ("pad_token_id",): 0,
    ("bos_token_id",): 1,
    ("eos_token_id",): 2,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"): 2,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"): 32,
    ("shared_intermediate_size",): 64,
    ("n_group", "topk_group"): 1,
    ("q_lora_rank", "kv_lora_rank"): 32,
    ("qk_rope_head_dim",): 8,
    ("qk_nope_head_dim", "v_head_dim"): 16,
    ("sliding_window", "attention_chunk_size"): 8,
    ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"): 1,
    ("index_n_heads",): 4,
    ("index_head_dim", "index_topk"): 16,
    ("linear_num_key_heads",): 2,
    ("linear_num_value_heads", "linear_num_heads"): 4,
    ("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"): 16,
    ("mamba_n_heads", "mamba_num_heads"): 4,
    ("mamba_d_head", "mamba_head_dim"): 32,
    ("mamba_d_state", "ssm_state_size", "mamba_dt_rank"): 8,
    ("mamba_expand", "n_groups"): 2,
    ("mamba_chunk_size",): 16,
    ("mamba_d_conv",): 4,
    ("mamba_n_groups",): 1,
    ("hidden_size_per_layer_input", "block_size"): 16,
    ("laurel_rank",): 8,
    ("encoder_layers", "decoder_layers"): LAYERS,
    ("encoder_attention_heads", "decoder_attention_heads"): 4,
    ("encoder_ffn_dim", "decoder_ffn_dim"): 128,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "embedding_scale": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "final_logit_softcapping": 5.0,
    "mup_enabled": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "is_decoder": True,
}
_NOISE = (
    "attention_dropout",
    "residual_dropout",
    "resid_pdrop",
    "attn_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "embedding_dropout",
    "router_jitter_noise",
    "input_jitter_noise",
)
# Off where they are None: a size would switch them on.
_SWITCHES = {"sliding_window", "q_lora_rank", "kv_lora_rank", "attention_chunk_size"}

_DROP = object()
_UNEVEN = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_PER_LAYER = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
}
# Values that some architectures require.
_SPECIAL: dict[str, dict[str, Any]] = {
    **{name: {"rotary_dim": 8} for name in ("codegen", "gptj")},
    "gemma": {"num_key_value_heads": 1},  # as the 2B has
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 64},
    },
    "falcon_h1": {
        "mamba_d_ssm": 128,
        "mamba_rms_norm": True,
        "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0],
    },
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2, "n_groups": 1, "chunk_size": 16},
    "mpt": {"attn_pdrop": 0},
    "prophetnet": {
        "num_encoder_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "num_hidden_layers": _DROP,
        "num_attention_heads": _DROP,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attention_head_size": 16,
        "feed_forward_size": 64,
        "num_buckets": 4,
    },
    "xlnet": {"max_position_embeddings": _DROP},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "zaya": {"num_experts_per_tok": 1},
    # Its hybrid layers are counted by this name only.
    "zamba2": {
        "layer_types": _DROP,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention"],
        "mamba_ngroups": 2,
    },
    "roc_bert": {
        "pronunciation_vocab_size": 32,
        "shape_vocab_size": 32,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "cohere_compass_text": {
        "layer_types": _UNEVEN,
        "logit_scale": 0.0625,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
            for kind in set(_UNEVEN)
        },
    },
    # Entries, and more of them than are chosen, in samples of a few tokens.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "index_topk": 2,
    },
    "dots1": {"n_shared_experts": 1},
    # Their head_dim means qk_rope_head_dim.
    "axk1": {"head_dim": 8},
    "deepseek_v3": {"head_dim": 8},
    "youtu": {"head_dim": 8},
    "dots3_note_text": {
        "per_layer_config": {},
        "head_dim": 24,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "shared_experts_intermediate_size": 32,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "intermediate_size": [128] * LAYERS,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "layer_types": _UNEVEN,
    },
    # The output of experts is normalized: tiny weights, whose gradients are huge then, would make
    # plain runs part by more than is compared after a rounding of their first weights.
    "gemma4_text": {**_PER_LAYER, "enable_moe_block": True, "initializer_range": 0.3},
    "gemma4_unified_text": _PER_LAYER,
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "layer_types": _DROP,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 2, "num_hidden_layers": 2 * LAYERS, "head_dim": 8},
    "minicpm3": {"logits_scaling": _DROP},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "crop_size": 28,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "hc_count": 2,
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "heads_per_ngram": 2,
    },
}


_DERIVED = {"layers_block_type": "layer_types"}
"""Where the property that cannot be set has another name than what sets it."""


def model_types() -> list[str]:
    """Return every causal LM that transformers has."""
    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING.keys()))


def describe(model_type: str) -> str:
    """Return all values of the tiny configuration, or why there is none; the same in every
    process."""
    try:
        return str(tiny_config(model_type).to_json_string(use_diff=False))
    except Exception as error:  # validators of single architectures
        return str(error)


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Four layers of 64 columns, everything that the architecture has switched on."""
    return _configuration(model_type, _values(model_type, CONFIG_MAPPING[model_type]()))


def _values(model_type: str, default: PreTrainedConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"dtype": "float32"}
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, PreTrainedConfig):
            values[name] = {"model_type": part.model_type, **_values(part.model_type, part)}
    for names, size in _SIZES.items():
        values |= {name: size for name in names if _takes(default, name)}
    values |= {name: v for name, v in _MULTIPLIERS.items() if hasattr(default, name)}
    values |= {name: 0.0 for name in _NOISE if hasattr(default, name)}
    if "qk_rope_head_dim" in values or "kv_lora_rank" in values:
        values["num_key_value_heads"] = 4  # multi-head latent attention
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if kinds:
        uneven = [kinds[0], *kinds[1:], *reversed(kinds)]
        values["layer_types"] = (uneven + [kinds[0]] * LAYERS)[:LAYERS]
        if len(kinds) == 2:
            values["layer_types"] = [kinds[0], kinds[1], kinds[1], kinds[0]]
    values |= _SPECIAL.get(model_type, {})
    return {name: value for name, value in values.items() if value is not _DROP}


def _configuration(model_type: str, values: dict[str, Any]) -> PreTrainedConfig:
    """Return the configuration of those `values` that can be set; some only look as if they
    could."""
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[model_type](**copy.deepcopy(values))
    except AttributeError as error:
        derived = re.search(r"property '(\w+)' of .* has no setter", str(error))
        name = _DERIVED.get(derived[1], derived[1]) if derived else None
        if name not in values:
            raise
        return _configuration(model_type, {k: v for k, v in values.items() if k != name})
    return config


def _takes(default: PreTrainedConfig, name: str) -> bool:
    try:
        value = getattr(default, name)
    except AttributeError:
        return False
    except Exception:  # per-layer attributes want a layer
        return True
    return name not in _SWITCHES or value is not None


def tiny_model(model_type: str) -> PreTrainedModel:
    """Return a float32 model with noise on every parameter, the same in every process. In training
    mode, with nothing random in it."""
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    model: PreTrainedModel | None = None
    for attention in ("sdpa", "eager"):
        try:
            torch.manual_seed(0)
            config: Any = tiny_config(model_type)
            if model_class.config_class is not type(config):  # as AutoModelForCausalLM does
                config = config.get_text_config()
            _refuse_large(model_class, config)
            model = model_class._from_config(config, attn_implementation=attention).float()
            break
        except (ValueError, ImportError):
            if attention == "eager":
                raise
    assert model is not None
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    _add_noise(model)
    return model.train()


def _refuse_large(model_class: Any, config: PreTrainedConfig) -> None:
    """Refuse an architecture whose sizes have other names and would be built in full size."""
    with torch.device("meta"):
        model = model_class._from_config(copy.deepcopy(config))
    num_parameters = sum(p.numel() for p in model.parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise ValueError(f"its tiny configuration has {num_parameters} parameters")


@torch.no_grad()
def _add_noise(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for _, parameter in sorted(model.named_parameters()):
        if not torch.isfinite(parameter).all():  # memory that no rule wrote
            parameter.zero_()
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    for buffer in model.buffers():
        if buffer.is_floating_point() and not torch.isfinite(buffer).all():
            buffer.zero_()
