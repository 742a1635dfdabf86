"""A trained model written as a Hugging Face directory."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoTokenizer, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from bigtrain.errors import ModelError, first_line, one_line
from bigtrain.models.configuration import auto_class, num_counted_mtp_layers, unmarked
from bigtrain.models.layers.multi_token import add_mtp_layers, mtp_layers
from bigtrain.models.layers.parameters import names_of
from bigtrain.models.transformers_patches import computed_in_float32, dtype_plan, names_not_saved
from bigtrain.models.weights.checksums import TOKENIZER_FILES
from bigtrain.models.weights.lazy_tensors import LazyTensor, forget_computed
from bigtrain.models.weights.older_readers import rewrite_tokenizer_config
from bigtrain.system.text_record import RECORD_NAME

MAX_SHARD_SIZE = "5GB"

LikeBase = Callable[
    [Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
    tuple[dict[str, torch.Tensor], list[str]],
]
"""Maps tensors by their name in files, and the same tensors by the model's names, to tensors as in
the base and notes: `bigtrain.models.export.base_record.BaseRecord.like_base`."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_REMEDY = (
    "train with the model's own tokenizer, or a model_type that takes any, such as llama or qwen3"
)

# Text by whose tokens two tokenizers are compared: upper case, digits, indentation, other scripts.
_COMPARED_TEXT = "The w1 of 2024:\n    if x >= 10:\n\treturn 'café 東京'  # Don't"


