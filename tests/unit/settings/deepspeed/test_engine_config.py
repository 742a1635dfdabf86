"""The DeepSpeed JSON: found, refused with every reason, and rendered without any "auto"."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bigtrain.errors import ConfigError
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.deepspeed.accepted import REFUSED_BLOCKS, ROWS
from bigtrain.settings.deepspeed.engine_config import (
    check_file_alone,
    deepspeed_config_names,
    find_deepspeed_config,
    read_deepspeed_config,
    render,
)
from bigtrain.settings.deepspeed.keys import key_table, suggestion
from bigtrain.settings.resolve import resolve_run, resolve_run_files
from bigtrain.settings.run_config import RunConfig
from bigtrain.system.shipped_files import ds_configs
from tests.support.run_trees import run_config

PLAN = BatchPlan(
    global_batch_size=16, micro_batch_size=2, data_size=2, accumulation=4, sequence_length=8
)


def make_config(**sections: Any) -> RunConfig:
    batch = {"global_batch_size": 16, "micro_batch_size": 2, **sections.pop("batch", {})}
    return run_config(**{"precision": {"dtype": "float32"}, "batch": batch, **sections})


def rendered(raw: dict[str, Any], **sections: Any) -> dict[str, Any]:
    before = json.dumps(raw)
    engine, problems = render(make_config(**sections), PLAN, raw, "x.json")
    assert problems == []
    assert engine is not None
    assert json.dumps(raw) == before
    return engine.deepspeed


def problems_of(raw: dict[str, Any], **sections: Any) -> list[str]:
    engine, problems = render(make_config(**sections), PLAN, raw, "x.json")
    assert engine is None
    return [str(problem) for problem in problems]


def tree_of(key: str, value: Any) -> Any:
    """Return the JSON in which a dotted key has a value."""
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def write_json(path: Path, tree: object) -> str:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return str(path)


# --- finding and reading -----------------------------------------------------------------------


def test_names_paths_and_shipped_paths_are_found(tmp_path: Path) -> None:
    shipped = ds_configs() / "zero2.json"
    assert find_deepspeed_config("zero2") == shipped
    assert find_deepspeed_config("zero2.json") == shipped
    assert find_deepspeed_config("ds_configs/zero2.json").samefile(shipped)
    own = tmp_path / "own.json"
    own.write_text("{}")
    assert find_deepspeed_config(str(own)) == own


def test_unknown_name_lists_the_names() -> None:
    with pytest.raises(ConfigError) as caught:
        find_deepspeed_config("zeor2")
    text = str(caught.value)
    assert "--deepspeed_config = 'zeor2'" in text
    assert "did you mean zero2?" in text
    assert ", ".join(deepspeed_config_names()) in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
        ('{"bf16": {}, "bf16": {}}', "key 'bf16' is given twice"),
        ('{"gradient_clipping": NaN}', "NaN is not JSON"),
        ("[1]", "must hold one object"),
        ("\xff", "is not UTF-8 text"),
    ],
)
def test_what_is_not_a_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_deepspeed_config(path)


# --- keys and values ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"zero_optimisation": {"stage": 2}}, "x.json: zero_optimisation: unknown key, which Dee"),
        (
            {"zero_optimization": {"overlap_com": True}},
            "x.json: zero_optimization.overlap_com = True: unknown key, which DeepSpeed would "
            "ignore or reject -> did you mean zero_optimization.overlap_comm?",
        ),
        ({"stage": 2}, "-> it belongs to zero_optimization: write zero_optimization.stage"),
        ({"bf16": {"xyzzy": 1}}, "known in bf16: bf16_master_weights_and_grads"),
        (
            {"zero_optimization": {"stage": 4}},
            "x.json: zero_optimization.stage = 4: must be one of 0, 1, 2, 3",
        ),
        ({"zero_optimization": {"stage": True}}, "stage = True: must be one of 0, 1, 2, 3"),
        ({"zero_optimization": {"overlap_comm": "yes"}}, "must be of JSON type boolean or null"),
        ({"zero_optimization": {"reduce_bucket_size": 1.5}}, "must be of JSON type integer"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "must be more than 0"),
        ({"zero_optimization": 2}, "x.json: zero_optimization = 2: must be a block of settings"),
        (
            {"zero_optimization": {"cpu_offload": True}},
            "zero_optimization.cpu_offload = True: is deprecated in DeepSpeed -> use "
            'offload_optimizer: {"device": "cpu"}',
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}},
            "x.json: optimizer.params.momentum = 0.9: unknown parameter of AdamW -> known in",
        ),
        ({"communication_data_type": "int8"}, "must be one of fp32, bf16, fp16"),
    ],
)
def test_unknown_keys_and_values_are_refused(raw: dict[str, Any], message: str) -> None:
    (text,) = problems_of(raw)
    assert message in text


@pytest.mark.parametrize("path", sorted(key_table()["removed"]))
def test_removed_blocks_are_named_as_removed(path: str) -> None:
    (text,) = problems_of(tree_of(path, {}))
    assert text.startswith(f"x.json: {path}: was removed from DeepSpeed (0.19.8)")
    assert text.endswith(f"-> remove {path}")


@pytest.mark.parametrize("path", sorted(REFUSED_BLOCKS))
def test_blocks_the_run_owns_are_refused(path: str) -> None:
    texts = problems_of(tree_of(path, {}))
    assert any(t.startswith(f"x.json: {path}:") and REFUSED_BLOCKS[path][0] in t for t in texts)
    node = key_table()
    for name in path.split("."):
        node = node["keys"][name]


# --- one owner for each setting ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"gradient_clipping": 0.5}, "0.5: contradicts optimizer.clip_norm = 1.0 of the run"),
        ({"train_batch_size": 32}, "32: contradicts batch.global_batch_size = 16 of the run"),
        (
            {"train_micro_batch_size_per_gpu": 4},
            "train_micro_batch_size_per_gpu = 4: contradicts batch.micro_batch_size = 2 of the run",
        ),
        (
            {"gradient_accumulation_steps": 1},
            "gradient_accumulation_steps = 1: contradicts batch.global_batch_size / "
            "(batch.micro_batch_size x data-parallel size) = 16 / (2 x 2) = 4 of the run",
        ),
        ({"bf16": {"enabled": True}}, "bf16.enabled = True: contradicts precision.dtype = float32"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = True: contradicts precision.dtype = float32"),
        ({"optimizer": {"type": "Lion"}}, "type = 'Lion': contradicts optimizer.type = adamw"),
        ({"optimizer": {"type": "Lamb"}}, 'write "AdamW" or "auto"'),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "optimizer.params.lr = 0.0001: contradicts optimizer.lr = 0.001",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.999]}}},
            "optimizer.params.betas = [0.9, 0.999]: contradicts optimizer.betas = [0.9, 0.95]",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
            "optimizer.params.adam_w_mode = False: contradicts optimizer.type = adamw",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "= 'bf16': contradicts precision.gradient_dtype = float32 (the default)",
        ),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op = 'sum': contradicts batch"),
        ({"log_level": "auto"}, "x.json: log_level = 'auto': cannot be resolved"),
        ({"zero_optimization": {"stage": "auto"}}, "stage = 'auto': cannot be resolved"),
    ],
)
def test_contradictions_name_both_owners(raw: dict[str, Any], message: str) -> None:
    (text,) = problems_of(raw)
    assert text.startswith("x.json: ")
    assert message in text
    in_tokens = {"global_batch_size": None, "global_tokens": 128}
    (text,) = problems_of({"train_batch_size": 32}, batch=in_tokens)
    assert "contradicts batch.global_tokens = 128" in text


@pytest.mark.parametrize(
    ("block", "contradicts"),
    [
        ({"type": "AdamW"}, False),
        ({"type": "AdamW", "params": {"lr": "auto", "torch_adam": True, "fused": True}}, False),
        ({"type": "Muon"}, False),
        ({"type": "muon", "params": {"lr": 1e-3}}, False),
        ({"type": "auto"}, False),
        ({"type": "AdamW", "params": {"lr": 1e-3, "betas": "auto"}}, True),
        ({"type": "Lion"}, True),
        ({"type": "Adam"}, False),
        ({"type": "Adam", "params": {"lr": 1e-3}}, True),
    ],
)
def test_an_optimizer_of_the_json_is_the_run_s_or_a_placeholder(
    block: dict[str, Any], contradicts: bool
) -> None:
    muon = make_config(optimizer={"type": "muon"})
    engine, problems = render(muon, PLAN, {"optimizer": block}, "x.json")
    assert (engine is None) == contradicts
    assert [str(problem) for problem in problems] == contradicts * [
        f"x.json: optimizer.type = {block['type']!r}: contradicts optimizer.type = muon of the "
        'run, which owns it -> remove it from x.json or write "muon" or "auto", or change '
        "optimizer.type in the run YAML"
    ]


def test_equal_values_are_not_contradictions() -> None:
    raw = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1,
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "float32"},
        "optimizer": {
            "type": "adamw",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
    }
    result = rendered(raw)
    assert "train_batch_size" not in result
    assert "bf16" not in result
    assert result["optimizer"]["type"] == "AdamW"


# --- what is rendered --------------------------------------------------------------------------


def test_empty_json_is_zero_0_with_everything_the_run_owns() -> None:
    params = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    assert rendered({}) == {
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {**params, "torch_adam": True, "fused": True}},
        "zero_optimization": {"stage": 0},
    }
    # DeepSpeed's own default is on.
    assert rendered({}, optimizer={"clip_norm": 0.0})["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("raw", "throughput"),
    [
        ({}, {"enabled": False, "synchronized": False}),
        # What DeepSpeed prints is timed, without waiting for the device.
        ({"steps_per_print": 10}, {"enabled": True, "synchronized": False}),
        # Values of the JSON stay.
        (tree_of("timers.throughput.enabled", False), {"enabled": False, "synchronized": False}),
        (tree_of("timers.throughput.enabled", True), {"enabled": True, "synchronized": False}),
        (tree_of("timers.throughput.synchronized", True), {"enabled": True, "synchronized": True}),
    ],
)
def test_deepspeed_waits_for_the_device_for_its_throughput_only_if_told_to(
    raw: dict[str, Any], throughput: dict[str, bool]
) -> None:
    assert rendered(raw)["timers"] == {"throughput": throughput}


def test_zero_3_has_no_leaf_modules() -> None:
    """DeepSpeed's default are the blocks of several mixtures of experts."""
    leaves: dict[str, Any]
    for leaves in ({}, {"names": []}):
        given = {"leaf_module": leaves} if leaves else {}
        zero = rendered({"zero_optimization": {"stage": 3, **given}})["zero_optimization"]
        assert zero == {"stage": 3, "leaf_module": {"classes": [], **leaves}}
    named = {"stage": 3, "leaf_module": {"name_suffixes": ["self_attn"]}}
    (text,) = problems_of({"zero_optimization": named})
    assert "DeepSpeed gathers a leaf's parameters by its positional inputs" in text


