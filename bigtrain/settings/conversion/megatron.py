"""Arguments of GPT-NeoX and of Megatron-LM, as YAML or JSON. Pure.

A file of GPT-NeoX is often one of several that are given together: ``bigtrain convert`` takes them
all, and later ones win. Models and vocabularies: `megatron_model.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.settings.conversion.accepted_values import as_number
from bigtrain.settings.conversion.draft import Draft
from bigtrain.settings.conversion.megatron_keys import NEOX_NAME
from bigtrain.settings.conversion.megatron_model import set_model, tokenizer_directory

_TEST_KEYS = ("ENV_VARS", "TEST_TYPE", "METRICS", "BEFORE_SCRIPT", "AFTER_SCRIPT", "LAUNCHER")
"""Keys of the YAMLs of Megatron-LM's functional tests that are not arguments."""


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a file: names with underscores, without leading dashes; arguments
    below MODEL_ARGS, language_model and model_parallel move to the top."""
    arguments: dict[str, Any] = {}
    for name, value in tree.items():
        is_group = name in ("MODEL_ARGS", "language_model", "model_parallel")
        if is_group and isinstance(value, Mapping):
            arguments.update(flat(value))
        elif name not in _TEST_KEYS:
            arguments[str(name).lstrip("-").replace("-", "_")] = value
    return arguments


def fill_neox(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several keys of GPT-NeoX."""
    # Optimizer.
    optimizer = draft.mapping("optimizer")
    params = {name: as_number(value) for name, value in optimizer.get("params", {}).items()}
    if str(optimizer.get("type", "Adam")).lower() not in ("adam", "adamw"):
        draft.refuse("optimizer", f"{optimizer.get('type')} is not converted", "type: Adam")
    lr = params.get("lr") or draft.required_number("lr", "optimizer.lr")
    _set_optimizer(draft, lr, params.get("betas", [0.9, 0.999]), params.get("eps", 1e-8))
    draft.set("optimizer.clip_norm", draft.number("gradient_clipping", 1.0))
    # Length, schedule and batch.
    steps = int(draft.required_number("train_iters", "train.steps", "train.epochs"))
    draft.required_number("seq_length", "batch.sequence_length")
    warmup_ratio = draft.number("warmup", 0.01)
    decay_iters = int(draft.number("lr_decay_iters", steps))
    exact_warmup = decay_iters * warmup_ratio
    warmup_steps = int(exact_warmup)
    if warmup_steps:
        draft.set("schedule.warmup_steps", warmup_steps)
    if warmup_steps != exact_warmup:
        draft.notes.append(
            f"warmup = {warmup_ratio:g}: {exact_warmup:g} steps are {warmup_steps}, as there"
        )
    _set_schedule(draft, lr, steps, decay_iters, warmup_steps)
    _set_neox_batch(draft)
    # Dtypes, engine, checkpoints and model.
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
    if len(zero) > 1:
        draft.notes.append(
            f"zero_optimization: its stage is used, by ds_configs/zero{zero.get('stage', 0)}.json; "
            "bucket sizes and overlap are the JSON's, with the same results"
        )
    if draft.value("keep_last_n_checkpoints") is None:
        draft.notes.append(
            "keep_last_n_checkpoints: GPT-NeoX keeps all checkpoints; here checkpoint.keep_last=2"
        )
    if draft.value("checkpoint_activations"):
        draft.set("model.gradient_checkpointing", "full")
    attention = str(draft.value("attention_config", "global"))
    if any(name in attention for name in ("mamba", "rwkv", "gmlp", "sparse", "local", "bigbird")):
        draft.refuse("attention_config", "only flash and global attention are converted")
    set_model(draft, uses_rms=draft.value("norm") == "rmsnorm")
    _set_data(draft)


