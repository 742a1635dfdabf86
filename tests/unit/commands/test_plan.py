"""`bigtrain plan`: what it writes a run accepts, and what is wrong is one clear error."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.planner.constraints import FIELDS
from bigtrain.planner.layout import Layout
from bigtrain.planner.memory import MemoryUse
from bigtrain.planner.plan_text import default_choice, parameter_count
from bigtrain.planner.search import Candidate, Cluster
from bigtrain.planner.tables.engines import cpu_engine
from bigtrain.planner.tables.hardware import find_device
from bigtrain.python_api.planning import plan, run_and_engine
from bigtrain.settings.resolve import resolve_run_files
from tests.support.worlds import ROOT

RUN = {
    "model": {
        "config": {
            "model_type": "llama", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        },
    },
    "data": {"path": "shards"},
    "batch": {"sequence_length": 64, "global_batch_size": 32},
    "train": {"steps": 3},
    "optimizer": {"lr": 1e-3},
    "output": {"directory": "run"},
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIGTRAIN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def test_plan_shows_the_best_layouts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(config), "--gpus", "8xH100-80GB", "--top", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("279K parameters on 8 x H100-80GB, 32 samples of 64 tokens")
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert lines[6].startswith("memory of 1, GiB of 76.0 usable")


def test_cpus_are_planned_by_the_shipped_figures(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["plan", "--config", str(config), "--gpus", "4xCPU", "precision.dtype=float32"]) == 0
    )
    assert "on 4 x CPU" in capsys.readouterr().out
    device = find_device("CPU")
    assert device.is_cpu
    assert device.memory_bandwidth < 1e12
    assert cpu_engine().zero[3].micro_batch > 0


@pytest.mark.parametrize("choose", [4, 60])
def test_what_is_written_is_a_run(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], choose: int
) -> None:
    arguments = ["plan", "--config", str(config), "--gpus", "8xH100", "--json"]
    written = ["--write", str(tmp_path / "best"), "--choose", str(choose)]
    assert main([*arguments, *written]) == 0
    output = capsys.readouterr().out
    tree, end = json.JSONDecoder().raw_decode(output)
    assert (
        "deepspeed --quiet --num_accelerators 8 bigtrain/train.py --config "
        f"{tmp_path}/best/run.yaml" in output[end:]
    )
    layout = tree["layouts"][choose - 1]["layout"]
    resolved = resolve_run_files(str(tmp_path / "best" / "run.yaml"), [], 8)
    assert resolved.engine.zero_stage == layout["zero_stage"]
    assert resolved.topology.tensor_size == layout["tensor_size"]
    assert resolved.topology.pipeline_size == layout["pipeline_size"]
    assert resolved.plan.micro_batch_size == layout["micro_batch_size"]
    assert resolved.plan.accumulation == layout["num_accumulation"]
    assert resolved.config.model.gradient_checkpointing == layout["recompute"]


def test_loss_and_buckets_of_a_layout_are_written(config: Path) -> None:
    from bigtrain.settings.loading import load_run_config

    run = load_run_config(str(config), [])
    usual = Layout(data_size=8, zero_stage=2, sequence_length=64, reduce_bucket_elements=50_000_000,
                   gather_bucket_elements=50_000_000)  # fmt: skip
    tree, raw = run_and_engine(run, usual)
    assert "loss" not in tree["model"]
    assert raw["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    other = replace(usual, loss_chunk_tokens=16, reduce_bucket_elements=7, gather_bucket_elements=8)
    tree, raw = run_and_engine(run, other, "chunked")
    assert (tree["model"]["loss"], tree["model"]["loss_chunk_tokens"]) == ("chunked", 16)
    assert raw["zero_optimization"]["reduce_bucket_size"] == 7
    assert raw["zero_optimization"]["allgather_bucket_size"] == 8
    tree, _ = run_and_engine(run, usual, "plain")
    assert tree["model"]["loss"] == "plain"
    offloaded = replace(usual, zero_stage=1, offload_optimizer=True)
    _, raw = run_and_engine(run, offloaded)
    zero = raw["zero_optimization"]
    assert (zero["stage"], zero["offload_optimizer"]["device"]) == (1, "cpu")


def test_loss_and_buckets_of_the_configuration_are_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of losses by operators all logits at once are the fastest."""
    overrides = ["model.compile=off", "model.kernels=none"]
    command = ["plan", "--config", "llama3_1b", "--gpus", "8xH100-80GB", *overrides]
    assert main(command) == 0
    varied = capsys.readouterr().out
    assert main([*command, "--as-configured"]) == 0
    kept = capsys.readouterr().out
    assert [text in varied for text in (", plain loss", ", buckets of")] == [True, True]
    assert [text in kept for text in (", plain loss", ", buckets of")] == [False, False]


