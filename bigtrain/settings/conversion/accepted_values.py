"""Values that other trainers take for the keys whose values a conversion reads. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Texts that YAML 1.1, argparse of HF, or pydantic read as true and false.
_TRUE = ("true", "yes", "on", "y", "t")
_FALSE = ("false", "no", "off", "n", "f")
_TYPE_NAMES: Mapping[type, str] = {str: "a text", list: "a list", dict: "keys and values"}


@dataclass(frozen=True)
class Values:
    """Values that another trainer takes for a key.

    has_flags: true and false. words: texts with a meaning. minimum, maximum: of numbers; without a
    minimum, no numbers. is_above_minimum: the minimum itself is excluded. whole_from: numbers from
    this one on must be whole. types: str, list or dict, any value.
    """

    has_flags: bool = False
    words: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float = math.inf
    is_above_minimum: bool = False
    whole_from: float = math.inf
    types: tuple[type, ...] = ()

    def read(self, value: Any) -> Any:
        """Return the value as the trainer reads it. Raises ValueError, whose text is the rule, for
        a value that the trainer does not take."""
        if isinstance(value, str) and value in self.words:
            return value
        if self.has_flags:
            text = str(value).strip().lower()
            if text in _TRUE or value in (1, "1"):
                return True
            if text in _FALSE or value in (0, "0"):
                return False
        number = None if isinstance(value, bool) else as_number(value)
        if self.minimum is not None and isinstance(number, (int, float)) and math.isfinite(number):
            is_excluded = self.is_above_minimum and number == self.minimum
            if self.minimum <= number <= self.maximum and not is_excluded:
                if number < self.whole_from:
                    return number
                if number == int(number):
                    return int(number)
        if isinstance(value, self.types):
            return value
        raise ValueError(f"must be {self.describe()}")

    def describe(self) -> str:
        """Return the values in words."""
        texts = ["true", "false"] if self.has_flags else []
        texts += self.words
        if self.minimum is not None:
            noun = "a whole number" if self.whole_from == -math.inf else "a number"
            lower = f"above {self.minimum:g}" if self.is_above_minimum else f"from {self.minimum:g}"
            upper = f" to {self.maximum:g}" if self.maximum < math.inf else ""
            integers = (
                f", whole from {self.whole_from:g}" if abs(self.whole_from) < math.inf else ""
            )
            texts.append(f"{noun} {lower}{upper}{integers}")
        texts += [_TYPE_NAMES[type_] for type_ in self.types]
        return " or ".join(texts)

    @property
    def example(self) -> Any:
        """A value that the trainer takes."""
        if self.has_flags:
            return False
        if self.words:
            return self.words[0]
        return self.types[0]() if self.minimum is None else min(max(1, self.minimum), self.maximum)


def flag(*words: str) -> Values:
    """Return the values true and false, and `words`."""
    return Values(has_flags=True, words=words)


def whole(minimum: float, maximum: float = math.inf) -> Values:
    """Return the whole numbers from `minimum` to `maximum`."""
    return Values(minimum=minimum, maximum=maximum, whole_from=-math.inf)


FLAG = flag()
COUNT = whole(1)
NUMBER = Values(minimum=0)
POSITIVE = Values(minimum=0, is_above_minimum=True)
SHARE = Values(minimum=0, maximum=1)
SHARE_OR_COUNT = Values(minimum=0, whole_from=1)
TEXT = Values(types=(str,))
TEXTS = Values(types=(str, list))
FIELDS = Values(types=(dict,))


def as_number(value: Any) -> Any:
    """Return the number of a text such as 1e-5, which YAML reads as a text; return other
    values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value


Accepted = Sequence[tuple[Values, str]]
"""Values, each with the names of the keys that take them, divided by spaces."""

