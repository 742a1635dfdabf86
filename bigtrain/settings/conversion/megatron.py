"""Arguments of GPT-NeoX and of Megatron-LM, as YAML or JSON. Pure.

A file of GPT-NeoX is often one of several that are given together: ``bigtrain convert`` takes them
all, and later ones win. Defaults are taken from GPT-NeoX 2.0 (neox_args.py) and of Megatron-LM
(megatron/training/arguments.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bigtrain.settings.conversion.draft import Draft, as_number
from bigtrain.settings.conversion.megatron_keys import INITIALIZATION, MEGATRON_NAME, NEOX_NAME

_OF_TESTS = ("ENV_VARS", "TEST_TYPE", "METRICS", "BEFORE_SCRIPT", "AFTER_SCRIPT", "LAUNCHER")
"""Keys of the YAMLs of Megatron-LM's functional tests that are not arguments."""
_ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu", "mish": "mish"}
"""Activations of GPT-NeoX without a gate, by their names in transformers."""


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a file: names with underscores and without dashes before them, those
    below MODEL_ARGS, language_model and model_parallel at the top."""
    arguments: dict[str, Any] = {}
    for name, value in tree.items():
        if name in ("MODEL_ARGS", "language_model", "model_parallel") and isinstance(
            value, Mapping
        ):
            arguments.update(flat(value))
        elif name not in _OF_TESTS:
            arguments[str(name).lstrip("-").replace("-", "_")] = value
    return arguments


def fill_neox(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several keys of GPT-NeoX."""
    optimizer = draft.mapping("optimizer")
    params = {name: as_number(value) for name, value in optimizer.get("params", {}).items()}
    if str(optimizer.get("type", "Adam")).lower() not in ("adam", "adamw"):
        draft.refuse("optimizer", f"{optimizer.get('type')} is not converted", "type: Adam")
    lr = params.get("lr", draft.number("lr", 0.0))
    _set_optimizer(draft, lr, params.get("betas", [0.9, 0.999]), params.get("eps", 1e-8))
    draft.set("optimizer.clip_norm", draft.number("gradient_clipping", 1.0))
    steps, warmup = int(draft.number("train_iters", 0)), draft.number("warmup", 0.01)
    decay_iters = int(draft.number("lr_decay_iters", steps))
    warmup_steps = int(decay_iters * warmup)
    if warmup_steps:
        draft.set("schedule.warmup_steps", warmup_steps)
    _set_schedule(draft, lr, steps, decay_iters, warmup_steps)
    _set_neox_batch(draft)
    # Formats and engine.
    fp16, bf16 = draft.mapping("fp16"), draft.mapping("bf16")
    precision = draft.value("precision")
    dtype = "float16" if fp16.get("enabled") or precision == "fp16" else "float32"
    if bf16.get("enabled") or precision == "bfloat16" or fp16.get("type") == "bfloat16":
        dtype = "bfloat16"
    draft.set("precision.dtype", dtype)
    if dtype == "float16" and "initial_scale_power" in fp16:
        draft.set("precision.initial_loss_scale_power", fp16["initial_scale_power"])
    gradients = draft.mapping("data_types").get("grad_accum_dtype")
    if gradients in ("fp32", "bf16") and dtype == "bfloat16":
        draft.set("precision.gradient_dtype", gradients)
    zero = draft.mapping("zero_optimization")
    draft.set("engine.deepspeed_config", f"zero{zero.get('stage', 0)}")
    if draft.value("checkpoint_activations"):
        draft.set("model.gradient_checkpointing", "full")
    attention = str(draft.value("attention_config", "global"))
    if any(name in attention for name in ("mamba", "rwkv", "gmlp", "sparse", "local", "bigbird")):
        draft.refuse("attention_config", "only flash and global attention are converted")
    _set_model(draft, uses_rms=draft.value("norm", "layernorm") == "rmsnorm")
    _set_data(draft)