@pytest.mark.parametrize(
    ("stage", "precision", "accumulated"),
    [
        (3, {"dtype": "float32"}, None),
        (0, {"dtype": "bfloat16"}, None),
        (1, {"dtype": "bfloat16"}, "fp32"),
        (2, {"dtype": "bfloat16"}, "fp32"),
        (3, {"dtype": "bfloat16", "gradient_dtype": "bfloat16"}, "bf16"),
        (2, {"dtype": "float16"}, None),
        (2, {"dtype": "float16", "gradient_dtype": "float32"}, "fp32"),
    ],
)
def test_gradient_dtype(stage: int, precision: dict[str, str], accumulated: str | None) -> None:
    raw = {"zero_optimization": {"stage": stage}}
    result = rendered(raw, precision=precision)
    assert result.get("data_types", {}).get("grad_accum_dtype") == accumulated
    assert result.get("communication_data_type") == accumulated
    if accumulated == "fp32":  # the JSON may choose the dtype on the wire
        chosen = rendered({**raw, "communication_data_type": "bf16"}, precision=precision)
        assert chosen["communication_data_type"] == "bf16"


def test_only_the_precision_of_the_run_is_enabled() -> None:
    raw = {
        "bf16": {"enabled": "auto", "check_grad_overflow": False},
        "fp16": {"enabled": "auto", "hysteresis": 4, "initial_scale_power": "auto"},
    }
    bf16 = rendered(raw, precision={"dtype": "bfloat16"})
    assert bf16["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert "fp16" not in bf16
    fp16 = rendered(raw, precision={"dtype": "float16", "initial_loss_scale_power": 12})
    assert fp16["fp16"] == {"enabled": True, "hysteresis": 4, "initial_scale_power": 12}
    assert "bf16" not in fp16


def test_automatic_sizes_are_resolved_and_whole_floats_become_integers() -> None:
    sizes = {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    zero = rendered({"zero_optimization": {"stage": 3, **sizes, "stage3_max_live_parameters": 1e9}})
    assert zero["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 50_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "leaf_module": {"classes": []},
    }
    assert type(zero["zero_optimization"]["stage3_max_live_parameters"]) is int


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def test_torch_adam_is_the_default_and_can_be_declined() -> None:
    torch_adam = rendered({"zero_optimization": OFFLOAD})
    assert torch_adam["optimizer"]["params"]["torch_adam"] is True
    assert torch_adam["zero_force_ds_cpu_optimizer"] is False
    declined = {"optimizer": {"params": {"torch_adam": False}}, "zero_optimization": OFFLOAD}
    result = rendered(declined)
    assert set(result["optimizer"]["params"]) == {"lr", "betas", "eps", "weight_decay"}
    assert "zero_force_ds_cpu_optimizer" not in result
    forced = {"zero_force_ds_cpu_optimizer": True, "zero_optimization": OFFLOAD}
    assert "torch_adam" not in rendered(forced)["optimizer"]["params"]


def test_foreach_replaces_fused() -> None:
    params = rendered({"optimizer": {"params": {"foreach": True}}})["optimizer"]["params"]
    assert params["foreach"] is True
    assert params["fused"] is False


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"optimizer": {"params": {"torch_adam": False, "fused": True}}},
            "optimizer.params.fused = True: is a parameter of torch's AdamW",
        ),
        ({"optimizer": {"params": {"fused": True, "foreach": True}}}, "fused or foreach, not both"),
        (
            {
                "optimizer": {"params": {"torch_adam": True}},
                "zero_force_ds_cpu_optimizer": True,
                "zero_optimization": OFFLOAD,
            },
            "zero_force_ds_cpu_optimizer = True: contradicts optimizer.params.torch_adam = True",
        ),
        ({"optimizer": {"params": {"torch_adam": "auto"}}}, "must be true or false"),
    ],
)
def test_optimizer_conflicts(raw: dict[str, Any], message: str) -> None:
    assert any(message in text for text in problems_of(raw))