@torch.no_grad()
def write_model(
    weights: Mapping[str, torch.Tensor],
    hf_config: PreTrainedConfig,
    output: Path,
    dtype: str | None,
    max_shard_size: str,
    *,
    like_base: LikeBase | None = None,
    as_stored: Collection[str] = (),
) -> tuple[bool, list[str]]:
    """Write configuration and weights as `save_pretrained` does; return whether there are several
    weight files, and notes on tensors that differ from the base's tensors.

    `save_pretrained` holds all weights in memory, this function the weights of a single file. Both
    take names and conversions of tensors from transformers. Weights are written in `dtype` (None:
    the dtype of the base), except for weights that the architecture keeps in float32, and weights
    named in `as_stored`, whose dtype does not change. `like_base`: gives the tensors the names and
    dtypes of the base's files; None for a model without a base.
    """
    cast_to = None if dtype is None else DTYPES[dtype]
    with torch.device("meta"):
        model: Any = auto_class(hf_config).from_config(hf_config, dtype=cast_to)
        add_mtp_layers(model, hf_config)
    # Rename and convert parameters to the tensors of the files.
    state = _model_state(weights, model, cast_to, output, as_stored)
    stored = stored_names(model, state)
    notes: list[str] = []
    if like_base is not None:
        stored, notes = like_base(stored, state)
    elif mtp_layers(model) is not None:
        # Files have copies of embedding and head for multi-token prediction layers. An export with
        # a base already has the base's copies.
        from bigtrain.models.weights.mtp_names import MtpNames

        mtp_names = MtpNames.find(model)
        weight_names = {module: f"{name}.weight" for name, module in model.named_modules()}
        embedding = stored[weight_names[model.get_input_embeddings()]]
        head = stored.get(weight_names[model.get_output_embeddings()], embedding)  # absent if tied
        stored |= dict.fromkeys(mtp_names.copies("input"), embedding)
        stored |= dict.fromkeys(mtp_names.copies("output"), head)
    elif count := num_counted_mtp_layers(model.config):
        notes = [
            f"{CONFIG_NAME} counts layers for multi-token prediction ({count}), which were not "
            "trained, and no tensor is of them"
        ]
    with unmarked(model.config):
        model.save_pretrained(output, state_dict={})  # configurations, and no weights
    # Split the weights into files, and read and write one file at a time.
    meta_tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in stored.items()
    }
    split = split_torch_state_dict_into_shards(
        meta_tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file in output.glob("model*.safetensors"):
        file.unlink()
    for file_name, names in split.filename_to_tensors.items():
        file_tensors: dict[str, torch.Tensor] = {}
        addresses: set[int] = set()
        for name in names:
            tensor = stored[name]
            tensor = tensor.read() if isinstance(tensor, LazyTensor) else tensor.contiguous()
            # A safetensors file cannot hold a storage under two names.
            is_shared = tensor.data_ptr() in addresses and tensor.numel() > 0
            addresses.add(tensor.data_ptr())
            file_tensors[name] = tensor.clone() if is_shared else tensor
        save_file(file_tensors, output / file_name, metadata={"format": "pt"})
        # safetensors writes with permissions for the owner only, whatever the umask is.
        shutil.copymode(output / CONFIG_NAME, output / file_name)
        del file_tensors  # before the next file is read
    forget_computed()
    if split.is_sharded:
        index = {
            "metadata": {"total_parameters": model.num_parameters(), **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (output / SAFE_WEIGHTS_INDEX_NAME).write_text(text)
    return split.is_sharded, notes


def stored_names(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the files to which `state`, the parameters of `model` by name, is
    converted, by name in the files. Raises ModelError for multi-token prediction layers without
    known names."""
    if mtp_layers(model) is None:
        file_tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(state))
        return file_tensors
    from bigtrain.models.weights.mtp_names import MtpNames

    names = MtpNames.find(model)
    as_layers = {names.as_layer(name): tensor for name, tensor in state.items()}
    reverted = revert_weight_conversion(model, as_layers)
    return {names.stored(name): tensor for name, tensor in reverted.items()}


def _model_state(
    weights: Mapping[str, torch.Tensor],
    model: Any,
    dtype: torch.dtype | None,
    output: Path,
    as_stored: Collection[str],
) -> dict[str, torch.Tensor]:
    """Return `weights` by name in the order of the model's state dict, tied weights once, in the
    dtypes of `write_model`. Raises ModelError if checkpoint and model have different parameters."""
    groups = names_of(model.named_parameters(remove_duplicate=False)).values()
    first_names = {name: group[0] for group in groups for name in group}  # of tied parameters
    expected = set(first_names.values())
    weights_by_name = {first_names.get(name, name): tensor for name, tensor in weights.items()}
    missing = expected - weights_by_name.keys()
    superfluous = weights_by_name.keys() - expected - {name for name, _ in model.named_buffers()}
    wrong_names = sorted(missing) + sorted(superfluous)
    if wrong_names:
        raise ModelError(
            f"{output}: these parameters are in only one of checkpoint and model: "
            f"{', '.join(wrong_names[:5])}"
        )
    # Some parameters stay in float32: patterns of the architecture, and parameters that the
    # architecture computes in float32.
    skipped_names = set(model.all_tied_weights_keys) | names_not_saved(model)
    float32_patterns: list[str] = []
    if dtype is not None:
        float32_patterns += [pattern.replace("*", ".*") for pattern in dtype_plan(model, dtype)]
        float32_patterns += [f"^{re.escape(name)}$" for name in computed_in_float32(model, dtype)]
    uncast_names = {first_names.get(name, name) for name in as_stored}
    state = {}
    for name, meta_tensor in model.state_dict().items():
        first_name = first_names.get(name, name)
        tensor = weights_by_name.get(first_name)
        if name in skipped_names or tensor is None:
            continue
        if tensor.ndim > meta_tensor.ndim:
            tensor = tensor[0]  # checkpoints hold scalars as vectors
        if dtype is None:
            tensor = tensor.detach()
        elif tensor.is_floating_point() and first_name not in uncast_names:
            stays_float32 = any(re.search(pattern, name) for pattern in float32_patterns)
            tensor = tensor.detach().to(torch.float32 if stays_float32 else dtype)
        state[name] = tensor
    return state


def write_tokenizer(
    source: Path, directory: Path, output: Path, base_files: Path | None = None
) -> list[str]:
    """Write the tokenizer of `source` into `directory`, and check that transformers loads the same
    tokenizer from `directory`.

    `output`: the directory's name in errors. `base_files`: a directory with the base's tokenizer
    files; `directory` contains copies, which stay if `source` is the base's tokenizer.
    Returns notes on differences from the base's files. Raises ModelError if the tokenizer cannot be
    loaded, or gives other tokens when loaded next to the model.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = "no such directory" if not source.is_dir() else one_line(error, None)
        raise ModelError(f"tokenizer {source}: cannot be loaded: {reason}") from error
    # Replace the base's files unless they are the run's tokenizer.
    notes: list[str] = []
    difference = _tokenizer_difference(tokenizer, base_files)
    if difference is not None:
        changed_files = {name for name in TOKENIZER_FILES if (directory / name).is_file()}
        for name in changed_files:
            (directory / name).unlink()
        tokenizer.save_pretrained(directory)
        rewrite_tokenizer_config(directory)
        changed_files |= {name for name in TOKENIZER_FILES if (directory / name).is_file()}
        if base_files is not None:
            files = ", ".join(sorted(changed_files))
            notes.append(f"{files}: the tokenizer of the run's data; {difference}")
    elif changed_fields := rewrite_tokenizer_config(directory, is_base=True):
        fields = ", ".join(changed_fields)
        notes.append(f"tokenizer_config.json: written for transformers 4: {fields}")
    # Copy the record of how texts begin and end.
    record, target = source / RECORD_NAME, directory / RECORD_NAME
    if record.is_file():
        is_new = not target.is_file() or target.read_bytes() != record.read_bytes()
        if is_new and base_files is not None:
            notes.append(f"{RECORD_NAME}: how the texts of the run's data begin and end")
        shutil.copyfile(record, target)
    # Next to a config.json, transformers may take the model type's tokenizer class instead.
    loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    if loaded(_COMPARED_TEXT).input_ids != tokenizer(_COMPARED_TEXT).input_ids:
        raise ModelError(
            f"{output}: not written: transformers reads the run's tokenizer ({source}) as a "
            f"{type(loaded).__name__} next to this model, which gives other tokens -> "
            f"{TOKENIZER_REMEDY}"
        )
    return notes


def class_beside(model_type: str, source: Path, texts: Sequence[str]) -> str | None:
    """Return the class as which transformers loads the tokenizer in `source` next to a model of
    `model_type`, if that class gives other tokens for `texts`; None if it gives the same tokens.

    For some model types, transformers ignores the class that the tokenizer's files name.
    """
    class_name = TOKENIZER_MAPPING_NAMES.get(model_type)
    if class_name is None or class_name == "TokenizersBackend":
        return None
    with TemporaryDirectory() as name:
        directory = Path(name)
        for file in TOKENIZER_FILES:
            if (source / file).is_file():
                shutil.copyfile(source / file, directory / file)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        (directory / CONFIG_NAME).write_text(json.dumps({"model_type": model_type}))
        tokenizer_beside = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    compared_texts = [_COMPARED_TEXT, *texts]
    if tokenizer_beside(compared_texts).input_ids == tokenizer(compared_texts).input_ids:
        return None
    return type(tokenizer_beside).__name__


def _tokenizer_difference(tokenizer: Any, base_files: Path | None) -> str | None:
    """Return how `tokenizer` differs from the tokenizer in `base_files`; None if both are equal."""
    if base_files is None or not any((base_files / name).is_file() for name in TOKENIZER_FILES):
        return "the base has none"
    try:
        base = AutoTokenizer.from_pretrained(base_files, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        return f"the base's cannot be loaded ({first_line(error)})"
    for aspect, read in (
        ("class", lambda t: type(t).__name__),
        ("tokens and rules", _tokens_and_rules),
        ("special tokens", lambda t: t.special_tokens_map),
        ("chat template", lambda t: t.chat_template),
    ):
        if read(base) != read(tokenizer):
            return f"its {aspect} differ{'s' if aspect == 'class' else ''} from the base's"
    return None


def _tokens_and_rules(tokenizer: Any) -> Any:
    """Return what decides a tokenizer's tokens: the vocabulary, or all rules of a fast tokenizer
    without padding and truncation, which depend on the last call."""
    if not getattr(tokenizer, "is_fast", False):
        return tokenizer.get_vocab()
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: value for name, value in rules.items() if name not in ("padding", "truncation")}
