"""`bigtrain convert`: trainers are told apart, tables are complete, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.settings.commented_yaml import setting_names
from bigtrain.settings.conversion.common import OPTIMIZERS
from bigtrain.settings.conversion.convert import TRAINERS, convert
from bigtrain.settings.conversion.trainer import TASKS
from bigtrain.settings.loading import load_run_config

SFT: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "output_dir": "runs/sft",
    "learning_rate": "2e-5",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "packing": True,
    "assistant_only_loss": True,
    "dataset_name": "org/chats",
    "max_length": 512,
    "max_steps": 30,
    "warmup_ratio": 0.1,
}
DPO: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "output_dir": "runs/dpo",
    "beta": 0.2,
    "learning_rate": 1e-6,
    "max_length": 256,
}
CLM: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "output_dir": "runs/clm",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "block_size": 256,
    "train_file": "mine.jsonl",
    "validation_split_percentage": 5,
    "max_train_samples": 1000,
    "eval_strategy": "steps",
    "eval_steps": 25,
    "save_steps": 50,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}


def write(directory: Path, keys: dict[str, Any], name: str = "found.yaml") -> Path:
    path = directory / name
    path.write_text(yaml.safe_dump(keys), encoding="utf-8")
    return path


def problems(directory: Path, keys: dict[str, Any], **options: Any) -> dict[str, str]:
    """Return rule and fix of each problem of a file, by key."""
    with pytest.raises(ConfigError) as caught:
        convert([write(directory, keys)], **{"world_size": 4, **options})
    return {p.key: f"{p.rule} -> {p.remedy}" for p in caught.value.problems}


def test_the_command_writes_a_run_and_its_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, {**SFT, "push_to_hub": True})
    words = ["convert", "found.yaml", "--world-size", "4", "optimizer.weight_decay=0.01"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "bigtrain tokenize --input org/chats --tokenizer org/model --output shards/" in printed
    assert "bigtrain check --config run.yaml --world-size 4" in printed
    assert "push_to_hub = True: an export is uploaded with `hf upload`" in printed
    config = load_run_config("run.yaml")
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-5, 0.01)
    assert (config.batch.global_batch_size, config.batch.sequence_length) == (32, 512)
    assert config.schedule.warmup_ratio == 0.1
    assert config.precision.dtype == "bfloat16"
    # It is the user's from then on.
    assert main(words) == 2
    assert "run.yaml: exists, and may have been edited" in capsys.readouterr().err.replace("'", "")


def test_json_is_read_like_yaml(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(SFT))
    by_json = convert([path], world_size=4)
    assert by_json.tree == convert([write(tmp_path, SFT)], world_size=4).tree


def test_a_later_file_wins(tmp_path: Path) -> None:
    first, second = write(tmp_path, SFT), write(tmp_path, {"max_length": 64}, "second.yaml")
    assert convert([first, second], world_size=4).config.batch.sequence_length == 64


@pytest.mark.parametrize("name", TRAINERS)
def test_every_row_names_a_setting_or_a_reason(name: str) -> None:
    settings = set(setting_names())
    for key, row in TRAINERS[name].table.items():
        assert row.describe(), key
        # A value that a conversion reads is one that the trainer takes, or a problem.
        assert row.accepted is not None or row.kind not in ("sets", "read"), key
        if row.kind == "sets":
            assert any(f"{name}.".startswith(f"{row.path}.") for name in settings), key
        else:
            assert row.text, key
        for member, row_within in row.members.items():
            assert row_within.describe(), f"{key}.{member}"


@pytest.mark.parametrize(
    ("keys", "options", "key", "text"),
    [
        (
            {**SFT, "group_by_length": True},
            {},
            "group_by_length",
            "--omit group_by_length",
        ),
        (
            {**SFT, "invented": 1},
            {},
            "invented",
            "is not a key of HF Trainer and TRL that bigtrain",
        ),
        (
            {**SFT, "load_best_model_at_end": True, "metric_for_best_model": "eval_accuracy"},
            {},
            "metric_for_best_model",
            "--omit metric_for_best_model: the loss",
        ),
        ({**CLM, "block_size": None}, {"task": "pretrain"}, "block_size", "batch.sequence_length="),
        ({**SFT, "lr_scheduler_type": "cosinus"}, {}, "lr_scheduler_type", "did you mean cosine?"),
        ({**SFT, "optim": "rmsprop"}, {}, "optim", "is not an optimizer of bigtrain"),
        ({**SFT, "lr_scheduler_type": "polynomial"}, {}, "lr_scheduler_type", "is not a schedule"),
        ({**SFT, "learning_rate": "fast"}, {}, "learning_rate", "must be a number above 0"),
        (SFT, {"world_size": None}, "per_device_train_batch_size", "--world-size N"),
        (DPO, {}, "the trainer", "--task pretrain or sft or dpo or orpo or kto or reward"),
        ({**DPO, "loss_type": "aot"}, {"task": "dpo"}, "loss_type", "is not a loss of DPO"),
        ({**DPO, "rpo_alpha": 1.0}, {"task": "dpo"}, "rpo_alpha", "objective.sft_weight weighs"),
        ({**SFT, "use_peft": True}, {}, "lora_target_modules", "by a table of architectures"),
        ({**SFT, "train_sampling_strategy": "sequential"}, {}, "train_sampling_strategy", "always"),
        (
            {**SFT, "dataset_mixer": {"org/chats": 1.0, "org/code": 0.5}},
            {},
            "dataset_mixer",
            "takes 0.5 of the rows of org/code",
        ),
        (
            {**SFT, "dataset_mixture": {"datasets": [{"id": "org/chats", "weight": 0.25}]}},
            {},
            "dataset_mixture",
            "takes 0.25 of the rows of org/chats",
        ),
        (
            {
                **SFT,
                "dataset_mixture": {
                    "datasets": [
                        {"id": "org/chats", "config": "en", "weight": 0.5},
                        {"id": "org/chats", "config": "de"},
                    ]
                },
            },
            {},
            "dataset_mixture",
            "takes 0.5 of the rows of org/chats",
        ),
    ],
)
def test_nothing_is_guessed(
    tmp_path: Path, keys: dict[str, Any], options: dict[str, Any], key: str, text: str
) -> None:
    assert text in problems(tmp_path, keys, **options)[key]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"hello": 1}, "is not a file of Axolotl, LLaMA-Factory"),
        ({"model": "m", "train_dataset": "d", "cutoff_len": 8}, "LLaMA-Factory's new trainer (v1)"),
        ({**DPO, "num_generations": 8}, "is of reinforcement learning, which is not converted"),
        ({"num_layers": 2, "train_impl": "dpo"}, "is of GPT-NeoX's post-training"),
        (
            {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"steps": 1}, "seed": 1},
            "is a run of bigtrain already -> bigtrain check --config ",
        ),
        (
            {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2},
            "is a DeepSpeed JSON, not a trainer's file -> bigtrain check --config RUN.yaml "
            "--deepspeed_config ",
        ),
    ],
)
def test_other_files_are_refused_as_a_whole(
    tmp_path: Path, keys: dict[str, Any], text: str
) -> None:
    [(_, problem)] = problems(tmp_path, keys).items()
    assert text in problem


NEOX: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "vocab_size": 256,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
    "train_micro_batch_size_per_gpu": 2,
    "train_iters": 100,
    "data_path": "data/pile_text_document",
}
AXOLOTL: dict[str, Any] = {
    "base_model": "org/model",
    "datasets": [{"path": "org/chats", "type": "chat_template"}],
    "output_dir": "runs/axolotl",
    "learning_rate": 1e-5,
    "micro_batch_size": 2,
    "warmup_steps": 10,
    "sample_packing": True,
}
AXOLOTL_LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True}
LLAMA_FACTORY: dict[str, Any] = {
    "stage": "sft",
    "model_name_or_path": "org/model",
    "dataset": "chats",
    "output_dir": "runs/factory",
    "learning_rate": 1e-5,
    "neat_packing": True,
    "bf16": True,
}


@pytest.mark.parametrize(
    ("keys", "key", "value", "legal"),
    [
        (AXOLOTL, "bf16", "yess", "true or false or auto or full"),
        (AXOLOTL, "gradient_checkpointing", "maybe", "true or false or offload"),
        (AXOLOTL, "flash_attention", 3, "true or false"),
        (AXOLOTL, "val_set_size", 1.5, "a number from 0, whole from 1"),
        (AXOLOTL, "warmup_steps", "ten", "a number from 0, whole from 1"),
        (AXOLOTL, "micro_batch_size", -2, "a whole number from 1"),
        (AXOLOTL, "learning_rate", -1, "a number above 0"),
        (AXOLOTL, "datasets", 5, "a list or keys and values or a text"),
        (AXOLOTL, "special_tokens", "<pad>", "keys and values"),
        (AXOLOTL, "roles_to_train", ["user"], "a run learns answers only"),
        (AXOLOTL, "bfloat16", True, "masters are float32"),
        (LLAMA_FACTORY, "bf16", "auto", "true or false"),
        (LLAMA_FACTORY, "cutoff_len", "64k", "a whole number from 1"),
        (LLAMA_FACTORY, "flash_attn", "fa4", "auto or disabled or sdpa or fa2 or fa3"),
        (LLAMA_FACTORY, "max_samples", 10.5, "a whole number from 1"),
        (SFT, "packing", "somewhat", "true or false"),
        (SFT, "weight_decay", float("nan"), "a number from 0"),
        (SFT, "eval_strategy", "stpes", "steps or epoch or no"),
        (
            {**SFT, "lr_scheduler_type": "cosine_with_restarts"},
            "lr_scheduler_kwargs",
            {"num_cycles": "two"},
            "a number above 0",
        ),
        (SFT, "load_in_4bit", [True], "true or false"),
    ],
)
def test_a_value_that_the_trainer_does_not_take_is_one_problem(
    tmp_path: Path, keys: dict[str, Any], key: str, value: object, legal: str
) -> None:
    convert([write(tmp_path, keys)], world_size=4)
    found = problems(tmp_path, {**keys, key: value})
    assert [name.partition(".")[0] for name in found] == [key]
    assert legal in "".join(found.values())
    # Without the key it is a run.
    convert([write(tmp_path, {**keys, key: None if key not in keys else keys[key]})], world_size=4)


@pytest.mark.parametrize("word", [True, "true", "yes", "On", "1", 1])
@pytest.mark.parametrize(
    ("keys", "key", "setting"),
    [
        (AXOLOTL, "gradient_checkpointing", ("model", "gradient_checkpointing")),
        (LLAMA_FACTORY, "torch_compile", ("model", "compile")),
        (SFT, "fp16", ("precision", "dtype")),
    ],
)
def test_true_and_false_are_read_as_yaml_and_the_trainer_do(
    tmp_path: Path, word: object, keys: dict[str, Any], key: str, setting: tuple[str, str]
) -> None:
    without = {name: value for name, value in keys.items() if name != "bf16"} | {"bf16": False}
    without = keys if key != "fp16" else without
    opposite = {"true": "false", "yes": "no", "On": "off", "1": "0"}.get(str(word), not word)
    section, name = setting

    def value(word: object) -> object:
        tree = convert([write(tmp_path, {**without, key: word})], world_size=4).tree
        return tree[section].get(name)

    assert value(word) == value(True) != value(opposite) == value(False)


def test_keys_within_keys_are_read_too(tmp_path: Path) -> None:
    keys = next(
        file["keys"]
        for name, file in json.loads(
            Path(__file__).with_name("public_files.json").read_text(encoding="utf-8")
        ).items()
        if name.startswith("EleutherAI") and file.get("omit") == [] and "fp16" in file["keys"]
    )
    found = problems(tmp_path, {**keys, "fp16": {"enabled": "perhaps"}})
    assert found["fp16.enabled"].startswith("must be true or false, as in GPT-NeoX")


def chats(**keys: Any) -> dict[str, Any]:
    """Return a file of Axolotl whose dataset has further keys."""
    return {**AXOLOTL, "datasets": [{"path": "org/chats", "type": "chat_template", **keys}]}


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        (chats(roles_to_train=["user"]), "datasets.0.roles_to_train", "learns answers only"),
        (chats(train_on_eos="last"), "datasets.0.train_on_eos", "the end of each answer"),
        (chats(drop_system_message=True), "datasets.0.drop_system_message", "system message"),
        (chats(drop_system_message="y?"), "datasets.0.drop_system_message", "true or false"),
        (chats(field_mesages="x"), "datasets.0.field_mesages", "did you mean field_messages?"),
        (chats(field_messages=["x"]), "datasets.0.field_messages", "must be a text"),
        (chats(wieght=3), "datasets.0.wieght", "--omit datasets.0.wieght accepts a run"),
        (chats(weight=3), "datasets.0.weight", "is not a key of Axolotl that bigtrain knows"),
        (chats(field_output="foo"), "datasets.0.field_output", "is not a key of Axolotl"),
        (chats(shards=10), "datasets.0.shards", "a part of the rows: cut the file"),
        (chats(chat_template="mine"), "datasets.0.chat_template", "tokenize --chat-template"),
        (
            chats(message_property_mappings={"role": "role", "wight": "w"}),
            "datasets.0.message_property_mappings.wight",
            "is not a key of Axolotl",
        ),
        (
            {**AXOLOTL, "test_datasets": [{"path": "mine.jsonl", "spilt": "test"}]},
            "test_datasets.0.spilt",
            "did you mean split?",
        ),
        (
            {**AXOLOTL, "pretraining_dataset": {"path": "org/texts", "skip": 100}},
            "pretraining_dataset.0.skip",
            "a part of the rows",
        ),
        ({**AXOLOTL, "datasets": [5]}, "datasets", "must hold keys and values in each entry"),
        (
            {**SFT, "dataset_mixture": {"datasets": [{"id": "org/chats", "wieght": 0.5}]}},
            "dataset_mixture.datasets.0.wieght",
            "did you mean weight?",
        ),
        ({**SFT, "lr_scheduler_kwargs": {"pwer": 2}}, "lr_scheduler_kwargs.pwer", "--omit"),
        (
            {**NEOX, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "beta": [0.9, 0.95]}}},
            "optimizer.params.beta",
            "did you mean betas?",
        ),
        ({**NEOX, "fp16": {"enabld": True}}, "fp16.enabld", "did you mean enabled?"),
        ({**NEOX, "zero_optimization": {"stgae": 1}}, "zero_optimization.stgae", "--omit"),
        ({**NEOX, "data_types": {"grad_dtype": "fp32"}}, "data_types.grad_dtype", "--omit"),
    ],
)
def test_a_key_within_a_key_is_refused_by_its_name(
    tmp_path: Path, keys: dict[str, Any], key: str, text: str
) -> None:
    found = problems(tmp_path, keys)
    assert list(found) == [key]
    assert text in found[key]


@pytest.mark.parametrize("key", ["train_on_eos", "field_output", "shards"])
def test_a_key_within_a_key_can_be_omitted(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, chats(**{key: 7}))
    conversion = convert([path], world_size=4, omitted=[f"datasets.0.{key}"])
    assert f"datasets.0.{key} = 7: omitted, as --omit asks" in conversion.notes
    assert conversion.commands == convert([write(tmp_path, chats())], world_size=4).commands
    for absent in ("datasets.0.no_such_key", "datasets.3.path", "datasets.0"):
        found = problems(tmp_path, chats(), omitted=[absent])
        assert found[f"--omit {absent}"].startswith("the file has no such key")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"roles": {"assistant": ["bot"], "user": ["user"]}}, "--format messages --role bot=a"),
        ({"chat_template": "chatml"}, "--format messages --chat-template chatml --output"),
        ({"field_messages": "turns", "roles_to_train": None}, "--key messages=turns --output"),
    ],
)
def test_keys_of_a_dataset_are_options(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    [command] = convert([write(tmp_path, chats(**keys))], world_size=4).commands
    assert words in command


def test_a_dataset_may_be_its_path(tmp_path: Path) -> None:
    keys = {**AXOLOTL, "datasets": None, "pretraining_dataset": "org/texts"}
    [command] = convert([write(tmp_path, keys)], world_size=4).commands
    assert "--input org/texts --tokenizer org/model --text-key text" in command


def notes_of(directory: Path, keys: dict[str, Any], *overrides: str) -> str:
    conversion = convert([write(directory, keys)], world_size=4, overrides=overrides)
    return "\n".join(conversion.notes)


EVALUATED = {"val_set_size": 0.1, "save_steps": 100, "eval_steps": 50}
"""Keys of Axolotl with which it can keep the best checkpoint."""


@pytest.mark.parametrize(
    ("keys", "kept", "note"),
    [
        (EVALUATED, None, "load_best_model_at_end is missing: Axolotl then ends with"),
        ({**EVALUATED, "load_best_model_at_end": False}, None, ""),
        ({**EVALUATED, "load_best_model_at_end": "yes"}, 1, "exports its last weights"),
        ({**EVALUATED, "early_stopping_patience": 3}, 1, "exports its last weights"),
        ({**EVALUATED, "load_best_model_at_end": True, "eval_steps": 30}, None, "so not here"),
        ({"load_best_model_at_end": True, "save_steps": 100}, None, "so not here"),
        (
            {"val_set_size": 0.1, "saves_per_epoch": 1, "evals_per_epoch": 4, "num_epochs": 2},
            None,
            "checkpoint.keep_best=1 evaluation.every_epochs=1 and `bigtrain export --best`",
        ),
        ({"val_set_size": 0.1, "saves_per_epoch": 1, "evals_per_epoch": 1}, None, ""),
    ],
)
def test_the_best_checkpoint_of_axolotl(
    tmp_path: Path, keys: dict[str, Any], kept: int | None, note: str
) -> None:
    conversion = convert([write(tmp_path, {**AXOLOTL, **keys})], world_size=4)
    assert conversion.tree.get("checkpoint", {}).get("keep_best") == kept
    text = "\n".join(conversion.notes)
    assert note in text if note else "load_best_model_at_end" not in text


@pytest.mark.parametrize("keys", [{**AXOLOTL, **EVALUATED}, {**CLM, "max_steps": 100}])
@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("metric_for_best_model", "eval_accuracy", "evaluation.best.metric names one of a run"),
        ("greater_is_better", True, "the highest loss for the best"),
    ],
)
def test_the_best_checkpoint_has_the_lowest_loss(
    tmp_path: Path, keys: dict[str, Any], key: str, value: object, text: str
) -> None:
    found = problems(tmp_path, {**keys, "load_best_model_at_end": True, key: value})
    assert list(found) == [key]
    assert text in found[key]


@pytest.mark.parametrize(
    "keys",
    [
        {**AXOLOTL, "val_set_size": 0.1, "num_epochs": 2},
        {**CLM, "num_train_epochs": 2},
    ],
)
def test_the_best_checkpoint_needs_an_evaluation_at_each_save(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    keys = {**keys, "load_best_model_at_end": True, "eval_steps": 0.25, "save_steps": 0.5}
    found = problems(tmp_path, keys)
    assert list(found) == ["load_best_model_at_end"]
    assert found["load_best_model_at_end"].endswith("-> evaluation.every_epochs=1 after the file")
    overrides = ["evaluation.every_epochs=1"]
    conversion = convert([write(tmp_path, keys)], world_size=4, overrides=overrides)
    assert conversion.config.checkpoint.keep_best == 1


@pytest.mark.parametrize("keys", [{"max_steps": 9}, {"eval_steps": None, "evals_per_epoch": 4}])
def test_saves_and_evaluations_in_other_units_are_listed(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    shares = {"val_set_size": 0.1, "save_steps": 0.5, "eval_steps": 0.25}
    steps = {**shares, "save_steps": 100}
    for each in (shares, steps):
        text = notes_of(tmp_path, {**AXOLOTL, **each, **keys})
        assert "load_best_model_at_end is missing" in text


def test_evaluations_that_the_file_does_not_name(tmp_path: Path) -> None:
    text = "once, at the end of the run: evaluation.every_epochs=1 evaluates each epoch"
    for sets in ({"val_set_size": 0.1}, {"test_datasets": ["org/test"]}):
        assert text in notes_of(tmp_path, {**AXOLOTL, **sets})
        assert text not in notes_of(tmp_path, {**AXOLOTL, **sets, "evals_per_epoch": 2})
        keys = {**AXOLOTL, **sets, "eval_strategy": "epoch"}
        assert text not in notes_of(tmp_path, keys)
        conversion = convert([write(tmp_path, keys)], world_size=4)
        assert conversion.config.evaluation.every_epochs == 1.0
    assert text not in notes_of(tmp_path, AXOLOTL)
    quiet = {**CLM, "eval_strategy": "no", "load_best_model_at_end": False}
    assert "eval_strategy is missing or no: there the run is not" in notes_of(tmp_path, quiet)
    assert "eval_strategy is missing" not in notes_of(tmp_path, SFT)


@pytest.mark.parametrize(
    ("keys", "epochs"),
    [
        ({**AXOLOTL, "num_epochs": 2}, "num_epochs"),
        ({**CLM, "num_train_epochs": 2, "load_best_model_at_end": False}, "num_train_epochs"),
    ],
)
def test_a_share_of_the_run_is_a_number_of_epochs(
    tmp_path: Path, keys: dict[str, Any], epochs: str
) -> None:
    keys = {**keys, "eval_steps": 0.25, "save_steps": 0.5, "val_set_size": None}
    config = convert([write(tmp_path, keys)], world_size=4).config
    assert config.evaluation.every_epochs == 0.5
    assert config.checkpoint.every_epochs == 1.0
    notes = notes_of(tmp_path, {**keys, epochs: None, "max_steps": 100})
    assert "eval_steps = 0.25: a share of the run has no counterpart" in notes


def test_packs_of_axolotl_with_flash_attention_are_longer(tmp_path: Path) -> None:
    keys = {**AXOLOTL, "sequence_len": 1000, "micro_batch_size": 2, "sample_packing": True}
    text = "packs rows into 2000 tokens (micro_batch_size x sequence_len), a run into 1000"
    assert text in notes_of(tmp_path, {**keys, "flash_attention": True})
    assert text in notes_of(tmp_path, {**keys, "attn_implementation": "flash_attention_2"})
    assert "packs rows into" not in notes_of(tmp_path, {**keys, "sdp_attention": True})
    one = {**keys, "flash_attention": True, "micro_batch_size": 1}
    assert "packs rows into" not in notes_of(tmp_path, one)


def test_checkpoints_that_axolotl_keeps(tmp_path: Path) -> None:
    text = "Axolotl keeps the newest 4 checkpoints"
    assert text in notes_of(tmp_path, {**AXOLOTL, "saves_per_epoch": 2})
    assert text not in notes_of(tmp_path, {**AXOLOTL, "save_total_limit": 3})
    assert text not in notes_of(tmp_path, AXOLOTL, "checkpoint.keep_last=4")


def misspelt(keys: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return the keys of a file with `name` in the place of `key`."""
    return {name if old == key else old: value for old, value in keys.items()}


