"""Length of a run in epochs: counted as steps from the samples, shown by check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from bigtrain.cli import main
from bigtrain.data.loading.dataset_checks import count_samples
from bigtrain.data.shards.dataset import open_dataset
from bigtrain.errors import ConfigError
from bigtrain.run.checkpointing.changed_settings import mathematics
from bigtrain.run.length import UNKNOWN, count_steps, with_steps
from bigtrain.settings.loading import parse_run_config
from bigtrain.settings.resolve import resolve_run
from bigtrain.settings.run_config import RunConfig
from tests.support.datasets import write_dataset
from tests.support.run_trees import run_tree


def tree(place: Path, train: dict[str, Any], **sections: Any) -> dict[str, Any]:
    model = {"config": {"model_type": "llama", "vocab_size": 50}}
    common = {"model": model, "data": {"path": str(place / "shards")}}
    return run_tree(train=train, output={"directory": str(place / "run")}, **(common | sections))


def config_of(train: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig.model_validate(tree(Path(), train, **sections))


@pytest.mark.parametrize(
    ("epochs", "samples", "steps", "more"),
    [(1.0, 40, 10, 0), (2, 41, 21, 2), (0.1, 40, 1, 0), (0.3, 40, 3, 0), (1e-9, 40, 1, 3)],
)
def test_epochs_are_samples_in_full_steps(
    epochs: float, samples: int, steps: int, more: int
) -> None:
    counted, line = count_steps(config_of({"epochs": epochs}), [samples])
    assert counted == steps
    assert (f"the last step reads {more} of the next epoch" in line) == (more > 0)


def test_sources_with_epochs_are_read_as_often_as_these_say() -> None:
    sources = [{"path": "a", "epochs": 1}, {"path": "b", "epochs": 0.5}]
    config = config_of({"epochs": 3}, data={"sources": sources})
    steps, line = count_steps(config, [100, 40])
    assert steps == 3 * (100 + 20) / 4
    assert "3 of 120 samples (the sources by their epochs) is train.steps = 90" in line


@pytest.mark.parametrize(
    ("train", "sources", "why"),
    [
        ({}, None, "train.steps: is required"),
        ({"steps": 3, "epochs": 1}, None, "train.steps = 3: train.epochs = 1 gives the length"),
        ({"epochs": 0}, None, "train.epochs = 0: input should be greater than 0"),
        ({"epochs": float("nan")}, None, "train.epochs = nan: input should be"),
        (
            {"epochs": 1},
            [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}],
            "train.steps=N; or data.sources.0.epochs instead of weight",
        ),
    ],
)
def test_a_length_that_is_none_or_ambiguous_is_refused(
    train: dict[str, Any], sources: Any, why: str
) -> None:
    sections = {} if sources is None else {"data": {"sources": sources}}
    with pytest.raises(ConfigError, match=None) as caught:
        parse_run_config(tree(Path(), train, **sections))
    assert why in str(caught.value)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_check_shows_the_steps_that_the_run_takes(
    packing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = {"path": str(tmp_path / "shards"), "packing": packing}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(tree(tmp_path, {"epochs": 1.5}, data=data)))
    if packing == "best_fit":
        assert main(["check", "--config", str(path)]) == 0
        assert UNKNOWN.format("train.epochs", 1.5) in capsys.readouterr().out
    write_dataset(tmp_path / "shards", vocab_size=50)
    config = parse_run_config(tree(tmp_path, {"epochs": 1.5}, data=data))
    samples = count_samples(config, open_dataset(tmp_path / "shards"), "train")
    steps = -(-(3 * samples) // 8)
    for more in ([], ["--inputs"]):
        assert main(["check", "--config", str(path), "--resolved", *more]) == 0
        said = capsys.readouterr().out
        assert f"train.epochs = 1.5 of {samples} samples (the training split) is" in said
        assert f"  steps: {steps}\n" in said
    assert main(["check", "--config", str(path), "--show", "train.steps"]) == 0
    assert capsys.readouterr().out == f"{steps}\n"
    late = f"schedule.warmup_steps={steps + 1}"
    for more in ([], ["--inputs"]):
        assert main(["check", "--config", str(path), *more, late]) == 2
        assert f"schedule.warmup_steps = {steps + 1}: more than the run's steps" in (
            capsys.readouterr().err
        )


def test_a_counted_run_is_one_of_steps(tmp_path: Path) -> None:
    write_dataset(tmp_path / "shards", vocab_size=50)
    dataset = open_dataset(tmp_path / "shards")
    run = resolve_run(parse_run_config(tree(tmp_path, {"epochs": 2})), 1)
    counted, (line,) = with_steps(run, [dataset])
    with pytest.raises(ConfigError, match="too short for one global batch: 0 training tokens"):
        with_steps(run, [])
    again, lines = with_steps(counted, [dataset])
    assert (again, lines) == (counted, ())
    steps = counted.config.train.total_steps
    assert f"is train.steps = {steps} of 4 samples" in line
    # A checkpoint has the steps, and a resume compares them: of grown data they are others.
    by_steps = parse_run_config(tree(tmp_path, {"steps": steps}))
    assert mathematics(counted.config) == mathematics(by_steps)


@pytest.mark.parametrize("train", [{"epochs": 2}, {"steps": 7}])
def test_saves_and_evaluations_by_epochs_are_counted(train: dict[str, Any], tmp_path: Path) -> None:
    write_dataset(tmp_path / "shards", vocab_size=50)
    dataset = open_dataset(tmp_path / "shards")
    sections = {"checkpoint": {"every_epochs": 1}, "evaluation": {"every_epochs": 0.25}}
    config = parse_run_config(tree(tmp_path, train, **sections))
    per_epoch = count_samples(config, dataset, "train") / config.batch.samples_per_step
    run, lines = with_steps(resolve_run(config, 1), [dataset])
    assert run.config.checkpoint.every_steps == round(per_epoch)
    assert run.config.evaluation.every_steps == round(per_epoch / 4)
    assert run.config.epoch_settings == {}
    assert f"evaluation.every_epochs = 0.25 of {per_epoch:,.10g} steps is" in "\n".join(lines)
    assert run.config.train.total_steps == train.get("steps", run.config.train.steps)
    # At least one step.
    tiny = {"checkpoint": {"every_epochs": 1e-6}}
    run, _ = with_steps(resolve_run(parse_run_config(tree(tmp_path, train, **tiny)), 1), [dataset])
    assert run.config.checkpoint.every_steps == 1


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        (
            {"checkpoint": {"every_epochs": 1, "every_steps": 5}},
            "checkpoint.every_epochs = 1 and checkpoint.every_steps = 5 are the same distance",
        ),
        (
            {"evaluation": {"every_epochs": 0.5, "every_steps": 5}},
            "evaluation.every_epochs = 0.5 and evaluation.every_steps = 5 are the same distance",
        ),
        ({"checkpoint": {"every_epochs": 0}}, "input should be greater than 0"),
        (
            {"checkpoint": {"every_epochs": 1, "keep_best": 1}, "evaluation": {"every_epochs": 2}},
            "evaluation.every_epochs = 2.0 must be checkpoint.every_epochs = 1",
        ),
        (
            {
                "checkpoint": {"every_epochs": 1},
                "data": {"sources": [{"path": "a", "weight": 1.0}]},
            },
            "checkpoint.every_epochs = 1: sources with weights end their epochs",
        ),
        (
            {"evaluation": {"early_stopping": {"patience": 2}}},
            "evaluation.early_stopping depends on held_out_loss",
        ),
    ],
)
def test_distances_in_epochs_that_contradict_themselves(
    sections: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_config(tree(tmp_path, {"steps": 9}, **sections))
    assert why in str(caught.value)


def test_early_stopping_goes_with_evaluations_by_epochs(tmp_path: Path) -> None:
    section = {"every_epochs": 1, "early_stopping": {"patience": 2}}
    parse_run_config(tree(tmp_path, {"steps": 9}, evaluation=section))


def test_phases_have_no_epochs(tmp_path: Path) -> None:
    batch = {"sequence_length": 8, "global_batch_size": 4, "phases": [{"steps": 2}]}
    sections = {"batch": batch, "checkpoint": {"every_epochs": 1}}
    config = parse_run_config(tree(tmp_path, {"steps": 9}, **sections))
    with pytest.raises(ConfigError, match=r"checkpoint.every_epochs = 1.0: steps of batch.phases"):
        resolve_run(config, 1)


def test_a_schedule_of_the_user_is_checked_for_every_counted_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "falling_schedule.py").write_text(
        "def factor(step, total_steps):\n    return 1.0 - step / 3\n"
    )
    write_dataset(tmp_path / "shards", vocab_size=50)
    schedule = {"schedule": {"type": "falling_schedule:factor"}}
    run = resolve_run(parse_run_config(tree(tmp_path, {"epochs": 2}, **schedule)), 1)
    with pytest.raises(ConfigError, match="of step 4 of"):
        with_steps(run, [open_dataset(tmp_path / "shards")])