def fill_megatron(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several arguments of Megatron-LM."""
    # Optimizer and batch.
    lr = float(draft.required_number("lr", "optimizer.lr"))
    betas = [draft.number("adam_beta1", 0.9), draft.number("adam_beta2", 0.999)]
    if draft.value("optimizer", "adam") != "adam":
        draft.refuse("optimizer", "is not converted: adam")
    _set_optimizer(draft, lr, betas, float(draft.number("adam_eps", 1e-8)))
    draft.set("optimizer.clip_norm", draft.number("clip_grad", 1.0))
    steps = int(draft.required_number("train_iters", "train.steps", "train.epochs"))
    draft.required_number("seq_length", "batch.sequence_length")
    draft.required_number("micro_batch_size", "batch.micro_batch_size")
    draft.required_number("global_batch_size", "batch.global_batch_size", "batch.global_tokens")
    # Schedule.
    decay_iters = int(draft.number("lr_decay_iters", steps))
    warmup_steps = int(draft.number("lr_warmup_iters", 0))
    if draft.value("lr_warmup_fraction"):
        warmup_steps = int(draft.number("lr_warmup_fraction") * decay_iters)
    if warmup_steps:
        draft.set("schedule.warmup_steps", warmup_steps)
    _set_schedule(draft, lr, steps, decay_iters, warmup_steps)
    # Precision, recomputation, documents and model.
    dtype = "bfloat16" if draft.value("bf16") else "float32"
    draft.set("precision.dtype", "float16" if draft.value("fp16") else dtype)
    if draft.value("recompute_activations") or draft.value("recompute_granularity") == "full":
        draft.set("model.gradient_checkpointing", "full")
    resets_positions = bool(draft.value("reset_position_ids"))
    resets_attention = bool(draft.value("reset_attention_mask"))
    if resets_positions and resets_attention:
        draft.set("data.document_boundaries", "isolate")
    elif resets_positions or resets_attention:
        key = "reset_position_ids" if resets_positions else "reset_attention_mask"
        draft.refuse(key, "positions and attention are isolated together, or not at all")
    set_model(draft, uses_rms=draft.value("normalization", "LayerNorm") == "RMSNorm")
    _set_data(draft)


def _set_optimizer(draft: Draft, lr: float, betas: list[float], eps: float) -> None:
    """Set AdamW, and the seed, from these values and from arguments that both trainers have."""
    draft.set("optimizer.type", "adamw")
    draft.set("optimizer.lr", lr)
    draft.set("optimizer.betas", betas)
    draft.set("optimizer.eps", eps)
    draft.set("optimizer.weight_decay", draft.number("weight_decay"))
    draft.set("seed", int(draft.number("seed")))


def _set_schedule(draft: Draft, lr: float, steps: int, decay_iters: int, warmup_steps: int) -> None:
    """Set the schedule. After warmup, with progress p in [0, 1] over the decay steps:
    cosine: min_lr + (lr - min_lr) (1 + cos(pi p)) / 2, as in bigtrain. linear: Megatron-LM's line
    ends at min_lr; GPT-NeoX's line ends at 0 but is cut off at min_lr, which it reaches after
    (1 - min_lr / lr) of the decay steps. Sources: GPT-NeoX megatron/learning_rates.py, Megatron-LM
    core/optimizer_param_scheduler.py."""
    style = draft.value("lr_decay_style", "linear")
    if style not in ("cosine", "linear", "constant"):
        draft.refuse("lr_decay_style", "is not converted: cosine, linear, constant")
        return
    draft.set("schedule.type", style)
    if style == "constant":
        return
    min_lr_ratio = draft.number("min_lr", 0.0) / (lr or 1.0)
    draft.set("schedule.min_lr_ratio", min_lr_ratio)
    decay_steps = max(1, decay_iters - warmup_steps)
    is_cut_off = style == "linear" and bool(min_lr_ratio) and draft.trainer == NEOX_NAME
    if is_cut_off:
        exact_steps = decay_steps * (1 - min_lr_ratio)
        decay_steps = max(1, round(exact_steps))
        draft.notes.append(
            f"min_lr: GPT-NeoX's line to 0 is cut off at min_lr, after {exact_steps:g} steps of "
            f"decay: schedule.decay_steps={decay_steps}"
        )
    elif style == "cosine" and min_lr_ratio and draft.trainer == NEOX_NAME:
        draft.notes.append(
            "min_lr: the cosine ends at min_lr, as in GPT-NeoX since #1106; before, its cosine to "
            "0 was cut off there"
        )
    if decay_iters != steps or is_cut_off:
        draft.set("schedule.decay_steps", decay_steps)


def _set_neox_batch(draft: Draft) -> None:
    """Set the parallel degrees, and the batch, which depends on them."""
    tensor_size = int(draft.number("model_parallel_size", 1))
    pipeline_size = max(1, int(draft.number("pipe_parallel_size", 0)))
    for size, name in ((tensor_size, "tensor"), (pipeline_size, "pipeline")):
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
        data_size = max(1, draft.world_size // (tensor_size * pipeline_size))
        draft.set("batch.global_batch_size", micro_batch_size * accumulation * data_size)


def _set_data(draft: Draft) -> None:
    """Set the data, and the command that makes a dataset of Megatron's .bin and .idx files."""
    paths = draft.value("train_data_paths", draft.value("data_path", "DATA/text_document"))
    paths = paths if isinstance(paths, list) else str(paths).split()
    held_out_paths = draft.value("valid_data_paths")
    tokenizer = tokenizer_directory(draft)
    words = ["bigtrain manifest", *map(str, paths), f"--tokenizer {tokenizer}"]
    if isinstance(held_out_paths, list):
        words += ["--held-out", *map(str, held_out_paths)]
    draft.commands.append(" ".join(words))
    draft.notes.append(
        "data without .bin and .idx files, such as the JSONL that they were made of: `bigtrain "
        f"tokenize --input FILE.jsonl --tokenizer {tokenizer} --output shards/` in place of "
        "`manifest`, and data.path=shards/"
    )
    if draft.value("split") and not isinstance(held_out_paths, list):
        draft.notes.append(
            f"split = {draft.value('split')}: no part of the data is held out, unless `manifest "
            "--held-out` names files or `tokenize --held-out` a share"
        )
    draft.set("data.path", str(paths[0]).rpartition("/")[0] or ".")  # the directory of the files
    if "output" not in draft.run:
        draft.set("output.directory", "runs/converted")
    num_batches = draft.number("eval_iters")
    if num_batches and "global_batch_size" in draft.run.get("batch", {}):
        draft.set("evaluation.samples", int(num_batches * draft.run["batch"]["global_batch_size"]))


def is_neox(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments are GPT-NeoX's."""
    names = {"pipe_parallel_size", "train_micro_batch_size_per_gpu", "pos_emb", "no_weight_tying"}
    return bool(names & arguments.keys())


def is_megatron(arguments: Mapping[str, Any]) -> bool:
    """Return whether arguments are Megatron-LM's."""
    names = {"tensor_model_parallel_size", "micro_batch_size", "lr_warmup_fraction", "train_iters"}
    names |= {"normalization", "num_query_groups"}  # of a file with the model's arguments only
    return bool(names & arguments.keys()) and "num_layers" in arguments