@pytest.mark.parametrize(
    ("keys", "key", "name"),
    [
        (AXOLOTL, "base_model", "base_mode"),
        (AXOLOTL, "learning_rate", "learing_rate"),
        (AXOLOTL, "warmup_steps", "warmup_stps"),
        (AXOLOTL, "datasets", "dataset"),
        ({**AXOLOTL, **AXOLOTL_LORA}, "lora_r", "lora_rank"),
        (LLAMA_FACTORY, "stage", "stge"),
        (LLAMA_FACTORY, "neat_packing", "neat_paking"),
        (SFT, "learning_rate", "learning_rte"),
        (SFT, "per_device_train_batch_size", "per_device_train_batchsize"),
        (SFT, "assistant_only_loss", "assistant_only_los"),
    ],
)
def test_a_misspelt_key_is_one_problem_with_the_key_that_is_meant(
    tmp_path: Path, keys: dict[str, Any], key: str, name: str
) -> None:
    found = problems(tmp_path, misspelt(keys, key, name), trainer_name=None)
    assert list(found) == [name]
    assert f"did you mean {key}?" in found[name]


def test_a_misspelt_key_is_not_omitted_by_the_whole_command(tmp_path: Path) -> None:
    keys = {**misspelt(SFT, "learning_rate", "learning_rte"), "eos_token": "x", "kl_coef": 1}
    found = problems(tmp_path, keys)
    assert "kl_coef eos_token" in found["all of these"] or "eos_token" in found["all of these"]
    assert "learning_rte" not in found["all of these"]


