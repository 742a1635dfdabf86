"""Writing a Hugging Face directory, and verifying that the directory is the trained model."""

from __future__ import annotations

import copy
import glob
import math
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import CONFIG_NAME

from bigtrain.errors import ModelError, OutputError, one_line
from bigtrain.models.build import (
    build_model,
    empty_model,
    fit_grouped_products,
    read_in_turn,
)
from bigtrain.models.configuration import (
    auto_class,
    load_hf_config,
    scores_samples,
)
from bigtrain.models.equivalence.parameter_plan import find_gradient_reach
from bigtrain.models.export.base_record import BaseRecord
from bigtrain.models.file_names import GENERATION_CONFIG
from bigtrain.models.layers.multi_token import NAME as MTP
from bigtrain.models.text_ids import write_stop_ids
from bigtrain.models.transformers_patches import without_progress
from bigtrain.models.weights.checksums import write_checksums
from bigtrain.models.weights.export_hf import DTYPES, MAX_SHARD_SIZE, write_model, write_tokenizer
from bigtrain.models.weights.import_hf import find_weights
from bigtrain.models.weights.lazy_tensors import LazyTensor
from bigtrain.models.weights.older_readers import rewrite_config
from bigtrain.settings.run_config import ModelSection
from bigtrain.system.files import cannot_be_written

CARD = "README.md"
# Largest accepted relative root-mean-square difference of logits. Another kernel, thread count or
# device makes about 1e-6 in float32 and 5e-3 in bfloat16, a wrong or misplaced weight about 1.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 2e-2}

_GPU = "cuda"
_NO_CHANGES = "None but the values of trained tensors: files, keys and names are the same."


@dataclass(frozen=True)
class Probe:
    """A fixed input and the trained model's logits. input_ids: int64 [samples, tokens]. logits:
    float32 [samples, tokens, vocabulary], or scores [samples, labels]. dtype: name of the dtype in
    which the trained model computed."""

    input_ids: torch.Tensor
    logits: torch.Tensor
    dtype: str

    @staticmethod
    def make_input(vocabulary_size: int, max_tokens: int, samples: int = 1) -> torch.Tensor:
        """Return token ids [samples, up to 32] to probe a model with: equal ids for equal
        arguments."""
        generator = torch.Generator().manual_seed(0)
        shape = (samples, min(32, max_tokens))
        return torch.randint(0, vocabulary_size, shape, generator=generator)

    def save(self, path: Path) -> None:
        """Write to a safetensors file."""
        tensors = {"input_ids": self.input_ids, "logits": self.logits.contiguous()}
        save_file(tensors, path, metadata={"dtype": self.dtype})

    @staticmethod
    def load(path: Path, dtype: str) -> Probe:
        """Read what `save` wrote."""
        tensors = load_file(path)
        return Probe(tensors["input_ids"], tensors["logits"], dtype)


@dataclass(frozen=True)
class Destination:
    """Directory that an export writes, and how. output: the directory. tokenizer: directory with a
    tokenizer to copy. dtype: name of the dtype of stored weights; None for a tensor's dtype in the
    base. generation_config: file to copy, with the tokens that end the training texts and answers;
    transformers makes the file if this one does not exist. card: text of README.md. replace:
    whether an existing directory is replaced. max_shard_size: of a weight file, such as 5GB."""

    output: Path
    tokenizer: Path
    dtype: str | None
    generation_config: Path | None = None
    card: str = ""
    replace: bool = False
    max_shard_size: str = MAX_SHARD_SIZE


def why_not_reloaded(hf_config: PreTrainedConfig) -> str | None:
    """Return why transformers cannot read an export of the architecture without a base's files, for
    example because another class than the language model reads the configuration; None if
    transformers can, or if the model cannot be built at all, which the run's plan reports."""
    try:
        config = empty_model(hf_config).config
    except Exception:  # any error of an architecture's code
        return None
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        try:
            empty_model(AutoConfig.from_pretrained(directory, trust_remote_code=False))
        except Exception as error:  # any error of transformers or of an architecture's code
            return one_line(error)
    return None


