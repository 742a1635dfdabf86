"""What `accelerate launch` puts in the environment: the engine's configuration, or an error."""

from __future__ import annotations

from typing import Any

import pytest

from bigtrain.errors import ConfigError, LaunchError
from bigtrain.settings.accelerate import read_accelerate
from bigtrain.settings.loading import load_run_config, recipe_names
from bigtrain.settings.resolve import ResolvedRun, resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_config as run_of_four
from tests.support.worlds import ROOT

DEEPSPEED = "ACCELERATE_DEEPSPEED_"
ANSWERED = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_accumulation_steps,mixed_precision",
    f"{DEEPSPEED}ZERO_STAGE": "3",
    f"{DEEPSPEED}OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    f"{DEEPSPEED}OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
}


def run_config(**sections: Any) -> RunConfig:
    return run_of_four(
        **{**sections, "batch": {"global_batch_size": 16} | sections.get("batch", {})}
    )


def resolve(
    config: RunConfig, environment: dict[str, str], deepspeed_config: str | None = None
) -> ResolvedRun:
    accelerate = read_accelerate(environment)
    return resolve_run(config, 2, deepspeed_config, accelerate=accelerate)


def refused(
    config: RunConfig, environment: dict[str, str], deepspeed_config: str | None = None
) -> str:
    """The one problem of the two."""
    with pytest.raises(ConfigError) as raised:
        resolve(config, environment, deepspeed_config)
    assert len(raised.value.problems) == 1, str(raised.value)
    return str(raised.value.problems[0])


def test_answers_are_the_engine_where_the_run_is_silent() -> None:
    run = resolve(run_config(), ANSWERED)
    assert run.engine.source == "accelerate config"
    assert (run.engine.zero_stage, run.engine.offload_optimizer, run.engine.offload_param) == (
        3,
        "cpu",
        None,
    )
    assert run.plan.accumulation == 2
    assert run.config.batch.micro_batch_size == 4
    assert run.config.optimizer.clip_norm == 0.5
    assert run.engine.deepspeed["gradient_clipping"] == 0.5
    assert run.config.precision.dtype == "float32"
    assert run.config.engine.deepspeed_config == "accelerate config"
    # What train.py does again as soon as it knows the device.
    assert resolve(run.config, ANSWERED).engine == run.engine


def test_what_nobody_was_asked_for_is_no_answer() -> None:
    for environment in ({}, {"ACCELERATE_MIXED_PRECISION": "no"}):
        run = resolve(run_config(), environment)
        assert (run.engine.source, run.config.precision.dtype) == ("zero1.json", "bfloat16")
    answers = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
        f"{DEEPSPEED}CONFIG_FILE": str(ROOT / "ds_configs" / "zero2.json"),
    }
    run = resolve(run_config(), answers)
    assert run.config.precision.dtype == "bfloat16"
    assert (run.engine.source, run.engine.zero_stage) == ("zero2.json", 2)
    # Answers that agree with what is named.
    answers = {**ANSWERED, f"{DEEPSPEED}OFFLOAD_OPTIMIZER_DEVICE": "none"}
    run = resolve(run_config(optimizer={"clip_norm": 0.5}), answers, "zero3")
    assert (run.engine.source, run.plan.accumulation) == ("zero3.json", 2)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"precision": {"dtype": "float32"}},
            "accelerate config: mixed_precision = 'bf16': contradicts precision.dtype = float32",
        ),
        (
            {"optimizer": {"clip_norm": 1.0}},
            "accelerate config: gradient_clipping = 0.5: contradicts optimizer.clip_norm = 1.0",
        ),
        (
            {"batch": {"micro_batch_size": 8}},
            "accelerate config: gradient_accumulation_steps = 2: contradicts batch.global_batch_s",
        ),
        (
            {"engine": {"deepspeed_config": "zero3"}},
            "accelerate config: zero_optimization.offload_optimizer.device = 'cpu': contradicts "
            "zero_optimization.offload_optimizer.device = 'none' of zero3.json",
        ),
    ],
)
def test_contradictions_name_both(sections: dict[str, dict[str, Any]], said: str) -> None:
    answers = ANSWERED
    if "precision" in sections:
        answers = {**ANSWERED, "ACCELERATE_MIXED_PRECISION": "bf16"}
    problem = refused(run_config(**sections), answers)
    assert problem.startswith(said)
    assert " -> " in problem


DEFAULTS = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,gradient_accumulation_steps,mixed_precision",
    f"{DEEPSPEED}ZERO_STAGE": "2",
    f"{DEEPSPEED}OFFLOAD_OPTIMIZER_DEVICE": "none",
    f"{DEEPSPEED}OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
}


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_wizard_s_defaults_start_every_recipe_as_it_is(recipe: str) -> None:
    degrees = [f"parallel.{name}=1" for name in ("tensor", "pipeline", "sequence", "expert")]
    config = load_run_config(recipe, degrees)
    run = resolve(config, DEFAULTS)
    plain = resolve_run(config, 2)
    assert (run.config, run.plan) == (plain.config, plain.plan)
    assert run.engine.deepspeed == plain.engine.deepspeed
    said = {
        note.partition(" = ")[0].removeprefix("accelerate config: ") for note in run.engine.notes
    }
    expected = {
        "gradient_accumulation_steps": plain.plan.accumulation != 1,
        "mixed_precision": config.precision.dtype != "float32",
        "zero_optimization.stage": plain.engine.zero_stage != 2,
        "zero_optimization.offload_optimizer.device": plain.engine.offload_optimizer is not None,
        "zero_optimization.offload_param.device": plain.engine.offload_param is not None,
    }
    assert said == {key for key, is_said in expected.items() if is_said}