# --- the whole run -----------------------------------------------------------------------------


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}}
    tree = {"gradient_clipping": 0.5, "zero_optimisation": {}, "zero_optimization": zero}
    name = write_json(tmp_path / "own.json", tree)
    config = make_config(batch={"global_batch_size": 15})
    with pytest.raises(ConfigError) as caught:
        resolve_run(config, 2, name, "cpu")
    keys = [problem.key for problem in caught.value.problems]
    assert keys == [
        "batch.global_batch_size",
        f"{name}: zero_optimisation",
        f"{name}: gradient_clipping",
        f"{name}: zero_optimization.offload_optimizer.device",
    ]
    assert str(caught.value).startswith(f"4 problems in the run with {name}\n")
    assert caught.value.exit_code == 2
    with pytest.raises(ConfigError, match="must be a block of settings") as caught:
        resolve_run(make_config(), 1, write_json(tmp_path / "own.json", {"optimizer": 3}))
    assert len(caught.value.problems) == 1


def test_world_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="world size = 0: must be at least 1"):
        resolve_run(make_config(), 0)


def test_the_argument_wins_over_the_run_and_is_what_the_run_then_says() -> None:
    config = make_config(engine={"deepspeed_config": "zero1"})
    assert resolve_run(config, 1).engine.zero_stage == 1
    run = resolve_run(config, 1, "zero3_offload")
    assert run.config.engine.deepspeed_config == "zero3_offload"
    assert (run.engine.zero_stage, run.engine.source) == (3, "zero3_offload.json")
    assert (run.engine.offload_optimizer, run.engine.offload_param) == ("cpu", "cpu")


