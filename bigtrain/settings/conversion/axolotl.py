"""Axolotl's YAML. Pure. Defaults are taken from Axolotl of July 2026 (utils/schemas/,
core/builders/)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.settings.conversion.axolotl_rows import set_rows
from bigtrain.settings.conversion.common import (
    KeyDefault,
    set_adam,
    set_attention,
    set_batch,
    set_dtype,
    set_engine,
    set_length,
    set_noise,
    set_optimizer,
    set_schedule,
    set_steps,
)
from bigtrain.settings.conversion.draft import Draft, is_unset
from bigtrain.settings.conversion.methods import METHODS, set_objective
from bigtrain.settings.conversion.trainer import missing_evaluations, set_adapters, set_best


def fill(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several keys."""
    # Optimizer and schedule.
    draft.set("optimizer.lr", draft.number("learning_rate"))
    set_optimizer(draft, "optimizer", "adamw_torch_fused")
    set_adam(draft, ("adam_beta1", "adam_beta2"), "adam_epsilon")
    draft.set("optimizer.weight_decay", draft.number("weight_decay", 0.0))
    draft.set("optimizer.clip_norm", draft.number("max_grad_norm", 1.0))
    set_schedule(draft, "lr_scheduler", "cosine", draft.mapping("lr_scheduler_kwargs"))
    is_cosine = draft.value("lr_scheduler", "cosine") == "cosine"
    if is_cosine and draft.value("cosine_min_lr_ratio") is not None:
        draft.set("schedule.min_lr_ratio", draft.number("cosine_min_lr_ratio"))
    warmup_keys = {"warmup_steps", "warmup_ratio"}
    has_warmup = any(draft.value(key) is not None for key in warmup_keys)
    if not has_warmup and not warmup_keys & draft.unreadable:
        rule = "without it Axolotl warms up for min(3 % of the steps, 100)"
        draft.refuse("warmup_ratio", rule, "warmup_steps: N or warmup_ratio: R in the file")
    # Batch, length and precision.
    model_ranks = _set_degrees(draft)
    micro_batch = KeyDefault("micro_batch_size", 1)
    accumulation = KeyDefault("gradient_accumulation_steps", 1)
    set_batch(draft, micro_batch, accumulation, model_ranks)
    set_length(draft, KeyDefault("num_epochs", 1.0), "max_steps")
    # By default bf16 is auto: true unless fp16 is.
    if draft.value("fp16") is True and draft.value("bf16") in (None, "auto"):
        draft.set("precision.dtype", "float16")
    elif draft.value("bf16") is None:
        draft.set("precision.dtype", "bfloat16")
    else:
        set_dtype(draft, default="float32")
    draft.run.setdefault("batch", {}).setdefault("sequence_length", 512)
    set_noise(draft, "neftune_noise_alpha", "noisy_embedding_alpha")
    _set_model(draft)
    _set_log(draft)
    _set_objective(draft)
    set_rows(draft)


def _set_degrees(draft: Draft) -> int:
    """Set the parallel degrees. Return the number of ranks that share the samples of a
    micro-batch."""
    model_ranks = 1
    for key, name in (
        ("tensor_parallel_size", "tensor"),
        ("context_parallel_size", "sequence"),
        ("sequence_parallel_degree", "sequence"),
        ("expert_parallel_size", "expert"),
    ):
        size = int(draft.number(key, 1))
        if size > 1:
            draft.set(f"parallel.{name}", size)
            model_ranks *= 1 if name == "expert" else size  # expert ranks read different samples
    return model_ranks