def export_model(
    weights: Mapping[str, torch.Tensor],
    hf_config: PreTrainedConfig,
    destination: Destination,
    *,
    probe: Probe,
    base: BaseRecord | None = None,
    as_stored: Collection[str] = (),
    base_notes: Sequence[str] = (),
) -> list[str]:
    """Write `weights` as a Hugging Face directory whose logits for `probe` are the trained model's.

    Parameters: `weights`, full tensors by Hugging Face name, tied weights once; `base`, the record
    of the model from which the weights were trained: the directory equals the base except for
    trained values; `as_stored`, names of weights that keep their dtype in the base instead of the
    destination's; `base_notes`, notes that come first in the result.
    Returns a note for everything that was changed or added; the card lists the notes.
    Called by one process. Holds the `LazyTensor`s of a single file at a time, and of a single layer
    when verifying. The files are reloaded into transformers' model (by transformers, or a layer at
    a time if there are several weight files). Only if the logits agree, the directory appears under
    its name, and replaces an older directory. Raises ModelError if the logits differ, or if the
    directory exists and may not be replaced; OutputError if it cannot be written.
    """
    output, dtype, card = destination.output, destination.dtype, destination.card
    with writing_directory(output, replace=destination.replace) as temporary:
        # Configuration and weights.
        hf_config.use_cache = True  # for generation, whatever the run sets
        like_base = None
        if base is not None:
            like_base = partial(base.like_base, keep_dtypes=dtype is None, frozen=as_stored)
        is_sharded, notes = write_model(
            weights,
            hf_config,
            temporary,
            dtype,
            destination.max_shard_size,
            like_base=like_base,
            as_stored=as_stored,
        )
        notes = [*base_notes, *notes]
        settings = destination.generation_config
        if settings is not None and settings.is_file():
            shutil.copyfile(settings, temporary / GENERATION_CONFIG)
        if base is None:
            notes += rewrite_config(temporary / CONFIG_NAME)
        else:
            notes += base.write_files(temporary, hf_config, dtype)
        base_files = None if base is None else base.files
        notes += write_tokenizer(destination.tokenizer, temporary, output, base_files)
        if not scores_samples(hf_config):
            notes += write_stop_ids(temporary, hf_config)
        coarsest_dtype = dtype
        if coarsest_dtype is None:
            coarsest_dtype = probe.dtype if base is None else base.lowest_precision
        # Reload the model, a layer at a time if it has several files, and compare the logits.
        if is_sharded:
            section = ModelSection(path=str(temporary))
            reloaded_config = load_hf_config(section)
            probe_dtype = DTYPES[probe.dtype]
            model = build_model(section, reloaded_config, seed=0, dtype=probe_dtype, weights="left")
            read_in_turn(model, find_weights(str(temporary), reloaded_config))
        else:
            reloaded_config = AutoConfig.from_pretrained(temporary, trust_remote_code=False)
            model_class = auto_class(reloaded_config)
            model = model_class.from_pretrained(temporary, dtype=DTYPES[probe.dtype])
            fit_grouped_products(model)
        notes += compare_logits(model, probe, output, coarsest_dtype, on_gpu=not is_sharded)
        del model  # frees memory: the next check reads weights again
        _verify_unprobed(temporary, weights, hf_config, probe, output)
        # The model card lists what the export changed.
        if card and base is not None:
            card += "\n## Changes from the base\n\n"
            card += "".join(f"- {note}\n" for note in notes or [_NO_CHANGES])
        elif card and notes:
            card += "\n## Notes\n\n" + "".join(f"- {note}\n" for note in notes)
        if card:
            (temporary / CARD).write_text(card, encoding="utf-8")
    return notes


