"""Writing a Hugging Face directory, and proving that it is the model that was trained."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, enable_progress_bar

from bigtrain.errors import ModelError

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
    replace: bool = False,
) -> None:
    """Write `weights` as a Hugging Face directory that answers `probe` as the trained model did.

    Parameters: `weights`, full tensors by Hugging Face name, tied ones once; `dtype`, name of the
    dtype they are stored in. One process; needs the weights in memory twice. The directory appears
    under its name only after it has been reloaded with plain transformers and has answered right.
    Raises ModelError otherwise, or if `output` exists and is not to be replaced; what is to be
    replaced stays until then.
    """
    if output.exists() and not replace:
        raise ModelError(f"{output}: exists already; choose another --output or remove it")
    temporary = output.with_name(f".{output.name}.unfinished-{os.getpid()}")
    disable_progress_bar()
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _save(weights, hf_config, temporary, dtype)
        _save_tokenizer(tokenizer_directory, temporary, output)
        _verify(temporary, probe, output, max(_TOLERANCE[dtype], _TOLERANCE[probe.dtype]))
        if replace:
            shutil.rmtree(output, ignore_errors=True)
        temporary.rename(output)
    finally:
        enable_progress_bar()
        shutil.rmtree(temporary, ignore_errors=True)


def _save(
    weights: Mapping[str, torch.Tensor], hf_config: PreTrainedConfig, output: Path, dtype: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, dtype=_DTYPES[dtype])
    assert isinstance(model, PreTrainedModel)
    cast = {
        name: tensor.to(_DTYPES[dtype]) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    expected = {name for name, _ in model.named_parameters()}
    wrong = sorted(expected - cast.keys()) + sorted(
        cast.keys() - expected - {name for name, _ in model.named_buffers()}
    )
    if wrong:
        raise ModelError(
            f"{output}: these parameters are in only one of checkpoint and model: "
            f"{', '.join(wrong[:5])}"
        )
    model.load_state_dict(cast, strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(output)


def _save_tokenizer(source: Path, directory: Path, output: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        what = "no such directory" if not source.is_dir() else " ".join(str(error).split())
        raise ModelError(f"tokenizer {source}: cannot be loaded: {what}") from error
    tokenizer.save_pretrained(directory)
    # Beside a config.json, transformers may take the model type's own tokenizer class instead.
    again = AutoTokenizer.from_pretrained(directory)
    if again(_TEXT).input_ids != tokenizer(_TEXT).input_ids:
        raise ModelError(
            f"{output}: not written: transformers reads the run's tokenizer ({source}) as a "
            f"{type(again).__name__} beside this model, which gives other tokens -> train with a "
            "byte-level BPE (`bigtrain tokenizer`) or with the model's own tokenizer"
        )


@torch.no_grad()
def _verify(directory: Path, probe: Probe, output: Path, tolerance: float) -> None:
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