TRAINER_VALUES: Accepted = [
    (
        FLAG,
        "gradient_checkpointing use_peft use_rslora use_dora load_in_4bit load_in_8bit "
        "use_bnb_nested_quant bf16 fp16 tf32 packing assistant_only_loss do_eval "
        "load_best_model_at_end greater_is_better torch_compile",
    ),
    (
        COUNT,
        "per_device_train_batch_size gradient_accumulation_steps lora_r block_size "
        "max_length max_seq_length max_train_samples max_eval_samples",
    ),
    (whole(0), "seed save_total_limit"),
    (whole(-1), "max_steps"),
    (SHARE_OR_COUNT, "warmup_steps save_steps eval_steps logging_steps"),
    (
        SHARE,
        "warmup_ratio adam_beta1 adam_beta2 lora_dropout label_smoothing_factor label_smoothing",
    ),
    (POSITIVE, "learning_rate num_train_epochs lora_alpha"),
    (
        NUMBER,
        "adam_epsilon weight_decay max_grad_norm neftune_noise_alpha "
        "center_rewards_coefficient beta desirable_weight undesirable_weight simpo_gamma",
    ),
    (Values(minimum=0, maximum=100), "validation_split_percentage"),
    (Values(words=("steps", "epoch", "best", "no")), "save_strategy"),
    (Values(words=("steps", "epoch", "no")), "eval_strategy evaluation_strategy"),
    (Values(words=("bfd", "bfd_split", "ffd", "wrapped")), "packing_strategy"),
    (Values(words=("nf4", "fp4")), "bnb_4bit_quant_type"),
    (
        TEXT,
        "model_name_or_path attn_implementation optim lr_scheduler_type output_dir "
        "wandb_project train_file dataset_name dataset_config dataset_config_name "
        "dataset_train_split tokenizer_name dataset_text_field chat_template "
        "model_revision metric_for_best_model",
    ),
    (
        TEXTS,
        "lora_target_modules lora_modules_to_save lora_target_parameters report_to "
        "loss_type dataset_splits dataset_configs",
    ),
    (FIELDS, "lr_scheduler_kwargs dataset_mixer dataset_mixture"),
    (Values(types=(str, dict)), "deepspeed"),
]

LLAMA_FACTORY_VALUES: Accepted = [
    (
        FLAG,
        "use_rslora use_dora pissa_init double_quantization packing neat_packing mask_history "
        "disable_gradient_checkpointing",
    ),
    (COUNT, "lora_rank cutoff_len max_samples quantization_bit"),
    (whole(-1), "pissa_iter"),
    (SHARE_OR_COUNT, "val_size"),
    (POSITIVE, "loraplus_lr_ratio"),
    (
        NUMBER,
        "pref_beta pref_ftx simpo_gamma kto_chosen_weight kto_rejected_weight dpo_label_smoothing",
    ),
    (Values(words=("nf4", "fp4")), "quantization_type"),
    (Values(words=("auto", "disabled", "sdpa", "fa2", "fa3")), "flash_attn"),
    (TEXT, "stage finetuning_type lora_target additional_target dataset template pref_loss"),
    (FIELDS, "dataset_info"),
]

AXOLOTL_VALUES: Accepted = [
    (
        FLAG,
        "lora_target_linear peft_use_rslora peft_use_dora load_in_4bit load_in_8bit "
        "sample_packing flash_attention sdp_attention eager_attention flex_attention "
        "xformers_attention reward_model process_reward_model use_tensorboard fp16 "
        "load_best_model_at_end greater_is_better",
    ),
    (flag("auto", "full"), "bf16"),
    (flag("auto"), "tf32 torch_compile"),
    (flag("offload", "offload_disk"), "gradient_checkpointing"),
    (flag("legacy", "disk"), "activation_offloading"),
    (
        COUNT,
        "lora_r micro_batch_size gradient_accumulation_steps sequence_len "
        "tensor_parallel_size context_parallel_size sequence_parallel_degree "
        "expert_parallel_size save_total_limit",
    ),
    (whole(0), "seed early_stopping_patience"),
    (whole(-1), "max_steps"),
    (SHARE_OR_COUNT, "warmup_steps save_steps eval_steps logging_steps val_set_size"),
    (
        SHARE,
        "warmup_ratio cosine_min_lr_ratio adam_beta1 adam_beta2 lora_dropout dpo_label_smoothing",
    ),
    (POSITIVE, "learning_rate num_epochs lora_alpha loraplus_lr_ratio"),
    (
        NUMBER,
        "adam_epsilon weight_decay max_grad_norm saves_per_epoch evals_per_epoch rl_beta "
        "dpo_beta simpo_gamma kto_desirable_weight kto_undesirable_weight orpo_alpha "
        "center_rewards_coefficient neftune_noise_alpha noisy_embedding_alpha",
    ),
    (
        TEXT,
        "base_model optimizer lr_scheduler attn_implementation chat_template "
        "chat_template_jinja wandb_project output_dir adapter rl metric_for_best_model "
        "eval_strategy",
    ),
    (TEXTS, "lora_target_modules lora_modules_to_save lora_target_parameters"),
    (Values(has_flags=True, types=(str,)), "peft_init_lora_weights"),
    (FIELDS, "lr_scheduler_kwargs special_tokens overrides_of_model_config model_config"),
    (Values(types=(list, dict, str)), "datasets pretraining_dataset test_datasets"),
    (Values(types=(str, dict)), "deepspeed"),
]