def _set_model(draft: Draft) -> None:
    """Set recomputation, attention, compilation, engine and adapters."""
    recompute = draft.value("gradient_checkpointing")
    if recompute or draft.value("activation_offloading"):
        draft.set("model.gradient_checkpointing", "full")
    if recompute == "offload" or draft.value("activation_offloading"):
        draft.set("model.activation_offload", True)
    # Attention has a key, or one of four older switches.
    attention = draft.value("attn_implementation")
    for key, implementation in (
        ("flash_attention", "flash_attention_2"),
        ("sdp_attention", "sdpa"),
        ("eager_attention", "eager"),
        ("flex_attention", "flex_attention"),
    ):
        attention = implementation if draft.value(key) is True else attention
    set_attention(draft, attention)
    if draft.value("torch_compile"):
        draft.set("model.compile", "on")
    # FSDP shards what ZeRO 3 shards.
    if draft.value("deepspeed"):
        set_engine(draft, "deepspeed")
    elif draft.value("fsdp") or draft.value("fsdp_config"):
        draft.set("engine.deepspeed_config", "zero3")
    _set_adapters(draft)


def _set_adapters(draft: Draft) -> None:
    """Set the adapters. Axolotl has defaults for neither rank nor modules, so their keys must be in
    the file."""
    adapter = draft.value("adapter")
    if adapter is None:
        return
    if adapter not in ("lora", "qlora"):
        draft.refuse("adapter", "is not a kind of adapter of bigtrain: lora, qlora")
        return
    targets = draft.value("lora_target_modules", [])
    if draft.value("lora_target_linear") or targets == "all-linear":
        targets = "all-linear"
    if isinstance(targets, str) and targets != "all-linear":
        rule = "is a regular expression, and adapters.targets are shell patterns"
        draft.refuse("lora_target_modules", rule, "a list of names of modules in the file")
        targets = "all-linear"
    for key in ("lora_r", "lora_alpha"):
        if draft.number(key) is None:
            draft.refuse(key, "is missing, and Axolotl has no default", f"{key}: N in the file")
    set_adapters(
        draft,
        rank=draft.number("lora_r", 8),
        alpha=draft.number("lora_alpha", 16),
        targets=targets or "all-linear",
        dropout=draft.number("lora_dropout", 0.0),
    )
    # Options of adapters that change the mathematics.
    if draft.value("loraplus_lr_ratio") and draft.number("weight_decay", 0.0):
        draft.set("optimizer.weight_decay", 0.0)
        draft.notes.append("weight_decay: Axolotl's optimizer of LoRA+ does not decay")
    initial_values = draft.value("peft_init_lora_weights", True)
    if initial_values == "pissa":
        draft.set("adapters.init", "pissa")
    elif initial_values is not True:
        draft.refuse("peft_init_lora_weights", "is not implemented: true, pissa")
    if not targets:
        draft.refuse("lora_target_modules", "is missing", "lora_target_linear: true in the file")
    if draft.value("load_in_4bit"):
        draft.set("adapters.double_quantization", True)
    if draft.value("lora_target_parameters"):
        draft.set("adapters.target_parameters", draft.value("lora_target_parameters"))
    for key, name in (("peft_use_rslora", "rslora"), ("peft_use_dora", "dora")):
        if draft.value(key):
            draft.set(f"adapters.{name}", True)


def _set_log(draft: Draft) -> None:
    """Set log, seed, trackers, saves and evaluations."""
    draft.set("logging.every_steps", max(1, int(draft.number("logging_steps", 500))))
    draft.set("seed", int(draft.number("seed", 42)))
    if draft.value("wandb_project"):
        draft.set("logging.trackers", ["wandb"])
        draft.set("logging.project", draft.value("wandb_project"))
    elif draft.value("use_tensorboard"):
        draft.set("logging.trackers", ["tensorboard"])
    for key, section in (("save_steps", "checkpoint"), ("eval_steps", "evaluation")):
        set_steps(draft, key, section)
    for key, section in (("saves_per_epoch", "checkpoint"), ("evals_per_epoch", "evaluation")):
        if draft.value(key):
            draft.set(f"{section}.every_epochs", 1 / draft.number(key))
    has_epochs = draft.number("max_steps", -1) <= 0
    if has_epochs and not draft.value("saves_per_epoch") and not draft.value("save_steps"):
        draft.set("checkpoint.every_epochs", 1.0)
    if not draft.value("save_total_limit") and "checkpoint.keep_last" not in draft.given_settings:
        draft.notes.append(
            "save_total_limit is missing: Axolotl keeps the newest 4 checkpoints; here the newest "
            "2: checkpoint.keep_last=4"
        )
    _set_evaluation(draft)
    if draft.value("early_stopping_patience"):
        draft.notes.append(
            "early_stopping_patience: evaluation.early_stopping.patience, with every_steps"
        )


