"""Names that other programs (HF Trainer, Megatron, DeepSpeed, torchtitan, Lightning) use for the
settings of the run YAML, for "did you mean". Pure."""

from __future__ import annotations

_ELSEWHERE = {
    "model.path": "model_name model_name_or_path pretrained_model_name_or_path",
    "model.attention": "attn_implementation",
    "model.gradient_checkpointing": "activation_checkpointing recompute recompute_granularity",
    "model.compile": "torch_compile",
    "data.path": "dataset dataset_path data_path train_data train_data_path",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "tokenizer.add_special_tokens": "new_special_tokens additional_special_tokens special_tokens",
    "tokenizer.add_tokens": "new_tokens extra_tokens",
    "model.vocabulary": "resize_vocab resize_token_embeddings",
    "data.workers": "num_workers dataloader_num_workers",
    "batch.sequence_length": "seq_length seq_len max_seq_length max_seq_len max_length block_size "
    "context_length max_sequence_length",
    "batch.global_batch_size": "batch_size global_samples train_batch_size total_batch_size",
    "batch.micro_batch_size": "micro_samples per_device_train_batch_size per_device_batch_size "
    "train_micro_batch_size_per_gpu local_batch_size",
    "train.steps": "max_steps num_steps total_steps train_iters max_iters num_train_steps "
    "training_steps",
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2 adam_betas",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "optimizer.weight_decay": "wd",
    "optimizer.clip_norm": "max_grad_norm max_norm grad_clip clip_grad gradient_clipping "
    "gradient_clip_val grad_clip_norm",
    "schedule.type": "lr_scheduler_type lr_decay_style lr_scheduler scheduler",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_iters",
    "schedule.decay_steps": "lr_decay_iters",
    "schedule.min_lr_ratio": "min_lr",
    "precision.dtype": "torch_dtype mixed_precision bf16 fp16",
    "parallel.tensor": "tp tp_size tensor_parallel tensor_parallel_size "
    "tensor_model_parallel_size tensor_parallel_degree",
    "parallel.pipeline": "pp pp_size pipeline_parallel pipeline_parallel_size "
    "pipeline_model_parallel_size pipeline_parallel_degree",
    "parallel.sequence": "sp sp_size sequence_parallel sequence_parallel_size "
    "context_parallel context_parallel_size ulysses",
    "parallel.expert": "ep ep_size expert_parallel expert_parallel_size autoep_size "
    "expert_model_parallel_size expert_parallel_degree",
    "checkpoint.every_steps": "save_steps save_interval save_every checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit",
    "logging.every_steps": "logging_steps log_interval log_every log_every_n_steps",
    "logging.trackers": "report_to loggers",
    "evaluation.every_steps": "eval_steps eval_interval",
    "evaluation.samples": "eval_iters max_eval_samples",
    "watchdog.rendezvous_timeout_seconds": "arrival_timeout_seconds rdzv_timeout",
    "output.directory": "output_dir out_dir save_dir",
    "engine.deepspeed_config": "deepspeed zero_stage",
    "adapters.rank": "r lora_r lora_rank",
    "adapters.alpha": "lora_alpha",
    "adapters.dropout": "lora_dropout",
    "adapters.targets": "target_modules lora_target_modules",
    "seed": "random_seed manual_seed",
}
_NO_FIELD = {
    "gradient_accumulation_steps accumulation accumulation_steps grad_accum grad_accum_steps": (
        "accumulation is derived from batch.global_batch_size, batch.micro_batch_size and "
        "the world size"
    ),
    "epochs num_epochs num_train_epochs max_epochs": (
        "a run has train.steps; data.sources can weigh its datasets by epochs"
    ),
    "resume resume_from_checkpoint": (
        "the same command resumes from the newest checkpoint in its output.directory"
    ),
}


def field_known_as(name: str) -> str | None:
    """The field that other programs call `name`, as section.key; None where there is none."""
    return next((field for field, names in _ELSEWHERE.items() if name in names.split()), None)


def why_no_field(name: str) -> str | None:
    """What a run has instead of `name`, a setting of other programs; None if it is unknown."""
    return next((text for names, text in _NO_FIELD.items() if name in names.split()), None)


def with_setting_names(message: str) -> str:
    """The message of argparse about arguments that it does not know, with how the settings are
    written that they may stand for; other messages as they are."""
    kind, _, words = message.partition("unrecognized arguments: ")
    if kind or not words:
        return message
    names = [word.lstrip("-").split("=")[0] for word in words.split() if word.startswith("--")]
    found = [_how_to_write(name.replace("-", "_")) for name in names]
    return "; ".join([message, *found])


def _how_to_write(name: str) -> str:
    field = field_known_as(name) or (name if "." in name else None)
    if field is None and (reason := why_no_field(name)):
        return f"there is no {name}: {reason}"
    return f"a setting of the run is written {field or 'section.key'}=VALUE, without dashes"
