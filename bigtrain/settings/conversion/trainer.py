"""HF TrainingArguments, and the configurations of TRL's trainers, as JSON or YAML: the meaning of
several keys together. Pure.

Defaults are taken from transformers 5.23 (training_args.py) and TRL 1.16 (SFTConfig, DPOConfig,
KTOConfig, RewardConfig, ModelConfig), with which a test compares them. The task pretrain is
transformers' examples/pytorch/language-modeling/run_clm.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bigtrain.settings.conversion.common import (
    KeyDefault,
    model_name,
    set_adam,
    set_attention,
    set_batch,
    set_data,
    set_dtype,
    set_engine,
    set_length,
    set_noise,
    set_optimizer,
    set_packing,
    set_schedule,
    set_steps,
    set_trackers,
    shard_directories,
    tokenize_command,
)
from bigtrain.settings.conversion.draft import Draft
from bigtrain.settings.conversion.methods import METHODS, set_objective
from bigtrain.settings.conversion.trainer_keys import DPO_LOSSES

_SHARED: Mapping[str, Any] = {
    "max_length": 1024,
    "bf16": True,
    "gradient_checkpointing": True,
    "logging_steps": 10,
}
_TASK_DEFAULTS: Mapping[str, dict[str, Any]] = dict(
    pretrain={"learning_rate": 5e-5},
    sft={"learning_rate": 2e-5, **_SHARED},
    dpo={"learning_rate": 1e-6, **_SHARED},
    orpo={"learning_rate": 1e-6, **_SHARED},
    kto={"learning_rate": 1e-6, "train_sampling_strategy": "sequential", **_SHARED},
    reward={"learning_rate": 1e-4, **_SHARED},
)
"""Defaults of TRL's trainers that differ from TrainingArguments' defaults, and the learning rate of
run_clm.py (pretrain). bf16 is the default if fp16 is not set."""
TASKS = tuple(_TASK_DEFAULTS)


def task_of(keys: Mapping[str, Any]) -> str | None:
    """Return the task of a file by keys that only one trainer has; None for a file without these
    keys, as the configurations of DPO, ORPO and others have equal keys."""
    if "desirable_weight" in keys or "undesirable_weight" in keys:
        return "kto"
    if "center_rewards_coefficient" in keys:
        return "reward"
    sft_keys = {"packing", "max_seq_length", "assistant_only_loss", "dataset_text_field"}
    if sft_keys & keys.keys():
        return "sft"
    pretrain_keys = {"block_size", "validation_split_percentage", "train_file"}
    return "pretrain" if pretrain_keys & keys.keys() else None


def fill(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several keys. task: of `TASKS`; None: detect it by the
    keys."""
    task = task or task_of(draft.keys)
    if task is None:
        draft.refuse(
            "the trainer",
            "run_clm.py and several trainers of TRL have all keys of the file, and compute "
            "something else from them",
            f"--task {' or '.join(TASKS)} (pretrain: run_clm.py)",
        )
        set_training(draft, _TASK_DEFAULTS["sft"])  # finds problems of keys that all trainers have
        return
    defaults = _TASK_DEFAULTS[task]
    used_defaults = [
        f"{key} = {value}" for key, value in defaults.items() if draft.value(key) is None
    ]
    if used_defaults:
        owner = "TrainingArguments" if task == "pretrain" else f"TRL's trainer ({task})"
        draft.notes.append(f"defaults of {owner}: {', '.join(used_defaults)}")
    if "train_sampling_strategy" in defaults and draft.value("train_sampling_strategy") is None:
        draft.notes.append("TRL reads these rows in their order by default; here they are shuffled")
    set_training(draft, defaults)
    if task == "pretrain":
        _set_blocks(draft)
        return
    _set_objective(draft, task)
    _set_rows(draft, task, defaults["max_length"])