def test_both_files_are_reported_when_the_yaml_fails(tmp_path: Path) -> None:
    name = write_json(tmp_path / "own.json", {"zero_optimisation": {}})
    overrides = ["train.stps=3", f"engine.deepspeed_config={name}"]
    with pytest.raises(ConfigError) as caught:
        resolve_run_files("quickstart", overrides, 1)
    text = str(caught.value)
    assert "train.stps = 3: unknown key -> did you mean train.steps?" in text
    assert f"{name}: zero_optimisation: unknown key" in text
    assert text.splitlines()[0].startswith("2 problems in ")
    assert text.splitlines()[0].endswith(f"quickstart.yaml and the command line and {name}")


def test_nvme_needs_libaio(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": "/local-disk"}
    tree = {"zero_optimization": {"stage": 3, "offload_param": offload}}
    path = write_json(tmp_path / "x.json", tree)
    for known in (None, True):
        assert resolve_run(make_config(), 1, path, async_io=known).engine.offload_param == "nvme"
    with pytest.raises(ConfigError, match=r"libaio.* -> apt-get install libaio-dev"):
        resolve_run(make_config(), 1, path, async_io=False)


def test_numbers_of_a_model_written_in_the_run_are_judged() -> None:
    model = {"model_type": "llama", "num_attention_heads": 6, "num_hidden_layers": 2}
    sections: dict[str, Any] = {
        "model": {"config": model, "overrides": {"max_position_embeddings": 4}},
        "batch": {"sequence_length": 8, "global_batch_size": 16},
    }
    for parallel, expected in (
        ({"sequence": 4}, "does not divide its 6 attention heads -> parallel.sequence=3"),
        ({"pipeline": 4}, "is more than the model's 2 layers -> parallel.pipeline=2 at most"),
        ({}, "is more than the model's max_position_embeddings = 4 -> at most 4"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            resolve_run(make_config(**sections, parallel=parallel), 4, "zero1")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("aio.thread_count", "write aio.intra_op_parallelism"),
        ("aio.depth", "did you mean aio.queue_depth?"),
        ("micro_batch_size", "did you mean train_micro_batch_size_per_gpu?"),
        ("zero", "did you mean zero_optimization?"),
        ("lr", "it belongs to optimizer.params: write optimizer.params.lr"),
        ("optimizer.params.learning_rate", "known in optimizer.params: adam_w_mode"),
        ("zero_optimization.zzz", "nearest known key is zero_optimization."),
        ("activation_checkpoint", "remove it"),
        ("flops_profiler.output", "did you mean flops_profiler.output_file?"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_accepted_one(key: str, nearest: str) -> None:
    (problem,) = check_file_alone(tree_of(key, 1), "x.json")
    assert nearest in (problem.remedy or "")


def known_leaves() -> Iterator[str]:
    """Yield every key of a value that DeepSpeed knows, dotted; blocks without known keys count as
    one."""
    levels: list[tuple[tuple[str, ...], Any]] = [((), key_table()["keys"])]
    while levels:
        parents, keys = levels.pop()
        for name, node in keys.items():
            if "keys" in node:
                levels.append(((*parents, name), node["keys"]))
            else:
                yield ".".join((*parents, name))


def test_a_letter_too_many_still_finds_an_accepted_key() -> None:
    """No key is suggested that would be refused itself."""
    accepted = {row.key for row in ROWS}
    for key in (key for key in known_leaves() if "." in key):
        named = re.search(r"did you mean (\S+)\?", suggestion(f"{key}x", accepted))
        assert named is not None or key not in accepted, key
        if named is not None:
            assert any(f"{one}.".startswith(f"{named[1]}.") for one in accepted), key