@pytest.mark.parametrize(
    ("keys", "changes", "key", "text"),
    [
        (AXOLOTL, {"output_dir": None}, "output_dir", "output.directory=VALUE after the file"),
        (SFT, {"output_dir": None}, "output_dir", "output_dir: VALUE in the file"),
        (AXOLOTL, {"datasets": None}, "datasets", "data.path=SHARDS after the file"),
        (SFT, {"adam_beta1": 1.0}, "adam_beta1", "optimizer.betas"),
        (AXOLOTL, {"neftune_noise_alpha": 1e9, "adam_beta2": 1}, "adam_beta2", "optimizer.betas"),
    ],
)
def test_a_setting_that_is_refused_is_a_problem_of_the_key_of_the_file(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], key: str, text: str
) -> None:
    found = problems(tmp_path, {**keys, **changes})
    assert list(found) == [key]
    assert text in found[key]


def test_a_directory_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path)]) == 2
    assert "is a directory -> the path of one file: it has no YAML" in capsys.readouterr().err
    path = write(tmp_path, SFT)
    assert main(["convert", str(tmp_path)]) == 2
    assert f"the path of one file: {path}" in capsys.readouterr().err


def test_rows_without_packing_are_samples(tmp_path: Path) -> None:
    conversion = convert([write(tmp_path, {**SFT, "packing": False})], world_size=4)
    assert conversion.tree["data"]["packing"] == "none"
    assert any(note.startswith("data.packing = none: ") for note in conversion.notes)
    packed = convert([write(tmp_path, SFT)], world_size=4)
    assert packed.tree["data"]["packing"] == "best_fit"
    # A setting of the user has no note on what it replaces.
    given = convert([write(tmp_path, SFT)], world_size=4, overrides=["data.packing=concatenate"])
    assert not any("truncated" in note for note in given.notes)
    assert "long_documents" not in given.tree["data"]