def set_training(draft: Draft, defaults: Mapping[str, Any]) -> None:
    """Set optimizer, schedule, batch, length, precision, saves and log from keys that
    TrainingArguments and LLaMA-Factory have. defaults: of `_TASK_DEFAULTS`."""
    # Optimizer, schedule and batch.
    draft.set("optimizer.lr", draft.number("learning_rate", defaults["learning_rate"]))
    set_optimizer(draft, "optim", "adamw_torch")
    set_adam(draft, ("adam_beta1", "adam_beta2"), "adam_epsilon")
    draft.set("optimizer.weight_decay", draft.number("weight_decay", 0.0))
    draft.set("optimizer.clip_norm", draft.number("max_grad_norm", 1.0))
    set_schedule(draft, "lr_scheduler_type", "linear", draft.mapping("lr_scheduler_kwargs"))
    set_batch(
        draft,
        KeyDefault("per_device_train_batch_size", 8),
        KeyDefault("gradient_accumulation_steps", 1),
    )
    set_length(draft, KeyDefault("num_train_epochs", 3.0), "max_steps")
    set_dtype(draft, default="bfloat16" if defaults.get("bf16") else "float32")
    # How layers are computed.
    if draft.value("gradient_checkpointing", defaults.get("gradient_checkpointing")):
        draft.set("model.gradient_checkpointing", "full")
    set_attention(draft, draft.value("attn_implementation"))
    if draft.value("torch_compile"):
        draft.set("model.compile", "on")
    if draft.value("model_revision", "main") != "main":
        draft.refuse("model_revision", "a run reads the model's main branch, or a directory")
    # Engine, and what is logged and saved.
    set_engine(draft, "deepspeed")
    set_noise(draft, "neftune_noise_alpha")
    draft.set(
        "logging.every_steps",
        max(1, int(draft.number("logging_steps", defaults.get("logging_steps", 500)))),
    )
    if "seed" not in draft.run:
        draft.set("seed", 42)
    if draft.value("report_to") is not None:
        set_trackers(draft, draft.value("report_to"))
    _set_saves(draft)


def _set_saves(draft: Draft) -> None:
    """Set saves, evaluations and the best checkpoint; note where the defaults of HF Trainer
    differ."""
    # Saves.
    if draft.value("save_strategy", "steps") in ("steps", "best"):
        set_steps(draft, "save_steps", "checkpoint")
    elif draft.value("save_strategy") == "epoch":
        draft.set("checkpoint.every_epochs", 1.0)
    has_saves = draft.value("save_strategy", "steps") != "no"
    keep_last = draft.number("save_total_limit")
    if keep_last:
        draft.set("checkpoint.keep_last", int(keep_last))
    elif has_saves and "checkpoint.keep_last" not in draft.given_settings:
        draft.notes.append(
            "save_total_limit is missing: there all checkpoints are kept; here the newest two: "
            "checkpoint.keep_last=N"
        )
    # Evaluations.
    strategy = draft.value("eval_strategy", draft.value("evaluation_strategy", "no"))
    if strategy == "steps":
        set_steps(draft, "eval_steps", "evaluation")
    elif strategy == "epoch":
        draft.set("evaluation.every_epochs", 1.0)
    if strategy in ("steps", "epoch") and not draft.value("val_size"):
        draft.notes.append(
            f"eval_strategy = {strategy}: there the test split is evaluated; here data that is "
            "held out: add `--held-out 0.05` to the tokenize line, or tokenize the test split "
            "and name it in evaluation.held_out"
        )
    is_count_set = "evaluation.samples" in draft.given_settings or draft.value("max_eval_samples")
    if strategy in ("steps", "epoch") and not is_count_set:
        draft.notes.append(
            "an evaluation measures 256 held-out samples, always the same ones; there all of them: "
            "evaluation.samples=N"
        )
    set_keys = ("validation_split_percentage", "validation_file", "val_size", "eval_dataset")
    if strategy == "no" and any(draft.value(key) for key in set_keys):
        draft.notes.append(
            "eval_strategy is missing or no: there the run is not evaluated while it trains; here "
            "once, at its end: evaluation.every_epochs=1 evaluates each epoch"
        )
    if draft.value("load_best_model_at_end"):
        set_best(draft)


def missing_evaluations(draft: Draft) -> list[str]:
    """Return the setting, as ``section.key=value``, that makes the run evaluate at the epochs of
    its saves; empty if it does, has no saves by epochs, or the user sets one of the two periods."""
    save_epochs = draft.run.get("checkpoint", {}).get("every_epochs")
    evaluation_epochs = draft.run.get("evaluation", {}).get("every_epochs")
    settings = {"checkpoint.every_epochs", "evaluation.every_epochs"}
    if save_epochs in (None, evaluation_epochs) or settings & draft.given_settings.keys():
        return []
    return [f"evaluation.every_epochs={save_epochs:g}"]


