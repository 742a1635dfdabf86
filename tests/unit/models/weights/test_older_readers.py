"""Configurations as transformers 4.57 reads them; tests/parity/test_older_readers.py loads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from bigtrain.models.weights.older_readers import rewrite_config

SIZES = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 3e4}
NO_FORM = "has no form that transformers 4 reads"


def factors(number: int) -> dict[str, Any]:
    return {"short_factor": [1.0] * number, "long_factor": [2.0] * number}


# Configuration, fields of the file for transformers 4.57, and the start of the only note.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 6, "head_dim": 16},
        {"num_experts": 6, "num_local_experts": 6},
        "",
    ),
    "token ids": (
        {"model_type": "xlm", "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7},
        {"bos_index": 5, "eos_index": 6, "pad_index": 7},
        "",
    ),
    "longrope": (
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONGROPE, **factors(8), "original_max_position_embeddings": 64},
        },
        {
            "rope_scaling": {"type": "longrope", **factors(8)},
            "rope_theta": 3e4,
            "original_max_position_embeddings": 64,
        },
        "",
    ),
    "longrope of half the dimensions": (
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 64,
            "rope_parameters": {**LONGROPE, **factors(4), "partial_rotary_factor": 0.5},
        },
        {"rope_scaling": {"type": "longrope", **factors(4)}, "partial_rotary_factor": 0.5},
        "",
    ),
    "longrope with a field that 4.57 has not": (
        {
            "model_type": "phi3",
            "rope_parameters": {**LONGROPE, **factors(8), "factor": 4.0},
        },
        {},
        NO_FORM,
    ),
    "longrope of a class that takes more fields": (
        {
            "model_type": "phimoe",
            "rope_parameters": {
                **LONGROPE, **factors(8), "short_mscale": 1.1, "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "rope_scaling": {
                "rope_type": "longrope", **factors(8), "short_mscale": 1.1, "long_mscale": 1.2,
                "original_max_position_embeddings": 64,
            },
        },
        "",
    ),
    "two fields": (
        {
            "model_type": "olmo2",
            "rope_parameters": {"rope_type": "linear", "rope_theta": 3e4, "factor": 2.0},
        },
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 3e4},
        "",
    ),
    "yarn of a class with two fields": (
        {
            "model_type": "olmo",
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 3e4, "factor": 2.0,
                "original_max_position_embeddings": 64,
            },
        },
        {},
        NO_FORM,
    ),
    "layer types": (
        {"model_type": "granitemoehybrid", "layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["mamba", "attention"], "time_step_limit": [0.0, float("inf")]},
        "",
    ),
    "layer types that 4.57 has too": (
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["linear_attention", "full_attention"]},
        "",
    ),
    "sizes that 4.57 computes": (
        {
            "model_type": "zamba2",
            "layers_block_type": ["linear_attention", "hybrid"],
            "attention_head_dim": 8,
        },
        {"layers_block_type": ["mamba", "hybrid"], "attention_head_dim": 8},
        "attention_head_dim = 8: transformers 4.57 computes 32",
    ),
    "not in 4.57": ({"model_type": "recurrent_gemma"}, {}, "transformers 4.57 refuses a recurrent"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_new_configuration_has_the_older_fields(name: str, tmp_path: Path) -> None:
    """And transformers 5 reads the same from it as before."""
    given, expected, note = CASES[name]
    config = AutoConfig.for_model(**SIZES | given)
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path).to_dict()
    notes = rewrite_config(tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    assert {key: values.get(key) for key in expected} == expected
    assert [text.removeprefix("config.json: ").removeprefix("rope_parameters ")[: len(note)]
            for text in notes] == ([note] if note else [])  # fmt: skip
    after = AutoConfig.from_pretrained(tmp_path).to_dict()
    for rope in (before.get("rope_parameters"), after.get("rope_parameters")):
        if rope:
            rope.pop("type", None)  # the older name of rope_type
    assert {key: after.get(key) for key in before} == before


def test_a_part_of_a_configuration_has_the_older_fields(tmp_path: Path) -> None:
    text = {"num_experts": 6, "head_dim": 16, **SIZES}
    AutoConfig.for_model("qwen3_vl_moe", text_config=text).save_pretrained(tmp_path)
    rewrite_config(tmp_path / "config.json")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["text_config"]["num_experts"] == 6