def test_a_file_of_run_clm_is_pretraining(tmp_path: Path) -> None:
    """Tokens of all rows in blocks, with the defaults of TrainingArguments."""
    from transformers import TrainingArguments

    conversion = convert([write(tmp_path, CLM)], world_size=2)
    defaults = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    run: Any = conversion.tree
    assert run["batch"] == {"sequence_length": 256, "micro_batch_size": 2, "global_batch_size": 16}
    assert run["data"] == {"packing": "concatenate", "path": "shards/"}
    assert run["optimizer"]["lr"] == defaults.learning_rate
    assert (run["precision"]["dtype"], defaults.bf16) == ("float32", False)
    assert run["checkpoint"]["keep_best"] == 1
    (command,) = conversion.commands
    assert command == (
        "bigtrain tokenize --input mine.jsonl --tokenizer org/model --text-key text --held-out "
        "0.05 --max-samples 1000 --output shards/"
    )
    assert any("bigtrain export --best" in note for note in conversion.notes)


def test_datasets_of_llama_factory_are_found_beside_the_file(tmp_path: Path) -> None:
    records = {
        "mine": {"file_name": "rows/mine.json"},
        "public": {"hf_hub_url": "org/rows"},
        "odd": 3,
    }
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(records))
    keys = {**FACTORY, "dataset": "mine,public,other", "dataset_dir": "data"}
    conversion = convert([write(tmp_path, keys)], world_size=1)
    inputs = [command.split()[3] for command in conversion.commands]
    assert inputs == [str(tmp_path / "data/rows/mine.json"), "org/rows", "FILE_OF_other"]
    assert any("of each FILE_OF_" in note for note in conversion.notes)


