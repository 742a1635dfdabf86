"""Runs of transformers 4.57 on model directories, in an environment of its own.

    python transformers4.py make OUT            tiny models of many families, one folder each
    python transformers4.py logits DIR...       writes logits.json into each, of its own loading
    python transformers4.py try-logits DIR...   the same, or error.txt
    python transformers4.py generate DIR...     writes generated.json into each
    python transformers4.py fields OUT          arguments of all configuration classes

Imports nothing of bigtrain and nothing of transformers 5.
"""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

IDS = [[3, 17, 5, 9, 80, 41, 2, 66, 7, 12, 30, 31, 33, 90, 15, 28, 64, 77, 8, 19, 4, 55, 61, 22]]

_SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_GPT = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_theta": 5e5, "rope_scaling": _LLAMA3}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "rope_theta": 2e4}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "qwen2": ("qwen2", {"rope_theta": 1e6}),
    "qwen3": (
        "qwen3",
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 8}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 8, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
         "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 1e6},
    ),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", _GPT),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 20000}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("falcon", {"head_dim": None}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "starcoder2": ("starcoder2", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    ),
    "cohere": ("cohere", {}),
    "granite": ("granite", {}),
    "glm4": ("glm4", {}),
    "smollm3": ("smollm3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4}),
    "olmoe": ("olmoe", {"num_experts": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2,
            "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
        },
    ),
    "glm4_moe": ("glm4_moe", {"n_routed_experts": 4, "first_k_dense_replace": 1}),
    "mamba": ("mamba", {"state_size": 8}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32, "context_length": 64}),
}  # fmt: skip


def make(out: Path) -> None:
    """Write a tiny model of each family, in bfloat16 but for every third."""
    for number, (name, (model_type, values)) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        sizes = values if model_type in ("gpt2", "gptj") else {**_SIZES, **_EXPERTS, **values}
        sizes = {key: value for key, value in sizes.items() if value is not None}
        config = transformers.AutoConfig.for_model(model_type, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        if number % 3:
            model = model.to(torch.bfloat16)
        model.save_pretrained(out / name, max_shard_size="40KB" if number % 5 == 0 else "5GB")


@torch.no_grad()
def logits(directory: Path) -> None:
    """Write what the model in `directory` computes in float32 for IDS."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    result = model.eval()(input_ids=torch.tensor(IDS), use_cache=False).logits
    torch.save(result, directory / "logits.pt")


def try_logits(directory: Path) -> None:
    """As `logits`, if transformers 4 has the model's type; writes an error to error.txt."""
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        return
    try:
        logits(directory)
    except Exception as error:
        (directory / "error.txt").write_text(f"{type(error).__name__}: {error}")


def fields(out: Path) -> None:
    """Write the arguments of every configuration class by model type, and its other names for
    fields."""
    table = {}
    for package in pkgutil.iter_modules(transformers.models.__path__):
        try:
            name = f"transformers.models.{package.name}.configuration_{package.name}"
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, transformers.PretrainedConfig):
                arguments = list(inspect.signature(kind.__init__).parameters)
                table[kind.model_type] = arguments, kind.attribute_map
    out.mkdir()
    (out / "fields.json").write_text(json.dumps(table))


@torch.no_grad()
def generate(directory: Path) -> None:
    """Write the tokens and the text that the directory's model and tokenizer generate greedily."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    given = tokenizer("def read(self, ", return_tensors="pt")
    made = model.generate(**given, do_sample=False, max_new_tokens=24)
    result = {"tokens": made.tolist(), "text": tokenizer.decode(made[0])}
    (directory / "generated.json").write_text(json.dumps(result))


COMMANDS = {
    "make": make,
    "logits": logits,
    "try-logits": try_logits,
    "generate": generate,
    "fields": fields,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    command, *places = sys.argv[1:]
    for place in places:
        try:
            COMMANDS[command](Path(place))
        except Exception as error:
            raise SystemExit(f"{place}: {type(error).__name__}: {error}") from error