def fill_megatron(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several arguments of Megatron-LM."""
    lr = float(draft.number("lr", 0.0))
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    if draft.value("optimizer", "adam") != "adam":
        draft.refuse("optimizer", "is not converted: adam")
    _set_optimizer(draft, lr, betas, float(draft.number("adam_eps", 1e-8)))
    draft.set("optimizer.clip_norm", draft.number("clip_grad", 1.0))
    steps = int(draft.number("train_iters", 0))
    decay_iters = int(draft.number("lr_decay_iters", steps))
    warmup_steps = int(draft.number("lr_warmup_iters", 0))
    if draft.value("lr_warmup_fraction"):
        warmup_steps = int(draft.number("lr_warmup_fraction") * decay_iters)
    if warmup_steps:
        draft.set("schedule.warmup_steps", warmup_steps)
    _set_schedule(draft, lr, steps, decay_iters, warmup_steps)
    dtype = "bfloat16" if draft.value("bf16") else "float32"
    draft.set("precision.dtype", "float16" if draft.value("fp16") else dtype)
    if draft.value("recompute_activations") or draft.value("recompute_granularity") == "full":
        draft.set("model.gradient_checkpointing", "full")
    resets = [bool(draft.value(name)) for name in ("reset_position_ids", "reset_attention_mask")]
    if all(resets):
        draft.set("data.document_boundaries", "isolate")
    elif any(resets):
        key = "reset_position_ids" if resets[0] else "reset_attention_mask"
        draft.refuse(key, "positions and attention are isolated together, or not at all")
    _set_model(draft, uses_rms=draft.value("normalization", "LayerNorm") == "RMSNorm")
    _set_data(draft)


def _set_optimizer(draft: Draft, lr: float, betas: list[float], eps: float) -> None:
    if not lr:
        draft.refuse("lr", "is missing", "the learning rate in the file, or another file with it")
        lr = 1.0
    draft.set("optimizer.type", "adamw")
    draft.set("optimizer.lr", lr)
    draft.set("optimizer.betas", betas)
    draft.set("optimizer.eps", eps)
    draft.set("optimizer.weight_decay", draft.number("weight_decay", 0.01))


def _set_schedule(draft: Draft, lr: float, steps: int, decay_iters: int, warmup_steps: int) -> None:
    style = draft.value("lr_decay_style", "linear")
    if style not in ("cosine", "linear", "constant"):
        draft.refuse("lr_decay_style", "is not converted: cosine, linear, constant")
        return
    draft.set("schedule.type", style)
    if style == "constant":
        return
    draft.set("schedule.min_lr_ratio", draft.number("min_lr", 0.0) / (lr or 1.0))
    if decay_iters != steps:
        draft.set("schedule.decay_steps", max(1, decay_iters - warmup_steps))


def _set_neox_batch(draft: Draft) -> None:
    tensor = int(draft.number("model_parallel_size", 1))
    pipeline = max(1, int(draft.number("pipe_parallel_size", 0)))
    for size, name in ((tensor, "tensor"), (pipeline, "pipeline")):
        if size > 1:
            draft.set(f"parallel.{name}", size)
    micro_batch_size = int(draft.number("train_micro_batch_size_per_gpu", 1))
    draft.set("batch.micro_batch_size", micro_batch_size)
    if draft.value("train_batch_size") is not None:
        draft.set("batch.global_batch_size", int(draft.number("train_batch_size")))
    elif draft.world_size is None:
        draft.refuse(
            "train_micro_batch_size_per_gpu",
            "the global batch is this x gradient_accumulation_steps x the data-parallel size, and "
            "the file does not have the number of devices",
            "--world-size N, the devices that the file was run with",
        )
    else:
        accumulation = int(draft.number("gradient_accumulation_steps", 1))
        data_size = max(1, draft.world_size // (tensor * pipeline))
        draft.set("batch.global_batch_size", micro_batch_size * accumulation * data_size)


def _set_model(draft: Draft, *, uses_rms: bool) -> None:
    """Set ``model.config`` for the two families that Hugging Face has: GPT-NeoX with layer norms
    and GELU, and Llama with RMS norms and SwiGLU. Anything between is a problem."""
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
    position = draft.value("pos_emb", draft.value("position_embedding_type", "learned"))
    if position not in ("rotary", "rope"):
        draft.refuse("pos_emb", f"{position} positions are not converted: rotary", "model.config")
        return
    is_gated = bool(draft.value("swiglu")) or draft.value("activation", "gelu") == "swiglu"
    if uses_rms != is_gated:
        draft.refuse(
            "norm",
            "RMS norms go with SwiGLU (llama) and layer norms with GELU (gpt_neox) in Hugging "
            "Face's models, and this mixes them",
            "model.config, with a model_type that has both",
        )
        return
    vocabulary = draft.number("padded_vocab_size", draft.number("vocab_size"))
    model_type = "llama" if uses_rms else "gpt_neox"
    if draft.value("add_qkv_bias") and uses_rms:
        model_type = "qwen2"  # a llama whose projections of queries, keys and values have biases
    elif draft.value("add_qkv_bias"):
        draft.refuse("add_qkv_bias", "goes with RMS norms and SwiGLU (qwen2)", "model.config")
    config: dict[str, Any] = {"model_type": model_type, **sizes}
    if vocabulary is None:
        draft.notes.append(
            "vocab_size: model.config.vocab_size=N, the rows of the tokenizer and padding"
        )
    else:
        config["vocab_size"] = int(vocabulary)
    # NeoX ties embedding and head unless told otherwise; so does Megatron.
    untied = draft.value("no_weight_tying") or draft.value("untie_embeddings_and_output_weights")
    config["tie_word_embeddings"] = not untied
    config["initializer_range"] = _initializer_range(draft, sizes["hidden_size"])
    base = draft.number("rotary_emb_base", draft.number("rotary_base", 10000))
    share = draft.number("rotary_pct", draft.number("rotary_percent", 1.0))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": float(base)}
    if uses_rms:
        _complete_llama(draft, config, share)
    else:
        _complete_neox(draft, config, share)
    draft.set("model.config", config)


def _initializer_range(draft: Draft, hidden_size: int) -> float:
    """Return the standard deviation of the initial weights. Outputs of attention and MLP have
    another one in both trainers: by default this is listed, and a value of the file is refused."""
    method = draft.value("init_method", "normal")
    standard_deviation = float(draft.number("init_method_std", 0.02))
    if method == "small_init":  # megatron/model/init_functions.py, small_init_init_method
        standard_deviation = math.sqrt(2 / (5 * hidden_size))
    elif method != "normal":
        draft.refuse("init_method", INITIALIZATION)
    if "output_layer_init_method" not in draft.omitted:
        outputs = draft.value("output_layer_init_method", "scaled_normal")
        if outputs == "scaled_normal":
            draft.notes.append(
                "output_layer_init_method = 'scaled_normal': initial weights of the outputs of "
                "attention and MLP have initializer_range, not init_method_std / sqrt(2 num_layers)"
            )
        elif outputs != "normal" or method != "normal":
            draft.refuse("output_layer_init_method", INITIALIZATION)
    return standard_deviation


def _complete_neox(draft: Draft, config: dict[str, Any], share: float) -> None:
    config["rope_parameters"]["partial_rotary_factor"] = float(share)
    config["intermediate_size"] = int(
        draft.number(
            "intermediate_size", draft.number("ffn_hidden_size", 4 * config["hidden_size"])
        )
    )
    config["use_parallel_residual"] = bool(draft.value("gpt_j_residual", False))
    activation = str(draft.value("activation", "gelu"))
    if activation == "gelu" and draft.value("bias_gelu_fusion"):
        # Its kernel is the tanh approximation (megatron/model/activations.py, bias_gelu).
        config["hidden_act"] = "gelu_pytorch_tanh"
    elif activation in _ACTIVATIONS:
        config["hidden_act"] = _ACTIVATIONS[activation]
    else:
        draft.refuse("activation", f"is not converted: {', '.join(_ACTIVATIONS)}", "model.config")
    config["layer_norm_eps"] = draft.number("layernorm_epsilon", 1e-5)
    config["hidden_dropout"] = draft.number("hidden_dropout", 0.0)
    config["attention_dropout"] = draft.number("attention_dropout", 0.0)
    if draft.trainer == MEGATRON_NAME:
        draft.refuse(
            "normalization",
            "a GPT of Megatron has fused projections of its own order",
            "model.config",
        )


def _complete_llama(draft: Draft, config: dict[str, Any], share: float) -> None:
    hidden_size = config["hidden_size"]
    if share != 1:
        draft.refuse("rotary_pct", "a llama rotates all of a head: 1", "model.config")
    for key in (
        "use_bias_in_norms",
        "use_bias_in_attn_linear",
        "use_bias_in_mlp",
        "add_bias_linear",
    ):
        if draft.value(key):
            draft.refuse(key, "a llama has no biases: false", "model.config")
    if draft.trainer == NEOX_NAME:
        # A gated MLP of GPT-NeoX has a third of the size for each projection, rounded up
        # (megatron/model/transformer.py, ffn_dim_in).
        multiple = int(draft.number("mlp_multiple_of", 1))
        third = int(draft.number("intermediate_size", 4 * hidden_size) * 2 / 3) // 2
        config["intermediate_size"] = -(-third // multiple) * multiple
    else:
        given = draft.number("ffn_hidden_size")
        default = int(4 * hidden_size * 2 / 3) // 64 * 64
        config["intermediate_size"] = int(given or default)
    key_heads = draft.number("num_kv_heads", config["num_attention_heads"])
    if draft.trainer == MEGATRON_NAME and draft.value("group_query_attention"):
        key_heads = draft.number("num_query_groups", 1)
    config["num_key_value_heads"] = int(key_heads)
    epsilon = draft.number("rms_norm_epsilon", draft.number("norm_epsilon", 1e-5))
    config["rms_norm_eps"] = float(epsilon)
    config["attention_dropout"] = draft.number("attention_dropout", 0.0)
    if draft.number("hidden_dropout", 0.0):
        draft.refuse("hidden_dropout", "a llama has no dropout of hidden states: 0", "model.config")


def _set_data(draft: Draft) -> None:
    """Set the data, and the command that makes a dataset of it."""
    paths = draft.value("train_data_paths", draft.value("data_path", "DATA/text_document"))
    paths = paths if isinstance(paths, list) else str(paths).split()
    held_out = draft.value("valid_data_paths")
    words = ["bigtrain manifest", *map(str, paths), "--tokenizer TOKENIZER"]
    if isinstance(held_out, list):
        words += ["--held-out", *map(str, held_out)]
    draft.commands.append(" ".join(words))
    draft.set("data.path", str(paths[0]).rpartition("/")[0] or ".")
    if "output" not in draft.run:
        draft.set("output.directory", "runs/converted")
    iterations = draft.number("eval_iters")
    if iterations and "global_batch_size" in draft.run.get("batch", {}):
        draft.set("evaluation.samples", int(iterations * draft.run["batch"]["global_batch_size"]))


def is_neox(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments are GPT-NeoX's."""
    own = {"pipe_parallel_size", "train_micro_batch_size_per_gpu", "pos_emb", "no_weight_tying"}
    return bool(own & arguments.keys())


def is_megatron(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments are Megatron-LM's."""
    own = {"tensor_model_parallel_size", "micro_batch_size", "lr_warmup_fraction", "train_iters"}
    own |= {"normalization", "num_query_groups"}  # of a file with the model's arguments only
    return bool(own & arguments.keys()) and "num_layers" in arguments