@pytest.mark.parametrize(
    ("record", "words", "note"),
    [
        ({"subset": "en", "split": "test"}, "--dataset-config en --dataset-split test", ""),
        ({"formatting": "sharegpt", "ranking": False, "split": "train"}, "--text-key text", ""),
        ({"columns": {"prompt": "question"}}, "", "--key NAME=COLUMN of the tokenize line"),
        ({"tags": {"role_tag": "role"}}, "", "--role NAME=ROLE of the tokenize line"),
    ],
)
def test_keys_of_dataset_info_are_options(
    tmp_path: Path, record: dict[str, Any], words: str, note: str
) -> None:
    (tmp_path / "data").mkdir()
    records = {"wiki": {"hf_hub_url": "org/wiki", **record}, "unused": {"invented": 1}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(records))
    conversion = convert([write(tmp_path, FACTORY)], world_size=1)
    assert words in conversion.commands[0]
    assert note in "\n".join(conversion.notes)


@pytest.mark.parametrize(
    ("record", "key", "text"),
    [
        ({"num_samples": 100}, "num_samples", "tokenize --max-samples takes the first ones"),
        ({"revision": "v2"}, "revision", "the dataset's main branch"),
        ({"spilt": "test"}, "spilt", "did you mean split?"),
        ({"weight": 2}, "weight", "--omit dataset_info.wiki.weight accepts a run without it"),
        ({"formatting": "chatty"}, "formatting", "must be alpaca or sharegpt or openai"),
        ({"columns": {"promt": "q"}}, "columns.promt", "did you mean prompt?"),
    ],
)
def test_a_key_of_dataset_info_is_refused_by_its_name(
    tmp_path: Path, record: dict[str, Any], key: str, text: str
) -> None:
    (tmp_path / "data").mkdir()
    records = {"wiki": {"file_name": "wiki.json", **record}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(records))
    found = problems(tmp_path, FACTORY, world_size=1)
    assert list(found) == [f"dataset_info.wiki.{key}"]
    assert text in found[f"dataset_info.wiki.{key}"]
    omitted = [f"dataset_info.wiki.{key}"]
    conversion = convert([write(tmp_path, FACTORY)], world_size=1, omitted=omitted)
    assert any(note.startswith(f"{omitted[0]} = ") for note in conversion.notes)


def test_a_missing_task_hides_no_other_problem(tmp_path: Path) -> None:
    found = problems(tmp_path, DPO, world_size=None)
    assert found.keys() == {"the trainer", "per_device_train_batch_size"}


def test_all_keys_can_be_omitted_with_one_line(tmp_path: Path) -> None:
    keys = {**SFT, "weight_noise": 0.1, "group_by_length": True, "label_smoothing": 0.1}
    found = problems(tmp_path, keys)
    words = found["the command"].rpartition("--omit ")[2].split()
    assert set(words) == {"weight_noise", "group_by_length", "label_smoothing"}
    conversion = convert([write(tmp_path, keys)], world_size=4, omitted=words)
    assert "group_by_length = True: omitted, as --omit asks" in conversion.notes


