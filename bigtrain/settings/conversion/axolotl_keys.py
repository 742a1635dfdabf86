"""Keys of Axolotl's YAML by name, and their settings here. Pure."""

from __future__ import annotations

from bigtrain.settings.conversion.accepted_values import (
    AXOLOTL_DATASET_VALUES,
    AXOLOTL_VALUES,
    TEXT,
)
from bigtrain.settings.conversion.common import SCHEDULE_OPTIONS
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

AXOLOTL_NAME = "Axolotl"
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

AXOLOTL_TABLE: Table = {
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
AXOLOTL_TABLE = with_values(AXOLOTL_TABLE, AXOLOTL_VALUES)
