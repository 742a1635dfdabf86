"""Arguments of GPT-NeoX and Megatron-LM by name, and their settings here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bigtrain.settings.conversion.accepted_values import (
    FIELDS,
    FLAG,
    MEGATRON_SHARED_VALUES,
    MEGATRON_VALUES,
    NEOX_VALUES,
    NUMBER,
    POSITIVE,
    TEXT,
    Values,
    whole,
)
from bigtrain.settings.conversion.tables import (
    Table,
    note,
    read,
    refused,
    rows,
    sets,
    with_values,
)

NEOX_NAME, MEGATRON_NAME = "GPT-NeoX", "Megatron-LM"
_MODEL = read("`model.config`")
_FASTER = note("the same results, faster or with less memory")
_PROGRAM = note("is of the program, not of the training")
INITIALIZATION = "initial weights are drawn with one standard deviation (initializer_range)"

NEOX_DEFAULTS: Mapping[str, Any] = {
    "weight_decay": 0.1,
    "seed": 1234,
    "norm": "layernorm",
    "activation": "gelu",
    "layernorm_epsilon": 1e-5,
    "rms_norm_epsilon": 1e-8,
    "use_bias_in_norms": True,
    "use_bias_in_attn_linear": True,
    "use_bias_in_mlp": True,
    "make_vocab_size_divisible_by": 128,
    "init_method": "normal",
    "output_layer_init_method": "scaled_normal",
    "split": "969, 30, 1",
}
"""Defaults of GPT-NeoX (megatron/neox_arguments/neox_args.py at ea7aefd8)."""

MEGATRON_DEFAULTS: Mapping[str, Any] = {
    "weight_decay": 0.01,
    "seed": 1234,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "add_bias_linear": True,
    "norm_epsilon": 1e-5,
    "make_vocab_size_divisible_by": 128,
    "output_layer_init_method": "scaled_normal",
}
"""Defaults of Megatron-LM (megatron/training/arguments.py and megatron/core/transformer/
transformer_config.py at d98e8a64)."""

_SHARED: Table = {
    **rows(
        "num_layers hidden_size num_attention_heads max_position_embeddings intermediate_size "
        "ffn_hidden_size norm normalization swiglu activation position_embedding_type pos_emb "
        "rotary_pct rotary_percent rotary_emb_base rotary_base num_kv_heads num_query_groups "
        "group_query_attention mlp_multiple_of untie_embeddings_and_output_weights no_weight_tying "
        "gpt_j_residual rms_norm_epsilon layernorm_epsilon norm_epsilon vocab_size hidden_dropout "
        "attention_dropout disable_bias_linear add_bias_linear use_bias_in_norms "
        "use_bias_in_attn_linear use_bias_in_mlp init_method_std kv_channels padded_vocab_size "
        "add_qkv_bias",
        _MODEL,
    ),
    "init_method": read("normal and small_init: `model.config.initializer_range`"),
    "output_layer_init_method": read("normal, or scaled_normal, which is listed"),
    "seq_length": sets("batch.sequence_length"),
    "train_iters": sets("train.steps"),
    **rows("lr min_lr", read("`optimizer.lr`, `schedule.min_lr_ratio`")),
    "lr_decay_style": read("`schedule.type`"),
    "lr_decay_iters": read("`schedule.decay_steps`"),
    "weight_decay": read("`optimizer.weight_decay`"),
    "seed": sets("seed"),
    "eval_interval": sets("evaluation.every_steps"),
    "eval_iters": read("`evaluation.samples`, batches"),
    "log_interval": sets("logging.every_steps"),
    **rows("data_path train_data_paths valid_data_paths", read("the line that makes the data")),
    "test_data_paths": note("tests are not a part of a run"),
    "split": note("of one file: `manifest --held-out` takes another one"),
    "save": sets("output.directory"),
    **rows(
        "tokenizer_type vocab_file merge_file tokenizer_model",
        note("name the tokenizer's directory in the line that makes the data"),
    ),
    "make_vocab_size_divisible_by": read("`model.config.vocab_size`"),
    "distributed_backend": _PROGRAM,
    "num_workers": note("data.workers sets the reader threads"),
    **rows(
        "tensorboard_dir log_dir wandb_project wandb_group wandb_team use_wandb wandb_host "
        "tensorboard_queue_size",
        note("logging.trackers names trackers"),
    ),
    "load": read("absent, or refused: checkpoints of Megatron are not read"),
    "finetune": read("refused with load"),
}

_SHARED = with_values(_SHARED, MEGATRON_SHARED_VALUES)

_OPTIMIZER_PARAMS = with_values(
    {
        "lr": read("`optimizer.lr`"),
        "betas": read("`optimizer.betas`"),
        "eps": read("`optimizer.eps`"),
    },
    [(POSITIVE, "lr"), (Values(types=(list,)), "betas"), (NUMBER, "eps")],
)
_OPTIMIZER = with_values(
    {"type": read("`optimizer.type`"), "params": read("`optimizer`", _OPTIMIZER_PARAMS)},
    [(TEXT, "type"), (FIELDS, "params")],
)
_HALF = with_values(
    {
        **rows("enabled type", read("`precision.dtype`")),
        "initial_scale_power": read("`precision.initial_loss_scale_power`"),
        **rows(
            "fp16 bf16 auto_cast loss_scale loss_scale_window hysteresis min_loss_scale "
            "consecutive_hysteresis",
            read("how the loss is scaled is the engine's"),
        ),
    },
    [
        (FLAG, "enabled"),
        (whole(0), "initial_scale_power"),
        (Values(words=("fp16", "bfloat16")), "type"),
    ],
)
_ZERO = with_values(
    {
        "stage": read("`engine.deepspeed_config`"),
        **rows(
            "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter "
            "reduce_bucket_size contiguous_gradients cpu_offload load_from_fp32_weights "
            "round_robin_gradients sub_group_size offload_param offload_optimizer "
            "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
            "stage3_param_persistence_threshold stage3_gather_16bit_weights_on_model_save "
            "elastic_checkpoint ignore_unused_parameters",
            read("the stage's JSON has its own"),
        ),
    },
    [(whole(0, 3), "stage")],
)
_DATA_TYPES = with_values(
    {"grad_accum_dtype": read("`precision.gradient_dtype`")},
    [(Values(words=("fp32", "bf16", "fp16")), "grad_accum_dtype")],
)

NEOX_TABLE: Table = {
    **_SHARED,
    "optimizer": read(
        "`optimizer.type` (Adam is AdamW there), `optimizer.lr`, betas, eps", _OPTIMIZER
    ),
    "gradient_clipping": read("`optimizer.clip_norm`"),
    "warmup": read("`schedule.warmup_ratio`"),
    "train_batch_size": read("`batch.global_batch_size`"),
    "train_micro_batch_size_per_gpu": read("`batch.micro_batch_size`"),
    "gradient_accumulation_steps": read("`batch.global_batch_size`"),
    "model_parallel_size": read("`parallel.tensor`"),
    "pipe_parallel_size": read("`parallel.pipeline`; 0 and 1 are one stage"),
    "zero_optimization": read("`engine.deepspeed_config`: the stage's JSON", _ZERO),
    **rows("fp16 bf16", read("`precision.dtype`", _HALF)),
    "precision": read("`precision.dtype`"),
    "data_types": read("`precision.gradient_dtype`", _DATA_TYPES),
    "checkpoint_activations": read("`model.gradient_checkpointing`"),
    "checkpoint_factor": sets("checkpoint.every_steps"),
    "keep_last_n_checkpoints": sets("checkpoint.keep_last"),
    "extra_save_iters": note("checkpoints are at multiples of checkpoint.every_steps"),
    "attention_config": read("only flash and global"),
    "rope_fusion": _FASTER,
    **rows(
        "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion layernorm_fusion "
        "rmsnorm_fusion partition_activations synchronize_each_layer checkpoint_num_layers "
        "output_layer_parallelism fp32_allreduce use_flashattn_swiglu mlp_type "
        "contiguous_checkpointing checkpoint_in_cpu pipe_partition_size expert_interval",
        _FASTER,
    ),
    "bias_gelu_fusion": read("`model.config.hidden_act`: gelu_pytorch_tanh"),
    "override_lr_scheduler": note(
        "a resume that changes the schedule needs checkpoint.allow_changes"
    ),
    "use_checkpoint_lr_scheduler": note("a resume keeps the schedule of the run"),
    "sliding_window_width": refused(
        "attention within a window: model.config of a mistral has sliding_window, one more"
    ),
    "use_bnb_optimizer": refused("optimizer.type=adamw_8bit is bitsandbytes' AdamW in 8 bits"),
    "deepspeed_extra_args": refused("keys of DeepSpeed: engine.deepspeed_config names a JSON"),
    "attention_type": refused("is not an argument of GPT-NeoX 2.0: attention_config"),
    "warmup_iters": refused("is not an argument of GPT-NeoX 2.0: warmup, a share of the steps"),
    "decay_lr_to": refused("is not an argument of GPT-NeoX 2.0: min_lr"),
    **rows(
        "te_fp8_format te_fp8_wgrad te_fp8_amax_history_len te_fp8_amax_compute_algo "
        "te_fp8_margin fp8",
        refused("Transformer Engine's float8: precision.float8 has another scaling"),
    ),
    **rows(
        "data_impl steps_per_print wall_clock_breakdown hostfile launcher comment include "
        "checkpoint_validation_with_forward_pass log_grad_norm log_optimizer_states print "
        "checkpoint user_script num_gpus deepspeed_slurm autotuning_run profile profile_step_start "
        "profile_step_stop memory_profiling memory_profiling_path use_comet comet_workspace "
        "comet_project comet_experiment_name comet_tags comet_others use_tensorboard "
        "log_param_norm test_data_weights train_data_weights valid_data_weights",
        _PROGRAM,
    ),
    **rows(
        "train_impl dataset_impl kto_fp32 dpo_beta kto_beta pack_impl pos_train_data_paths "
        "moe_num_experts "
        "num_experts sparsity_config soft_prompt_tuning mup_width_scale use_mup "
        "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion "
        "mamba_use_bias_in_conv mamba_use_bias_in_linears gmlp_attn_dim te_columnparallel "
        "te_layernorm_mlp te_mha",
        refused("is not converted; write the run YAML by `bigtrain init`"),
    ),
}

NEOX_TABLE = with_values(NEOX_TABLE, NEOX_VALUES)

MEGATRON_TABLE: Table = {
    **_SHARED,
    "optimizer": read("`optimizer.type`: adam is AdamW"),
    **rows("adam_beta1 adam_beta2", read("`optimizer.betas`")),
    "adam_eps": read("`optimizer.eps`"),
    "clip_grad": read("`optimizer.clip_norm`"),
    "lr_warmup_fraction": read("`schedule.warmup_ratio`"),
    "lr_warmup_iters": read("`schedule.warmup_steps`"),
    "lr_warmup_samples": refused("in samples: divide them by the global batch"),
    "train_samples": refused("in samples: train_iters, these divided by the global batch"),
    "lr_decay_samples": refused("in samples: lr_decay_iters"),
    "global_batch_size": sets("batch.global_batch_size"),
    "micro_batch_size": sets("batch.micro_batch_size"),
    "rampup_batch_size": refused("batch.phases has other batches at the start"),
    "tensor_model_parallel_size": sets("parallel.tensor"),
    "pipeline_model_parallel_size": sets("parallel.pipeline"),
    "context_parallel_size": sets("parallel.sequence"),
    "sequence_parallel": _FASTER,
    "use_distributed_optimizer": note("ZeRO 1: engine.deepspeed_config=zero1"),
    **rows("bf16 fp16", read("`precision.dtype`")),
    **rows("recompute_activations recompute_granularity", read("`model.gradient_checkpointing`")),
    "save_interval": sets("checkpoint.every_steps"),
    "eod_mask_loss": sets("data.mask_end_of_document", {True: True, False: False}),
    "reset_attention_mask": read("`data.document_boundaries`, together with reset_position_ids"),
    "reset_position_ids": read("`data.document_boundaries`"),
    **rows("valid_data_path test_data_path", note("pairs for `manifest --held-out`")),
    **rows(
        "use_flash_attn attention_backend transformer_impl overlap_grad_reduce "
        "overlap_param_gather use_mcore_models no_gradient_accumulation_fusion "
        "attention_softmax_in_fp32 accumulate_allreduce_grads_in_fp32 recompute_method "
        "recompute_num_layers no_masked_softmax_fusion bias_swiglu_fusion apply_rope_fusion "
        "no_async_tensor_model_parallel_allreduce manual_gc distribute_saved_activations "
        "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage",
        _FASTER,
    ),
    **rows(
        "use_checkpoint_opt_param_scheduler log_throughput no_mmap_bin_files wandb_entity "
        "wandb_exp_name wandb_save_dir dist_ckpt_optim_fully_reshardable no_rope_fusion "
        "use_tp_pp_dp_mapping no_ckpt_fully_parallel_save cross_entropy_loss_fusion "
        "cross_entropy_fusion_impl tp_comm_overlap calculate_per_token_loss "
        "timing_log_level log_params_norm log_num_zeros_in_grad log_validation_ppl_to_tensorboard "
        "log_timers_to_tensorboard log_memory_to_tensorboard deterministic_mode dist_ckpt_format "
        "ckpt_format data_cache_path use_checkpoint_args no_load_optim no_load_rng exit_interval "
        "ckpt_fully_parallel_load async_save use_persistent_ckpt_worker auto_detect_ckpt_format "
        "save_retain_interval dist_ckpt_strictness distributed_timeout_minutes "
        "tensorboard_log_interval",
        _PROGRAM,
    ),
    **rows(
        "num_experts moe_router_topk multi_latent_attention mtp_num_layers qk_layernorm fp8_format "
        "fp8 squared_relu use_rope_scaling rope_scaling_factor spec init_model_with_meta_device",
        refused("is not converted; write model.config, or start from a Hugging Face configuration"),
    ),
}
MEGATRON_TABLE = with_values(MEGATRON_TABLE, MEGATRON_VALUES)
