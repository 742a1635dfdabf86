"""`bigtrain parity` passes where the numbers are the same, and says where they are not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from bigtrain.cli import main
from bigtrain.errors import ConfigError
from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.objectives.section import ObjectiveSection
from bigtrain.parity.batches import micro_batches
from bigtrain.parity.comparison import compare, mean_of
from bigtrain.parity.proxy import Proxy, shrink
from bigtrain.parity.reference import TrainingTrace, train_reference, train_reordered
from bigtrain.parity.run import reference_of, train_points
from bigtrain.parity.topologies import points
from bigtrain.settings.batch_plan import BatchPlan
from bigtrain.settings.run_config import ModelSection, MoeSection, RunConfig
from bigtrain.settings.sections.optimizer import OptimizerSection
from tests.parity.conftest import ARCHITECTURES, llama, run_config
from tests.parity.expert_models import MODELS as EXPERT_MODELS
from tests.support.lives import run_forked_world
from tests.support.longrope import longrope
from tests.support.worlds import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

LORA = {"rank": 4, "alpha": 16, "targets": "all-linear"}


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worlds without the seconds of imports; the slow tier has them as users have them."""
    monkeypatch.setattr("bigtrain.parity.run.run_local_world", run_forked_world)


def config_of(data: Path, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        run_config(data, {"config": llama()}, micro_batch_size=1, **sections)
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Proxy:
    return shrink(config_of(Path("unread")), 2, tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def reference(small: Proxy) -> TrainingTrace:
    (figures,) = train_reference(small.config)
    return figures


def test_every_topology_is_listed_once(small: Proxy) -> None:
    all_points = points(small, 2)
    assert len({point.name for point in all_points}) == len(all_points)
    legal = [point.name for point in all_points if point.refusal is None]
    assert {"zero0, data 2", "zero3, data 2", "zero2, data 1, sequence 2"} <= set(legal)
    assert all(point.refusal for point in all_points if point.name not in legal)


def test_an_architecture_without_a_plan_is_refused_at_that_degree_alone(tmp_path: Path) -> None:
    run = run_config(Path("unread"), {"config": ARCHITECTURES["gpt2"]}, micro_batch_size=1)
    small = shrink(RunConfig.model_validate(run), 2, tmp_path / "model")
    refusals = {point.name: point.refusal for point in points(small, 2)}
    assert "no tensor-parallel plan" in str(refusals["zero1, data 1, tensor 2"])
    assert refusals["pipeline_zero1, data 1, pipeline 2"] is None


def test_experts_are_divided_where_there_are_some(small: Proxy, tmp_path: Path) -> None:
    values = run_config(Path("unread"), {"config": ARCHITECTURES["qwen3_moe"]}, micro_batch_size=1)
    proxy = shrink(RunConfig.model_validate(values), 2, tmp_path / "model")
    expert_points = [point for point in points(proxy, 2) if "expert" in point.name]
    assert {point.name for point in expert_points} >= {"zero3, data 2, expert 2"}
    assert all(point.refusal is None for point in expert_points)
    assert not [point for point in points(small, 2) if "expert" in point.name]


def test_batches_are_the_same_at_every_topology(small: Proxy) -> None:
    whole = micro_batches(small.config, BatchPlan(4, 4, 1, 1, 16), 3, 0)[0]
    plan = BatchPlan(4, 1, 2, 2, 16)
    rows = [
        micro_batches(small.config, plan, 3, rank)[micro] for micro in (0, 1) for rank in (0, 1)
    ]
    assert torch.equal(torch.cat([row.input_ids for row in rows]), whole.input_ids)
    assert torch.equal(torch.cat([row.labels for row in rows]), whole.labels)


@pytest.mark.slow
def test_the_command_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dataset: Path, forked: None
) -> None:
    # The loss in chunks, on every topology; the reference takes all logits at once.
    run = run_config(dataset, {"config": llama(), "loss": "chunked"}, micro_batch_size=1)
    run["data"] = {"path": str(dataset), "document_boundaries": "isolate"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["parity", "--config", str(tmp_path / "run.yaml"), "--world-size", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count("  same") >= 8
    assert "DIFFERENT" not in out


def test_another_model_is_found_out(
    small: Proxy, reference: TrainingTrace, tmp_path: Path, forked: None
) -> None:
    point = next(p for p in points(small, 2) if p.name == "zero1, data 2")
    model = point.config.model.model_copy(update={"overrides": {"rms_norm_eps": 0.1}})
    changed = replace(point, config=point.config.model_copy(update={"model": model}))
    ((_, trace),) = train_points([changed], 2, tmp_path)
    assert isinstance(trace, TrainingTrace)
    verdict = compare([reference], trace)
    assert not verdict.passed
    assert "layers.0, in the forward pass" in verdict.first_difference


def test_where_a_difference_arises(reference: TrainingTrace) -> None:
    assert compare([reference], reference).passed

    name = list(reference.first)[4]
    moved = {**reference.first, name: reference.first[name] + 1e-3}
    last = {**reference.last, name: reference.last[name] + 1e-3}
    verdict = compare([reference], replace(reference, first=moved, last=last))
    assert not verdict.passed
    assert (
        verdict.first_difference
        == f"the gradient of {name}, in the backward pass of the first step"
    )

    losses = [reference.losses[0] + 1e-3, *reference.losses[1:]]
    verdict = compare([reference], replace(reference, losses=losses))
    assert verdict.first_difference == "after the last layer: norm, head or loss"

    norms = [*reference.norms[:-1], float("nan")]
    assert not compare([reference], replace(reference, norms=norms)).passed

    missing = {key: value for key, value in reference.last.items() if key != name}
    assert not compare([reference], replace(reference, last=missing)).passed


def test_the_proxy_is_as_the_run_says(tmp_path: Path) -> None:
    """Frozen parameters, decay, betas, no clipping, a loss that the run chooses to be in chunks."""
    run = run_config(
        Path("unread"),
        {"config": {**ARCHITECTURES["gpt2"], "vocab_size": 200_000, "n_positions": 2048}},
        micro_batch_size=1,
        optimizer={"lr": 1e-5, "betas": [0.8, 0.9], "weight_decay": 0.3, "clip_norm": 0.0},
    )
    run["model"]["frozen"] = ["transformer.wpe.*", "transformer.h.9.*"]
    run["batch"] = {"sequence_length": 2048, "global_batch_size": 8}
    proxy = shrink(RunConfig.model_validate(run), 2, tmp_path / "model")
    config = proxy.config
    assert config.model.frozen == ("transformer.wpe.*",)
    assert any("transformer.h.9.* match nothing" in note for note in proxy.notes)
    assert config.model.loss == "chunked"
    optimizer = config.optimizer
    assert (optimizer.betas, optimizer.weight_decay, optimizer.clip_norm) == ((0.8, 0.9), 0.3, 0.0)
    run["model"]["frozen"] = ["*"]
    with pytest.raises(ConfigError, match=r"model\.frozen .*leaves nothing to train"):
        shrink(RunConfig.model_validate(run), 2, tmp_path / "frozen")


def test_the_runs_own_engine_is_compared_too(tmp_path: Path) -> None:
    """Its numbers are those of another run; what DeepSpeed is told of memory stays."""
    own = tmp_path / "mine.json"
    tree = {
        "train_batch_size": 4096,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    }
    own.write_text(json.dumps(tree))
    config = config_of(Path("unread"), engine={"deepspeed_config": str(own)})
    proxy = shrink(config, 2, tmp_path / "model")
    point = next(p for p in points(proxy, 2) if p.name == "mine, data 2")
    assert point.refusal is None
    numbers = {"train_batch_size": "auto", "gradient_clipping": "auto"}
    assert json.loads(Path(point.engine).read_text()) == {**tree, **numbers}


def test_16_bit_is_compared_with_runs_that_only_rounding_puts_apart() -> None:
    runs = [
        TrainingTrace([1.0 + off], [2.0], {"layer": 4.0}, {}, {"w": torch.tensor([off])})
        for off in (-1e-3, 0.0, 1e-3)
    ]
    centre, limits = mean_of(runs)
    assert centre.losses == pytest.approx([1.0])
    assert (limits.loss, limits.norm) == (pytest.approx(3e-3), 0.0)
    assert limits.weight == pytest.approx(3e-3)


GPT2 = {key: value for key, value in ARCHITECTURES["gpt2"].items() if not key.endswith("pdrop")}
"""With the dropout that its configuration has by default."""


def with_dropout(**sections: Any) -> dict[str, Any]:
    model = {"config": GPT2, "frozen": ["transformer.wpe.*"]}
    return run_config(Path("unread"), model, micro_batch_size=1, **sections)


def mutated(name: str, old: str, new: str) -> str:
    """Text of the package's file `name` with `new` instead of `old`, which is there once."""
    text = (ROOT / "bigtrain" / name).read_text()
    assert text.count(old) == 1, (name, old)
    return text.replace(old, new)


FEW_POINTS = """
import sys
from bigtrain.cli import main
from bigtrain.parity import run
points, where = run.points, sys.argv.pop(1)
run.points = lambda *words: [
    point for point in points(*words)
    if where in point.name and "tensor" not in point.name and (point.is_wrong or not point.refusal)
][:4]
sys.exit(main(sys.argv[1:]))
"""


def parity_of_a_copy(
    directory: Path,
    changes: dict[str, tuple[str, str]],
    run: dict[str, Any] | None = None,
    world_size: int = 1,
    where: str = "data",
) -> tuple[int, str]:
    """Exit code and output of the command, of bigtrain with text replaced, at the first four points
    with `where` in their names."""
    for folder in ("bigtrain", "ds_configs"):
        shutil.copytree(ROOT / folder, directory / folder)
    for name, (old, new) in changes.items():
        (directory / "bigtrain" / name).write_text(mutated(name, old, new))
    (directory / "run.yaml").write_text(yaml.safe_dump(run or with_dropout()))
    arguments = ["parity", "--config", "run.yaml", "--world-size", str(world_size)]
    done = subprocess.run(
        [sys.executable, "-c", FEW_POINTS, where, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_dropout_frozen_offload_and_16_bit_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked: None
) -> None:
    engine = {"deepspeed_config": "zero2_offload"}
    run = with_dropout(precision={"dtype": "bfloat16"}, engine=engine)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    assert main(["parity", "--config", str(tmp_path / "run.yaml"), "--world-size", "1"]) == 0
    output = capsys.readouterr().out
    assert "note: dropout is off here (attn_pdrop = 0.1" in output
    assert output.count("  same") == 6
    assert "zero2_offload, data 1, bfloat16" in output


def test_a_crash_is_a_row(small: Proxy, tmp_path: Path, forked: None) -> None:
    """And the points after it train in another world."""
    first, second, third = (replace(p, config=alone(p.config)) for p in points(small, 2)[:3])
    model = second.config.model.model_copy(update={"path": str(tmp_path / "gone")})
    crashing = replace(second, config=second.config.model_copy(update={"model": model}))
    outcomes = train_points([first, crashing, third], 1, tmp_path)
    assert [point for point, _ in outcomes] == [first, crashing, third]
    assert isinstance(outcomes[0][1], TrainingTrace)
    assert str(outcomes[1][1]).startswith("ModelError: model.path = ")
    assert isinstance(outcomes[2][1], TrainingTrace)


def alone(config: RunConfig) -> RunConfig:
    """Without parallelism, for a world of one process."""
    return config.model_copy(update={"parallel": RunConfig.model_fields["parallel"].default})


@pytest.mark.slow
def test_a_crash_is_told_by_the_command(tmp_path: Path) -> None:
    choose = "model_plan = model_plan or require_model_plan"
    crash = "if engine_config.zero_stage == 1:\n        raise RuntimeError('no luck\\nat all')\n"
    change = {"engine/build.py": (choose, f"{crash}    {choose}")}
    code, output = parity_of_a_copy(tmp_path, change)
    assert code == 1, output
    (row,) = [line for line in output.splitlines() if line.startswith("zero1, data 1")]
    assert row.endswith("crashed: RuntimeError: no luck")
    assert output.count("  same") == 3


MUTATIONS = {
    "vectors decay": {
        "models/layers/parameter_roles.py": (
            "(groups.decay if decays else groups.no_decay)",
            "groups.decay",
        )
    },
    "labels are smoothed": {
        "models/layers/token_loss.py": (
            'ignore_index=IGNORED_LABEL, reduction="sum")',
            'ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=0.01)',
        )
    },
    "nothing is frozen": {
        "models/layers/parameters.py": (
            "get_parameter(names[0]).requires_grad_(False)",
            "get_parameter(names[0]).requires_grad_(True)",
        )
    },
    "the norm is clipped to another": {
        "settings/deepspeed/engine_config.py": (
            '"gradient_clipping": config.optimizer.clip_norm,',
            '"gradient_clipping": 1.02 * config.optimizer.clip_norm,',
        )
    },
    "the rate is a step late": {
        "engine/optimizers/build.py": (
            'group["lr"] = lr *',
            'group["lr"], group["next"] = group.get("next", lr), lr *',
        )
    },
    "weights are read rounded": {
        "models/weights/weight_files.py": (
            "out.copy_(part[slices] if slices",
            "out.copy_(part[slices].bfloat16() if slices",
        )
    },
}


MIXTRAL = llama(
    model_type="mixtral",
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.001,
)
DEEPSEEK = {**EXPERT_MODELS["deepseek_v3"], "num_hidden_layers": 2}
GLOBAL = {"auxiliary_loss": "global_batch"}
PREFERENCE = {"objective": {"type": "preference", "loss": "ipo"}}
KTO = {"objective": {"type": "kto"}}
AVERAGED: dict[str, Any] = {"lr": 1e-3, "ema": {"decay": 0.99}}
LIVE = {"type": "distillation", "teacher_model": "teacher"}
REWARD = {"objective": {"type": "reward", "center_rewards_coefficient": 0.5}}
CLASSES = {"objective": {"type": "classification"}}

# Of what only several ranks have: text replaced, the run's model and sections, where it shows.
MUTATIONS_OF_RANKS: dict[str, tuple[dict[str, tuple[str, str]], dict[str, Any], str]] = {
    "the auxiliary loss is of a sequence rank": (
        {
            "models/parallel/sequence.py": (
                "if self._exchanging and router_logits:",
                "if False and router_logits:",
            )
        },
        {"model": MIXTRAL},
        "sequence 2",
    ),
    "the auxiliary loss of training is of a sequence rank": (
        {
            "models/parallel/sequence.py": (
                "if self._exchanging and router_logits:",
                "if self._exchanging and router_logits and not _module.training:",
            )
        },
        {"model": MIXTRAL},
        "sequence 2",
    ),
    "counts for biases are of a rank": (
        {
            "engine/experts.py": (
                "        dist.all_reduce(total, group=self._mesh.replicas)\n",
                "",
            )
        },
        {"model": DEEPSEEK, "moe": {"bias_update_rate": 0.001}},
        "data 2",
    ),
    "counts of the global batch are of a rank": (
        {
            "engine/experts.py": (
                "            dist.all_reduce(counts, group=self._replicas)\n",
                "",
            )
        },
        {"model": MIXTRAL, "moe": GLOBAL},
        "data 2",
    ),
    "the z-loss is a sum": (
        {
            "models/experts.py": (
                "torch.stack(layer_sums).sum() / num_rows",
                "torch.stack(layer_sums).sum()",
            )
        },
        {"model": MIXTRAL, "moe": {"z_loss_coefficient": 0.01}},
        "data 2",
    ),
    "rows are counted instead of pairs": (
        {
            "objectives/losses/passes.py": (
                'pairs_present(labels) if self.objective.unit == "pairs" else targets.any(-1)',
                "targets.any(-1)",
            )
        },
        {"model": llama(), **PREFERENCE},
        "data 2",
    ),
    "rows of rewards are counted instead of pairs": (
        {
            "objectives/losses/passes.py": (
                'pairs_present(labels) if self.objective.unit == "pairs" else targets.any(-1)',
                "targets.any(-1)",
            )
        },
        {"model": llama(), **REWARD},
        "data",
    ),
    "a token after the end is scored": (
        {"engine/forward.py": ("positions < lengths,", "positions <= lengths,")},
        {"model": llama(), **CLASSES},
        "data",
    ),
    "adapters are scaled twice": (
        {
            "models/layers/adapters.py": (
                "lora_alpha=section.alpha,",
                "lora_alpha=2 * section.alpha,",
            )
        },
        {"model": llama(), "adapters": LORA},
        "data 2",
    ),
    "adapters begin with other values": (
        {
            "models/build.py": (
                "lambda layer_name: seed_of(seed, layer_name)",
                "lambda name: seed_of(1, name)",
            )
        },
        {"model": llama(), "adapters": LORA},
        "data 2",
    ),
}


def run_of(sections: dict[str, Any], directory: Path) -> dict[str, Any]:
    """A run of a model of its configuration, or with adapters on one of its files."""
    more = {name: section for name, section in sections.items() if name not in ("model", "loss")}
    model = {"config": sections["model"], "loss": sections.get("loss", "auto")}
    run: dict[str, Any] = run_config(Path("unread"), model, micro_batch_size=1, **more)
    run["data"]["mask_end_of_document"] = "objective" not in more
    if more.get("objective", {}).get("type") == "distillation":
        run["data"]["packing"] = "best_fit"
    if "teacher_model" in more.get("objective", {}):
        section = ModelSection(config=sections["model"])
        build_model(section, load_hf_config(section), seed=2).save_pretrained(directory / "teacher")
        run["objective"] = {**more["objective"], "teacher_model": str(directory / "teacher")}
    if "adapters" in more:
        section = ModelSection(config=sections["model"])
        build_model(section, load_hf_config(section), seed=1).save_pretrained(directory / "base")
        run["model"] = {"path": str(directory / "base")}
    return run


def test_mutations_are_of_the_code_as_it_is() -> None:
    for changes in (*MUTATIONS.values(), *(changes for changes, *_ in MUTATIONS_OF_RANKS.values())):
        for name, (old, new) in changes.items():
            compile(mutated(name, old, new), name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_wrong_is_told(name: str, tmp_path: Path) -> None:
    """Also where the reference once did as the run does, and would be as wrong."""
    code, output = parity_of_a_copy(tmp_path, MUTATIONS[name])
    assert code == 1, output
    assert output.count("DIFFERENT") == 4, output


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS_OF_RANKS)
def test_what_is_wrong_between_ranks_is_told(name: str, tmp_path: Path) -> None:
    changes, sections, where = MUTATIONS_OF_RANKS[name]
    code, output = parity_of_a_copy(tmp_path, changes, run_of(sections, tmp_path), 2, where)
    assert code == 1, output
    lines = [line for line in output.splitlines() if line.startswith("zero") and where in line]
    assert lines
    assert all("DIFFERENT" in line or "auxiliary loss" in line for line in lines), output


STAGES = "pipeline_zero1, data 1, pipeline 2"
NO_OBJECTIVE: dict[str, Any] = {"objective": ObjectiveSection()}
NO_MOE: dict[str, Any] = {"moe": MoeSection()}
DISTILLED: dict[str, Any] = {"type": "distillation", "teacher": "unread"}
OTHER_EMA = {"optimizer": OptimizerSection(**(AVERAGED | {"ema": {"decay": 0.79}}))}
HEAD_ADAPTED = {**LORA, "modules_to_save": ["score"]}
# By name: sections of a run, without what of them the reference is another one, and where.
TERMS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "biases": (
        {"model": DEEPSEEK, "moe": {"bias_update_rate": 0.001}},
        NO_MOE,
        ("zero2, data 2, expert 2",),
    ),
    "pairs": ({"model": llama(), **PREFERENCE}, NO_OBJECTIVE, ("zero2, data 2",)),
    "answers": ({"model": llama(), **KTO}, NO_OBJECTIVE, ("zero1, data 2",)),
    "weights and averages in stages": (
        {"model": llama(), "loss": "chunked", "optimizer": AVERAGED},
        OTHER_EMA,
        (STAGES,),
    ),
    "live teacher": ({"model": llama(), "objective": LIVE}, NO_OBJECTIVE, ("zero3, data 2",)),
    "global batch": (
        {"model": MIXTRAL, "moe": {**GLOBAL, "z_loss_coefficient": 0.001}},
        NO_MOE,
        ("zero1, data 2", "zero2, data 1, sequence 2"),
    ),
    "auxiliary loss": ({"model": MIXTRAL}, {}, ("zero3, data 1, sequence 2, expert 2",)),
    "adapters": (
        {"model": llama(), "adapters": LORA},
        {"adapters": None},
        ("zero2, data 2", STAGES),
    ),
    "pairs in stages": ({"model": llama(), **PREFERENCE}, NO_OBJECTIVE, (STAGES,)),
    "answers in parts": (
        {"model": llama(), **KTO},
        NO_OBJECTIVE,
        ("zero3, data 1, sequence 2", STAGES),
    ),
    "answers with adapters": (
        {"model": llama(), "adapters": LORA, **KTO},
        NO_OBJECTIVE,
        ("zero3, data 2", "zero1, data 1, tensor 2", STAGES),
    ),
    "rewards": (
        {"model": llama(), **REWARD},
        {"objective": ObjectiveSection(type="reward")},
        ("zero3, data 2", "zero1, data 1, sequence 2", STAGES),
    ),
    "classes with adapters": (
        {"model": llama(), "adapters": HEAD_ADAPTED, **CLASSES},
        {"adapters": None},
        ("zero1, data 2", STAGES),
    ),
    "terms": (
        {"model": llama(), "objective": {"label_smoothing": 0.1, "z_loss": 0.01}},
        NO_OBJECTIVE,
        ("zero1, data 2", "zero1, data 1, tensor 2"),
    ),
    "teacher": (
        {"model": llama(), "objective": DISTILLED},
        {"objective": ObjectiveSection(**DISTILLED, alpha=0.51)},
        ("zero3, data 2", STAGES),
    ),
    **{
        optimizer: (
            {"model": llama(), "optimizer": {"type": optimizer, "lr": 1e-3}},
            {"optimizer": OptimizerSection(lr=1e-3)},
            ("zero2, data 2", "zero3, data 1, tensor 2", STAGES),
        )
        for optimizer in ("muon", "lion", "adafactor")
    },
}


@pytest.mark.parametrize(
    "name", ["biases", *(pytest.param(name, marks=pytest.mark.slow) for name in [*TERMS][1:])]
)
def test_terms_of_the_loss_and_adapters_are_compared(
    name: str, tmp_path: Path, forked: None
) -> None:
    sections, without, point_names = TERMS[name]
    (tmp_path / "run").mkdir()
    config = RunConfig.model_validate(run_of(sections, tmp_path / "run"))
    listed = points(shrink(config, 2, tmp_path / "model"), 2)
    chosen = [point for point in listed if point.name in point_names]
    assert [point.refusal for point in chosen] == [None] * len(point_names)
    traces = train_points(chosen, 2, tmp_path)
    for point, (_, trace) in zip(chosen, traces, strict=True):
        assert isinstance(trace, TrainingTrace), trace
        assert compare(reference_of(point, 2), trace).passed, point.name
        # Without the term the reference is another one.
        model = point.config.model.model_copy(update={"overrides": {"router_aux_loss_coef": 0.0}})
        other = replace(point, config=point.config.model_copy(update={"model": model, **without}))
        assert not compare(train_reference(other.config), trace).passed, point.name


def test_the_proxy_says_what_it_changes_of_routers_and_adapters(tmp_path: Path) -> None:
    moe = {"z_loss_coefficient": 0.001, "auxiliary_loss": "global_batch"}
    config = RunConfig.model_validate(run_of({"model": MIXTRAL, "moe": moe}, tmp_path))
    proxy = shrink(config, 2, tmp_path / "model")
    assert proxy.config.moe.auxiliary_loss == "global_batch"
    assert "moe.z_loss_coefficient = 0.05 here, so that an error is detected" in proxy.notes
    assert "router_aux_loss_coef = 0.001 is 0.5 here, so that an error is detected" in proxy.notes
    adapters = {"targets": ["q_proj", "model.layers.2.*"], "dropout": 0.1, "quantization": "nf4"}
    (tmp_path / "deep").mkdir()
    deep = run_of({"model": llama(num_hidden_layers=9), "adapters": adapters}, tmp_path / "deep")
    deep["adapters"]["targets"] = ["q_proj", "model.layers.8.*"]
    proxy = shrink(RunConfig.model_validate(deep), 2, tmp_path / "adapted")
    assert proxy.config.adapters is not None
    assert proxy.config.adapters.targets == ("q_proj",)
    assert (proxy.config.adapters.dropout, proxy.config.adapters.quantization) == (0.0, "none")
    assert "adapters.targets: model.layers.8.* match nothing in the proxy model" in proxy.notes
    deep["adapters"]["targets"] = ["model.layers.8.*"]
    with pytest.raises(ConfigError, match=r"adapters\.targets .*matches no layer of the proxy"):
        shrink(RunConfig.model_validate(deep), 2, tmp_path / "none")


def test_rounding_is_what_plain_training_shows_of_it(
    small: Proxy, reference: TrainingTrace
) -> None:
    """A weight may be as far off as sums in other orders take that very parameter, no farther."""
    reordered = train_reordered(small.config)
    assert all(compare([reference], other, reordered).passed for other in reordered)
    assert any(
        not torch.equal(other.last[name], weight)
        for other in reordered
        for name, weight in reference.last.items()
    )

    name, second, *_ = reference.last

    def moved(name: str, by: float) -> TrainingTrace:
        return replace(reference, last={**reference.last, name: reference.last[name] + by})

    rough = [moved(name, 1e-4)]
    assert not compare([reference], moved(name, 1e-4)).passed
    assert compare([reference], moved(name, 3e-4), rough).passed
    verdict = compare([reference], moved(name, 5e-4), rough)
    assert not verdict.passed
    assert verdict.weight > 4e-4 > 0.9 * verdict.limits.weight
    assert not compare([reference], moved(second, 3e-4), rough).passed


@pytest.mark.parametrize("isolates", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "ignored"),
    [
        (llama(model_type="mistral", sliding_window=4096), {"sliding_window": None}),
        pytest.param(
            llama(model_type="phi3", pad_token_id=None, **longrope(4, 4096)),
            {"original_max_position_embeddings": 4096},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["window", "longrope"],
)
def test_lengths_that_the_run_passes_show(
    model: dict[str, Any], ignored: dict[str, Any], isolates: bool, tmp_path: Path
) -> None:
    """A window or long rotary embeddings that a topology would ignore: 16 tokens come to them."""
    values = {**model, "max_position_embeddings": 8192}
    run = run_config(Path("unread"), {"config": values}, micro_batch_size=1)
    run["batch"]["sequence_length"] = 8192
    if isolates:
        run["data"]["document_boundaries"] = "isolate"
    config = shrink(RunConfig.model_validate(run), 2, tmp_path / "model").config
    (expected,), reordered = train_reference(config), train_reordered(config)
    assert config.model.path is not None
    file = Path(config.model.path) / "config.json"
    values = json.loads(file.read_text()) | ignored
    if "original_max_position_embeddings" in ignored:
        values["rope_parameters"] |= ignored
    file.write_text(json.dumps(values))
    (other,) = train_reference(config)
    assert not compare([expected], other, reordered).passed