def set_best(draft: Draft) -> None:
    """Set that the best checkpoint is kept, as load_best_model_at_end asks. Shared with Axolotl."""
    draft.set("checkpoint.keep_best", 1)
    for setting in missing_evaluations(draft):
        rule = "needs an evaluation at each save, and not at other times"
        draft.refuse("load_best_model_at_end", rule, f"{setting} after the file")
    draft.notes.append(
        "load_best_model_at_end: the best checkpoint is kept, and the run exports its last "
        "weights; `bigtrain export --best` exports the best"
    )
    metric = draft.value("metric_for_best_model", "loss")
    if metric not in ("loss", "eval_loss"):
        rule = "is a metric of the program; evaluation.best.metric names one of a run"
        draft.refuse("metric_for_best_model", rule, "--omit metric_for_best_model: the loss")
    elif draft.value("greater_is_better"):
        rule = "takes the checkpoint with the highest loss for the best"
        draft.refuse("greater_is_better", rule, "--omit greater_is_better: the lowest loss")


def _set_objective(draft: Draft, task: str) -> None:
    """Set adapters and the objective of a trainer of TRL."""
    if draft.value("use_peft") or draft.value("load_in_4bit") or draft.value("load_in_8bit"):
        targets = draft.value("lora_target_modules")
        parameters = draft.value("lora_target_parameters")
        if targets is None and not parameters:
            rule = "is missing, and peft then chooses layers by a table of architectures"
            fix = "lora_target_modules: all-linear, or names of modules, in the file"
            draft.refuse("lora_target_modules", rule, fix)
        # If the file names parameters and no modules, only these parameters have adapters.
        default_targets: object = [] if parameters else "all-linear"
        set_adapters(
            draft,
            rank=draft.number("lora_r", 16),
            alpha=draft.number("lora_alpha", 32),
            targets=targets or default_targets,
            dropout=draft.number("lora_dropout", 0.05),
        )
        if parameters:
            draft.set("adapters.target_parameters", parameters)
    # Each trainer has one loss, except the trainer of DPO, in which loss_type names the loss.
    method = METHODS[task]
    loss = draft.value("loss_type")
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    if method is METHODS["dpo"] and loss is not None:
        method = replace(method, loss=loss)
        if loss not in DPO_LOSSES:
            choices = ", ".join(DPO_LOSSES)
            draft.refuse("loss_type", f"is not a loss of DPO that bigtrain has: {choices}")
    weight_keys = ("desirable_weight", "undesirable_weight")
    set_objective(draft, method, draft.number("beta", 0.1), weight_keys)


def set_adapters(
    draft: Draft, *, rank: float, alpha: float, targets: object, dropout: float
) -> None:
    """Set the adapters from these values, and from keys that TRL, Axolotl and LLaMA-Factory
    share."""
    draft.set("adapters.rank", int(rank))
    draft.set("adapters.alpha", float(alpha))
    draft.set("adapters.dropout", dropout)
    draft.set("adapters.targets", targets)
    if draft.value("load_in_4bit"):
        draft.set("adapters.quantization", draft.value("bnb_4bit_quant_type", "nf4"))
        draft.set("adapters.double_quantization", bool(draft.value("use_bnb_nested_quant", False)))
    elif draft.value("load_in_8bit"):
        draft.set("adapters.quantization", "int8")
    if draft.value("loraplus_lr_ratio"):
        draft.set("adapters.loraplus_lr_ratio", draft.number("loraplus_lr_ratio"))
    if draft.value("lora_modules_to_save"):
        draft.set("adapters.modules_to_save", draft.value("lora_modules_to_save"))
    for key, name in (("use_rslora", "rslora"), ("use_dora", "dora")):
        if draft.value(key):
            draft.set(f"adapters.{name}", True)


