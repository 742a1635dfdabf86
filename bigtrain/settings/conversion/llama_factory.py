"""LLaMA-Factory's YAML: keys of HF TrainingArguments and further keys. Pure, except that it reads
dataset_info.json.
Defaults are taken from LLaMA-Factory (hparams/, data/template.py) of August 2026."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bigtrain.settings.conversion.accepted_values import (
    COUNT,
    FLAG,
    LLAMA_FACTORY_VALUES,
    TEXT,
    Values,
)
from bigtrain.settings.conversion.common import (
    held_out_options,
    model_name,
    read_members,
    set_data,
    set_packing,
    shard_directories,
    tokenize_command,
)
from bigtrain.settings.conversion.draft import Draft
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
from bigtrain.settings.conversion.trainer import set_adapters, set_training
from bigtrain.settings.conversion.trainer_keys import TRAINER_TABLE

NAME = "LLaMA-Factory"
_OTHER_METHOD = refused("this method of fine-tuning is not implemented")

_DATASET_TABLE: Table = {
    **rows("file_name hf_hub_url", read("`tokenize --input`")),
    **rows("ms_hub_url om_hub_url", note("tokenize reads files, and datasets of Hugging Face")),
    "cloud_file_name": note("name it in --input of the tokenize line"),
    "script_url": refused("code of the hub is never run"),
    "subset": read("`tokenize --dataset-config`"),
    "split": read("`tokenize --dataset-split`"),
    **rows("folder data_dir", refused("a part of the dataset: name its files in --input")),
    "revision": refused("tokenize reads the dataset's main branch"),
    "num_samples": refused("draws rows; tokenize --max-samples takes the first ones"),
    "formatting": read("found by `tokenize`, whose --format names it"),
    "ranking": read("`objective`: its kind decides what rows have"),
    "columns": note(
        "names in the data: --key NAME=COLUMN of the tokenize line",
        rows(
            "prompt query response history messages system tools chosen rejected kto_tag images "
            "videos audios",
            read("`tokenize --key`"),
        ),
    ),
    "tags": note(
        "names in the data: --key from=TAG, --key value=TAG, --role NAME=ROLE of the tokenize line",
        rows(
            "role_tag content_tag user_tag assistant_tag observation_tag function_tag system_tag",
            read("`tokenize --key`, `tokenize --role`"),
        ),
    ),
}
_DATASET_TABLE = with_values(
    _DATASET_TABLE,
    [
        (TEXT, "file_name hf_hub_url subset split"),
        (FLAG, "ranking"),
        (COUNT, "num_samples"),
        (Values(words=("alpaca", "sharegpt", "openai")), "formatting"),
        (Values(types=(dict,)), "columns tags"),
    ],
)
"""Keys of a dataset in dataset_info.json (LLaMA-Factory's data/parser.py)."""

TABLE: Table = {
    **TRAINER_TABLE,
    "stage": read("`objective`: pt, sft, dpo, kto, rm"),
    "finetuning_type": read("`adapters` for lora"),
    "lora_rank": read("`adapters.rank`"),
    "lora_target": read("`adapters.targets`"),
    "additional_target": read("`adapters.modules_to_save`"),
    "use_rslora": read("`adapters.rslora`"),
    "use_dora": read("`adapters.dora`"),
    "loraplus_lr_ratio": read("`adapters.loraplus_lr_ratio`"),
    "loraplus_lr_embedding": note("embeddings have no adapters"),
    "pissa_init": read("`adapters.init`: pissa"),
    "pissa_iter": read("only -1: the exact decomposition"),
    "pissa_convert": note("an export of adapters always fits the base itself"),
    "adapter_name_or_path": refused("adapters begin from zero"),
    "quantization_bit": read("`adapters.quantization`: 4, 8"),
    "quantization_method": only(("bnb", "bitsandbytes"), "only bitsandbytes is implemented"),
    "double_quantization": read("`adapters.double_quantization`"),
    "quantization_type": read("`adapters.quantization`"),
    "upcast_layernorm": refused("normalization layers in float32 are not implemented"),
    **rows(
        "oft_rank oft_block_size oft_target freeze_trainable_layers freeze_trainable_modules "
        "freeze_extra_modules use_galore galore_layerwise galore_target galore_rank galore_scale "
        "use_apollo apollo_layerwise apollo_target apollo_rank apollo_scale apollo_scale_type "
        "use_badam badam_mode badam_switch_mode badam_switch_interval badam_verbose use_llama_pro "
        "use_adam_mini mixture_of_depths use_muon use_dft_loss use_eaft_loss use_asft_loss "
        "eaft_alpha "
        "asft_alpha shift_attn use_kt kt_optimize_rule",
        _OTHER_METHOD,
    ),
    **rows(
        "pref_beta pref_loss simpo_gamma kto_chosen_weight kto_rejected_weight", read("`objective`")
    ),
    "pref_ftx": read("`objective.sft_weight`"),
    "dpo_label_smoothing": read("`objective.label_smoothing`"),
    "ref_model": refused("the reference is the model that the run starts from"),
    "dataset": read("the `tokenize` lines: names of data/dataset_info.json"),
    "dataset_dir": note("dataset_info.json there has the files of the datasets"),
    "dataset_info": read(
        "the `tokenize` lines: dataset_info.json, of whose datasets these keys are known: "
        + ", ".join(sorted(_DATASET_TABLE))
    ),
    "eval_dataset": note("tokenize it, and name it in evaluation.held_out"),
    "val_size": read("`tokenize --held-out`"),
    "template": read("`tokenize --chat-template`"),
    "cutoff_len": sets("batch.sequence_length"),
    "max_samples": read("`tokenize --max-samples`, of each dataset"),
    "packing": read("`data.packing`"),
    "neat_packing": read("`data.packing`: packed and isolated"),
    "train_on_prompt": only((False,), "a run learns answers only"),
    "mask_history": read("`tokenize --learn last`"),
    "mix_strategy": only(("concat",), "interleaving repeats or drops rows"),
    "interleave_probs": refused("data.sources with weights mixes datasets"),
    "streaming": note("shards are read in the order of data.samples"),
    "default_system": refused("a system message is a part of the rows"),
    "enable_thinking": only((True,), "the template decides it: --chat-template FILE"),
    "new_special_tokens": refused("`bigtrain tokenizer --config`, tokenizer.add_special_tokens"),
    "resize_vocab": refused("model.vocabulary, with tokenizer.add_special_tokens"),
    "flash_attn": read("`model.attention`"),
    "use_unsloth": note("the same results by other kernels"),
    "enable_liger_kernel": note("the same results by other kernels: model.kernels=liger"),
    "disable_gradient_checkpointing": read("`model.gradient_checkpointing`, on by default"),
    "pure_bf16": refused("masters are float32"),
    "rope_scaling": refused("model.overrides sets the model's rope parameters"),
    "freeze_vision_tower": note("of models with images"),
    "freeze_multi_modal_projector": note("of models with images"),
    **rows("image_max_pixels video_max_pixels", note("of models with images")),
    **rows(
        "plot_loss overwrite_cache preprocessing_num_workers tokenized_path use_swanlab "
        "swanlab_project swanlab_run_name predict_with_generate max_new_tokens top_p infer_backend "
        "ray_run_name ray_storage_path ray_num_workers resources_per_worker placement_strategy "
        "ray_init_kwargs do_eval do_predict fp8_backend fp8_enable_fsdp_float8_all_gather "
        "cache_dir use_fast_tokenizer hf_hub_token export_dir preprocessing_batch_size",
        note("is of the program, not of the training"),
    ),
}
TABLE = {**TABLE, **rows("fp8", refused("its float8 is another one than precision.float8"))}

TABLE = with_values(TABLE, LLAMA_FACTORY_VALUES)

_STAGES = ("pt", "sft", "dpo", "kto", "rm")
_TEMPLATES = {
    "chatml": "chatml",
    "qwen3_nothink": "chatml",
    "qwen": "qwen2_5",
    "qwen3": "qwen3",
    "phi": "phi3",
    "gemma": "gemma3",
    **{
        name: name
        for name in "llama3 phi4 gemma3 mistral llama2 zephyr vicuna alpaca deepseek "
        "deepseek3".split()
    },
}
"""Templates of LLaMA-Factory that write what one of `bigtrain.data.chat.named_templates` does."""
_TEMPLATES_WITH_NEWLINES = (
    "chatml",
    "qwen3_nothink",
    "qwen",
    "qwen3",
    "phi",
    "gemma",
    "gemma3",
    "alpaca",
)
"""Templates with which LLaMA-Factory also learns the newline after an answer's end."""
_ATTENTION = {
    "fa2": "flash_attention_2",
    "sdpa": "sdpa",
    "disabled": "eager",
    "fa3": "flash_attention_3",
}


def fill(draft: Draft, task: str | None) -> None:
    """Set the settings that follow from several keys."""
    stage = draft.value("stage", "sft")
    if stage not in _STAGES:
        draft.refuse("stage", f"is not a kind of objective: {', '.join(_STAGES)}", "another stage")
        return
    set_training(draft, {"learning_rate": 5e-5})
    has_dtype = draft.value("bf16") or draft.value("fp16") or "bf16" in draft.omitted
    if not has_dtype and "pure_bf16" not in draft.keys:  # the table refuses pure_bf16
        rule = "without bf16 and fp16 LLaMA-Factory trains the weights in the dtype of their files"
        draft.refuse("bf16", rule, "bf16: true in the file, or --omit bf16: float32")
    if not draft.value("disable_gradient_checkpointing"):
        draft.set("model.gradient_checkpointing", "full")
    attention = draft.value("flash_attn")
    if attention in _ATTENTION:
        draft.set("model.attention", _ATTENTION[attention])
    _set_objective(draft, stage)
    _set_adapters(draft)
    _set_rows(draft, stage)


def _set_objective(draft: Draft, stage: str) -> None:
    """Set the objective of a stage; the stage dpo has several losses of pairs, in pref_loss."""
    method = METHODS[stage]
    loss = draft.value("pref_loss", "sigmoid")
    if method is METHODS["dpo"] and loss != method.loss:
        if loss in ("ipo", "simpo", "orpo"):
            method = METHODS[loss]
        elif loss == "hinge":
            method = replace(method, loss=loss)
        else:
            draft.refuse(
                "pref_loss", "is not a loss of pairs of bigtrain: sigmoid, hinge, ipo, simpo, orpo"
            )
    weights = ("kto_chosen_weight", "kto_rejected_weight")
    set_objective(draft, method, draft.number("pref_beta", 0.1), weights)


def _set_adapters(draft: Draft) -> None:
    """Set the adapters of finetuning_type lora, the default; full has none."""
    method = draft.value("finetuning_type", "lora")
    if method == "full":
        return
    if method != "lora":
        draft.refuse("finetuning_type", "is not implemented: lora, full")
        return
    rank = draft.number("lora_rank", 8)
    names = draft.value("lora_target", "all")
    targets = "all-linear" if names == "all" else [name.strip() for name in str(names).split(",")]
    set_adapters(
        draft,
        rank=rank,
        alpha=draft.number("lora_alpha", 2 * rank),
        targets=targets,
        dropout=draft.number("lora_dropout", 0.0),
    )
    # PiSSA decomposes the weights exactly; LLaMA-Factory approximates by default.
    if draft.value("pissa_init"):
        draft.set("adapters.init", "pissa")
        if draft.number("pissa_iter", 16) != -1 and "pissa_iter" not in draft.omitted:
            rule = "16, the default, or another number decomposes weights by random vectors"
            fix = "pissa_iter: -1 in the file, or --omit pissa_iter: the exact decomposition"
            draft.refuse("pissa_iter", rule, fix)
    if draft.value("additional_target"):
        modules = [name.strip() for name in str(draft.value("additional_target")).split(",")]
        draft.set("adapters.modules_to_save", modules)
    # The base in 4 or 8 bits.
    bits = draft.value("quantization_bit")
    if bits == 4:
        draft.set("adapters.quantization", draft.value("quantization_type", "nf4"))
        draft.set("adapters.double_quantization", draft.value("double_quantization", True))
    elif bits == 8:
        draft.set("adapters.quantization", "int8")
    elif bits is not None:
        draft.refuse("quantization_bit", "is not implemented: 4, 8")


def _set_rows(draft: Draft, stage: str) -> None:
    """Set packing, and the commands that make the data."""
    if "batch" not in draft.run or "sequence_length" not in draft.run["batch"]:
        draft.set("batch.sequence_length", 2048)
    if stage == "pt":
        draft.set("data.packing", "concatenate")
    elif stage == "sft":
        packs = bool(draft.value("neat_packing") or draft.value("packing"))
        set_packing(draft, packs=packs, length_key="cutoff_len")
        if draft.value("packing") and not draft.value("neat_packing"):
            draft.refuse(
                "packing",
                "without neat_packing the rows of a pack see each other",
                "neat_packing: true in the file, or --omit packing: each row in a sample",
            )
    # One command for each dataset.
    options = _row_options(draft, stage)
    names = [name.strip() for name in str(draft.value("dataset", "DATA")).split(",")]
    outputs = shard_directories(names)
    commands = []
    has_all_sources = True
    for name, output in zip(names, outputs, strict=True):
        # Read the dataset's record of dataset_info.json, which is empty without the file, and
        # refuse its keys that are not in `_DATASET_TABLE`.
        prefix = f"dataset_info.{name}."
        kept_keys = draft.value("dataset_info", {}).get(name, {})  # without omitted ones
        values = read_members(draft, prefix, kept_keys, _DATASET_TABLE)
        keys_in_file = draft.keys.get("dataset_info", {}).get(name, {})
        draft.apply_members(prefix, keys_in_file, _DATASET_TABLE)
        record = {key: value for key, value in values.items() if value is not None}
        source = record.get("file_name") or record.get("hf_hub_url")
        has_all_sources = has_all_sources and source is not None
        source_options = ["--dataset-config", record["subset"]] if record.get("subset") else []
        if record.get("split", "train") != "train":
            source_options += ["--dataset-split", record["split"]]
        source = source or f"FILE_OF_{name}"
        row_options = [*source_options, *options]
        commands.append(tokenize_command(source, model_name(draft), row_options, output))
    folder = draft.value("dataset_dir", "data")
    draft.notes.append(
        f"dataset: columns that {folder}/dataset_info.json renames are --key NAME=COLUMN"
    )
    if not has_all_sources:
        draft.notes.append(
            f"dataset: {folder}/dataset_info.json, which is not here, has the file, or the Hub's "
            "name, of each FILE_OF_..."
        )
    set_data(draft, commands, outputs)


def _row_options(draft: Draft, stage: str) -> list[str]:
    """Return the options of `tokenize` that all datasets have."""
    options = [*METHODS[stage].rows, *held_out_options(draft, "val_size")]
    if draft.value("mask_history"):
        options += ["--learn", "last"]
    if draft.value("max_samples"):
        options += ["--max-samples", str(int(draft.number("max_samples")))]
    template = draft.value("template")
    if template in _TEMPLATES and stage != "pt":
        options += ["--chat-template", _TEMPLATES[template]]
        if template in _TEMPLATES_WITH_NEWLINES:
            draft.notes.append(
                f"template = {template!r}: LLaMA-Factory also learns the newline after an answer's "
                "end"
            )
    elif template is not None and stage != "pt":
        draft.refuse(
            "template",
            "is a template of LLaMA-Factory's own, and a run takes the tokenizer's, or a file",
            "--omit template takes the tokenizer's; or tokenize --chat-template FILE",
        )
    return options


def dataset_info(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the key dataset_info with the records of ``dataset_dir``/dataset_info.json, in which
    file_name is a complete path; empty without the file. dataset_dir is relative to the current
    directory, or to `folder`, the directory of the YAML."""
    directory = Path(str(keys.get("dataset_dir", "data")))
    for parent in (directory, folder / directory):
        try:
            records = json.loads((parent / "dataset_info.json").read_bytes())
        except (OSError, ValueError):
            continue
        items = records.items() if isinstance(records, dict) else []
        dataset_records = {name: dict(record) for name, record in items if isinstance(record, dict)}
        for record in dataset_records.values():
            if isinstance(record.get("file_name"), str):
                record["file_name"] = str(parent / record["file_name"])
        return {"dataset_info": dataset_records}
    return {}


def is_llama_factory(keys: Mapping[str, Any]) -> bool:
    """Return whether a file is LLaMA-Factory's."""
    return bool({"stage", "finetuning_type", "cutoff_len"} & keys.keys()) and "model" not in keys