def _set_evaluation(draft: Draft) -> None:
    """Set evaluations by eval_strategy, and the best checkpoint; note where Axolotl's defaults
    differ (core/builders/base.py and causal.py; utils/config/, `normalize_config`)."""
    has_split, has_sets = draft.number("val_set_size", 0) > 0, bool(draft.value("test_datasets"))
    has_period = draft.value("eval_steps") or draft.value("evals_per_epoch")
    if draft.value("eval_strategy") == "epoch" and not has_period:
        draft.set("evaluation.every_epochs", 1.0)
    elif not has_period and (has_split or has_sets):
        draft.notes.append(
            "eval_steps and evals_per_epoch are missing: older versions of Axolotl then evaluate "
            "each epoch, newer ones never; here once, at the end of the run: "
            "evaluation.every_epochs=1 evaluates each epoch"
        )
    # Axolotl loads the best model by itself if each save follows an evaluation. It compares the
    # two periods, in steps or as shares of the run (below 1).
    periods = []
    for key, rate_key in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        share = 1.0
        if draft.value(rate_key):
            share = 1 / (draft.number(rate_key) * draft.number("num_epochs", 1))
        periods.append(share if share < 1 else draft.number(key, 0))
    save_period, evaluation_period = periods
    are_periods_set = save_period and evaluation_period
    can_load_best = (
        has_split != has_sets and are_periods_set and save_period % evaluation_period == 0
    )
    loads_best = draft.value("load_best_model_at_end")  # None: by default
    if can_load_best and (loads_best or draft.value("early_stopping_patience")):
        set_best(draft)
    elif can_load_best and loads_best is None and not draft.value("rl"):
        settings = " ".join(("checkpoint.keep_best=1", *missing_evaluations(draft)))
        draft.notes.append(
            "load_best_model_at_end is missing: Axolotl then ends with the weights of the best "
            f"checkpoint; here with the last: {settings} and `bigtrain export --best`"
        )
    elif loads_best and not can_load_best:
        draft.notes.append(
            "load_best_model_at_end = True: Axolotl does so only with val_set_size or "
            "test_datasets, and save_steps that are a multiple of eval_steps, so not here"
        )


def _set_objective(draft: Draft) -> None:
    """Set the objective of reward_model or rl; without either it is next_token."""
    method = "reward" if draft.value("reward_model") else draft.value("rl")
    if draft.value("process_reward_model"):
        draft.refuse("process_reward_model", "rewards of steps are not a kind of objective")
    elif method is not None and method not in METHODS:
        draft.refuse("rl", "is not a kind of objective")
    elif method is not None:
        beta = draft.number("rl_beta", draft.number("dpo_beta", draft.number("orpo_alpha", 0.1)))
        weights = ("kto_desirable_weight", "kto_undesirable_weight")
        set_objective(draft, METHODS[method], beta, weights)


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file, with datasets as a list of dictionaries: a file may also have a
    single dataset without a list, and a path in place of a dataset's dictionary."""
    keys = dict(tree)
    for key in ("datasets", "pretraining_dataset", "test_datasets"):
        datasets = [keys[key]] if isinstance(keys.get(key), (str, Mapping)) else keys.get(key)
        if isinstance(datasets, list):
            keys[key] = [{"path": item} if isinstance(item, str) else item for item in datasets]
    return keys


def is_axolotl(keys: Mapping[str, Any]) -> bool:
    """Return whether a file is Axolotl's."""
    axolotl_keys = {"datasets", "sequence_len", "micro_batch_size", "pretraining_dataset"}
    has_model = "base_model" in keys and not is_unset(keys["base_model"])
    return has_model and bool(axolotl_keys & keys.keys())
