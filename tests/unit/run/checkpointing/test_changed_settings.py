"""Which changed settings make another run."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bigtrain.data.samples.phases import Phase, SourcePhase, first_phase
from bigtrain.errors import CheckpointError
from bigtrain.models.equivalence.model_plan import ModelPlan
from bigtrain.models.equivalence.parameter_plan import ParameterPlan
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.layers.plans import LossPlan
from bigtrain.run.checkpointing import checkpoints
from bigtrain.run.checkpointing.changed_settings import (
    changed_averages,
    changed_rate,
    refuse_other_run,
    resumed_phases,
)
from bigtrain.run.preflight import Inputs
from bigtrain.settings.run_config import RunConfig
from tests.support.run_trees import run_tree
from tests.support.small_checkpoint import SHARDS, write_small_checkpoint

MORE = SourcePhase(path="more", hash="m", num_tokens=2001)


def tree(**data: Any) -> dict[str, Any]:
    return run_tree(data=data or {"path": "shards"})


def inputs(*sources: SourcePhase) -> Inputs:
    model_plan = ModelPlan(None, Isolation("none"), LossPlan("plain", 1, "loss: plain"))
    return Inputs(None, "h", sources or (SHARDS,), (), (), model_plan)


def stored(config: dict[str, Any], *sources: SourcePhase) -> dict[str, Any]:
    """The state of a checkpoint."""
    run = RunConfig.model_validate(config)
    return {
        "config": run.model_dump(mode="json"),
        "samples": 12,
        "step": 1,
        "phases": json.loads(json.dumps([asdict(first_phase(run, sources or (SHARDS,)))])),
        "parameters": ParameterPlan().record(),
    }


def resume(
    document: dict[str, Any], now: dict[str, Any], inputs_now: Inputs | None = None
) -> tuple[Phase, ...]:
    run = RunConfig.model_validate(now)
    current_inputs = inputs_now or inputs()
    return resumed_phases(document, run, current_inputs.sources, Path("checkpoint"))


@pytest.mark.parametrize("section", ["objective", "optimizer", "moe", "schedule"])
def test_a_setting_that_a_checkpoint_lacks_had_its_default(section: str) -> None:
    """As settings of a later release do."""
    names = stored(tree())["config"][section].keys() - tree().get(section, {}).keys()
    for name in names:
        document = stored(tree())
        del document["config"][section][name]
        assert resume(document, tree()), name
    document = stored(tree())
    del document["config"]["optimizer"]["weight_decay"]
    now = tree() | {"optimizer": {"lr": 1e-3, "weight_decay": 0.3}}
    with pytest.raises(CheckpointError, match=r"optimizer\.weight_decay: .* there, 0\.3 now"):
        resume(document, now)


MIXTURE = {"sources": [{"path": "shards", "weight": 1}, {"path": "more", "weight": 3}]}


def test_changes_are_refused_with_what_differs_and_followed_where_they_are_allowed() -> None:
    changed = {**tree(**MIXTURE), "batch": {"sequence_length": 4, "global_batch_size": 8}}
    changed["optimizer"] = {"lr": 2e-3}
    document, now = stored(tree()), inputs(SHARDS, MORE)
    with pytest.raises(CheckpointError) as caught:
        resume(document, changed, now)
    assert str(caught.value).splitlines() == [
        "checkpoint belongs to a run with other settings; use another output.directory, restore "
        "the settings, or resume with these by checkpoint.allow_changes="
        "[batch.global_batch_size,batch.sequence_length,data.sources,optimizer.lr]:",
        "  batch.global_batch_size: 4 there, 8 now",
        "  batch.sequence_length: 8 there, 4 now",
        "  optimizer.lr: 0.001 there, 0.002 now",
        "  data.sources: more is new",
        "  data.sources: share of shards: 1 there, 0.25 now",
    ]
    for keys in (["data", "batch", "optimizer.lr"], ["optimizer", "batch", "data.sources"]):
        first, second = resume(document, {**changed, "checkpoint": {"allow_changes": keys}}, now)
        assert (first.first_sample, first.sequence_length) == (0, 8)
        assert (second.first_sample, second.sequence_length, second.chunk_length) == (12, 4, 8)
        # One chunk in a group of one, of which both halves were read: nothing is left out.
        assert [(s.path, s.weight, s.start) for s in second.sources] == [
            ("shards", 1, 24),
            ("more", 3, 0),
        ]
    partly = {**changed, "checkpoint": {"allow_changes": ["batch", "optimizer"]}}
    advice = r"allow_changes=\[batch,data.sources,optimizer\]:\n  data.sources:"
    with pytest.raises(CheckpointError, match=advice):  # what is allowed already must stay
        resume(document, partly, now)


def test_other_models_are_named_by_key_and_by_what_can_change() -> None:
    llama = {"model_type": "llama", "hidden_size": 64, "vocab_size": 100}
    document = stored({**tree(), "model": {"config": llama}})
    other = {"model_type": "llama", "hidden_size": 32, "vocab_size": 100, "rms_norm_eps": 1e-5}
    with pytest.raises(CheckpointError) as caught:
        resume(document, {**tree(), "model": {"config": other}})
    assert str(caught.value).splitlines() == [
        "checkpoint belongs to a run with other settings; use another output.directory, restore "
        "the settings, or resume with these by checkpoint.allow_changes=[model.config] (of "
        "model.config only what leaves every tensor its shape can change):",
        "  model.config: hidden_size: 64 there, 32 now",
        "  model.config: rms_norm_eps: absent there, 1e-05 now",
    ]


def test_fewer_steps_than_are_done_are_not_advised() -> None:
    """With them allowed, the run would be at its end, and nothing would be trained."""
    document = {**stored({**tree(), "train": {"steps": 500}}), "step": 500}
    with pytest.raises(CheckpointError) as caught:
        resume(document, {**tree(), "train": {"steps": 20}})
    assert str(caught.value).splitlines() == [
        "checkpoint belongs to a run with other settings; use another output.directory, or restore "
        "the settings (with these train.steps nothing would be left to do; with more it could "
        "resume by checkpoint.allow_changes=[train.steps]):",
        "  train.steps: 500 there, 20 now",
    ]


def test_the_phases_of_a_run_add_up() -> None:
    document = stored(tree())
    changed = {**tree(**MIXTURE), "checkpoint": {"allow_changes": ["data"]}}
    assert len(resume(document, tree(sources=[{"path": "moved", "weight": 2}]))) == 1
    phases = resume(document, changed, inputs(SHARDS, MORE))
    document |= {
        "config": RunConfig.model_validate(changed).model_dump(mode="json"),
        "samples": 20,
        "phases": [asdict(phase) for phase in phases],
    }
    assert resume(document, changed, inputs(SHARDS, MORE)) == phases
    back = {**tree(), "checkpoint": {"allow_changes": ["data"]}}
    again = resume(document, back, inputs(SHARDS))
    assert [phase.first_sample for phase in again] == [0, 12, 20]
    assert sum(source.start for source in again[-1].sources) == 20


def test_allowed_changes_are_settings() -> None:
    for entry in ("data", "batch.sequence_length", "optimizer.lr"):
        RunConfig.model_validate({**tree(), "checkpoint": {"allow_changes": [entry]}})
    with pytest.raises(ValueError, match="seed cannot change in a run"):
        RunConfig.model_validate({**tree(), "checkpoint": {"allow_changes": ["seed"]}})
    for entry in ("dataa", "batch.sequence", "seed.x", ""):
        with pytest.raises(ValueError, match="neither a section nor a key"):
            RunConfig.model_validate({**tree(), "checkpoint": {"allow_changes": [entry]}})


@pytest.mark.parametrize("there", ["concatenate", "best_fit"])
def test_packed_documents_go_on_as_they_were_packed(there: str) -> None:
    before = tree(path="shards", packing=there)
    allowed = {"checkpoint": {"allow_changes": ["data", "batch"]}}
    now = {**tree(path="shards", packing="best_fit", long_documents="truncate"), **allowed}
    now["batch"] = {"sequence_length": 4, "global_batch_size": 4}
    with pytest.raises(CheckpointError, match="pack the documents differently") as caught:
        resume(stored(before), now)
    lines = ["batch.sequence_length: 8 there, 4 now"]
    lines.append("data.long_documents: 'cut' there, 'truncate' now")
    if there == "concatenate":
        lines.append("data.packing: 'concatenate' there, 'best_fit' now")
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == lines
    packed = tree(path="shards", packing="best_fit")
    assert len(resume(stored(packed), packed)) == 1


def test_a_run_is_refused_by_what_its_directory_holds_before_it_starts(tmp_path: Path) -> None:
    now = {**tree(), "output": {"directory": str(tmp_path)}}
    other = {**now, "optimizer": {"lr": 2e-3}}
    assert refuse_other_run(RunConfig.model_validate(now)) is None
    write_small_checkpoint(tmp_path, 1, now)
    newest = write_small_checkpoint(tmp_path, 2, other)
    assert refuse_other_run(RunConfig.model_validate(other)) == newest
    config = RunConfig.model_validate(now)
    with pytest.raises(CheckpointError, match=r"optimizer\.lr: 0\.002 there, 0\.001 now"):
        refuse_other_run(config)
    allowed = {**now, "checkpoint": {"allow_changes": ["optimizer.lr"]}}
    assert refuse_other_run(RunConfig.model_validate(allowed)) == newest
    with pytest.raises(CheckpointError, match=r"data\.sources: more is new"):
        refuse_other_run(RunConfig.model_validate(other), (MORE,))
    # As the run does, it passes over a checkpoint that is corrupt.
    (newest / checkpoints.STATE).write_text("{}")
    assert refuse_other_run(config) == checkpoints.checkpoint_path(tmp_path, 1)


NOW = ParameterPlan(
    decaying=("layers.*.up_proj.weight",),
    matrices=("layers.*.up_proj.weight",),
)


def of_plan(document: dict[str, Any], plan: ParameterPlan, **optimizer: Any) -> tuple[Phase, ...]:
    now = tree()
    now["optimizer"] |= optimizer
    document = {**document, "config": RunConfig.model_validate(now).model_dump(mode="json")}
    allowed = {**now, "checkpoint": {"allow_changes": ["optimizer.weight_decay"]}}
    run, current_inputs = RunConfig.model_validate(now), inputs()
    arguments = (current_inputs.sources, Path("checkpoint"), plan)
    try:
        return resumed_phases(document, run, *arguments)
    except CheckpointError:
        assert resumed_phases(document, RunConfig.model_validate(allowed), *arguments)
        raise


def test_groups_that_an_upgrade_has_changed_are_another_run() -> None:
    document = {**stored(tree()), "parameters": NOW.record()}
    assert of_plan(document, NOW)
    others = replace(NOW, decaying=("layers.*.mixer.A_log",))
    with pytest.raises(CheckpointError) as caught:
        of_plan(document, others)
    assert str(caught.value).splitlines()[1:] == [
        "  optimizer.weight_decay: fell on layers.*.up_proj.weight there, and not now",
        "  optimizer.weight_decay: falls on layers.*.mixer.A_log now, and did not there",
    ]
    now = RunConfig.model_validate(tree())
    fewer = replace(NOW, matrices=())
    with pytest.raises(CheckpointError, match=r"optimizer\.type: updates other matrices now: lay"):
        resumed_phases(document, now, inputs().sources, Path("checkpoint"), fewer)


def test_frozen_parameters_are_not_trained_at_a_resume() -> None:
    """Not even if the change is allowed, which is then not advised; the reverse is."""
    allowed = {**tree(), "checkpoint": {"allow_changes": ["model.frozen"]}}
    frozen = {"frozen": ["model.embed*"], **tree()["model"]}
    names = ("model.embed_tokens.weight", "model.embed_positions.weight")
    document = {
        **stored({**tree(), "model": frozen}),
        "parameters": replace(NOW, frozen=names).record(),
    }
    for now in (tree(), allowed):
        run = RunConfig.model_validate(now)
        with pytest.raises(CheckpointError) as caught:
            resumed_phases(document, run, (SHARDS,), Path("checkpoint"), NOW)
        assert "model.embed_tokens.weight and 1 more had no optimizer states" in str(caught.value)
        assert "initialize_from=checkpoint" in str(caught.value)
        assert "allow_changes" not in str(caught.value)
    run = RunConfig.model_validate(allowed)
    more = replace(NOW, frozen=(*names, "model.norm.weight"))
    assert resumed_phases(document, run, (SHARDS,), Path("checkpoint"), more)


@pytest.mark.parametrize("key", ["rank", "targets", "dora", "modules_to_save"])
def test_what_trains_other_tensors_is_named(key: str) -> None:
    other = {"rank": 4, "targets": ["q_proj"], "dora": True, "modules_to_save": ["lm_head"]}
    model = {"model": {"path": "base"}}
    document = stored({**tree(), **model, "adapters": {"rank": 8}})
    with pytest.raises(CheckpointError, match=rf"\(of adapters\.{key} only what trains no tensor"):
        resume(document, {**tree(), **model, "adapters": {"rank": 8, key: other[key]}})


def test_states_of_another_optimizer_are_not_continued() -> None:
    """Not even if the change is allowed: the checkpoint has no moments in 8 bits, or only those."""
    allowed = {**tree(), "checkpoint": {"allow_changes": ["optimizer"]}}
    for there, now in (("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")):
        before = {**tree(), "optimizer": {"lr": 1e-3, "type": there}}
        changed = {**allowed, "optimizer": {"lr": 1e-3, "type": now}}
        with pytest.raises(CheckpointError, match=f"has states of optimizer.type = {there}, which"):
            resume(stored(before), changed)
    lion = {**allowed, "optimizer": {"lr": 1e-3, "type": "lion"}}
    assert resume(stored(tree()), lion)  # it has a first moment


def test_a_learning_rate_that_jumps_is_named() -> None:
    """A longer run decays later: the rate of the next step is another one."""
    there = RunConfig.model_validate({**tree(), "train": {"steps": 100}})
    longer = there.model_copy(update={"train": there.train.model_copy(update={"steps": 1000})})
    document = {"config": there.model_dump(mode="json"), "step": 50}
    line = changed_rate(document, longer)
    assert line is not None
    assert line.startswith("learning rate of step 51: ")
    assert "changed: train.steps" in line
    assert changed_rate(document, there) is None


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (None, None, None),
        (0.9, 0.9, None),
        (None, 0.9, "has no averages of the weights; they begin with the weights of step 50"),
        (0.9, None, "optimizer.ema is off: the checkpoint's averages of the weights are not"),
        (0.9, 0.99, "optimizer.ema.decay: 0.9 in the checkpoint, 0.99 from now on"),
    ],
)
def test_averages_that_begin_end_or_change(
    before: float | None, now: float | None, text: str | None
) -> None:
    there, here = (
        RunConfig.model_validate(
            {**tree(), "optimizer": {"lr": 1e-3, "ema": decay and {"decay": decay}}}
        )
        for decay in (before, now)
    )
    document = {**stored(there.model_dump(mode="json")), "step": 50, "engine": {"ema": before}}
    resumed_phases(document, here, [SHARDS], Path())
    line = changed_averages(document, here)
    assert line is None if text is None else text in str(line)
