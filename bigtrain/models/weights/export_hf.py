"""A trained model written as a Hugging Face directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from bigtrain.errors import ModelError
from bigtrain.models.layers.parameters import names_of
from bigtrain.models.transformers_patches import dtype_plan, names_not_saved
from bigtrain.models.weights.lazy_tensors import LazyTensor, forget_computed
from bigtrain.system.text_record import RECORD_NAME

MAX_SHARD_SIZE = "5GB"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Tokenized before and after: upper case, digits, indentation, other scripts.
_TEXT = "The w1 of 2024:\n    if x >= 10:\n\treturn 'café 東京'  # Don't"


@torch.no_grad()
def write_model(
    weights: Mapping[str, torch.Tensor],
    hf_config: PreTrainedConfig,
    output: Path,
    dtype: str,
    max_shard_size: str,
) -> bool:
    """Write configuration and weights as `save_pretrained` does; returns whether in several files.

    That method holds all weights at once; this one holds a file's. Names and conversions of tensors
    are transformers' here as well.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=DTYPES[dtype])
    stored = revert_weight_conversion(model, _state(weights, model, DTYPES[dtype], output))
    model.save_pretrained(output, state_dict={})  # configurations, and no weights
    sizes = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
    }
    split = split_torch_state_dict_into_shards(
        sizes, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file in output.glob("model*.safetensors"):
        file.unlink()
    for file_name, names in split.filename_to_tensors.items():
        held = {name: _materialized(stored[name]) for name in names}
        save_file(held, output / file_name, metadata={"format": "pt"})
        # safetensors writes with permissions for the owner alone, whatever the umask is.
        shutil.copymode(output / CONFIG_NAME, output / file_name)
        del held
    forget_computed()
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (output / SAFE_WEIGHTS_INDEX_NAME).write_text(text)
    return split.is_sharded


def _state(
    weights: Mapping[str, torch.Tensor], model: Any, dtype: torch.dtype, output: Path
) -> dict[str, torch.Tensor]:
    """`weights` by the names and in the order of the model's state dict, tied ones once.

    In `dtype`, except for those that the architecture keeps in float32.
    """
    names = names_of(model.named_parameters(remove_duplicate=False)).values()
    alias = {name: group[0] for group in names for name in group}
    expected = set(alias.values())
    kept = {alias.get(name, name): tensor for name, tensor in weights.items()}
    wrong = sorted(expected - kept.keys()) + sorted(
        kept.keys() - expected - {name for name, _ in model.named_buffers()}
    )
    if wrong:
        raise ModelError(
            f"{output}: these parameters are in only one of checkpoint and model: "
            f"{', '.join(wrong[:5])}"
        )
    skipped = set(model.all_tied_weights_keys) | names_not_saved(model)
    exact = [pattern.replace("*", ".*") for pattern in dtype_plan(model, dtype)]
    found = {}
    for name, like in model.state_dict().items():
        tensor = kept.get(alias.get(name, name))
        if name in skipped or tensor is None:
            continue
        if tensor.ndim > like.ndim:
            tensor = tensor[0]  # checkpoints hold scalars as vectors
        if tensor.is_floating_point():
            in_float32 = any(re.search(pattern, name) for pattern in exact)
            tensor = tensor.detach().to(torch.float32 if in_float32 else dtype)
        found[name] = tensor
    return found


def _materialized(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, LazyTensor) else tensor.contiguous()


def write_tokenizer(source: Path, directory: Path, output: Path) -> None:
    """Write the tokenizer of `source` into `directory`, and check that transformers loads it there.

    `output`: the directory's name in errors. Raises ModelError if it cannot be loaded, or gives
    other tokens when loaded beside the model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        what = "no such directory" if not source.is_dir() else " ".join(str(error).split())
        raise ModelError(f"tokenizer {source}: cannot be loaded: {what}") from error
    tokenizer.save_pretrained(directory)
    if (source / RECORD_NAME).is_file():
        shutil.copyfile(source / RECORD_NAME, directory / RECORD_NAME)
    # Beside a config.json, transformers may take the model type's own tokenizer class instead.
    again = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if again(_TEXT).input_ids != tokenizer(_TEXT).input_ids:
        raise ModelError(
            f"{output}: not written: transformers reads the run's tokenizer ({source}) as a "
            f"{type(again).__name__} beside this model, which gives other tokens -> train with a "
            "byte-level BPE (`bigtrain tokenizer`) or with the model's own tokenizer"
        )
