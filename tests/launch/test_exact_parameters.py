"""Frozen parameters, those without a gradient, and those that an architecture keeps in float32:
whole runs, from the base's files to the export's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.launch.conftest import VOCAB_SIZE, Inputs, run_tree, trained

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
BASES: dict[str, dict[str, Any]] = {
    "llama": TEXT,
    "gemma3": {
        "text_config": {
            **TEXT,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
        },
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
        "image_token_index": 318,
        "boi_token_index": 316,
        "eoi_token_index": 317,
    },
    "ernie4_5_moe": {
        **{name: value for name, value in TEXT.items() if name != "head_dim"},
        "moe_intermediate_size": 16,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models in float32, whose values no 16-bit dtype holds."""
    directories_by_name = {}
    for name, values in BASES.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **values))
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.02)
                if key.endswith("e_score_correction_bias"):
                    parameter.add_(10)
        directories_by_name[name] = tmp_path_factory.mktemp("bases") / name
        model.float().save_pretrained(directories_by_name[name])
    return directories_by_name


def run(inputs: Inputs, base: Path, directory: Path, engine: str, **sections: Any) -> str:
    """Train from `base` in bfloat16, and export; returns the output."""
    tree = run_tree(inputs.shards, directory)
    tree["model"] = {"path": str(base)}
    tree |= {
        "train": {"steps": 4},
        "precision": {"dtype": "bfloat16"},
        "evaluation": {"every_steps": 4, "samples": 8},
        "engine": {"deepspeed_config": engine},
    }
    tree["checkpoint"] = {"every_steps": 2}
    for section, values in sections.items():
        tree[section] = tree.get(section, {}) | values
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(tree))
    output = trained("--config", file, num_processes=2)
    return output


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same_bytes(base: Path, export: Path, pattern: str) -> int:
    """The number of tensors with a name that matches; all have to be the same in both."""
    before, after = weights(base), weights(export)
    names = [name for name in before if re.search(pattern, name)]
    for name in names:
        assert after[name].dtype == before[name].dtype, name
        assert torch.equal(after[name], before[name]), name
    for name in before.keys() - set(names):
        assert not torch.equal(after[name].float(), before[name].float()), name
    return len(names)


@pytest.mark.slow
def test_frozen_parameters_leave_as_they_came(
    inputs: Inputs, bases: dict[str, Path], tmp_path: Path
) -> None:
    frozen = {"frozen": ["model.layers.0.*", "*norm.weight"]}
    directory = tmp_path / "run"
    base, allowed = bases["llama"], {"allow_changes": ["train"]}
    run(inputs, base, directory, "zero1", model=frozen, train={"steps": 2})
    run(inputs, base, directory, "zero3", model=frozen, checkpoint=allowed)
    assert same_bytes(base, directory / "hf", r"layers\.0\.|norm\.weight$") == 12


@pytest.mark.slow
def test_what_text_does_not_reach_leaves_as_it_came(
    inputs: Inputs, bases: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    output = run(inputs, bases["gemma3"], directory, "zero3")
    assert "not trained, since they get no gradient from text: 34 parameters" in output
    assert same_bytes(bases["gemma3"], directory / "hf", "vision_tower|projector") == 34


@pytest.mark.slow
def test_a_router_that_its_architecture_keeps_in_float32(
    inputs: Inputs, bases: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    base = bases["ernie4_5_moe"]
    output = run(inputs, base, directory, "zero3")
    assert "kept in float32 by its architecture: 2 parameters" in output
    assert same_bytes(base, directory / "hf", "e_score_correction_bias") == 1
    weights_by_name = weights(directory / "hf")
    router = weights_by_name["model.layers.1.mlp.gate.weight"]
    assert router.dtype == torch.float32
    assert not torch.equal(router, router.bfloat16().float())
    # As in the base, which is in float32.
    assert weights_by_name["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float32
    # The trained model's logits are those of plain transformers, whose router is in float32.
    model = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.bfloat16).eval()
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.float32
    probe = load_file(directory / "checkpoints" / "step-00000004" / "probe.safetensors")
    with torch.no_grad():
        logits = model(input_ids=probe["input_ids"], use_cache=False).logits.float()
        assert torch.equal(logits, probe["logits"])
        gate = model.model.layers[1].mlp.gate
        gate.weight.data = gate.weight.data.bfloat16().float()
        rounded = model(input_ids=probe["input_ids"], use_cache=False).logits.float()
    assert not torch.equal(rounded, probe["logits"])