def _set_blocks(draft: Draft) -> None:
    """Set the data of run_clm.py: the tokens of the rows, concatenated and split into blocks."""
    length = draft.required_number("block_size", "batch.sequence_length")
    draft.set("batch.sequence_length", int(length))
    draft.set("data.packing", "concatenate")
    options = [*METHODS["pt"].rows]
    percentage = draft.number("validation_split_percentage", 0)
    if percentage:
        options += ["--held-out", f"{percentage / 100:g}"]
    if draft.value("dataset_config_name"):
        options += ["--dataset-config", str(draft.value("dataset_config_name"))]
    if draft.value("max_train_samples"):
        options += ["--max-samples", str(int(draft.number("max_train_samples")))]
    draft.notes.append(
        "tokenize ends each text with the tokenizer's end token; run_clm.py adds what the "
        "tokenizer adds by itself, which is often nothing"
    )
    source = str(draft.value("train_file", draft.value("dataset_name", "DATA")))
    tokenizer = str(draft.value("tokenizer_name", model_name(draft)))
    set_data(draft, [tokenize_command(source, tokenizer, options, "shards/")], ["shards/"])


def _set_rows(draft: Draft, task: str, default_length: int) -> None:
    """Set sequence length, packing, and the commands that make the data."""
    length = draft.number("max_length", draft.number("max_seq_length", default_length))
    draft.set("batch.sequence_length", int(length))
    if METHODS[task].objective is None:
        set_packing(draft, packs=bool(draft.value("packing")), length_key="max_length")
        if draft.value("packing_strategy") == "wrapped":
            draft.set("data.packing", "concatenate")
            draft.run["data"].pop("long_documents", None)
        learns_answers = (
            draft.value("assistant_only_loss") or "assistant_only_loss" in draft.omitted
        )
        if not learns_answers:
            draft.refuse(
                "assistant_only_loss",
                "false, the default, also learns the user's messages of conversations; a run "
                "learns "
                "the assistant's",
                "--omit assistant_only_loss learns answers only",
            )
    # One command for each dataset.
    options = [*METHODS[task].rows]
    if draft.value("chat_template"):
        options += ["--chat-template", "template.jinja"]
        draft.notes.append("chat_template: write its text into template.jinja")
    tokenizer = model_name(draft)
    sources = _sources(draft)
    outputs = shard_directories(range(len(sources)))
    commands = [
        tokenize_command(source.name, tokenizer, [*source.options, *options], output)
        for source, output in zip(sources, outputs, strict=True)
    ]
    set_data(draft, commands, outputs)


def _refuse_shares(draft: Draft, key: str, shares: Iterable[tuple[str, Any]]) -> None:
    """Refuse a share of a dataset's rows other than 1. shares: names of datasets, with shares."""
    for name, share in shares:
        if share != 1.0:
            rule = f"takes {share} of the rows of {name}"
            draft.refuse(key, rule, "cut the rows, and 1.0 in the file")


class _Source(NamedTuple):
    """A dataset: its name, and options of `tokenize` for its configuration and split."""

    name: str
    options: list[str]


def _sources(draft: Draft) -> list[_Source]:
    """Return the datasets of the file."""
    # A file names its data as a mixture, as a dictionary of shares, or as one dataset.
    mixture = draft.value("dataset_mixture")
    if isinstance(mixture, Mapping):
        entries = mixture.get("datasets", [])
        shares = [(entry.get("id"), entry.get("weight", 1.0)) for entry in entries]
        _refuse_shares(draft, "dataset_mixture", shares)
    elif isinstance(draft.value("dataset_mixer"), Mapping):
        mixer, splits = draft.value("dataset_mixer"), draft.value("dataset_splits", ["train"])
        entries = [{"id": name, "split": splits[0]} for name in mixer]
        _refuse_shares(draft, "dataset_mixer", mixer.items())
    else:
        name = draft.value("dataset_name", "DATA")
        split = draft.value("dataset_train_split", "train")
        entries = [{"id": name, "config": draft.value("dataset_config"), "split": split}]
    sources = []
    for entry in entries:
        options = []
        if entry.get("config") not in (None, "default"):
            options += ["--dataset-config", str(entry["config"])]
        if entry.get("split", "train") != "train":
            options += ["--dataset-split", str(entry["split"])]
        sources.append(_Source(str(entry.get("id")), options))
    return sources
