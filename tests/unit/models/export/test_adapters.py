"""Exported adapters, as plain peft loads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bigtrain.errors import ModelError
from bigtrain.models.build import build_model, empty_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export import adapters
from bigtrain.models.export.adapters import export_adapter
from bigtrain.models.export.verified import Destination, Probe
from bigtrain.models.layers.adapter_checks import check_adapters
from bigtrain.models.layers.adapter_names import base_name
from bigtrain.models.layers.adapters import lora_config
from bigtrain.settings.run_config import AdaptersSection, ModelSection
from tests.parity.conftest import SHARED_MOE
from tests.support.chats import save_chat_tokenizer

SHARED = SHARED_MOE | {"num_hidden_layers": 2}


@torch.no_grad()
def export(section: AdaptersSection, root: Path) -> Path:
    """Random adapters beside a random base, exported; the directory of peft's."""
    source = ModelSection(config=SHARED)
    config = load_hf_config(source)
    base, output = root / "base", root / "adapter"
    model = build_model(source, config, seed=7, adapters=section).eval()
    plain = build_model(source, config, seed=0)
    state = model.state_dict()
    plain.load_state_dict({base_name(n): t for n, t in state.items() if ".lora_" not in n})
    plain.save_pretrained(base)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    for name in trained:
        model.get_parameter(name).normal_(std=0.3)
    ids = Probe.make_input(97, 32)
    probe = Probe(ids, model(input_ids=ids, use_cache=False).logits, "float32")
    weights = {name: model.get_parameter(name) for name in trained}
    made = save_chat_tokenizer(root / "tokenizer")
    destination = Destination(output, made, "float32")
    export_adapter(weights, section, str(base), config, destination, probe)
    return output


def test_layers_with_the_names_of_experts_have_adapters(tmp_path: Path) -> None:
    """peft reads targets named gate_proj as the stacks of this architecture: it would load no
    adapter for the dense layer and for the shared expert, and make others for the stacks."""
    output = export(AdaptersSection(rank=2, dropout=0.1), tmp_path)
    written = json.loads((output / "adapter_config.json").read_text())
    ends = {name.rpartition(".")[2] for name in written["target_modules"]}
    assert ends == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(written["target_parameters"]) == 2 * 3
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in written["target_parameters"]
    assert written["lora_dropout"] == 0


def test_stacks_and_layers_with_the_names_of_experts_go_together(tmp_path: Path) -> None:
    output = export(AdaptersSection(rank=2, targets=("attention", "mlp")), tmp_path)
    written = json.loads((output / "adapter_config.json").read_text())
    assert len(written["target_parameters"]) == 2 * 3 + 2


def test_names_that_peft_converts_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "file_config", lora_config)
    with pytest.raises((ModelError, RuntimeWarning)):
        export(AdaptersSection(rank=2), tmp_path)


def test_dora_of_layers_with_the_names_of_experts_is_refused() -> None:
    config = load_hf_config(ModelSection(config=SHARED))
    model = empty_model(config)
    (problem,) = check_adapters(model, AdaptersSection(dora=True))
    assert (problem.key, problem.value) == ("adapters.dora", True)
    assert "takes down_proj and gate_proj and up_proj of this architecture" in problem.rule
    assert check_adapters(model, AdaptersSection(dora=True, targets="attention")) == []
