"""Writing a Hugging Face directory, and proving that it is the model that was trained."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from bigtrain.config import ModelSection
from bigtrain.data.directories import cannot_be_written
from bigtrain.errors import ModelError, OutputError
from bigtrain.models.configuration import GENERATION_CONFIG, load_hf_config
from bigtrain.models.huggingface import build_model, read_in_turn
from bigtrain.models.lazy_tensors import LazyTensor, forget_computed
from bigtrain.models.stage_layout import names_of
from bigtrain.models.weight_files import write_checksums
from bigtrain.models.weights import find_weights

MAX_SHARD_SIZE = "5GB"

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Relative root-mean-square difference of logits that another kernel, thread count or device makes:
# about 1e-6 was seen in float32 and 5e-3 in bfloat16; a wrong or misplaced weight makes about 1.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}

# Read by the tokenizer before and after: cases, digits, indentation, other scripts.
_TEXT = "The w1 of 2024:\n    if x >= 10:\n\treturn 'café 東京'  # Don't"


@dataclass(frozen=True)
class Probe:
    """A fixed input and what the trained model answered.

    input_ids: int64 [samples, tokens]. logits: float32 [samples, tokens, vocabulary].
    dtype: name of the dtype the trained model computed in.
    """

    input_ids: torch.Tensor
    logits: torch.Tensor
    dtype: str

    @staticmethod
    def make_input(vocabulary_size: int, max_tokens: int, seed: int = 0) -> torch.Tensor:
        """Token ids [1, up to 32] to probe a model with; the same for the same arguments."""
        generator = torch.Generator().manual_seed(seed)
        size = (1, min(32, max_tokens))
        return torch.randint(0, vocabulary_size, size, generator=generator)

    def save(self, path: Path) -> None:
        """Write to a safetensors file."""
        tensors = {"input_ids": self.input_ids, "logits": self.logits.contiguous()}
        save_file(tensors, path, metadata={"dtype": self.dtype})

    @staticmethod
    def load(path: Path, dtype: str) -> Probe:
        """Read what `save` wrote."""
        tensors = load_file(path)
        return Probe(tensors["input_ids"], tensors["logits"], dtype)


def export_model(
    weights: Mapping[str, torch.Tensor],
    hf_config: PreTrainedConfig,
    tokenizer_directory: Path,
    output: Path,
    *,
    dtype: str,
    probe: Probe,
    generation_config: Path | None = None,
    replace: bool = False,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Write `weights` as a Hugging Face directory that answers `probe` as the trained model did.

    Parameters: `weights`, full tensors by Hugging Face name, tied ones once; `dtype`, name of the
    dtype they are stored in; `generation_config`, a file to take over as it is, where it exists
    (otherwise transformers makes one of `hf_config`); `max_shard_size`, of a file, such as 5GB.
    One process. Of `LazyTensor`s it holds one file's at a time, and for the comparison one layer's.
    The directory appears under its name only after it has been reloaded with plain transformers and
    has answered right. Raises ModelError otherwise, or if `output` exists and is not to be
    replaced; OutputError where it cannot be written. What is to be replaced stays until then.
    """
    if output.exists() and not replace:
        raise ModelError(f"{output}: exists already; choose another --output or remove it")
    temporary = output.with_name(f".{output.name}.unfinished-{os.getpid()}")
    disable_progress_bar()
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        is_sharded = _save(weights, hf_config, temporary, dtype, max_shard_size)
        if generation_config is not None and generation_config.is_file():
            shutil.copyfile(generation_config, temporary / GENERATION_CONFIG)
        _save_tokenizer(tokenizer_directory, temporary, output)
        tolerance = max(_TOLERANCE[dtype], _TOLERANCE[probe.dtype])
        _verify(temporary, probe, output, tolerance, in_turn=is_sharded)
        write_checksums(temporary)
        if replace:
            shutil.rmtree(output, ignore_errors=True)
        temporary.rename(output)
    except (OSError, SafetensorError) as error:
        remedy = "make room, or export the checkpoint to another place: bigtrain export --output"
        raise OutputError(cannot_be_written(output, error, remedy)) from error
    finally:
        enable_progress_bar()
        shutil.rmtree(temporary, ignore_errors=True)


@torch.no_grad()
def _save(
    weights: Mapping[str, torch.Tensor],
    hf_config: PreTrainedConfig,
    output: Path,
    dtype: str,
    max_shard_size: str,
) -> bool:
    """Write configuration and weights as `save_pretrained` does; returns whether in several files.

    That method holds all weights at once. Which tensors there are in the files, and what they are
    made of, is transformers' to say here as well.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(hf_config, dtype=_DTYPES[dtype])
    stored = revert_weight_conversion(model, _state(weights, model, _DTYPES[dtype], output))
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
        # It writes for the owner alone, whatever the umask is.
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
    """`weights` by the names and in the order of the model's state, tied ones once.

    Of `dtype`, but for what the architecture keeps in float32.
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
    left_out = set(model.all_tied_weights_keys) | set(model._keys_to_ignore_on_save or ())
    exact = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    found = {}
    for name, like in model.state_dict().items():
        tensor = kept.get(alias.get(name, name))
        if name in left_out or tensor is None:
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


def _save_tokenizer(source: Path, directory: Path, output: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        what = "no such directory" if not source.is_dir() else " ".join(str(error).split())
        raise ModelError(f"tokenizer {source}: cannot be loaded: {what}") from error
    tokenizer.save_pretrained(directory)
    # Beside a config.json, transformers may take the model type's own tokenizer class instead.
    again = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if again(_TEXT).input_ids != tokenizer(_TEXT).input_ids:
        raise ModelError(
            f"{output}: not written: transformers reads the run's tokenizer ({source}) as a "
            f"{type(again).__name__} beside this model, which gives other tokens -> train with a "
            "byte-level BPE (`bigtrain tokenizer`) or with the model's own tokenizer"
        )


@torch.no_grad()
def _verify(
    directory: Path, probe: Probe, output: Path, tolerance: float, *, in_turn: bool
) -> None:
    """Compare what the model in `directory` answers; `in_turn`: a layer of it at a time."""
    if in_turn:
        section = ModelSection(path=str(directory))
        hf_config = load_hf_config(section)
        dtype = _DTYPES[probe.dtype]
        model = build_model(section, hf_config, seed=0, dtype=dtype, weights="left")
        read_in_turn(model, find_weights(str(directory), hf_config))
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=_DTYPES[probe.dtype])
    model.eval()
    logits = model(input_ids=probe.input_ids, use_cache=False).logits.float()
    difference = relative_difference(logits, probe.logits)
    if not difference <= tolerance:
        raise ModelError(
            f"{output}: not written: reloaded, its logits differ from the trained model's by "
            f"{difference:.1e} (root mean square, relative; limit {tolerance:.0e})"
        )


def relative_difference(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """Root-mean-square difference over the reference's spread; NaN or shape mismatch: infinity."""
    if ours.shape != reference.shape:
        return float("inf")
    spread = (reference - reference.mean()).square().mean().sqrt()
    difference = float((ours - reference).square().mean().sqrt() / spread.clamp(min=1e-30))
    return difference if difference == difference else float("inf")
