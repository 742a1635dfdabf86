"""Keys of HF TrainingArguments, and of the configurations of TRL's trainers, by name, and their
settings here. Pure."""

from __future__ import annotations

from typing import get_args

from bigtrain.objectives.preference import PairLoss
from bigtrain.settings.conversion.accepted_values import NUMBER, TEXT, TRAINER_VALUES, Values
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

TRAINER_NAME = "HF Trainer and TRL"
_ELSEWHERE = "is of the program, not of the training"
_DATA = read("the `tokenize` line")
_REINFORCEMENT = refused("reinforcement learning (GRPO, PPO, RLOO) is not a kind of objective")

_MIXTURE: Table = {
    "datasets": read(
        _DATA.text,
        with_values(
            {
                **rows("id config split", _DATA),
                "weight": read("only 1: all rows"),
                "columns": note("tokenize reads the columns of the format"),
            },
            [(TEXT, "id config split"), (NUMBER, "weight")],
        ),
    ),
    "seed": note("samples are shuffled by the seed of the run"),
    "test_split_size": note("`tokenize --held-out F` takes a share of the rows"),
}
_MIXTURE = with_values(_MIXTURE, [(Values(types=(list,)), "datasets")])
"""Keys of a mixture of datasets, as in the alignment handbook and open-r1."""

# TRL has separate trainers for CPO (simpo) and ORPO.
DPO_LOSSES = [name for name in get_args(PairLoss) if name not in ("simpo", "orpo")]

