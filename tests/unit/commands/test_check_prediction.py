"""`bigtrain check` says what a run is predicted to take, as the run itself and the plan say it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.commands.check import prediction
from bigtrain.commands.plan import PlanArguments, ranked_layouts
from bigtrain.planner.run_prediction import layout_of
from bigtrain.python_api.planning import run_and_engine
from bigtrain.settings.resolve import resolve_run_files

RECIPE = ("llama3_1b", ["model.loss=plain"], 8)


def lines(*overrides: str, gpu: str | None = None) -> list[str]:
    name, own, world_size = RECIPE
    return prediction(resolve_run_files(name, [*own, *overrides], world_size), gpu)


def test_without_a_device_memory_alone_is_told() -> None:
    line = lines()[0]
    assert line.startswith("predicted: ")
    assert "GiB of tensors on the fullest rank" in line
    assert "tokens/s" not in line


def test_with_a_device_it_is_what_the_plan_says_of_that_layout() -> None:
    args = PlanArguments(
        config=RECIPE[0], overrides=tuple(RECIPE[1]), gpus="8xH100-80GB", as_configured=True
    )
    plan = ranked_layouts(args)
    best = plan.fitting[0]
    tree, _ = run_and_engine(plan.config, best.layout, best.loss)
    parallel = [f"parallel.{name}={degree}" for name, degree in tree["parallel"].items()]
    line = lines(
        *parallel,
        f"engine.deepspeed_config=zero{best.layout.zero_stage}",
        f"batch.micro_batch_size={best.layout.micro_batch_size}",
        f"model.gradient_checkpointing={best.layout.recompute}",
        gpu="h100",
    )[0]
    assert line.endswith(f"{best.tokens_per_second:,.0f} tokens/s on H100-80GB")
    assert f"{best.memory.allocated / 2**30:.3g} GiB" in line


def test_the_copy_of_an_asynchronous_save_is_counted_where_there_is_one() -> None:
    name, own, world_size = RECIPE
    for copies in (True, False):
        overrides = [*own, f"checkpoint.asynchronous={str(copies).lower()}"]
        assert layout_of(resolve_run_files(name, overrides, world_size)).copies_states is copies


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")
def test_checkpoints_in_memory_are_counted_and_compared_with_the_host() -> None:
    name, own, world_size = RECIPE
    overrides = [*own, "checkpoint.memory={every_steps: 1, copies: 1}"]
    layout = layout_of(resolve_run_files(name, overrides, world_size))
    assert layout.memory_copies == 5  # taken between steps, two generations, of two hosts each
    line = next(line for line in lines(*overrides[len(own) :]) if "checkpoints in memory" in line)
    assert re.search(r"GiB for one rank of a host in /dev/shm, which has [\d.]+ of", line)


def test_what_cannot_fit_is_refused_as_the_run_refuses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["check", "--config", "llama3_8b", "--world-size", "8", "--gpu", "H100-80GB"]
    large = ["batch.micro_batch_size=8", "parallel.pipeline=1"]
    assert main([*command, *large]) != 0
    error = capsys.readouterr().err
    assert "80.0 GiB 76.0 are usable -> use bigtrain plan for a layout that fits" in error
    assert main([*command, *large, "engine.refuse_too_large=false"]) == 0
    out = capsys.readouterr().out
    assert "the run is predicted to need" in out


def test_a_model_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "--config", "quickstart", "model.config=null", "model.path=/no/model"]
    assert main(command) == 2
    assert "model.path = '/no/model': no such directory -> name" in capsys.readouterr().err


def test_an_unknown_device_is_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", "quickstart", "output.directory=new", "--gpu", "H900"]) == 2
    error = capsys.readouterr().err
    assert "--gpu = 'H900'" in error
    assert "H100-80GB" in error