def test_costs_are_traced_once(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bigtrain.models.tracing import meta_trace

    arguments = ["plan", "--config", str(config), "--gpus", "2xA100", "--json"]
    assert main(arguments) == 0
    monkeypatch.setattr(meta_trace, "trace_model", None)
    assert main(arguments) == 0
    with pytest.raises(TypeError):
        main([*arguments, "model.config.hidden_size=128"])


def test_without_torch_dense_layers_are_counted_by_a_closed_form(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "bigtrain.models.tracing.meta_trace", None)
    assert main(["plan", "--config", str(config), "--gpus", "2xA100"]) == 0
    assert "by a closed form of dense layers, not traced" in capsys.readouterr().out


def test_arguments_that_are_not_read_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--evaluate", "rows.csv", "--top", "3", "parallel.tensor=2"]) == 2
    error = capsys.readouterr().err
    assert "--top = 3: is not read by --evaluate -> omit it" in error
    assert "parallel.tensor=2: is not read by --evaluate -> omit it" in error
    assert main(["plan", "--calibrate", "--longest"]) == 2
    assert "--longest: is not read by --calibrate -> omit it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpus", "8xH900"], "nearest names: H"),
        (["--gpus", "0xH100"], "write e.g. 64xH100-80GB"),
        (["--gpus", "H100"], "write e.g. 64xH100-80GB"),
        (["--gpus", "12xH100"], "nearest: 8 or 16"),
        (["--gpus", "8xH100", "--hardware", "none.json"], "'none.json': no such file -> write one"),
        (["--gpus", "8xH100", "--hardware", "list.json"], "is not a calibration: must hold device"),
        (["--gpus", "8xH100", "model.config=null", "model.path=none/"], "no such directory"),
        (["--gpus", "7xH100"], "batch.global_batch_size: 28 or 35"),
        (["--gpus", "8xH100", "--write", "out", "--choose", "10000"], "layouts fit"),
        (["--gpus", "8xH100", "--choose", "2"], "--choose = 2: is not read by a plan without --wr"),
        (["--gpus", "8xH100", "--output", "x"], "--output = 'x': is not read by a plan"),
        (["--gpus", "4xH100,4xA100"], "names more than one kind of device"),
        (
            ["--gpus", "8xH100", "parallel.tensor=2", "parallel.tensor=1"],
            "parallel.tensor = '2': contradicts parallel.tensor=1, another override -> keep one",
        ),
        (
            ["--gpus", "8xH100", "--longest", "batch.sequence_length=64"],
            "batch.sequence_length = '64': is what --longest searches",
        ),
        (["--gpus", "8xH100", "model.frozen=[nothing]"], "matches the name of no parameter"),
        (["--gpus", "8xH100", "model.frozen=['*']"], "leaves nothing to train"),
        (["--gpus", "8xH100", "model.config.hidden_sise=8"], "did you mean"),
        ([], "--gpus: is required for a plan"),
    ],
)
def test_what_cannot_be_planned_is_one_error(
    config: Path,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.json").write_text("[1, 2]")
    assert main(["plan", "--config", str(config), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bigtrain plan: 1 problem")
    assert len(error.splitlines()) == 2
    assert says in error
    assert not (tmp_path / "out").exists()


def test_evaluation_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (ROOT / "benchmarks" / "planner_rows.csv").read_text().splitlines(keepends=True)
    few = tmp_path / "few.csv"
    few.write_text("".join(rows[:5]))
    assert main(["plan", "--evaluate", str(few), "--output", str(tmp_path / "out.csv")]) == 0
    assert "| LLM Foundry benchmarks | 4 |" in capsys.readouterr().out
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 5
    for unwritable in (str(tmp_path / "no" / "x.csv"), "/dev/full"):
        assert main(["plan", "--evaluate", str(few), "--output", unwritable]) == 2
        assert f"--output = {unwritable}: cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "wanted", "rate", "published", "slower"),
    [
        ("llama31_405b", "16384xH100-80GB", {"tensor_size": 8, "pipeline_size": 16}, 79,
         {"tensor_size": 8, "pipeline_size": 16}, 1.0),
        ("deepseek_v3", "2048xH800-80GB", {"sequence_size": 2, "expert_size": 128}, 641,
         {"pipeline_size": 16, "expert_size": 64}, 1.28),
    ],
)  # fmt: skip
def test_plans_of_published_models_are_those_in_the_docs(
    capsys: pytest.CaptureFixture[str],
    name: str,
    gpus: str,
    wanted: dict[str, int],
    rate: int,
    published: dict[str, int],
    slower: float,
) -> None:
    """Of over a thousand legal ones; the published degrees take `slower` times as long."""
    config = ROOT / "benchmarks" / "published" / f"{name}.yaml"
    assert main(["plan", "--config", str(config), "--gpus", gpus, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    fitting = [layout for layout in plan["layouts"] if layout["fits"]]
    assert len(fitting) + plan["num_layouts_that_do_not_fit"] > 1000
    first = plan["layouts"][0]
    assert wanted.items() <= first["layout"].items()
    assert round(first["tokens_per_second_per_device"]) == rate
    degrees = {"tensor_size": 1, "sequence_size": 1, **published}
    alike = [layout for layout in fitting if degrees.items() <= layout["layout"].items()]
    best = alike[0]["tokens_per_second_per_device"]
    assert first["tokens_per_second_per_device"] / best == pytest.approx(slower, abs=0.005)
    rates = r" \| .*?([\d,]+) tokens/s \| [^|]*?(\d+) tokens/s \|"
    [(_, told)] = re.findall(TITLES[name] + rates, (ROOT / "docs/planner.md").read_text())
    assert int(told) == rate


TITLES = {"llama31_405b": "16,384 H100", "deepseek_v3": "2,048 H800"}
"""Of rows in docs/planner.md."""


def test_what_is_written_leaves_the_error_of_predictions_as_reserve() -> None:
    """The fastest layout is passed by if it leaves less; it is written if it is named."""
    cluster = Cluster(find_device("H100-80GB", "--gpus"), 8, 1e12)
    usable = cluster.usable_memory

    def candidate(share: float) -> Candidate:
        memory = MemoryUse(
            states=share * usable, gradients=0, gathered=0, buckets=0, activations=0, loss=0,
            context=0, host_offload=0, host_checkpoint=0, host_export=0, stage=0,
        )  # fmt: skip
        return Candidate(None, memory, True, lambda: None)  # type: ignore[arg-type,return-value]

    assert default_choice([candidate(0.999), candidate(0.97), candidate(0.95)], cluster) == 3
    assert default_choice([candidate(0.9), candidate(0.95)], cluster) == 1
    assert default_choice([candidate(0.99), candidate(0.98)], cluster) == 1


@pytest.mark.parametrize(
    ("number", "text"), [(8.03e9, "8.03B"), (2.56e6, "2.56M"), (812_345, "812K"), (7, "7")]
)
def test_counts_of_parameters_are_read_by_people(number: float, text: str) -> None:
    assert parameter_count(number) == text


HELD = {
    "parallel.tensor=2": {"tensor_size": 2},
    "parallel.pipeline=2": {"pipeline_size": 2},
    "parallel.sequence=2": {"sequence_size": 2, "ring_size": 1},
    "parallel.sequence={ulysses: 2, ring: 2}": {"sequence_size": 4, "ring_size": 2},
    "parallel={tensor: 2}": {"tensor_size": 2, "pipeline_size": 1, "sequence_size": 1},
    "batch.micro_batch_size=4": {"micro_batch_size": 4},
    "model.gradient_checkpointing=full": {"recompute": "full", "recompute_every": 1},
    "model.gradient_checkpointing=2": {"recompute": "full", "recompute_every": 2},
    "model.gradient_checkpointing=none": {"recompute": "none"},
    "model.tiled_mlp=4": {"tiled_mlp": 4},
    "model.activation_offload=false": {"offload_activations": False},
    "engine.deepspeed_config=zero3": {"zero_stage": 3, "offload_optimizer": False},
    "engine.deepspeed_config=zero2_offload": {
        "zero_stage": 2, "offload_optimizer": True, "offload_parameters": False,
    },
    "engine.deepspeed_config=zero3_offload": {
        "zero_stage": 3, "offload_optimizer": True, "offload_parameters": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("override", HELD)
def test_an_override_of_the_layout_holds_all_layouts(
    config: Path, override: str, tmp_path: Path
) -> None:
    planned = plan(config, "8xH100-80GB", override)
    assert planned.fitting
    for candidate in [*planned.fitting, *planned.others]:
        layout = vars(candidate.layout)
        assert {name: layout[name] for name in HELD[override]} == HELD[override]
    # What is written has it too, and a run accepts it with the override as without.
    path = planned.write(tmp_path / "planned", 1)
    written = resolve_run_files(str(path), (), 8)
    assert written.config == resolve_run_files(str(path), override_of_run(override), 8).config
    if override.startswith("engine."):
        name = override.partition("=")[2]
        shipped = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text())
        raw = json.loads(path.with_name("deepspeed.json").read_text())
        assert raw["zero_optimization"] == shipped["zero_optimization"]


def override_of_run(override: str) -> list[str]:
    """The override, but for the name of the JSON, which was written elsewhere."""
    return [] if override.startswith("engine.") else [override]


def test_the_help_names_every_setting_that_holds_layouts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {override.partition("=")[0] for override in HELD} <= {*FIELDS, "parallel"}
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    words = " ".join(capsys.readouterr().out.split()).replace("- ", "-")
    for setting in FIELDS:
        assert setting in words


def test_a_run_yaml_without_overrides_does_not_hold_the_layouts(config: Path) -> None:
    tree = {**RUN, "parallel": {"tensor": 2}, "engine": {"deepspeed_config": "zero3"}}
    config.write_text(yaml.safe_dump(tree))
    layouts = [candidate.layout for candidate in plan(config, "8xH100-80GB").fitting]
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    assert {layout.tensor_size for layout in layouts} > {1, 2}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("parallel.tensor=3", "parallel.tensor = 3: no layout on 8 devices has this value -> "
         "possible with the other settings: 1, 2"),
        ("batch.micro_batch_size=3", "batch.micro_batch_size = 3: no layout on 8 devices has this "
         "value -> possible with the other settings: 1, 2, 4, 8, 16, 32"),
    ],
)  # fmt: skip
def test_an_override_that_no_layout_has_is_refused(config: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config, "8xH100-80GB", override)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("checkpoint={every_steps: 7}", "checkpoint.every_steps = 7"),
        ("optimizer={lr: 1.0e-4}", "optimizer.lr = 0.0001"),
        ("parallel={}", "parallel = '{}'"),
    ],
)
def test_a_section_counts_by_the_keys_that_it_names(config: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(key)}: changes nothing in a plan"):
        plan(config, "8xH100-80GB", override)


@pytest.mark.parametrize(("name", "is_fused"), [("zero3", True), ("zeropp", False)])
def test_layers_are_priced_as_the_named_json_lets_them_compute(
    config: Path, name: str, is_fused: bool
) -> None:
    """ZeRO++ keeps hooks inside of layers, which are not compiled then."""
    planned = plan(config, "8xH100-80GB", f"engine.deepspeed_config={name}")
    assert {candidate.layout.fused_layers for candidate in planned.fitting} == {is_fused}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["batch.sequence_length=4096", "batch.global_batch_size=8"], "batch.sequence_length"),
        (["model.loss=liger", "objective.z_loss=1.0e-4"], "model.loss"),
    ],
)
def test_settings_that_no_layout_allows_are_the_cause(
    config: Path, overrides: list[str], key: str
) -> None:
    """And not the number of devices."""
    with pytest.raises(ConfigError) as raised:
        plan(config, "8xH100-80GB", *overrides)
    assert any(problem.key.startswith(key) for problem in raised.value.problems)
    assert all(problem.key != "--gpus" for problem in raised.value.problems)