TRAINER_TABLE: Table = {
    # Model and adapters.
    "model_name_or_path": sets("model.path"),
    "attn_implementation": read("`model.attention`"),
    "gradient_checkpointing": read("`model.gradient_checkpointing`"),
    "use_peft": read("`adapters`"),
    "lora_r": read("`adapters.rank`"),
    "lora_alpha": read("`adapters.alpha`"),
    "lora_dropout": read("`adapters.dropout`"),
    "lora_target_modules": read("`adapters.targets`"),
    "lora_target_parameters": read("`adapters.target_parameters`"),
    "lora_modules_to_save": read("`adapters.modules_to_save`"),
    "use_rslora": read("`adapters.rslora`"),
    "use_dora": read("`adapters.dora`"),
    "load_in_4bit": read("`adapters.quantization`"),
    "bnb_4bit_quant_type": read("`adapters.quantization`"),
    "use_bnb_nested_quant": read("`adapters.double_quantization`"),
    "load_in_8bit": read("`adapters.quantization`: int8"),
    # Optimizer, schedule, batch, length.
    "learning_rate": read("`optimizer.lr`"),
    "optim": read("`optimizer.type`"),
    "weight_decay": read("`optimizer.weight_decay`"),
    "adam_beta1": read("`optimizer.betas`"),
    "adam_beta2": read("`optimizer.betas`"),
    "adam_epsilon": read("`optimizer.eps`"),
    "max_grad_norm": read("`optimizer.clip_norm`"),
    "lr_scheduler_type": read("`schedule.type`"),
    "lr_scheduler_kwargs": read("`schedule.min_lr_ratio`, `schedule.cycles`", SCHEDULE_OPTIONS),
    "warmup_steps": read("`schedule.warmup_steps`"),
    "warmup_ratio": read("`schedule.warmup_ratio`"),
    "per_device_train_batch_size": read("`batch.micro_batch_size`, `batch.global_batch_size`"),
    "gradient_accumulation_steps": read("`batch.global_batch_size`"),
    "num_train_epochs": read("`train.epochs`"),
    "max_steps": read("`train.steps`, if more than 0"),
    "bf16": read("`precision.dtype`"),
    "fp16": read("`precision.dtype`"),
    "tf32": sets("precision.tf32", {True: True, False: False}),
    "seed": sets("seed"),
    "label_smoothing_factor": sets("objective.label_smoothing"),
    "neftune_noise_alpha": read("`model.neftune_noise_alpha`"),
    "deepspeed": read("`engine.deepspeed_config`, a path"),
    # Objectives.
    **rows("beta loss_type desirable_weight undesirable_weight simpo_gamma", read("`objective`")),
    "center_rewards_coefficient": read("`objective.center_rewards_coefficient`"),
    "label_smoothing": read("`objective.label_smoothing`"),
    "rpo_alpha": refused(
        "weighs the mean over the tokens of all chosen answers; objective.sft_weight weighs the "
        "mean over each answer's"
    ),
    "ref_model": refused("the reference is the model that the run starts from"),
    "max_prompt_length": note(
        "prompts are not cut; tokenize --max-prompt-tokens drops rows with longer ones"
    ),
    # Data.
    "block_size": read("`batch.sequence_length`, of run_clm.py"),
    "validation_split_percentage": read("`tokenize --held-out`"),
    "train_file": read("`tokenize --input`"),
    "validation_file": note("tokenize it, and name it in evaluation.held_out"),
    "dataset_config_name": read("`tokenize --dataset-config`"),
    "max_train_samples": read("`tokenize --max-samples`"),
    "max_eval_samples": sets("evaluation.samples"),
    "tokenizer_name": read("`tokenize --tokenizer`"),
    **rows("config_overrides config_name", refused("`model.config` and `model.overrides`")),
    "max_length": read("`batch.sequence_length`"),
    "max_seq_length": read("`batch.sequence_length`, the older name of max_length"),
    "packing": read("`data.packing`"),
    "packing_strategy": read("`data.packing`"),
    "padding_free": note("it saves padding; data.packing=best_fit does, too"),
    "assistant_only_loss": read("answers alone are learned from conversations"),
    "completion_only_loss": only((True,), "a prompt would be learned too"),
    **rows(
        "dataset_name dataset_config dataset_train_split dataset_splits dataset_mixer "
        "dataset_configs dataset_text_field",
        _DATA,
    ),
    "dataset_mixture": read(_DATA.text, _MIXTURE),
    **rows("dataset_test_split eval_dataset", note("evaluation is on `tokenize --held-out`")),
    "dataset_kwargs": note("of TRL's own preparation of the data"),
    "chat_template": read("a file for `tokenize --chat-template`"),
    "eos_token": refused("the tokenizer's directory decides the end of sequences"),
    "system_prompt": refused("a system message is a part of the rows"),
    # Saves, evaluations, log.
    "output_dir": sets("output.directory"),
    "logging_steps": read("`logging.every_steps`"),
    "report_to": read("`logging.trackers`"),
    "wandb_project": sets("logging.project"),
    "save_steps": read("`checkpoint.every_steps`, if saves are by steps"),
    "save_strategy": read("`checkpoint.every_steps`, or every_epochs"),
    "save_total_limit": read("`checkpoint.keep_last`"),
    "eval_steps": read("`evaluation.every_steps`, if evaluations are by steps"),
    **rows(
        "eval_strategy evaluation_strategy do_eval",
        read("`evaluation.every_steps`, or every_epochs"),
    ),
    "max_samples": refused("the first rows of the data: cut the file"),
    # Without a counterpart, and without an effect on the mathematics.
    **rows("torch_dtype dtype", note("weights are read in the dtype of precision.dtype")),
    **rows(
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_model_revision hub_always_push "
        "hub_token push_to_hub_model_id",
        note("an export is uploaded with `hf upload`"),
    ),
    **rows(
        "dataset_num_proc preprocessing_num_workers",
        note("tokenize takes all cores; --workers N"),
    ),
    **rows(
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last "
        "dataloader_persistent_workers dataloader_prefetch_factor",
        note("data.workers sets the reader threads"),
    ),
    **rows(
        "do_train do_predict log_level logging_strategy logging_first_step "
        "run_name disable_tqdm remove_unused_columns ddp_timeout ddp_find_unused_parameters "
        "wandb_entity wandb_group wandb_run_group callbacks benchmarks logging_dir local_rank "
        "save_safetensors log_on_each_node save_on_each_node overwrite_cache keep_linebreaks "
        "low_cpu_mem_usage use_fast_tokenizer",
        note(_ELSEWHERE),
    ),
    "overwrite_output_dir": note(
        "a run continues in a directory that it began in; remove the directory to begin again"
    ),
    "load_best_model_at_end": read("`checkpoint.keep_best`"),
    **rows("metric_for_best_model greater_is_better", read("`evaluation.best`")),
    **rows(
        "save_only_model resume_from_checkpoint", note("a run resumes from complete checkpoints")
    ),
    **rows("fsdp fsdp_config", note("ZeRO 3 takes its place: engine.deepspeed_config=zero3")),
    **rows(
        "per_device_eval_batch_size eval_accumulation_steps",
        note("an evaluation has the micro-batch of the run"),
    ),
    **rows("eval_on_start prediction_loss_only", note("evaluations measure the held-out loss")),
    "average_tokens_across_devices": only((True,), "the loss is the mean over the tokens of all"),
    "gradient_checkpointing_kwargs": note("recomputation gives the same gradients"),
    "train_sampling_strategy": only(("random",), "samples are always shuffled"),
    "group_by_length": refused("the order of samples by length is not implemented"),
    "use_liger_kernel": note("the same results; model.kernels=liger and model.loss=liger"),
    "torch_compile": read("`model.compile`"),
    "auto_find_batch_size": refused("the micro-batch is a setting"),
    "trust_remote_code": note("code of the hub is never run; a model that needs it is refused"),
    "model_revision": read("only main: a run reads the model's main branch, or a directory"),
    "use_cache": note("is of generation"),
    "precompute_ref_log_probs": note("`bigtrain score` stores them"),
    **rows(
        "num_generations reward_funcs reward_weights use_vllm max_completion_length "
        "num_iterations vllm_device vllm_gpu_memory_utilization scale_rewards kl_coef "
        "dataset_prompt_column mask_truncated_completions",
        _REINFORCEMENT,
    ),
    **rows("optim_args optim_target_modules", refused("options of another optimizer")),
    "temperature": _REINFORCEMENT,
}

TRAINER_TABLE = with_values(TRAINER_TABLE, TRAINER_VALUES)
