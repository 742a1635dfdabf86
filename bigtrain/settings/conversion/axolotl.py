"""Axolotl's YAML. Pure. Defaults are taken from Axolotl of July 2026 (utils/schemas/,
core/builders/)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.settings.conversion.accepted_values import (
    AXOLOTL_DATASET_VALUES,
    AXOLOTL_VALUES,
    TEXT,
)
from bigtrain.settings.conversion.axolotl_rows import set_rows
from bigtrain.settings.conversion.common import (
    SCHEDULE_OPTIONS,
    set_adam,
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
from bigtrain.settings.conversion.tables import (
    Table,
    note,
    only,
    read,
    refused,
    rows,
    sets,
    with_values,
)
from bigtrain.settings.conversion.trainer import missing_evaluations, set_adapters, set_best

NAME = "Axolotl"
_SAME = note("the same results by other kernels; see model.kernels and model.loss")
_ELSEWHERE = note("is of the program, not of the training")
_ANSWERS = only((["assistant"], ["gpt"]), "a run learns answers only")

_DATASET: Table = {
    "path": read("`tokenize --input`"),
    "name": read("`tokenize --dataset-config`"),
    "split": read("`tokenize --dataset-split`"),
    "type": read("`tokenize --format`"),
    **rows("data_files data_dir", note("name these files in --input of the tokenize line")),
    "ds_type": note("the ending of a file decides its format: tokenize --read-as"),
    "preprocess_shards": note("tokenize takes any number of rows"),
    "streaming": note("shards are read in the order of data.samples"),
    **rows("shards shards_idx skip", refused("a part of the rows: cut the file")),
    "revision": refused("tokenize reads the dataset's main branch"),
    "trust_remote_code": note("code of the hub is never run"),
    **rows("input_transform input_format", refused("tokenize --filter MODULE:FUNCTION edits rows")),
    "conversation": read("`tokenize --format`, of type alpaca_chat"),
    "chat_template": read("`tokenize --chat-template`, of this dataset"),
    "chat_template_jinja": refused("write its text into a file for tokenize --chat-template"),
    "field": read("`tokenize --text-key`"),
    "text_column": read("`tokenize --text-key`"),
    "field_messages": read("`tokenize --key messages=`"),
    "message_property_mappings": read(
        "`tokenize --format`",
        with_values(
            rows("role content", read("`tokenize --format`: messages or sharegpt")),
            [(TEXT, "role content")],
        ),
    ),
    **rows("message_field_role message_field_content", read("`tokenize --format`")),
    "roles": read("`tokenize --role`"),
    **rows("field_human field_model field_system", refused("tokenize --key NAME=KEY names keys")),
    "field_tools": only(("tools",), "tokenize reads the tools of a conversation from this key"),
    **rows(
        "field_thinking template_thinking_key",
        only(("reasoning_content",), "messages are rendered with the keys that they have"),
    ),
    "split_thinking": refused("messages are rendered as they are"),
    **rows(
        "message_field_training message_field_training_detail",
        refused("marks of messages do not decide what is learned: tokenize --learn"),
    ),
    "roles_to_train": _ANSWERS,
    **rows(
        "train_on_eos train_on_eot",
        only(("turn",), "a run learns the end of each answer that it learns"),
    ),
    "drop_system_message": refused("a system message is a part of the rows"),
    **rows("logprobs_field temperature", refused("distillation is not a kind of objective")),
    "field_chosen": only(("chosen",), "tokenize --key chosen=KEY names another one"),
    "field_rejected": only(("rejected",), "tokenize --key rejected=KEY names another one"),
    **rows(
        "step_separator max_completion_length train_on_last_step_only",
        refused("rewards of steps are not a kind of objective"),
    ),
}
_DATASET = with_values(_DATASET, AXOLOTL_DATASET_VALUES)
"""Keys of a dataset (Axolotl's utils/schemas/datasets.py)."""

TABLE: Table = {
    "base_model": sets("model.path"),
    "base_model_config": note("the configuration is the base model's"),
    **rows(
        "model_type tokenizer_type tokenizer_config processor_type is_llama_derived_model "
        "is_mistral_derived_model is_falcon_derived_model is_qwen_derived_model cls_model_config "
        "tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common",
        note("the directory of the model decides its classes"),
    ),
    "trust_remote_code": note("code of the hub is never run; a model that needs it is refused"),
    "revision_of_model": refused("a run reads the model's main branch, or a directory"),
    "adapter": read("`adapters`: lora, qlora"),
    "lora_r": read("`adapters.rank`"),
    "lora_alpha": read("`adapters.alpha`"),
    "lora_dropout": read("`adapters.dropout`"),
    **rows("lora_target_modules lora_target_linear", read("`adapters.targets`")),
    "lora_target_parameters": read("`adapters.target_parameters`"),
    "lora_modules_to_save": read("`adapters.modules_to_save`"),
    "peft_use_rslora": read("`adapters.rslora`"),
    "peft_use_dora": read("`adapters.dora`"),
    "load_in_4bit": read("`adapters.quantization`, double_quantization true"),
    "load_in_8bit": read("`adapters.quantization`: int8"),
    "peft_init_lora_weights": read("`adapters.init`: pissa"),
    "lora_model_dir": refused("adapters begin from zero"),
    "lora_fan_in_fan_out": note("the layer's class decides it"),
    "loraplus_lr_ratio": read("`adapters.loraplus_lr_ratio`; Axolotl then has no weight decay"),
    "loraplus_lr_embedding": note("embeddings have no adapters"),
    "relora_steps": refused("merging adapters during the run (ReLoRA) is not implemented"),
    **rows("gptq quantize_moe_experts qat", refused("this quantization is not implemented")),
    "learning_rate": read("`optimizer.lr`"),
    "eta_min": refused("lr_scheduler_kwargs has the least learning rate"),
    "optimizer": read("`optimizer.type`"),
    **rows("optim_args optim_target_modules lr_groups", refused("options of another optimizer")),
    "weight_decay": read("`optimizer.weight_decay`"),
    **rows("adam_beta1 adam_beta2", read("`optimizer.betas`")),
    "adam_epsilon": read("`optimizer.eps`"),
    "max_grad_norm": read("`optimizer.clip_norm`"),
    "lr_scheduler": read("`schedule.type`"),
    "lr_scheduler_kwargs": read("`schedule.min_lr_ratio`, `schedule.cycles`", SCHEDULE_OPTIONS),
    "cosine_min_lr_ratio": read("`schedule.min_lr_ratio`"),
    "cosine_constant_lr_ratio": refused("a constant rate at the end is not implemented"),
    "lr_quadratic_warmup": refused("the warm-up is linear"),
    "warmup_steps": read("`schedule.warmup_steps`"),
    "warmup_ratio": read("`schedule.warmup_ratio`"),
    "micro_batch_size": read("`batch.micro_batch_size`, `batch.global_batch_size`"),
    "gradient_accumulation_steps": read("`batch.global_batch_size`"),
    "batch_size": refused("gives the accumulation in another way: gradient_accumulation_steps"),
    "num_epochs": read("`train.epochs`"),
    "max_steps": read("`train.steps`"),
    "sequence_len": sets("batch.sequence_length"),
    "sample_packing": read("`data.packing`"),
    **rows(
        "pad_to_sequence_len eval_sample_packing eval_batch_size eval_table_size group_by_length "
        "sample_packing_eff_est sample_packing_sequentially sample_packing_bin_size "
        "sample_packing_group_size max_packed_sequence_len",
        note("packs are padded to the sequence length, in the order of data.packing"),
    ),
    **rows("bf16 fp16", read("`precision.dtype`")),
    **rows("bfloat16 float16", refused("weights in this dtype only: masters are float32")),
    "tf32": sets("precision.tf32", {True: True, False: False, "auto": True}),
    "fp8": refused("Axolotl's float8 is another one than precision.float8"),
    "gradient_checkpointing": read(
        "`model.gradient_checkpointing`; offload: also `model.activation_offload`"
    ),
    "activation_offloading": read("`model.activation_offload`"),
    "gradient_checkpointing_kwargs": note("recomputation gives the same gradients"),
    **rows(
        "attn_implementation flash_attention sdp_attention eager_attention flex_attention "
        "xformers_attention",
        read("`model.attention`"),
    ),
    "torch_compile": read("`model.compile`"),
    **rows(
        "plugins liger_rms_norm liger_rope liger_glu_activation liger_swiglu liger_layer_norm "
        "liger_fused_linear_cross_entropy liger_rms_norm_gated flash_attn_cross_entropy "
        "flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp lora_mlp_kernel "
        "lora_qkv_kernel lora_o_kernel use_kernels unsloth_cross_entropy_loss flash_optimum "
        "fused_attn_kernel experts_implementation use_scattermoe use_sonicmoe "
        "flex_attn_compile_kwargs gemma4_hybrid_attn_impl llama4_linearized_experts",
        _SAME,
    ),
    "deepspeed": read("`engine.deepspeed_config`, a path"),
    **rows(
        "fsdp fsdp_config fsdp_version", note("ZeRO takes its place: engine.deepspeed_config=zero3")
    ),
    "tensor_parallel_size": read("`parallel.tensor`"),
    "context_parallel_size": read("`parallel.sequence`"),
    "sequence_parallel_degree": read("`parallel.sequence`"),
    "expert_parallel_size": read("`parallel.expert`"),
    **rows(
        "dp_shard_size dp_replicate_size", note("the data-parallel size is the rest of the world")
    ),
    "heads_k_stride": note("of ring attention; results are the same"),
    "ring_attn_func": note("of ring attention; results are the same"),
    **rows("datasets pretraining_dataset", read("the `tokenize` lines", _DATASET)),
    "test_datasets": note("tokenize them, and name them in evaluation.held_out", _DATASET),
    "val_set_size": read("`tokenize --held-out`"),
    "chat_template": read("`tokenize --chat-template`; tokenizer_default: nothing"),
    "chat_template_jinja": read("a file for `tokenize --chat-template`"),
    "train_on_inputs": only((False,), "a run learns answers only"),
    "roles_to_train": _ANSWERS,
    "eot_tokens": note("ends of turns are found in the template"),
    "default_system_message": refused("a system message is a part of the rows"),
    "special_tokens": read("only pad_token: padding is never learned"),
    "tokens": refused(
        "added tokens: `bigtrain tokenizer --config` and tokenizer.add_special_tokens"
    ),
    "added_tokens_overrides": refused("changes the tokenizer: change its directory"),
    "resize_token_embeddings_to_32x": refused("more rows: model.vocabulary.pad_to_multiple_of=32"),
    "overrides_of_model_config": sets("model.overrides"),
    "model_config": sets("model.overrides"),
    "unfrozen_parameters": refused("model.frozen names what is not trained, by shell patterns"),
    "excess_length_strategy": note("see the line on rows that are too long"),
    "shuffle_merged_datasets": only((True,), "samples are always shuffled"),
    "rl": read("`objective`: dpo, ipo, simpo, orpo, kto"),
    **rows(
        "rl_beta dpo_beta simpo_gamma kto_desirable_weight kto_undesirable_weight orpo_alpha",
        read("`objective`"),
    ),
    **rows("reward_model process_reward_model", read("`objective`: reward")),
    "center_rewards_coefficient": read("`objective.center_rewards_coefficient`"),
    "dpo_label_smoothing": read("`objective.label_smoothing`"),
    **rows("trl ebft num_labels vllm", refused("this training is not a kind of objective")),
    "neftune_noise_alpha": read("`model.neftune_noise_alpha`"),
    "noisy_embedding_alpha": read("`model.neftune_noise_alpha`"),
    "output_dir": sets("output.directory"),
    "logging_steps": read("`logging.every_steps`"),
    "wandb_project": read("`logging.trackers`, `logging.project`"),
    "use_tensorboard": read("`logging.trackers`"),
    "save_steps": read("`checkpoint.every_steps`"),
    "eval_steps": read("`evaluation.every_steps`"),
    "save_total_limit": sets("checkpoint.keep_last"),
    "saves_per_epoch": read("`checkpoint.every_epochs`, 1 divided by it"),
    "evals_per_epoch": read("`evaluation.every_epochs`, 1 divided by it"),
    "save_strategy": note("the numbers of steps or of an epoch decide it"),
    "eval_strategy": read("`evaluation.every_epochs`, without a number of steps or of an epoch"),
    "load_best_model_at_end": read("`checkpoint.keep_best`"),
    **rows("metric_for_best_model greater_is_better", read("`evaluation.best`")),
    "early_stopping_patience": read("see the line"),
    "loss_watchdog_threshold": note("guard.spike_sigma skips bad steps"),
    "loss_watchdog_patience": note("guard.max_consecutive"),
    "seed": read("`seed`"),
    "resume_from_checkpoint": note("the same command resumes"),
    "auto_resume_from_checkpoints": note("the same command resumes"),
    "save_only_model": note("a run resumes from complete checkpoints"),
    "remove_unused_columns": _ELSEWHERE,
    **rows(
        "dataset_prepared_path wandb_entity wandb_watch wandb_name wandb_run_id wandb_log_model "
        "strict hub_model_id hub_strategy push_dataset_to_hub hf_use_auth_token debug local_rank "
        "dataset_processes ddp_find_unused_parameters ddp_timeout torchdistx_path device_map "
        "experimental_skip_move_to_device skip_prepare_dataset save_safetensors gptq_groupsize "
        "gptq_model_v1 save_first_step trackio_project_name trackio_run_name trackio_space_id "
        "use_mlflow mlflow_experiment_name dataloader_num_workers dataloader_pin_memory "
        "dataloader_prefetch_factor comet_project_name gc_steps include_tokens_per_second "
        "profiler_steps",
        _ELSEWHERE,
    ),
}
TABLE = with_values(TABLE, AXOLOTL_VALUES)


def fill(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several keys."""
    draft.set("optimizer.lr", draft.number("learning_rate"))
    set_optimizer(draft, "optimizer", "adamw_torch_fused")
    set_adam(draft, ("adam_beta1", "adam_beta2"), "adam_epsilon")
    draft.set("optimizer.weight_decay", draft.number("weight_decay", 0.0))
    draft.set("optimizer.clip_norm", draft.number("max_grad_norm", 1.0))
    options = draft.mapping("lr_scheduler_kwargs")
    name = draft.value("lr_scheduler", "cosine")
    set_schedule(draft, "lr_scheduler", "cosine", options)
    if name == "cosine" and draft.value("cosine_min_lr_ratio") is not None:
        draft.set("schedule.min_lr_ratio", draft.number("cosine_min_lr_ratio"))
    warmup_keys = {"warmup_steps", "warmup_ratio"}
    has_warmup = any(draft.value(key) is not None for key in warmup_keys)
    if not has_warmup and not warmup_keys & draft.unreadable:
        rule = "without it Axolotl warms up for min(3 % of the steps, 100)"
        draft.refuse("warmup_ratio", rule, "warmup_steps: N or warmup_ratio: R in the file")
    degrees = _set_degrees(draft)
    set_batch(draft, ("micro_batch_size", 1), ("gradient_accumulation_steps", 1), degrees)
    set_length(draft, ("num_epochs", 1.0), "max_steps")
    # bf16 is auto by default, and then true where fp16 is not.
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
    """Set the parallel degrees. Return the ranks that share a copy of the model's samples."""
    total = 1
    for key, name in (
        ("tensor_parallel_size", "tensor"),
        ("context_parallel_size", "sequence"),
        ("sequence_parallel_degree", "sequence"),
        ("expert_parallel_size", "expert"),
    ):
        size = int(draft.number(key, 1))
        if size > 1:
            draft.set(f"parallel.{name}", size)
            total *= 1 if name == "expert" else size
    return total


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
    if attention in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"):
        draft.set("model.attention", attention)
    elif attention is not None:
        draft.notes.append(
            f"attn_implementation = {attention!r}: model.attention=auto, the same result"
        )
    if draft.value("torch_compile"):
        draft.set("model.compile", "on")
    # FSDP shards what ZeRO 3 shards.
    if draft.value("deepspeed"):
        set_engine(draft, "deepspeed")
    elif draft.value("fsdp") or draft.value("fsdp_config"):
        draft.set("engine.deepspeed_config", "zero3")
    # Adapters: Axolotl has defaults for neither rank nor modules.
    adapter = draft.value("adapter")
    if adapter in ("lora", "qlora"):
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
        rank, alpha = draft.number("lora_r", 8), draft.number("lora_alpha", 16)
        set_adapters(
            draft,
            rank=rank,
            alpha=alpha,
            targets=targets or "all-linear",
            dropout=draft.number("lora_dropout", 0.0),
        )
        # Options of adapters that change the mathematics.
        if draft.value("loraplus_lr_ratio") and draft.number("weight_decay", 0.0):
            draft.set("optimizer.weight_decay", 0.0)
            draft.notes.append("weight_decay: Axolotl's optimizer of LoRA+ does not decay")
        initial = draft.value("peft_init_lora_weights", True)
        if initial == "pissa":
            draft.set("adapters.init", "pissa")
        elif initial is not True:
            draft.refuse("peft_init_lora_weights", "is not implemented: true, pissa")
        if not targets:
            draft.refuse(
                "lora_target_modules", "is missing", "lora_target_linear: true in the file"
            )
        if draft.value("load_in_4bit"):
            draft.set("adapters.double_quantization", True)
        if draft.value("lora_target_parameters"):
            draft.set("adapters.target_parameters", draft.value("lora_target_parameters"))
        for key, name in (("peft_use_rslora", "rslora"), ("peft_use_dora", "dora")):
            if draft.value(key):
                draft.set(f"adapters.{name}", True)
    elif adapter is not None:
        draft.refuse("adapter", "is not a kind of adapter of bigtrain: lora, qlora")


def _set_log(draft: Draft) -> None:
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
    """Set evaluations by eval_strategy, and the best checkpoint; list where Axolotl's defaults
    differ (core/builders/base.py and causal.py; utils/config/, `normalize_config`)."""
    has_shares, has_sets = draft.number("val_set_size", 0) > 0, bool(draft.value("test_datasets"))
    has_numbers = draft.value("eval_steps") or draft.value("evals_per_epoch")
    if draft.value("eval_strategy") == "epoch" and not has_numbers:
        draft.set("evaluation.every_epochs", 1.0)
    elif not has_numbers and (has_shares or has_sets):
        draft.notes.append(
            "eval_steps and evals_per_epoch are missing: older versions of Axolotl then evaluate "
            "each epoch, newer ones never; here once, at the end of the run: "
            "evaluation.every_epochs=1 evaluates each epoch"
        )
    # Axolotl loads the best model by itself where each save follows an evaluation.
    periods = []
    for key, rate in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        share = 1 / (draft.number(rate) * draft.number("num_epochs", 1)) if draft.value(rate) else 1
        periods.append(share if share < 1 else draft.number(key, 0))
    save, evaluation = periods
    is_loaded = has_shares != has_sets and save and evaluation and save % evaluation == 0
    loads_best = draft.value("load_best_model_at_end")
    if is_loaded and (loads_best or draft.value("early_stopping_patience")):
        set_best(draft)
    elif is_loaded and loads_best is None and not draft.value("rl"):
        settings = " ".join(("checkpoint.keep_best=1", *missing_evaluations(draft)))
        draft.notes.append(
            "load_best_model_at_end is missing: Axolotl then ends with the weights of the best "
            f"checkpoint; here with the last: {settings} and `bigtrain export --best`"
        )
    elif loads_best and not is_loaded:
        draft.notes.append(
            "load_best_model_at_end = True: Axolotl does so only with val_set_size or "
            "test_datasets, and save_steps that are a multiple of eval_steps, so not here"
        )


def _set_objective(draft: Draft) -> None:
    name = "reward" if draft.value("reward_model") else draft.value("rl")
    if draft.value("process_reward_model"):
        draft.refuse("process_reward_model", "rewards of steps are not a kind of objective")
    elif name is not None and name not in METHODS:
        draft.refuse("rl", "is not a kind of objective")
    elif name is not None:
        beta = draft.number("rl_beta", draft.number("dpo_beta", draft.number("orpo_alpha", 0.1)))
        weights = ("kto_desirable_weight", "kto_undesirable_weight")
        set_objective(draft, METHODS[name], beta, weights)


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a file in which datasets are a list of dictionaries: a dataset may be its
    path, or a dictionary without a list."""
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