@contextmanager
def writing_directory(output: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary directory that becomes `output`, with checksums, when the block ends; an
    error in the block removes the directory. `replace`: replace an existing `output`, which no
    other process writes, and remove temporary directories of killed exports. Raises ModelError if
    `output` exists and may not be replaced, OutputError if it cannot be written."""
    if output.exists() and not replace:
        raise ModelError(f"{output}: exists already; choose another --output or remove it")
    if replace:
        for leftover in output.parent.glob(f".{glob.escape(output.name)}.unfinished-*"):
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = output.with_name(f".{output.name}.unfinished-{os.getpid()}")
    replaced = output.with_name(f"{temporary.name}-replaced")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with without_progress():
            yield temporary
        write_checksums(temporary)
        if replace and os.path.lexists(output):
            output.rename(replaced)  # atomic, while removing the directory takes long
        temporary.rename(output)
    except (OSError, SafetensorError) as error:
        remedy = (
            "make room, or export the checkpoint to another directory: bigtrain export --output"
        )
        raise OutputError(cannot_be_written(output, error, remedy)) from error
    finally:
        if replaced.exists() and not output.exists():  # the second rename failed
            replaced.rename(output)
        for directory in (temporary, replaced):
            shutil.rmtree(directory, ignore_errors=True)


@torch.no_grad()
def probe_of(
    weights: Mapping[str, torch.Tensor], hf_config: PreTrainedConfig, probe: Probe
) -> Probe:
    """Return a probe with the input and dtype of `probe`, and the logits of a model with `weights`.
    Holds the complete model in memory."""
    model = auto_class(hf_config).from_config(copy.deepcopy(hf_config), dtype=DTYPES[probe.dtype])
    targets = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in weights.items():
        if name in targets:
            targets[name].copy_(tensor.read() if isinstance(tensor, LazyTensor) else tensor)
    model.tie_weights()
    fit_grouped_products(model)
    logits = model.eval()(input_ids=probe.input_ids, use_cache=False).logits.float()
    return Probe(probe.input_ids, logits, probe.dtype)


@torch.no_grad()
def _verify_unprobed(
    directory: Path,
    weights: Mapping[str, torch.Tensor],
    hf_config: PreTrainedConfig,
    probe: Probe,
    output: Path,
) -> None:
    """Compare the `weights` that do not influence the logits of `probe` with the weights in
    `directory`: layers for multi-token prediction, which transformers' causal LM does not load, and
    layers that only longer samples, or no samples of text, reach. Raises ModelError for a weight
    that differs. `output`: the directory's name in the error."""
    num_tokens = probe.input_ids.shape[1]
    reach = find_gradient_reach(hf_config, num_tokens)
    unprobed = weights.keys() if reach.absent is None else reach.absent
    names = [name for name in weights if name in unprobed or name.startswith(f"{MTP}.")]
    stored_tensors = find_weights(str(directory), hf_config).tensors if names else {}
    for name in names:
        weight = weights[name]
        trained = weight.read() if isinstance(weight, LazyTensor) else weight
        stored = stored_tensors[name].read()
        if not torch.equal(trained.to(stored.dtype), stored):
            raise ModelError(f"{output}: not written: reloaded, {name} differs")


@torch.no_grad()
def compare_logits(
    model: Any, probe: Probe, output: Path, dtype: str, *, on_gpu: bool = True
) -> list[str]:
    """Compare the logits of `model`, reloaded from files of `dtype`, with the probe's logits: on
    the CPU, and if the logits differ and `on_gpu` is set, on an available GPU. Return a note if the
    logits agree only on the GPU: sparse attention chooses among equal scores, which devices order
    differently. Raises ModelError if the logits do not agree. `output`: the directory's name in the
    error."""
    model.eval()
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[probe.dtype])
    difference = _logits_difference(model, probe, "cpu")
    if difference <= tolerance:
        return []
    if on_gpu and torch.cuda.is_available():
        try:
            gpu_difference = _logits_difference(model.to(_GPU), probe, _GPU)
        except torch.OutOfMemoryError:  # the GPU also holds the run's model
            gpu_difference = float("inf")
        if gpu_difference <= tolerance:
            return [
                f"on a CPU, logits differ from the trained model's on its GPU by {difference:.1e} "
                f"(root mean square, relative); on a GPU by {gpu_difference:.1e}"
            ]
    raise ModelError(
        f"{output}: not written: reloaded, its logits differ from the trained model's by "
        f"{difference:.1e} (root mean square, relative; limit {tolerance:.0e})"
    )


def _logits_difference(model: Any, probe: Probe, device: str) -> float:
    """Return the relative difference of the logits of `model` on `device` from the probe's."""
    ids = probe.input_ids.to(device)
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return relative_difference(logits.cpu(), probe.logits)


def relative_difference(logits: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ``rms(logits - reference) / rms(reference - mean(reference))``. For scores [samples,
    labels], which may be all alike, 0 replaces the mean. Returns infinity for NaN or a shape
    mismatch."""
    if logits.shape != reference.shape:
        return float("inf")
    mean = 0.0 if reference.ndim == 2 else reference.mean()
    spread = (reference - mean).square().mean().sqrt()
    difference = float((logits - reference).square().mean().sqrt() / spread.clamp(min=1e-30))
    return float("inf") if math.isnan(difference) else difference
