"""The run YAML, the topology, the batch arithmetic and the schedule."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bigtrain.errors import ConfigError
from bigtrain.settings.batch_plan import plan_batch
from bigtrain.settings.loading import find_config, load_run_config, parse_yaml, recipe_names
from bigtrain.settings.lr_schedule import learning_rate_at
from bigtrain.settings.run_config import (
    BatchSection,
    ParallelSection,
    PrecisionSection,
    RunConfig,
    ScheduleSection,
    Section,
)
from bigtrain.settings.sections.evaluation import HeldOutMetric
from bigtrain.settings.sections.optimizer import OPTIMIZERS
from bigtrain.settings.topology import derive_topology
from tests.support.run_trees import run_tree

NAMES = tuple(OPTIMIZERS)


def make_tree() -> dict[str, Any]:
    return run_tree(batch={"global_batch_size": 16, "micro_batch_size": 2}, train={"steps": 10})


def write(tmp_path: Path, tree: object) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree), encoding="utf-8")
    return str(path)


def problems_of(tmp_path: Path, tree: object, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(write(tmp_path, tree), overrides)
    return [str(problem) for problem in caught.value.problems]


# --- reading -----------------------------------------------------------------------------------


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for name in section.__subclasses__():
        yield from _sections(name)


def test_sections_that_are_defaults_are_as_if_they_were_validated() -> None:
    """They are made without validation, which takes time at every import of the settings."""
    defaults = [
        field.default
        for section in _sections(Section)
        for field in section.model_fields.values()
        if isinstance(field.default, Section)
    ]
    assert len(defaults) > 12
    for default in defaults:
        validated = type(default)()
        assert (default, repr(default)) == (validated, repr(validated))
        assert default.model_fields_set == validated.model_fields_set == set()


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_loads_by_name(recipe: str) -> None:
    config = load_run_config(recipe)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_run_is_frozen() -> None:
    config = RunConfig.model_validate(make_tree())
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


def test_missing_file_and_unreadable_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor the name of a recipe"):
        load_run_config(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError, match=r"did you mean quickstart\? .* recipe: .*quickstart"):
        find_config("quikstart")
    (text,) = problems_of(tmp_path, "- 1")
    assert "the file must hold sections" in text


@pytest.mark.parametrize(
    ("text", "where", "line"),
    [
        ("model:\n  config: {a: 1\ndata: [\n", "line 3, column 5", "'data: ['"),
        ('a: "x\nb: 2', "line 2, column 5", "'b: 2'"),
        ("a: 1\na: 2\n", "line 2, column 1: key 'a' is given twice", "'a: 2'"),
    ],
)
def test_a_fault_of_yaml_is_named_with_file_and_line(
    text: str, where: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config(write(tmp_path, text))
    shown = str(caught.value)
    assert f"YAML of {tmp_path / 'run.yaml'} {where}" in shown
    assert line in shown
    assert "unicode string" not in shown
    assert "^" not in shown


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("2.0e-3", 2e-3), ("1E5", 1e5), ("-.5", -0.5), ("5.", 5.0), ("7", 7),
     ("off", "off"), ("yes", "yes"), ("true", True), ("null", None), ("[1e-1, 2]", [0.1, 2])],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    parsed = parse_yaml(text, "test")
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides_are_read_as_yaml_in_order(tmp_path: Path) -> None:
    overrides = ["optimizer.lr=1e-4", "optimizer.lr=2e-4", "optimizer.betas=[0.8, 0.9]"]
    overrides += ["model.overrides.num_hidden_layers=3", "checkpoint.every_steps=null"]
    config = load_run_config(write(tmp_path, make_tree()), overrides)
    assert config.optimizer.lr == 2e-4
    assert config.model.overrides == {"num_hidden_layers": 3}
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.checkpoint.every_steps is None


@pytest.mark.parametrize("override", ["optimizer.lr", "=3", "optimizer..lr=3", ".lr=1"])
def test_what_is_no_override_is_refused(tmp_path: Path, override: str) -> None:
    (text,) = problems_of(tmp_path, make_tree(), override)
    assert text == f"{override}: is not an override -> write section.key=value"


# --- every problem at once, with key, value, rule and remedy -----------------------------------


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    tree = make_tree() | {"train": {"stps": 3}, "precision": {"dtype": "fp8"}, "checkpoints": {}}
    tree["optimizer"]["lr"] = -1.0
    texts = problems_of(tmp_path, tree, "oops")
    assert len(texts) == 6
    joined = "\n".join(texts)
    assert "oops: is not an override" in joined
    assert "train.steps: is required -> add train.steps to the file or as train.st" in joined
    assert "train.stps = 3: unknown key -> did you mean train.steps? known here: epochs" in joined
    assert "checkpoints = {}: unknown key -> did you mean checkpoint? known here:" in joined
    assert "optimizer.lr = -1.0: input should be greater than 0" in joined
    assert "precision.dtype = 'fp8': input should be 'float32', 'bfloat16' or 'float16'" in joined


@pytest.mark.parametrize(
    "section", [name for name, field in RunConfig.model_fields.items() if field.is_required()]
)
def test_the_remedy_for_a_missing_section_is_accepted(tmp_path: Path, section: str) -> None:
    tree = make_tree()
    written = tree.pop(section)
    (text,) = problems_of(tmp_path, tree)
    # Settings of the remedy, each with a value that the section had.
    settings = re.findall(r"(\S+)=VALUE", text)
    values = [
        f"{name}={json.dumps(written.get(name.rpartition('.')[2], 1.0))}" for name in settings
    ]
    assert settings
    remaining = ""  # a section may need a further setting, but is one now
    try:
        load_run_config(write(tmp_path, tree), values)
    except ConfigError as error:
        remaining = str(error)
    assert f"{section}: is required" not in remaining
    assert "must be a section" not in remaining


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "model.gradient_checkpointing=true",
            "must be none or full or a number, not true or false -> did you mean full?",
        ),
        ("model.gradient_checkpointing=on", "or must be a whole number -> did you mean full?"),
        ("model.gradient_checkpointing=false", "-> did you mean none?"),
        ("model.compile=true", "input should be 'auto', 'on' or 'off' -> did you mean on?"),
        ("model.tiled_mlp=no", "-> did you mean off?"),
        (
            "adapters.targets=q_proj",
            "input should be 'all-linear', 'attention' or 'mlp', or must be a list -> write a "
            "list: adapters.targets=[q_proj]",
        ),
        ("adapters.targets=[1]", "adapters.targets = 1: input should be a valid string"),
        ("adapters.targets=attentoin", "-> did you mean attention?"),
        ("logging.trackers=wandb", "-> write a list: logging.trackers=[wandb]"),
        ("model.config=null", "must be set -> model.path=MODEL, or add model.config"),
        ("data.path=null", "must be set -> data.path=SHARDS, or add data.sources"),
        ("seed=true", "must be a number, not true or false -> write a number"),
    ],
)
def test_one_value_is_one_problem(tmp_path: Path, override: str, text: str) -> None:
    (problem,) = problems_of(tmp_path, make_tree(), override)
    assert text in problem


@pytest.mark.parametrize(
    ("value", "meant"),
    [("half", "float16"), ("bfloat", "bfloat16"), ("FP32", "float32"), ("floot16", "float16")],
)
def test_a_value_under_another_name_is_meant(value: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_config("quickstart", [f"precision.dtype={value}"])
    assert str(caught.value).endswith(f" -> did you mean {meant}?")
    assert "quickstart.yaml and the command line\n" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=x"], "exactly one of model.path (trained weights) and model.config"),
        (["model.config=null"], "exactly one of model.path (trained weights) and model.config"),
        (["model.config={hidden_size: 8}"], "model.config must name a model_type"),
        (["batch.global_tokens=128"], "exactly one of batch.global_batch_size and batch.global_t"),
        (["batch.global_tokens=128"], "-> batch.global_batch_size=null, or batch.global_tokens="),
        (["batch.global_batch_size=null"], "must be set -> batch.global_batch_size=SAMPLES"),
        (
            ["batch.global_batch_size=null", "batch.global_tokens=100"],
            "100 is not a multiple of batch.sequence_length = 8; nearest: 96 or 104",
        ),
        (
            ["batch.global_batch_size=null", "batch.global_tokens=5"],
            "batch.sequence_length = 8; nearest: 8",
        ),
        (["schedule.warmup_steps=11"], "is more than train.steps = 10 -> schedule.warmup_steps=10"),
        (["optimizer.lr=.nan"], "optimizer.lr = nan: input should be a finite number"),
        (["model.gradient_checkpointing=some"], "model.gradient_checkpointing = 'some'"),
        (
            ["optimizer.type=moun"],
            f"{', '.join(map(repr, NAMES[:-1]))} or {NAMES[-1]!r} -> did you mean muon?",
        ),
        (["optimizer.betas=[0.9, 1.0]"], "optimizer.betas.1 = 1.0: input should be less than 1"),
        (["optimizer.betas=[0.9, 1.0]"], "less than 1 -> write a number less than 1"),
        (
            ["optimizer.type=adafactor", "optimizer.state_dtype=bfloat16"],
            "optimizer.state_dtype = bfloat16: optimizer.type = adafactor does not read it: "
            "Adafactor's states are a number for each row and column, in float32 -> remove it",
        ),
        (
            ["optimizer.type=adafactor", "optimizer.betas=[0.8, 0.9]"],
            "optimizer.betas = [0.8, 0.9]: optimizer.type = adafactor does not read it: ",
        ),
        (
            ["optimizer.type=lion", "optimizer.eps=1e-6"],
            "optimizer.eps = 1e-06: optimizer.type = lion does not read it: ",
        ),
        (["data.packing=none", "data.chunk_length=64"], "(data.packing = 'none') are made again"),
        (["data.chunk_length=100"], "= 100 is not a multiple of batch.sequence_length = "),
        (["checkpoint.allow_changes=[optimizer.lrr]"], "-> did you mean optimizer.lr?"),
        (["checkpoint.allow_changes=[optimiser]"], "-> did you mean optimizer?"),
        (["adapters={r: 8}", "model={path: a}"], "-> did you mean adapters.rank?"),
        (["data={sources: [{path: a}]}"], "-> write weight: 1 (or epochs: 1) in each"),
        (["optimizer=1e-3"], "-> write its settings: optimizer.lr=VALUE"),
        (["optimizer.betas=0.9"], "-> write a list: optimizer.betas=[a, b]"),
        (["batch.micro_batch_size=0"], "-> nearest: 1"),
        (["model={path: hf}", "checkpoint.initialize_from=old"], "from = 'old' and model.path = "),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, overrides: list[str], message: str) -> None:
    assert message in "\n".join(problems_of(tmp_path, make_tree(), *overrides))


@pytest.mark.parametrize("name", ["~/runs/a", "$HOME/a", "runs/${SLURM_JOB_ID}"])
def test_names_that_only_a_shell_expands_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would make a folder named ~ where the run was started."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (problem,) = problems_of(tmp_path, make_tree(), f"output.directory={name}")
    assert "expanded by a shell, not in a file" in problem
    written = {"~/runs/a": "/home/me/runs/a", "$HOME/a": "output.directory=/home/me/a"}
    assert problem.endswith(f"-> {written.get(name, 'output.directory=runs/7')}")
    load_run_config(write(tmp_path, make_tree()), ["output.directory=runs/a~b-5$"])


@pytest.mark.parametrize("kind", NAMES)
def test_an_optimizers_configuration_is_read_again(tmp_path: Path, kind: str) -> None:
    """A checkpoint holds every field, the defaults that an optimizer does not read too."""
    config = load_run_config(write(tmp_path, make_tree()), [f"optimizer.type={kind}"])
    assert type(config).model_validate(config.model_dump()) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data: exactly one of data.path (one dataset) and data.sources (a mixture)"),
        ({"path": "a", "sources": [{"path": "b", "weight": 1}]}, "data: exactly one of data.path"),
        ({"sources": [{"path": "a"}]}, "data: data.sources: every source must have a weight, or"),
        (
            {"sources": [{"path": "a", "weight": 1}, {"path": "b", "epochs": 2}]},
            "data: data.sources: every source must have a weight, or every one epochs",
        ),
        (
            {"sources": [{"path": "a", "weight": 1, "epochs": 1}]},
            "data: data.sources: every source must have a weight, or every one epochs, and none",
        ),
        (
            {"sources": [{"path": path, "weight": 1} for path in ("b", "a", "./a/")]},
            "data: data.sources: a is listed twice; give it one weight, the sum of those of "
            "data.sources.1 and data.sources.2",
        ),
        ({"sources": [{"path": "a", "weight": 0}]}, "data.sources.0.weight = 0: input should be"),
        (
            {"sources": [{"path": "a", "weight": 1, "epoch": 1}]},
            "data.sources.0.epoch = 1: unknown key -> did you mean data.sources.0.epochs? known",
        ),
    ],
)
def test_mixtures_that_are_refused(tmp_path: Path, data: object, message: str) -> None:
    problems = problems_of(tmp_path, make_tree() | {"data": data})
    assert any(problem.startswith(message) for problem in problems), problems


# --- topology and batch ------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [1, 4, {"ring": 2}, {"ulysses": 2, "ring": 2}])
def test_degrees_are_written_as_a_section(sequence: Any) -> None:
    section = ParallelSection(tensor=2, sequence=sequence, expert=8)
    tree = ParallelSection.tree_of(section.degrees)
    assert "pipeline" not in tree
    assert ParallelSection.model_validate(tree).degrees == section.degrees


def test_a_world_is_divided_by_the_degrees_or_told_the_nearest_that_is() -> None:
    topology, problems = derive_topology(ParallelSection(tensor=2, pipeline=2), 8)
    assert problems == []
    assert topology is not None
    assert (topology.data_size, topology.tensor_size, topology.pipeline_size) == (2, 2, 2)
    topology, (problem,) = derive_topology(ParallelSection(tensor=4), 6)
    assert topology is None
    assert str(problem) == (
        "world size = 6: must be a multiple of parallel.tensor x pipeline x sequence = 4 x 1 x 1 = "
        "4 -> start 4 or 8 processes, or set parallel.tensor=1, which resumes the same checkpoints"
    )


def test_the_equation_shows_the_arithmetic() -> None:
    batch = BatchSection(sequence_length=256, global_batch_size=16, micro_batch_size=4)
    plan, problems = plan_batch(batch, 2)
    assert problems == []
    assert plan is not None
    assert plan.equation() == (
        "16 samples per step = 4 per micro-batch x 2 data-parallel x 2 accumulation; 4096 tokens "
        "per step = 16 samples x 256 tokens"
    )


def test_a_batch_that_does_not_divide_names_what_would() -> None:
    batch = BatchSection(sequence_length=8, global_batch_size=12, micro_batch_size=4)
    plan, (problem,) = plan_batch(batch, 2)
    assert plan is None
    assert str(problem) == (
        "batch.global_batch_size = 12: must be a multiple of batch.micro_batch_size x "
        "data-parallel size = 4 x 2 = 8 -> nearest: 8 or 16, or batch.micro_batch_size: 3"
    )
    tokens = BatchSection(sequence_length=8, global_tokens=96, micro_batch_size=4)
    _, (problem,) = plan_batch(tokens, 2)
    assert str(problem).startswith("batch.global_tokens = 96: must be a multiple of")
    assert "= 8 samples = 64 tokens -> nearest: 64 or 128, or batch.micro_batch_size: 3" in (
        str(problem)
    )


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_a_plan_gives_every_sample_once(samples: int, micro: int, data: int, length: int) -> None:
    batch = BatchSection(sequence_length=length, global_batch_size=samples, micro_batch_size=micro)
    plan, problems = plan_batch(batch, data)
    if samples % (micro * data):
        assert plan is None
        (problem,) = problems
        nearest = problem.remedy.removeprefix("nearest: ")
        sizes, _, smaller = nearest.partition(", or batch.micro_batch_size: ")
        assert all(int(size) % (micro * data) == 0 for size in sizes.split(" or "))
        assert not smaller or samples % (int(smaller) * data) == 0
        return
    assert plan is not None
    given_out = [
        (micro_step * plan.data_size + rank) * plan.micro_batch_size + row
        for micro_step in range(plan.accumulation)
        for rank in range(plan.data_size)
        for row in range(plan.micro_batch_size)
    ]
    assert sorted(given_out) == list(range(samples))


# --- schedule ----------------------------------------------------------------------------------


def rates(total: int, peak: float = 1.0, **settings: Any) -> list[float]:
    schedule = ScheduleSection(**settings)
    return [learning_rate_at(step, peak, schedule, total) for step in range(total)]


@pytest.mark.parametrize(
    ("kind", "total", "settings", "expected"),
    [
        ("constant", 6, {"warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        # The floor is reached at the last step, and held after the decay.
        ("linear", 5, {"min_lr_ratio": 0.5, "warmup_steps": 1}, [1.0, 0.875, 0.75, 0.625, 0.5]),
        ("linear", 8, {"min_lr_ratio": 0.1, "decay_steps": 4}, [0.775, 0.55, 0.325, *[0.1] * 5]),
        ("cosine", 4, {"min_lr_ratio": 0.0}, [(1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0]),
        (
            "wsd",
            10,
            {"decay_steps": 2, "min_lr_ratio": 0.0, "warmup_steps": 2},
            [0.5, 1.0, 1, 1, 1, 1, 1, 1, 0.5, 0.0],
        ),
    ],
)
def test_rates_by_hand(
    kind: str, total: int, settings: dict[str, Any], expected: list[float]
) -> None:
    assert rates(total, type=kind, **settings) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("total", [1, 10, 30, 70, 999])
@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.1, 0.5, 1.0])
def test_a_ratio_warms_up_for_as_many_steps_as_in_transformers(
    total: int, ratio: float, tmp_path: Path
) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path), warmup_steps=ratio, use_cpu=True)
    # transformers takes 1 for one step.
    expected = total if ratio == 1.0 else arguments.get_warmup_steps(total)
    assert rates(total, warmup_ratio=ratio) == rates(total, warmup_steps=expected)


@pytest.mark.parametrize(
    ("cycles", "total", "warmup"), [(1, 9, 0), (2, 20, 4), (3, 49, 7), (5, 7, 0)]
)
def test_restarts_are_those_of_transformers_one_step_earlier(
    cycles: int, total: int, warmup: int
) -> None:
    """transformers' step s + 1 is step s here: the first step is above zero, the last one is at the
    minimum. Where a cycle ends, transformers is at the peak of the next one already."""
    import torch
    from transformers import get_cosine_with_hard_restarts_schedule_with_warmup as make

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer, warmup, total, num_cycles=cycles)
    expected = []
    for _ in range(total):
        optimizer.step()
        schedule.step()
        expected.append(schedule.get_last_lr()[0])
    ours = rates(total, type="cosine", cycles=cycles, warmup_steps=warmup, min_lr_ratio=0.0)
    ends = {warmup - 1 + k * (total - warmup) // cycles for k in range(1, cycles + 1)}
    for step in range(total):
        is_end = step in ends and (step - warmup + 1) * cycles % (total - warmup) == 0
        assert ours[step] == pytest.approx(0.0 if is_end else expected[step], abs=1e-12), step


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 5}, "schedule.warmup_ratio = 0.1 gives the warm-up"),
        ({"type": "linear", "cycles": 2}, "schedule.cycles = 2 has no effect with schedule.type"),
        ({"warmup_ratio": 1.5}, "less than or equal to 1"),
        ({"cycles": 0}, "greater than or equal to 1"),
    ],
)
def test_schedules_that_contradict_themselves(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        ScheduleSection(**settings)


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_short_names_of_dtypes_are_read(short: str, name: str) -> None:
    precision = PrecisionSection(dtype=short, gradient_dtype="fp32")  # type: ignore[arg-type]
    assert precision.model_dump()["dtype"] == name
    assert precision.gradient_dtype == "float32"


@given(st.sampled_from(["cosine", "linear", "constant", "wsd"]), st.integers(1, 60), st.data())
def test_rates_stay_between_zero_and_the_peak(kind: str, total: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, total))
    decay = data.draw(st.one_of(st.none(), st.integers(1, 80)))
    floor = data.draw(st.floats(0, 1))
    values = rates(
        total, type=kind, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=floor, peak=2.0
    )
    assert all(0 <= value <= 2.0 + 1e-12 for value in values)
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(values[warmup:]))


# --- checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "save", "keep", "remedy"),
    [
        (4, 4, 2, None),
        (8, 4, 3, None),
        (5, 4, 2, "-> guard.compare_every_steps=4"),
        (1, 4, 1, "-> set checkpoint.every_steps, and checkpoint.keep_last to 2 or more"),
        (1, "null", 2, "-> set checkpoint.every_steps, and checkpoint.keep_last to 2 or more"),
    ],
)
def test_a_checkpoint_from_before_the_last_comparison_is_kept(
    tmp_path: Path, every: int, save: object, keep: int, remedy: str | None
) -> None:
    overrides = [f"guard.compare_every_steps={every}", f"checkpoint.every_steps={save}"]
    overrides.append(f"checkpoint.keep_last={keep}")
    if remedy is None:
        load_run_config(write(tmp_path, make_tree()), overrides)
        return
    (problem,) = problems_of(tmp_path, make_tree(), *overrides)
    assert f"guard.compare_every_steps = {every}: a checkpoint from before" in problem
    assert remedy in problem


@pytest.mark.parametrize("evaluated", [3, None])
def test_the_best_checkpoints_have_a_held_out_loss(tmp_path: Path, evaluated: int | None) -> None:
    overrides = ["checkpoint.every_steps=4", "checkpoint.keep_best=1"]
    load_run_config(write(tmp_path, make_tree()), [*overrides, "evaluation.every_steps=2"])
    overrides.append(f"evaluation.every_steps={'null' if evaluated is None else evaluated}")
    (problem,) = problems_of(tmp_path, make_tree(), *overrides)
    assert f"evaluation.every_steps = {evaluated} must divide checkpoint.every_steps = 4" in problem


# --- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["evaluation.best.metric=loss"], "is not measured by a run -> held_out_loss"),
        (["evaluation.best.mode=max"], "a higher held_out_loss is worse -> min"),
        (["evaluation.best.metric=tasks/arc_easy/acc"], "evaluation.tasks names no task"),
        (["evaluation.tasks_limit=5"], "tasks_limit has no meaning without evaluation.tasks"),
        (["evaluation.tasks=[a,a]"], "a task is listed twice"),
        (["evaluation.early_stopping={patience: 2}"], "measured only at the end -> set evaluation"),
        (
            ["evaluation.held_out=[{name: x, path: a}, {name: x, path: b}]"],
            "evaluation.held_out: two sets have the same name",
        ),
        (["evaluation.best.metric=held_out_loss/law"], "unknown held-out set 'law' -> one of "),
        (
            [
                "evaluation={tasks: [a], best: {metric: tasks/a/acc, mode: max}}",
                "checkpoint={every_steps: 4, keep_best: 1}",
            ],
            "needs a tasks/a/acc at every checkpoint: evaluation.tasks_every_steps = None must",
        ),
        (["model.vocabulary.new_rows=mean"], "model.config has none -> omit it"),
    ],
)
def test_evaluations_that_cannot_be(tmp_path: Path, overrides: list[str], text: str) -> None:
    (problem,) = problems_of(tmp_path, make_tree(), *overrides)
    assert text in problem


OTHER_SET = "evaluation.held_out=[{name: law, path: a}]"


@pytest.mark.parametrize(
    ("objective", "metric", "mode", "answer"),
    [
        ("preference", "rewards/accuracies", "max", HeldOutMetric("rewards/accuracies", None)),
        ("preference", "rewards/margins/law", "max", HeldOutMetric("rewards/margins", "law")),
        ("preference", "rewards/chosen", "min", HeldOutMetric("rewards/chosen", None)),
        ("preference", "rewards/accuracies", "min", "is better -> evaluation.best.mode=max"),
        ("preference", "rewards/margins/lore", "max", "unknown held-out set 'lore' -> one of"),
        ("preference", "kl", "min", "is not measured with objective.type = preference"),
        ("reward", "rewards/accuracies", "max", HeldOutMetric("rewards/accuracies", None)),
        ("reward", "logps/chosen", "max", "-> held_out_loss, held_out_rewards/chosen"),
        ("kto", "rewards/margins", "max", HeldOutMetric("rewards/margins", None)),
        ("classification", "accuracy/law", "max", HeldOutMetric("accuracy", "law")),
        ("classification", "accuracy", "min", "a higher held_out_accuracy is better"),
        ("next_token", "accuracy", "max", "is not measured with objective.type = next_token"),
        ("tests.parity.objective_runs:SummedPairs", "a/b", "max", HeldOutMetric("a/b", None)),
        ("tests.parity.objective_runs:SummedPairs", "a/law", "max", HeldOutMetric("a", "law")),
    ],
)
def test_a_metric_that_the_objective_records(
    tmp_path: Path, objective: str, metric: str, mode: str, answer: HeldOutMetric | str
) -> None:
    best = f"evaluation.best={{metric: held_out_{metric}, mode: {mode}}}"
    overrides = [f"objective.type={objective}", OTHER_SET, best]
    if isinstance(answer, str):
        (problem,) = problems_of(tmp_path, make_tree(), *overrides)
        assert answer in problem
    else:
        config = load_run_config(write(tmp_path, make_tree()), overrides)
        assert config.best_held_out == answer


def test_a_metric_of_one_set(tmp_path: Path) -> None:
    overrides = ["evaluation.held_out=[{name: law, path: a}]"]
    overrides.append("evaluation.best.metric=held_out_bits_per_byte/law")
    config = load_run_config(write(tmp_path, make_tree()), overrides)
    best = config.evaluation.best
    assert config.best_held_out == HeldOutMetric("bits_per_byte", "law")
    assert best.is_better(1.0, 1.2, margin=0.1)
    assert not best.is_better(1.0, 1.05, margin=0.1)


@pytest.mark.parametrize(
    ("text", "sections"),
    [
        ("base_model: x\nadapter: lora\ndatasets: []\nseed: 1\n", "none"),
        ("optimizer: {type: Adam}\nhidden-size: 64\nnum-layers: 2\nseq-length: 32\n", "optimizer"),
    ],
)
def test_another_trainers_file_is_one_problem(tmp_path: Path, text: str, sections: str) -> None:
    file = tmp_path / "mine.yml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_run_config(str(file))
    (problem,) = raised.value.problems
    assert problem.rule == f"is no run: of its 4 keys, {sections} is a section"
    assert problem.remedy.startswith(f"bigtrain convert {file}")
