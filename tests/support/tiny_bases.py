"""Tiny pretrained models of different families, as directories that transformers 5 writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from bigtrain.models.build import build_model
from bigtrain.models.configuration import load_hf_config
from bigtrain.models.export.base_record import BaseRecord, record_base
from bigtrain.models.export.verified import Destination, Probe, export_model
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.settings.run_config import ModelSection

_SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {"rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e4, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        }},
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", _MIXED),
    "gemma3-vision": ("gemma3", _MIXED),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, **_EXPERTS}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
            "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, **_EXPERTS,
        },
    ),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **_MIXED}),
    "mamba": ("mamba", {"state_size": 8}),
}  # fmt: skip


def config_of(name: str) -> PreTrainedConfig:
    """Return the configuration of one of `BASES`."""
    model_type, values = _FAMILIES[name]
    if model_type == "gemma3":
        text = AutoConfig.for_model("gemma3_text", **{**_SIZES, **values})
        vision = {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 28,
            "num_attention_heads": 2, "patch_size": 14, "model_type": "siglip_vision_model",
        }  # fmt: skip
        tokens = {"image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502}
        composite: PreTrainedConfig = AutoConfig.for_model(
            model_type,
            text_config=text.to_dict(),
            vision_config=vision,
            mm_tokens_per_image=4,
            **tokens,
        )
        return composite
    sizes = {"vocab_size": 512, **values} if model_type == "gpt2" else {**_SIZES, **values}
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **sizes)
    return config


def make_base(name: str, directory: Path) -> None:
    """Write the model with random weights; every second family in bfloat16."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name))
    if list(_FAMILIES).index(name) % 2:
        model = model.to(torch.bfloat16)
    model.save_pretrained(directory)


BASES: dict[str, Callable[[Path], None]] = {name: partial(make_base, name) for name in _FAMILIES}


def exported_again(
    base: Path, dtype: str | None = None, *, tokenizer: Path, place: Path, **overrides: Any
) -> tuple[Path, list[str]]:
    """Import a base, change nothing, export into ``place/hf``; returns that and its notes.

    `tokenizer`: of the run's data, where the base has none.
    """
    if (base / "tokenizer.json").is_file():  # as `bigtrain tokenize` stores it
        tokenizer = place / "data"
        AutoTokenizer.from_pretrained(base).save_pretrained(tokenizer)
    section = ModelSection(path=str(base), overrides=overrides)
    hf_config = load_hf_config(section)
    weights = find_weights(str(base), hf_config)
    record_base(str(base), weights, place / "record")
    model = build_model(section, hf_config, seed=0).eval()
    ids = Probe.make_input(64, 24)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.float()
    masters = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    kept = model.state_dict()
    masters |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    notes = export_model(
        masters,
        hf_config,
        Destination(place / "hf", tokenizer, dtype, card="A card.\n"),
        probe=Probe(ids, logits, "float32"),
        base=BaseRecord(place / "record"),
    )
    return place / "hf", notes


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def files_of(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in paths
        if not path.name.endswith((".safetensors", ".safetensors.index.json"))
    }


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
    )


def assert_same_tensors(base: Path, output: Path) -> None:
    before, after = tensors_of(base), tensors_of(output)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert bits(tensor) == bits(after[name]), name