def test_the_wizard_s_defaults_are_the_engine_of_a_silent_run() -> None:
    run = resolve(run_config(batch={"micro_batch_size": 2}), DEFAULTS)
    assert (run.engine.zero_stage, run.config.precision.dtype) == (2, "float32")
    assert run.plan.accumulation == 4
    assert run.engine.notes == (
        "accelerate config: gradient_accumulation_steps = 1 is the wizard's default and counts as "
        "not answered: it contradicts the accumulation of the run, which owns it: 4",
    )
    assert resolve(run_config(batch={"micro_batch_size": 8}), DEFAULTS).engine.notes == ()


def test_two_files_are_one_too_many() -> None:
    answers = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        f"{DEEPSPEED}CONFIG_FILE": str(ROOT / "ds_configs" / "zero2.json"),
    }
    assert resolve(run_config(), answers, "zero2").engine.zero_stage == 2
    problem = refused(run_config(), answers, "zero3")
    assert problem.startswith("accelerate config: deepspeed_config_file = ")
    assert "contradicts --deepspeed_config = zero3" in problem
    problem = refused(run_config(engine={"deepspeed_config": "zero1"}), answers)
    assert "contradicts engine.deepspeed_config of the run = zero1" in problem


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(LaunchError, match="FullyShardedDataParallel was chosen"):
        read_accelerate({"ACCELERATE_USE_FSDP": "true"})
    moe = {**ANSWERED, f"{DEEPSPEED}MOE_LAYER_CLS_NAMES": "MixtralSparseMoeBlock"}
    with pytest.raises(ConfigError, match="deepspeed_moe_layer_cls_names"):
        read_accelerate(moe)
    fp8 = {**ANSWERED, "ACCELERATE_MIXED_PRECISION": "fp8"}
    assert "mixed_precision = 'fp8'" in refused(run_config(), fp8)
    # accelerate forgets the path it asked for.
    nvme = {**ANSWERED, f"{DEEPSPEED}OFFLOAD_PARAM_DEVICE": "nvme"}
    assert "offload_param.nvme_path" in refused(run_config(), nvme)
    nvme = {**ANSWERED, f"{DEEPSPEED}OFFLOAD_OPTIMIZER_DEVICE": "nvme"}
    assert "offload_optimizer.device = 'nvme'" in refused(run_config(), nvme)
    with pytest.raises(ConfigError, match="GRADIENT_CLIPPING = 'much': is not a number"):
        read_accelerate({**ANSWERED, "ACCELERATE_GRADIENT_CLIPPING": "much"})


def dynamo_answers(*options: str) -> dict[str, str]:
    """What `accelerate launch` itself makes of them, without DeepSpeed."""
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    fixed = ["--num_machines=1", "--num_processes=1", "--mixed_precision=no", "--cpu", "train.py"]
    arguments = launch_command_parser().parse_args([*options, *fixed])
    _, environment = prepare_simple_launcher_cmd_env(arguments)
    return {name: text for name, text in environment.items() if name.startswith("ACCELERATE_")}


def test_torch_dynamo_compiles_the_layers() -> None:
    answers = dynamo_answers("--dynamo_backend=inductor")
    run = resolve(run_config(), answers)
    assert run.config.model.compile == "on"
    # The engine and everything else are the run's: nothing was answered on DeepSpeed.
    assert (run.engine.source, run.config.precision.dtype) == ("zero1.json", "bfloat16")
    assert resolve(run.config, answers).config == run.config
    assert resolve(run_config(), answers, "zero2").engine.zero_stage == 2
    beside = {**ANSWERED, **answers, "ACCELERATE_USE_DEEPSPEED": "true"}
    beside[f"{DEEPSPEED}ZERO_STAGE"] = "1"
    assert resolve(run_config(), beside).config.model.compile == "on"
    model = {"config": {"model_type": "llama"}, "compile": "off"}
    problem = refused(run_config(model=model), answers)
    assert problem.startswith("accelerate config: torch dynamo = 'yes': contradicts model.compile")
    unasked = resolve(run_config(), dynamo_answers("--dynamo_backend=no"))
    assert unasked.config.model.compile == "auto"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--dynamo_backend=eager"], "dynamo_backend = 'EAGER'"),
        (["--dynamo_mode=max-autotune"], "dynamo_mode = 'max-autotune'"),
        (["--dynamo_use_fullgraph"], "dynamo_use_fullgraph = 'True'"),
        (["--dynamo_use_dynamic"], "dynamo_use_dynamic = 'True'"),
    ],
)
def test_torch_dynamo_as_layers_are_not_compiled(options: list[str], said: str) -> None:
    answers = dynamo_answers("--dynamo_backend=inductor", *options)
    with pytest.raises(ConfigError, match=f"{said}: is not how bigtrain compiles layers -> answer"):
        read_accelerate(answers)