@pytest.mark.parametrize(
    ("task", "objective"),
    [
        ("dpo", {"type": "preference", "loss": "sigmoid", "beta": 0.2}),
        ("orpo", {"type": "preference", "loss": "orpo", "beta": 0.2}),
        ("kto", {"type": "kto", "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.0}),
        ("reward", {"type": "reward", "center_rewards_coefficient": 0.0}),
    ],
)
def test_a_task_is_its_objective(tmp_path: Path, task: str, objective: dict[str, Any]) -> None:
    conversion = convert([write(tmp_path, DPO)], world_size=4, task=task)
    assert conversion.tree["objective"] == objective


MEGATRON: dict[str, Any] = {
    "--num-layers": 2,
    "--hidden-size": 64,
    "--num-attention-heads": 4,
    "--group-query-attention": True,
    "--num-query-groups": 2,
    "--ffn-hidden-size": 160,
    "--seq-length": 32,
    "--max-position-embeddings": 32,
    "--normalization": "RMSNorm",
    "--swiglu": True,
    "--position-embedding-type": "rope",
    "--rotary-base": 500000,
    "--untie-embeddings-and-output-weights": True,
    "--disable-bias-linear": True,
    "--micro-batch-size": 1,
    "--global-batch-size": 8,
    "--train-iters": 50,
    "--lr": 3e-4,
    "--min-lr": 3e-5,
    "--lr-decay-style": "cosine",
    "--lr-warmup-iters": 5,
    "--weight-decay": 0.1,
    "--clip-grad": 1.0,
    "--bf16": True,
    "--tensor-model-parallel-size": 2,
    "--data-path": "data/c4_text_document",
    "--hidden-dropout": 0,
    "--attention-dropout": 0,
    "--vocab-size": 1000,
}


OPEN_KEYS = {
    "--lr": "optimizer.lr",
    "--train-iters": "train.steps",
    "--seq-length": "batch.sequence_length",
    "--micro-batch-size": "batch.micro_batch_size",
    "--global-batch-size": "batch.global_batch_size",
}
"""Settings that a file of Megatron-LM with the model's arguments only leaves open."""


def test_the_command_of_an_error_converts_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is typed as it is read, with values for VALUE, and keeps the options of the first try."""
    monkeypatch.chdir(tmp_path)
    model = {key: value for key, value in MEGATRON.items() if key not in OPEN_KEYS}
    Path("a model.yaml").write_text(yaml.safe_dump(model))
    Path("more.yaml").write_text(yaml.safe_dump({"unknown": 3}))
    words = ["a model.yaml", "--also", "more.yaml", "--from", "megatron", "--world-size", "2"]
    words += ["--output", "my run.yaml"]
    assert main(["convert", words[0], "seed=7", *words[1:]]) == 2
    assert not Path("my run.yaml").exists()
    command = shlex.split(capsys.readouterr().err.rpartition(" -> ")[2])
    settings = [word for word in command if word.endswith("=VALUE")]
    assert {setting.removesuffix("=VALUE") for setting in settings} == {*OPEN_KEYS.values()}
    assert command[:2] == ["bigtrain", "convert"]
    assert main([word.replace("VALUE", "8") for word in command[1:]]) == 0
    run = load_run_config(Path("my run.yaml"))
    assert (run.train.steps, run.seed, run.optimizer.lr) == (8, 7, 8.0)
    # --min-lr is a rate, so the ratio is of the rate that the user gives.
    assert run.schedule.min_lr_ratio == pytest.approx(MEGATRON["--min-lr"] / 8)


def test_a_loss_of_pairs_is_its_name(tmp_path: Path) -> None:
    keys = {**DPO, "loss_type": "robust", "label_smoothing": 0.2}
    conversion = convert([write(tmp_path, keys)], world_size=4, task="dpo")
    expected = {"type": "preference", "loss": "robust", "label_smoothing": 0.2, "beta": 0.2}
    assert conversion.tree["objective"] == expected


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "--format messages"),
        ({"field_messages": "turns"}, "--format messages --key messages=turns"),
        (
            {
                "field_messages": "conversations",
                "message_property_mappings": {"role": "from", "content": "value"},
            },
            "--format sharegpt",
        ),
        (
            {"message_field_role": "from", "message_field_content": "value"},
            "--format sharegpt --key conversations=messages",
        ),
    ],
)
def test_chats_of_axolotl_name_their_parts(
    tmp_path: Path, entry: dict[str, Any], words: str
) -> None:
    dataset = {"path": "org/chats", "type": "chat_template", **entry}
    [line] = convert([write(tmp_path, {**AXOLOTL, "datasets": [dataset]})], world_size=4).commands
    assert f"--tokenizer org/model {words} --output" in line
    dataset["message_property_mappings"] = {"role": "speaker", "content": "text"}
    found = problems(tmp_path, {**AXOLOTL, "datasets": [dataset]})
    assert "datasets.0.message_property_mappings" in found


def test_an_evaluation_names_what_it_measures(tmp_path: Path) -> None:
    conversion = convert([write(tmp_path, {**SFT, "eval_strategy": "steps"})], world_size=4)
    assert any("--held-out 0.05" in note for note in conversion.notes)


def test_a_llama_of_megatron_is_a_llama(tmp_path: Path) -> None:
    conversion = convert([write(tmp_path, {"MODEL_ARGS": MEGATRON})])
    model = conversion.tree["model"]["config"]
    assert model["model_type"] == "llama"
    assert (model["intermediate_size"], model["num_key_value_heads"]) == (160, 2)
    assert model["rope_parameters"]["rope_theta"] == 500000.0
    assert conversion.config.schedule.min_lr_ratio == pytest.approx(0.1)
    assert conversion.config.parallel.tensor == 2
    assert conversion.commands == ["bigtrain manifest data/c4_text_document --tokenizer TOKENIZER"]


GATED = {"norm": "rmsnorm", "activation": "swiglu"}


@pytest.mark.parametrize(
    ("keys", "changes", "path", "value"),
    [
        # What a file does not have is the other trainer's default.
        (NEOX, {}, "optimizer.weight_decay", 0.1),
        (NEOX, {}, "seed", 1234),
        (NEOX, GATED, "model.config.rms_norm_eps", 1e-8),
        (NEOX, GATED, "model.config.mlp_bias", True),
        (NEOX, {}, "model.config.attention_bias", True),
        (NEOX, {"use_bias_in_attn_linear": False}, "model.config.attention_bias", False),
        (MEGATRON, {"--weight-decay": None}, "optimizer.weight_decay", 0.01),
        (MEGATRON, {"--disable-bias-linear": None}, "model.config.mlp_bias", True),
        (MEGATRON, {}, "model.config.attention_bias", False),
        # What it has arrives.
        (NEOX, {"init_method_std": 0.01}, "model.config.initializer_range", 0.01),
        (NEOX, {"bias_gelu_fusion": True}, "model.config.hidden_act", "gelu_pytorch_tanh"),
        (NEOX, {"activation": "relu"}, "model.config.hidden_act", "relu"),
        (MEGATRON, {"--kv-channels": 32}, "model.config.head_dim", 32),
        # The line to 0 that is cut off at a fifth: 99 steps after warmup, 79 of decay.
        (NEOX, {"min_lr": 2e-4}, "schedule.decay_steps", 79),
    ],
)
def test_arguments_of_megatron_arrive_at_their_settings(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], path: str, value: object
) -> None:
    found: Any = convert([write(tmp_path, {**keys, **changes})], world_size=2).tree
    for name in path.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ({**NEOX, "use_bias_in_mlp": False}, "use_bias_in_mlp"),
        ({**NEOX, "activation": "geglu"}, "activation"),
        ({**NEOX, "vocab_size": None}, "vocab_size"),
        ({**NEOX, "activation": "softsign"}, "activation"),
        ({**NEOX, **GATED, "activation": "silu"}, "norm"),  # silu has no gate there
        ({**NEOX, "init_method": "xavier_normal"}, "init_method"),
        ({**NEOX, "output_layer_init_method": "wang_init"}, "output_layer_init_method"),
        ({**MEGATRON, "--init-method": "orthogonal"}, "init_method"),
        ({**MEGATRON, "--add-qkv-bias": True, "--disable-bias-linear": None}, "add_bias_linear"),
        ({**MEGATRON, "--attention-dropout": 0, "--hidden-dropout": None}, "hidden_dropout"),
    ],
)
def test_a_model_that_would_be_another_one_is_refused(
    tmp_path: Path, keys: dict[str, Any], key: str
) -> None:
    assert problems(tmp_path, keys).keys() - {"the command"} == {key}


def test_differences_that_no_key_names_are_listed(tmp_path: Path) -> None:
    notes = "\n".join(convert([write(tmp_path, {**NEOX, "warmup": 0.015})], world_size=2).notes)
    for start in (
        "output_layer_init_method = 'scaled",
        "warmup = 0.015: 1.5 steps are 1",
        "split = 969",
    ):
        assert start in notes
    assert "keep_last_n_checkpoints: GPT-NeoX keeps all" in notes


def test_rows_of_the_embedding_follow_from_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"vocab": {"a": 0, "b": 299}},
        "added_tokens": [{"id": 300, "content": "<end>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    keys = {**NEOX, "vocab_size": None, "vocab_file": str(tmp_path / "tokenizer.json")}
    sizes = {"model_parallel_size": 2, "make_vocab_size_divisible_by": 64}
    conversion = convert([write(tmp_path, {**keys, **sizes})], world_size=2)
    assert conversion.tree["model"]["config"]["vocab_size"] == 384
    assert f"--tokenizer {tmp_path}" in conversion.commands[0]


def test_a_setting_after_omit_is_a_setting(tmp_path: Path) -> None:
    file, run_yaml = write(tmp_path, {**NEOX, "init_method": "orthogonal"}), tmp_path / "run.yaml"
    words = ["convert", str(file), "--world-size", "2", "--output", str(run_yaml)]
    assert main([*words, "--omit", "init_method", "optimizer.lr=0.5", "seed=7"]) == 0
    config = load_run_config(str(run_yaml))
    assert (config.optimizer.lr, config.seed) == (0.5, 7)


AXOLOTL: dict[str, Any] = {
    "base_model": "org/model",
    "datasets": [{"path": "org/chats", "type": "chat_template"}],
    "sequence_len": 512,
    "sample_packing": True,
    "learning_rate": 1e-4,
    "warmup_steps": 5,
    "max_steps": 40,
    "output_dir": "runs/ax",
}
FACTORY: dict[str, Any] = {
    "model_name_or_path": "org/model",
    "stage": "pt",
    "finetuning_type": "full",
    "dataset": "wiki",
    "cutoff_len": 256,
    "bf16": True,
    "output_dir": "runs/lf",
}
LORA = {"use_peft": True, "lora_target_modules": "all-linear"}
FACTORY_LORA = {"finetuning_type": "lora"}


@pytest.mark.parametrize(
    ("keys", "changes", "path", "value"),
    [
        (SFT, {"adam_beta1": 0.8}, "optimizer.betas", [0.8, 0.999]),
        (SFT, {"adam_beta2": 0.95}, "optimizer.betas", [0.9, 0.95]),
        (SFT, {"adam_epsilon": "1e-6"}, "optimizer.eps", 1e-6),
        (SFT, {"max_grad_norm": 0.3}, "optimizer.clip_norm", 0.3),
        (SFT, {"bf16": False}, "precision.dtype", "float32"),
        (SFT, {"fp16": True, "bf16": False}, "precision.dtype", "float16"),
        (SFT, {"seed": 7}, "seed", 7),
        (SFT, {"save_steps": 25}, "checkpoint.every_steps", 25),
        (SFT, {"packing_strategy": "wrapped"}, "data.packing", "concatenate"),
        (SFT, {"lr_scheduler_type": "cosine_with_restarts"}, "schedule.type", "cosine"),
        (SFT, {**LORA, "lora_r": 4}, "adapters.rank", 4),
        (SFT, LORA, "adapters.dropout", 0.05),
        (SFT, {**LORA, "load_in_4bit": True}, "adapters.quantization", "nf4"),
        (SFT, {**LORA, "load_in_8bit": True}, "adapters.quantization", "int8"),
        (SFT, {"neftune_noise_alpha": 5}, "model.neftune_noise_alpha", 5),
        (SFT, {**LORA, "optim": "adamw_bnb_8bit"}, "optimizer.type", "adamw_8bit"),
        (SFT, {}, "model.gradient_checkpointing", "full"),
        (AXOLOTL, {"neftune_noise_alpha": "7.5"}, "model.neftune_noise_alpha", 7.5),
        (AXOLOTL, {}, "precision.dtype", "bfloat16"),
        (AXOLOTL, {"fp16": True}, "precision.dtype", "float16"),
        (AXOLOTL, {"bf16": False}, "precision.dtype", "float32"),
        (AXOLOTL, AXOLOTL_LORA, "adapters.dropout", 0.0),
        (AXOLOTL, {**AXOLOTL_LORA, "load_in_8bit": True}, "adapters.quantization", "int8"),
        (AXOLOTL, {**AXOLOTL_LORA, "peft_init_lora_weights": "pissa"}, "adapters.init", "pissa"),
        (AXOLOTL, {**AXOLOTL_LORA, "loraplus_lr_ratio": 16, "weight_decay": 0.1},
         "optimizer.weight_decay", 0.0),
        (AXOLOTL, {**AXOLOTL_LORA, "loraplus_lr_ratio": 16}, "adapters.loraplus_lr_ratio", 16),
        (FACTORY, {**FACTORY_LORA, "loraplus_lr_ratio": 16.0, "weight_decay": 0.1},
         "optimizer.weight_decay", 0.1),
        (FACTORY, {**FACTORY_LORA, "pissa_init": True, "pissa_iter": -1}, "adapters.init", "pissa"),
        (FACTORY, {**FACTORY_LORA, "quantization_bit": 8}, "adapters.quantization", "int8"),
        (FACTORY, {"neftune_noise_alpha": 5}, "model.neftune_noise_alpha", 5),
        (AXOLOTL, {"adam_beta2": 0.95}, "optimizer.betas", [0.9, 0.95]),
        (AXOLOTL, {"bf16": "auto"}, "precision.dtype", "bfloat16"),
        (AXOLOTL, {"lr_scheduler": "linear"}, "schedule.type", "linear"),
        (AXOLOTL, {"cosine_min_lr_ratio": 0.2}, "schedule.min_lr_ratio", 0.2),
        (AXOLOTL, {"micro_batch_size": 3}, "batch.global_batch_size", 12),
        (AXOLOTL, {"tensor_parallel_size": 2, "micro_batch_size": 3}, "batch.global_batch_size", 6),
        (AXOLOTL, {"gradient_checkpointing": True}, "model.gradient_checkpointing", "full"),
        (AXOLOTL, {"rl": "simpo", "simpo_gamma": 1.5}, "objective.gamma", 1.5),
        (FACTORY, {"weight_decay": 0.1}, "optimizer.weight_decay", 0.1),
        (FACTORY, {"finetuning_type": "lora", "lora_rank": 4}, "adapters.alpha", 8.0),
        (FACTORY, {"finetuning_type": "lora", "lora_target": "q_proj,v_proj"}, "adapters.targets",
         ["q_proj", "v_proj"]),
        (FACTORY, {"stage": "dpo", "pref_loss": "orpo"}, "objective.loss", "orpo"),
        (FACTORY, {"stage": "dpo", "pref_ftx": 0.3}, "objective.sft_weight", 0.3),
        (FACTORY, {"stage": "dpo", "dpo_label_smoothing": 0.1}, "objective.label_smoothing", 0.1),
        (AXOLOTL, {"rl": "dpo", "dpo_label_smoothing": 0.1}, "objective.label_smoothing", 0.1),
    ],
)  # fmt: skip
def test_a_value_arrives_at_its_setting(
    tmp_path: Path, keys: dict[str, Any], changes: dict[str, Any], path: str, value: object
) -> None:
    found: Any = convert([write(tmp_path, {**keys, **changes})], world_size=4).tree
    for name in path.split("."):
        found = found[name]
    assert found == value


@pytest.mark.parametrize(
    ("keys", "model"),
    [
        (NEOX, {"model_type": "gpt_neox", "hidden_act": "gelu", "initializer_range": 0.02}),
        ({**NEOX, "activation": "relu", "bias_gelu_fusion": True}, {"hidden_act": "relu"}),
        ({**NEOX, "init_method": "small_init"}, {"initializer_range": (0.4 / 64) ** 0.5}),
        (MEGATRON, {"model_type": "llama", "num_key_value_heads": 2}),
        ({**MEGATRON, "--group-query-attention": None}, {"num_key_value_heads": 4}),
        (
            {**MEGATRON, "--add-qkv-bias": True, "--padded-vocab-size": 1024},
            {"model_type": "qwen2", "vocab_size": 1024},
        ),
    ],
)
def test_a_model_has_the_keys_of_its_arguments(
    keys: dict[str, Any], model: dict[str, Any], tmp_path: Path
) -> None:
    conversion = convert([write(tmp_path, keys)], world_size=4)
    assert isinstance(conversion.config.model.config, dict)
    assert model.items() <= conversion.config.model.config.items()
    assert any("output_layer_init_method = 'scaled_normal'" in line for line in conversion.notes)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"max_samples": 1000}, "--max-samples 1000"),
        ({"template": "qwen"}, "--chat-template qwen2_5"),
        ({"template": "gemma"}, "--chat-template gemma3"),
        ({"template": "mistral"}, "--chat-template mistral"),
    ],
)
def test_options_of_llama_factory_s_rows(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    found = {**FACTORY, "stage": "sft", "neat_packing": True, **keys}
    (command,) = convert([write(tmp_path, found)], world_size=4).commands
    assert words in command


@pytest.mark.parametrize(
    ("row_type", "words"),
    [
        ("alpaca", "--format alpaca-instruct "),
        ("alpaca_chat.load_no_prompt", "--format alpaca-chat-bare "),
        ("chat_template", "--format messages "),
        ("alpaca:chatml", "--format alpaca-chatml --parse-special-tokens "),
        ("alpaca:phi", "--format alpaca-phi --parse-special-tokens "),
        ("gpteacher", "--format alpaca-instruct --key output=response "),
        ("gpteacher:chat", "--format alpaca-chat --key output=response "),
        ("alpaca_w_system", "--format alpaca-chat-system "),
        ("alpaca_w_system.load_instruct", "--format alpaca-instruct-system "),
        ("alpaca_w_system.load_open_orca", "--format open-orca --ignore-key input "),
        (
            "alpaca_w_system.load_open_orca_chatml",
            "--format open-orca-chatml --ignore-key input --parse-special-tokens ",
        ),
        (
            "oasst:chat",
            "--format alpaca-chat --key instruction=INSTRUCTION --key output=RESPONSE "
            "--ignore-key input ",
        ),
    ],
)
def test_prompts_of_axolotl_are_formats(tmp_path: Path, row_type: str, words: str) -> None:
    found = {**AXOLOTL, "datasets": [{"path": "org/rows", "type": row_type}]}
    (command,) = convert([write(tmp_path, found)], world_size=4).commands
    assert words in command
    if row_type == "alpaca":  # without its type: by the template
        conversion = convert([write(tmp_path, found)], world_size=4, omitted=["datasets.0.type"])
        assert "--format alpaca " in conversion.commands[0]


def test_the_style_of_an_alpaca_chat_dataset(tmp_path: Path) -> None:
    """`conversation` of a dataset is read by one of Axolotl's types, and ignored by others."""
    for row_type, words in (
        ("alpaca_chat.load", "--format alpaca-chatml --parse-special-tokens "),
        ("alpaca_chat.load_no_prompt", "--format alpaca-chat-bare "),
        ("alpaca", "--format alpaca-instruct "),
    ):
        dataset = {"path": "org/rows", "type": row_type, "conversation": "chatml"}
        found = {**AXOLOTL, "datasets": [dataset]}
        assert words in convert([write(tmp_path, found)], world_size=4).commands[0]
    for row_type in ("alpaca:vicuna", "gpteacher:none", "alpaca_w_system.load_orca", "jeopardy"):
        found = {**AXOLOTL, "datasets": [{"path": "org/rows", "type": row_type}]}
        assert "prompts of its own" in problems(tmp_path, found)["datasets.0.type"]


@pytest.mark.parametrize(
    ("keys", "key", "text"),
    [
        ({**FACTORY, "bf16": False}, "bf16", "trains the weights in the dtype of their files"),
        (FACTORY | FACTORY_LORA | {"pissa_init": True}, "pissa_iter", "-1 in the file"),
        (FACTORY | FACTORY_LORA | {"quantization_bit": 3}, "quantization_bit", "4, 8"),
        (AXOLOTL | AXOLOTL_LORA | {"lora_r": None}, "lora_r", "Axolotl has no default"),
        (AXOLOTL | AXOLOTL_LORA | {"peft_init_lora_weights": "olora"}, "peft_init_lora_weights",
         "true, pissa"),
    ],
)  # fmt: skip
def test_values_without_counterpart_are_refused(
    tmp_path: Path, keys: dict[str, Any], key: str, text: str
) -> None:
    assert text in problems(tmp_path, keys)[key]


@pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
@pytest.mark.parametrize("task", [task for task in TASKS if task != "pretrain"])
def test_defaults_are_those_of_trl(task: str, tmp_path: Path) -> None:
    """Of the installed TRL and transformers: a file with a model and a directory only."""
    trl = pytest.importorskip("trl")
    module = importlib.import_module("trl.experimental.orpo") if task == "orpo" else trl
    name = {"sft": "SFT", "dpo": "DPO", "orpo": "ORPO", "kto": "KTO", "reward": "Reward"}[task]
    fields = dataclasses.fields(getattr(module, f"{name}Config"))
    theirs = {field.name: field.default for field in fields}
    keys = {"model_name_or_path": "org/model", "output_dir": "out", "learning_rate": None}
    omitted = ["assistant_only_loss"] if task == "sft" else []
    run: Any = convert(
        [write(tmp_path, keys)], world_size=1, task=task, trainer_name="trainer", omitted=omitted
    ).tree
    assert run["optimizer"]["lr"] == theirs["learning_rate"]
    assert run["optimizer"]["weight_decay"] == theirs["weight_decay"]
    assert run["optimizer"]["clip_norm"] == theirs["max_grad_norm"]
    betas = [theirs["adam_beta1"], theirs["adam_beta2"]]
    assert (run["optimizer"]["betas"], run["optimizer"]["eps"]) == (betas, theirs["adam_epsilon"])
    assert OPTIMIZERS[theirs["optim"]] == run["optimizer"]["type"]
    assert theirs["lr_scheduler_type"] == run["schedule"]["type"] == "linear"
    assert theirs["warmup_steps"] == 0
    assert "warmup_steps" not in run["schedule"]
    assert run["batch"]["micro_batch_size"] == theirs["per_device_train_batch_size"]
    assert theirs["gradient_accumulation_steps"] == 1
    assert run["train"]["epochs"] == theirs["num_train_epochs"]
    assert run["batch"]["sequence_length"] == theirs["max_length"]
    assert (run["model"]["gradient_checkpointing"] == "full") == theirs["gradient_checkpointing"]
    assert run["logging"]["every_steps"] == theirs["logging_steps"]
    assert run["seed"] == theirs["seed"]
    # None is true where fp16 is false (SFTConfig.__post_init__).
    assert (theirs["bf16"], run["precision"]["dtype"]) == (None, "bfloat16")
    if task in ("dpo", "orpo", "kto"):
        assert run["objective"]["beta"] == theirs["beta"]


def test_defaults_of_adapters_are_those_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    theirs = {field.name: field.default for field in dataclasses.fields(trl.ModelConfig)}
    keys = {**SFT, **LORA, "load_in_4bit": True}
    adapters = convert([write(tmp_path, keys)], world_size=1).tree["adapters"]
    assert adapters["rank"] == theirs["lora_r"]
    assert adapters["alpha"] == theirs["lora_alpha"]
    assert adapters["dropout"] == theirs["lora_dropout"]
    assert adapters["quantization"] == theirs["bnb_4bit_quant_type"]
    assert adapters["double_quantization"] == theirs["use_bnb_nested_quant"]
    assert theirs["lora_target_modules"] is None
