"""Settings of a run in which `bigtrain parity` would detect an error, and its report of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.parity import run as parity_run
from bigtrain.parity.proxy import shrink
from bigtrain.parity.topologies import points
from bigtrain.parity.visibility import invisible_settings
from bigtrain.settings.run_config import ModelSection, RunConfig
from tests.parity.conftest import llama, run_config
from tests.parity.expert_models import MODELS

SLOW = pytest.mark.slow
LORA = {"adapters": {"rank": 4, "alpha": 16, "targets": "all-linear"}}
EXPERTS = llama(
    model_type="mixtral",
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=1e-6,
)
RATED = {"type": "kto", "undesirable_weight": 1.4}
TEACHER = {"type": "distillation", "teacher": "unread"}


def config_of(directory: Path, model: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    """Return a run; with adapters, on a model with files."""
    run = run_config(Path("unread"), {"config": model or llama()}, micro_batch_size=1, **sections)
    run["data"]["mask_end_of_document"] = "objective" not in sections
    if sections.get("objective", {}).get("type") == "distillation":
        run["data"]["packing"] = "best_fit"
    if "adapters" in sections:
        section = ModelSection(config=llama())
        build_model(section, load_hf_config(section), seed=1).save_pretrained(directory / "base")
        run["model"] = {"path": str(directory / "base")}
    return RunConfig.model_validate(run)


def preference(**settings: Any) -> dict[str, Any]:
    return {"objective": {"type": "preference", **settings}}


def optimizer(**settings: Any) -> dict[str, Any]:
    return {"optimizer": {"lr": 1e-5, **settings}}


SMALL_TERMS = {"label_smoothing": 1e-6, "z_loss": 1e-6}


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"objective": RATED}, marks=SLOW),
        preference(loss="simpo", gamma=1e-4),
        {"objective": SMALL_TERMS, **optimizer(weight_decay=1e-6, ema={"decay": 0.9999})},
        pytest.param(
            {"objective": {"type": "reward", "center_rewards_coefficient": 1e-6}}, marks=SLOW
        ),
        pytest.param(preference(loss="ipo") | LORA, marks=SLOW),
        pytest.param(preference(loss="orpo"), marks=SLOW),
        pytest.param({"objective": {"type": "classification"}}, marks=SLOW),
        pytest.param({"objective": TEACHER}, marks=SLOW),
        pytest.param({"model": EXPERTS, "moe": {"z_loss_coefficient": 1e-6}}, marks=SLOW),
        pytest.param({"model": EXPERTS, "moe": {"auxiliary_loss": "global_batch"}}, marks=SLOW),
        pytest.param(
            {"model": MODELS["deepseek_v3"], "moe": {"bias_update_rate": 1e-6}}, marks=SLOW
        ),
        pytest.param(LORA | optimizer(type="lion"), marks=SLOW),
        pytest.param(optimizer(type="muon"), marks=SLOW),
        pytest.param(optimizer(type="adafactor"), marks=SLOW),
    ],
)
def test_errors_in_all_settings_would_show(sections: dict[str, Any], tmp_path: Path) -> None:
    config = shrink(config_of(tmp_path, **sections), 2, tmp_path / "model").config
    assert invisible_settings(config) == []


def test_settings_in_which_errors_would_not_show_are_reported(tmp_path: Path) -> None:
    config = shrink(config_of(tmp_path), 2, tmp_path / "model").config
    update = {"clip_norm": 100.0, "weight_decay": 1e-8}
    blind = config.model_copy(update={"optimizer": config.optimizer.model_copy(update=update)})
    lines = invisible_settings(blind)
    assert "optimizer.clip_norm: no step is above the threshold" in lines
    passes = "an error of a tenth would pass as rounding"
    assert {f"optimizer.{name}: {passes}" for name in update} <= set(lines)


def test_nothing_passes_where_an_error_would_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity_run, "points", lambda *inputs: points(*inputs)[:1])
    monkeypatch.setattr(parity_run, "train_points", lambda *_: [])
    said: list[str] = []
    config = config_of(tmp_path)
    monkeypatch.setattr(parity_run, "invisible_settings", lambda _: [])
    assert parity_run.run_parity(config, 1, said.append, lambda *_: None)
    monkeypatch.setattr(parity_run, "invisible_settings", lambda _: ["moe.some: too small"])
    assert not parity_run.run_parity(config, 1, said.append, lambda *_: None)
    assert "NOT COMPARED: moe.some: too small" in said