AXOLOTL_DATASET_VALUES: Accepted = [
    (FLAG, "split_thinking drop_system_message"),
    (
        TEXT,
        "path name split conversation chat_template field field_messages text_column "
        "message_field_role message_field_content",
    ),
    (FIELDS, "message_property_mappings roles"),
    (Values(types=(str, dict)), "type"),
]
"""Of the keys of a dataset."""

MEGATRON_SHARED_VALUES: Accepted = [
    (
        FLAG,
        "swiglu group_query_attention untie_embeddings_and_output_weights no_weight_tying "
        "gpt_j_residual disable_bias_linear add_bias_linear use_bias_in_norms "
        "use_bias_in_attn_linear use_bias_in_mlp add_qkv_bias finetune",
    ),
    (
        COUNT,
        "num_layers hidden_size num_attention_heads max_position_embeddings "
        "intermediate_size ffn_hidden_size num_kv_heads num_query_groups mlp_multiple_of "
        "vocab_size kv_channels padded_vocab_size make_vocab_size_divisible_by seq_length "
        "train_iters lr_decay_iters eval_interval log_interval",
    ),
    (whole(0), "seed eval_iters"),
    (
        NUMBER,
        "min_lr weight_decay rms_norm_epsilon layernorm_epsilon norm_epsilon init_method_std",
    ),
    (SHARE, "rotary_pct rotary_percent hidden_dropout attention_dropout"),
    (POSITIVE, "lr rotary_emb_base rotary_base"),
    (Values(words=("layernorm", "rmsnorm")), "norm"),
    (Values(words=("LayerNorm", "RMSNorm")), "normalization"),
    (
        TEXT,
        "activation position_embedding_type pos_emb init_method output_layer_init_method "
        "lr_decay_style save load",
    ),
    (TEXTS, "data_path train_data_paths valid_data_paths"),
]

NEOX_VALUES: Accepted = [
    (FIELDS, "optimizer fp16 bf16 zero_optimization data_types"),
    (Values(words=("fp16", "fp32", "bfloat16")), "precision"),
    (FLAG, "checkpoint_activations bias_gelu_fusion"),
    (
        COUNT,
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
        "model_parallel_size checkpoint_factor keep_last_n_checkpoints",
    ),
    (whole(0), "pipe_parallel_size"),
    (NUMBER, "gradient_clipping"),
    (SHARE, "warmup"),
    (TEXTS, "attention_config"),
]

MEGATRON_VALUES: Accepted = [
    (
        FLAG,
        "bf16 fp16 recompute_activations eod_mask_loss reset_attention_mask reset_position_ids",
    ),
    (
        COUNT,
        "global_batch_size micro_batch_size tensor_model_parallel_size "
        "pipeline_model_parallel_size context_parallel_size save_interval",
    ),
    (whole(0), "lr_warmup_iters"),
    (SHARE, "adam_beta1 adam_beta2 lr_warmup_fraction"),
    (NUMBER, "adam_eps clip_grad"),
    (Values(words=("full", "selective")), "recompute_granularity"),
    (TEXT, "optimizer"),
]
