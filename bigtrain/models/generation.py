"""Sampling from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from bigtrain.errors import ModelError
from bigtrain.models.weights.import_hf import refuse_pickles


@torch.no_grad()
def generate(
    model: str,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """`prompt` and its continuation. `temperature` 0 takes the likeliest token every time.

    Raises ModelError for a model or tokenizer that cannot be loaded, or an empty prompt.
    """
    tokenizer = _load(AutoTokenizer, model)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    if inputs.input_ids.numel() == 0:
        raise ModelError("--prompt: is empty; give at least one token to continue")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = _load_network(model).to(device)
    inputs = inputs.to(device)
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p}
        if temperature > 0
        else {"do_sample": False}
    )
    output = network.generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))


def _load_network(model: str) -> Any:
    try:
        refuse_pickles(model)
    except ValueError as error:
        raise ModelError(f"--model = {model!r}: {error}") from error
    return _load(AutoModelForCausalLM, model, dtype="auto", use_safetensors=True)


def _load(factory: Any, model: str, **options: Any) -> Any:
    disable_progress_bar()
    try:
        return factory.from_pretrained(model, trust_remote_code=False, **options)
    except (OSError, ValueError, SafetensorError) as error:
        what = " ".join(str(error).split()) if Path(model).is_dir() else _not_found(model)
        raise ModelError(f"--model = {model!r}: cannot be loaded: {what}") from error
    finally:
        enable_progress_bar()


def _not_found(model: str) -> str:
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        return "no such directory"
    return "neither a directory here nor a model that could be reached on the Hugging Face hub"
