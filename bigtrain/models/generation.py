"""Sampling from a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from bigtrain.errors import ModelError


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
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        network: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    except (OSError, ValueError, SafetensorError) as error:
        what = "no such directory" if not Path(model).is_dir() else str(error)
        raise ModelError(f"--model = {model!r}: cannot be loaded: {what}") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
    if inputs.input_ids.shape[1] == 0:
        raise ModelError("--prompt: is empty; give at least one token to continue")
    torch.manual_seed(seed)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p}
        if temperature > 0
        else {"do_sample": False}
    )
    output = network.to(device).generate(
        input_ids=inputs.input_ids,
        attention_mask=inputs.attention_mask,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.eos_token_id,
        **sampling,
    )
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
