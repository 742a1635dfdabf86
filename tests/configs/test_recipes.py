"""Each recipe is accepted, has the layout that a plan writes, and the model it names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from bigtrain.cli import main
from bigtrain.models.tracing.traced_costs import model_costs
from bigtrain.planner.memory import MEMORY_ERROR
from bigtrain.settings.hf_config_keys import inspect_configuration
from bigtrain.settings.loading import load_run_config, recipe_names
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.shipped_files import published_configuration, recipes
from tests.architecture.test_packaging import pins
from tools.recipes import command_of, planned_recipes, settings_of, with_layout

PLANNED = [path.stem for path in planned_recipes()]
# As model cards and safetensors indices of the hub count them; GPT-2 with 47 rows of padding.
PARAMETERS = {
    "gpt2_124m": 124_439_808 + 47 * 768,
    "gpt2_124m_muon": 124_439_808 + 47 * 768,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_1m": 8_030_261_248,
    "dpo_8b_lora": 8_030_261_248,
    "reward_1b": 1_235_814_400 + 2048,  # with its head
    "distill_1b": 1_235_814_400,
    "qwen3_8b_continue": 8_190_735_360,
    "qwen3_8b_lora": 8_190_735_360,
    "chat_1b": 1_235_814_400,
    "qwen3_30b_a3b": 30_532_122_624,
    "llama3_70b": 70_553_706_496,
    "hybrid_9b": 8_953_803_264,
}


def text_of(name: str) -> str:
    return (recipes() / f"{name}.yaml").read_text(encoding="utf-8")


@cache
def planned_layout(name: str) -> str:
    """Return the recipe with the layout that a plan writes."""
    return with_layout(text_of(name))


def num_gpus(name: str) -> str:
    gpus = command_of(text_of(name)).gpus
    assert gpus is not None
    return gpus.partition("x")[0]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # One for all tests of the file: a model is traced once.
    shared = tmp_path_factory.getbasetemp() / "recipes-cache"
    monkeypatch.setenv("BIGTRAIN_CACHE", str(shared))


def test_all_but_the_quickstart_name_their_hardware() -> None:
    assert sorted(PLANNED) == sorted(PARAMETERS)
    assert set(recipe_names()) - set(PLANNED) == {"quickstart"}
    for name in PLANNED:
        assert command_of(text_of(name)).config == name


@pytest.mark.parametrize("name", PLANNED)
def test_it_says_for_whom_and_from_where(name: str) -> None:
    head = text_of(name).partition("\nmodel:")[0]
    assert head.startswith("# For those who ") or head.startswith("# For those with ")
    assert re.search(r"^# Hyper-parameters: ", head, flags=re.M)
    assert re.search(r"arXiv\s(# )?\d{4}\.\d{5}", head)


@pytest.mark.parametrize("name", PLANNED)
def test_its_layout_is_what_a_plan_writes(name: str) -> None:
    for package in ("torch", "transformers"):
        if version(package).partition("+")[0] != pins()[package].partition("+")[0]:
            pytest.skip(f"the figures are those of the pinned {package}")
    assert planned_layout(name) == text_of(name), "python tools/recipes.py writes it anew"


@pytest.mark.parametrize("name", PLANNED)
def test_the_command_of_its_comment_writes_its_layout(name: str, tmp_path: Path) -> None:
    line = r"^# Layout: what `bigtrain (plan .* --write) DIR` takes"
    match = re.search(line, text_of(name), re.M)
    assert match is not None
    assert main([*match[1].split(), str(tmp_path)]) == 0
    written, recipe = load_run_config(str(tmp_path / "run.yaml")), load_run_config(name)
    assert written.batch.micro_batch_size == recipe.batch.micro_batch_size
    assert written.parallel == recipe.parallel
    assert written.model.model_dump(exclude={"path"}) == recipe.model.model_dump(exclude={"path"})
    engine = json.loads((tmp_path / "deepspeed.json").read_text(encoding="utf-8"))
    assert f"zero{engine['zero_optimization']['stage']}" == recipe.engine.deepspeed_config


@pytest.mark.parametrize("name", PLANNED)
def test_it_leaves_the_error_of_such_predictions_free(name: str) -> None:
    """The memory that its comment quotes is the plan's of today (above), and not tight."""
    line = r"^# predicted, not measured: ([\d.]+) GiB of ([\d.]+) on"
    quoted = re.search(line, text_of(name), re.M)
    assert quoted is not None
    assert float(quoted[1]) * (1 + MEMORY_ERROR) <= float(quoted[2])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (r"micro_batch_size: \d+", "micro_batch_size: 2"),
        (r"deepspeed_config: \w+", "deepspeed_config: zero0"),
        (r"gradient_checkpointing: \w+", "gradient_checkpointing: full"),
        (r"parallel: .*", "parallel: {tensor: 2, pipeline: 1, sequence: 1}"),
        (r"\d+,\d+ tokens/s/GPU", "999,000 tokens/s/GPU"),
        (r"[\d.]+ GiB of", "1 GiB of"),
    ],
)
def test_a_changed_layout_is_seen_and_put_right(wrong: str, right: str) -> None:
    text = text_of("gpt2_124m")
    changed = re.sub(wrong, right, text)
    assert changed != text
    assert with_layout(changed) == planned_layout("gpt2_124m") != changed


def test_a_changed_model_changes_the_layout() -> None:
    """The block is what is planned, not what stood there."""
    from bigtrain.commands.plan import PlanArguments, ranked_layouts

    arguments = PlanArguments(config="gpt2_124m", gpus="8xH100-80GB")
    plain = ranked_layouts(arguments).fitting[0]
    larger = replace(arguments, overrides=("batch.sequence_length=512",))
    other = ranked_layouts(larger).fitting[0]
    assert plain.tokens_per_second != other.tokens_per_second
    assert settings_of(plain)["deepspeed_config"].startswith("zero")


@pytest.mark.parametrize("name", recipe_names())
def test_plan_and_check_take_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = num_gpus(name) if name in PLANNED else "2"
    assert main(["plan", "--config", name, "--gpus", f"{gpus}xH100-80GB", "--top", "1"]) == 0
    assert "closed form" not in capsys.readouterr().out
    assert main(["check", "--config", name, "--world-size", gpus]) == 0
    degrees = load_run_config(name).parallel
    replicas = int(gpus) // (degrees.tensor * degrees.pipeline * degrees.sequence)
    assert f" x {replicas} data-parallel" in capsys.readouterr().out


@pytest.mark.parametrize("name", PLANNED)
def test_the_model_is_the_published_one(name: str) -> None:
    costs, remark = model_costs(load_run_config(name))
    assert remark == ""
    assert costs.num_parameters == PARAMETERS[name]


def test_configurations_ship_for_the_recipes_hub_names_and_no_others() -> None:
    named = {load_run_config(name).model.path for name in PLANNED} - {None}
    paths = {published_configuration(str(name)) for name in named}
    assert paths == set((recipes() / "configs").glob("*.json"))


def test_a_local_directory_wins_over_what_ships(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ModelSection(path="Qwen/Qwen3-8B-Base")
    assert inspect_configuration(section)[0].num_hidden_layers == 36
    own = tmp_path / "Qwen/Qwen3-8B-Base"
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": 5}')
    monkeypatch.chdir(tmp_path)
    assert inspect_configuration(section)[0].num_hidden_layers == 5
    # Another hub name: nothing is known of it without a network.
    assert inspect_configuration(ModelSection(path="Qwen/none"))[0].num_hidden_layers is None
