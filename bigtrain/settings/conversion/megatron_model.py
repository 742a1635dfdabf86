"""The model and vocabulary of GPT-NeoX's and Megatron-LM's arguments.

Pure but for reading a tokenizer's file. Defaults: `NEOX_DEFAULTS` and `MEGATRON_DEFAULTS`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bigtrain.settings.conversion.draft import Draft
from bigtrain.settings.conversion.megatron_keys import INITIALIZATION, MEGATRON_NAME, NEOX_NAME

_PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "mish": "mish",
}
"""Activations without a gate, and their `hidden_act`."""


def set_model(draft: Draft, *, uses_rms: bool) -> None:
    """Set ``model.config`` for the two families that Hugging Face has: GPT-NeoX with layer norms
    and GELU, and Llama with RMS norms and SwiGLU. Other combinations are refused."""
    # Initial weights, then sizes: other keys have no meaning without sizes.
    if draft.value("load") and draft.value("load") == draft.value("save"):
        draft.notes.append("load, which is save: the same command resumes")
    elif draft.value("load"):
        draft.refuse(
            "load",
            "a checkpoint of Megatron or GPT-NeoX is not read: convert it to Hugging Face's "
            "format, and set model.path",
        )
    sizes = {
        "num_hidden_layers": int(draft.number("num_layers", 0)),
        "hidden_size": int(draft.number("hidden_size", 0)),
        "num_attention_heads": int(draft.number("num_attention_heads", 0)),
        "max_position_embeddings": int(
            draft.number("max_position_embeddings", draft.number("seq_length", 0))
        ),
    }
    for name, size in sizes.items():
        if not size:
            key = "num_layers" if name == "num_hidden_layers" else name
            draft.refuse(key, "is missing", "the number in the file, or another file with it")
            return
    # Refuse what neither family has.
    position = draft.value("pos_emb", draft.value("position_embedding_type", "learned"))
    if position not in ("rotary", "rope"):
        draft.refuse("pos_emb", f"{position} positions are not converted: rotary", "model.config")
        return
    activation = str(draft.value("activation", "gelu")).lower()
    if activation not in ("swiglu", *_PLAIN_ACTIVATIONS):
        choices = ", ".join(("swiglu", *_PLAIN_ACTIVATIONS))
        draft.refuse("activation", f"has no counterpart; these have one: {choices}", "model.config")
        return
    is_gated = bool(draft.value("swiglu")) or activation == "swiglu"
    if uses_rms != is_gated:
        draft.refuse(
            "norm",
            "RMS norms go with SwiGLU (llama) and layer norms with GELU (gpt_neox) in Hugging "
            "Face's models, and this mixes them",
            "model.config, with a model_type that has both",
        )
        return
    # Write the configuration.
    model_type = "llama" if uses_rms else "gpt_neox"
    if draft.value("add_qkv_bias") and uses_rms:
        model_type = "qwen2"  # a llama whose projections of queries, keys and values have biases
    elif draft.value("add_qkv_bias"):
        draft.refuse("add_qkv_bias", "goes with RMS norms and SwiGLU (qwen2)", "model.config")
    config: dict[str, Any] = {"model_type": model_type, **sizes}
    config["vocab_size"] = _vocabulary_rows(draft)
    config["initializer_range"] = _initializer_range(draft, sizes["hidden_size"])
    # Both trainers tie embedding and head by default.
    is_untied = draft.value("no_weight_tying") or draft.value("untie_embeddings_and_output_weights")
    config["tie_word_embeddings"] = not is_untied
    rope_theta = draft.number("rotary_emb_base", draft.number("rotary_base", 10000))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": float(rope_theta)}
    # The share of a head's elements that are rotated.
    rotary_share = draft.number("rotary_pct", draft.number("rotary_percent", 1.0))
    if uses_rms:
        _complete_llama(draft, config, rotary_share)
    else:
        _complete_neox(draft, config, rotary_share)
    draft.set("model.config", config)


def _initializer_range(draft: Draft, hidden_size: int) -> float:
    """Return the standard deviation of the initial weights. In both trainers, output projections of
    attention and MLP have a smaller one: their default is noted, another method is refused."""
    method = draft.value("init_method", "normal")
    standard_deviation = float(draft.number("init_method_std", 0.02))
    if method == "small_init":  # megatron/model/init_functions.py, small_init_init_method
        standard_deviation = math.sqrt(2 / (5 * hidden_size))
    elif method != "normal":
        draft.refuse("init_method", INITIALIZATION)
    if "output_layer_init_method" not in draft.omitted:
        output_method = draft.value("output_layer_init_method", "scaled_normal")
        if output_method == "scaled_normal":
            draft.notes.append(
                "output_layer_init_method = 'scaled_normal': initial weights of the outputs of "
                "attention and MLP have initializer_range, not init_method_std / sqrt(2 num_layers)"
            )
        elif output_method != "normal" or method != "normal":
            draft.refuse("output_layer_init_method", INITIALIZATION)
    return standard_deviation


def _vocabulary_rows(draft: Draft) -> int:
    """Return the rows of the embedding: `vocab_size`, or the tokenizer's tokens, padded to a
    multiple of make_vocab_size_divisible_by x tensor-parallel size (GPT-NeoX
    megatron/tokenizer/tokenizer.py, `_vocab_size_with_padding`). 0 if the user sets the number; 0
    and a problem if it is unknown."""
    rows = draft.number("padded_vocab_size", draft.number("vocab_size"))
    if rows is not None:
        return int(rows)
    if "model.config.vocab_size" in draft.given_settings:
        return 0
    num_tokens = _count_tokens(tokenizer_directory(draft))
    tensor_size = draft.number("model_parallel_size", draft.number("tensor_model_parallel_size", 1))
    multiple = int(draft.number("make_vocab_size_divisible_by")) * max(1, int(tensor_size))
    if not num_tokens:
        draft.missing_settings.append("model.config.vocab_size")
        draft.refuse(
            "vocab_size",
            "is missing, and follows from the tokenizer, which is not on this machine",
            f"model.config.vocab_size=N, the tokenizer's tokens padded to a multiple of {multiple}",
        )
        return 0
    padded_rows = -(-num_tokens // multiple) * multiple
    draft.notes.append(
        f"vocab_size: {num_tokens:,} tokens of the tokenizer, padded to a multiple of {multiple}: "
        f"model.config.vocab_size={padded_rows}"
    )
    return padded_rows


def tokenizer_directory(draft: Draft) -> str:
    """Return the directory of the tokenizer's file that the arguments name; without one, the
    placeholder TOKENIZER."""
    name = draft.value("vocab_file", draft.value("tokenizer_model"))
    if not isinstance(name, str):
        return "TOKENIZER"
    path = Path(name)
    return str(path.parent if path.suffix else path)


def _count_tokens(directory: str) -> int:
    """Return the tokens of the tokenizer in `directory`, added ones too; 0 if it has no readable
    ``tokenizer.json``."""
    try:
        tree = json.loads((Path(directory) / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tree["model"]["vocab"]
        ids = [token["id"] for token in tree.get("added_tokens") or []]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    # A Unigram model has a list of tokens, other models a dictionary from tokens to ids.
    ids += vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return max(ids, default=-1) + 1


def _complete_neox(draft: Draft, config: dict[str, Any], rotary_share: float) -> None:
    """Add the keys of a gpt_neox to `config`."""
    config["rope_parameters"]["partial_rotary_factor"] = float(rotary_share)
    config["intermediate_size"] = int(
        draft.number(
            "intermediate_size", draft.number("ffn_hidden_size", 4 * config["hidden_size"])
        )
    )
    config["use_parallel_residual"] = bool(draft.value("gpt_j_residual", False))
    activation = str(draft.value("activation", "gelu")).lower()
    # GPT-NeoX's fused GELU is the tanh approximation (megatron/model/activations.py, bias_gelu).
    is_tanh = activation == "gelu" and bool(draft.value("bias_gelu_fusion"))
    config["hidden_act"] = "gelu_pytorch_tanh" if is_tanh else _PLAIN_ACTIVATIONS[activation]
    config["attention_bias"] = bool(draft.value("use_bias_in_attn_linear", True))
    for key in ("use_bias_in_norms", "use_bias_in_mlp"):
        if not draft.value(key, True):
            draft.refuse(key, "a gpt_neox has biases there: true", "model.config")
    config["layer_norm_eps"] = draft.number("layernorm_epsilon", 1e-5)
    config["hidden_dropout"] = draft.number("hidden_dropout", 0.0)
    config["attention_dropout"] = draft.number("attention_dropout", 0.0)
    if draft.trainer == MEGATRON_NAME:
        draft.refuse(
            "normalization",
            "a GPT of Megatron has fused projections of its own order",
            "model.config",
        )


def _complete_llama(draft: Draft, config: dict[str, Any], rotary_share: float) -> None:
    """Add the keys of a llama, or qwen2, to `config`."""
    hidden_size = config["hidden_size"]
    if rotary_share != 1:
        draft.refuse("rotary_pct", "a llama rotates all of a head: 1", "model.config")
    has_biases = bool(draft.value("add_bias_linear")) and not draft.value("disable_bias_linear")
    if config["model_type"] == "llama":
        config["attention_bias"] = bool(draft.value("use_bias_in_attn_linear", has_biases))
        config["mlp_bias"] = bool(draft.value("use_bias_in_mlp", has_biases))
    elif has_biases:
        draft.refuse(
            "add_bias_linear", "a qwen2 has the biases of add_qkv_bias only: false", "model.config"
        )
    if draft.trainer == NEOX_NAME:
        # A gated MLP of GPT-NeoX has a third of the size for each projection, rounded
        # up to a multiple (megatron/model/transformer.py, ffn_dim_in).
        multiple = int(draft.number("mlp_multiple_of", 1))
        projection_size = int(draft.number("intermediate_size", 4 * hidden_size) * 2 / 3) // 2
        config["intermediate_size"] = -(-projection_size // multiple) * multiple
    else:
        default_size = int(4 * hidden_size * 2 / 3) // 64 * 64
        config["intermediate_size"] = int(draft.number("ffn_hidden_size") or default_size)
    key_heads = draft.number("num_kv_heads", config["num_attention_heads"])
    if draft.trainer == MEGATRON_NAME and draft.value("group_query_attention"):
        key_heads = draft.number("num_query_groups", 1)
    config["num_key_value_heads"] = int(key_heads)
    if (head_size := draft.number("kv_channels")) is not None:
        config["head_dim"] = int(head_size)
    epsilon = draft.number("rms_norm_epsilon", draft.number("norm_epsilon", 1e-5))
    config["rms_norm_eps"] = float(epsilon)
    config["attention_dropout"] = draft.number("attention_dropout", 0.0)
    if draft.number("hidden_dropout", 0.0):
        draft.refuse("hidden_dropout", "a llama has no dropout of hidden states: 0", "model.config")
