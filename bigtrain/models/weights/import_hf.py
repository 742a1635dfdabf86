"""The weights of a Hugging Face directory or hub name, read a rectangle at a time. The loading code
of transformers decides which tensor of which file becomes which parameter: it runs on a model
without memory, with `LazyTensor`s instead of tensors."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import CONFIG_NAME

from bigtrain.errors import ModelError, one_line
from bigtrain.models.configuration import auto_class, num_trained_mtp_layers, scores_samples
from bigtrain.models.layers.multi_token import add_mtp_layers, mtp_layers
from bigtrain.models.layers.parameters import head_parameters, initial_head
from bigtrain.models.transformers_patches import drop_expected_keys, only_errors, without_progress
from bigtrain.models.weights.lazy_tensors import (
    LazyTensor,
    Offsets,
    blocks,
    forget_computed,
    narrowed,
)
from bigtrain.models.weights.weight_files import (
    StoredTensor,
    UnreadableError,
    find_file,
    stored_tensors_of,
    weight_files,
)
from bigtrain.models.weights.weight_paths import REWRITE
from bigtrain.system.storage.local_path import local_path

_SHOWN = 5
_UNKNOWN = ": the model has none"


@dataclass(frozen=True)
class Weights:
    """The weights in a model's files.

    setting: key and value that named the weights, for errors. tensors: tensors of the model by
    every name in the model; tied parameters are the same tensor. files: files with the weights.
    stored: tensors of the files by name in the files. copies: names of stored tensors that repeat a
    stored tensor (tied weights), with the name of the repeated tensor.
    """

    setting: str
    tensors: dict[str, LazyTensor]
    files: tuple[Path, ...]
    stored: Mapping[str, LazyTensor] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)

    def sources(self) -> dict[str, list[str]]:
        """Return the names of the stored tensors that each tensor of the model is made of."""
        return {name: _stored_names(tensor) for name, tensor in self.tensors.items()}

    def unused(self) -> dict[str, LazyTensor]:
        """Return stored tensors that no tensor of the model is made of, such as layers for
        multi-token prediction, which transformers ignores."""
        source_names = {name for names in self.sources().values() for name in names}
        used_names = source_names | self.copies.keys()
        return {name: tensor for name, tensor in self.stored.items() if name not in used_names}

    def fill(
        self, name: str, offsets: Offsets, out: torch.Tensor, *, is_buffer: bool = False
    ) -> None:
        """Read the rectangle of parameter or buffer `name` that starts at `offsets` into `out` of
        any dtype, device and strides. Raises ModelError for a file that cannot be read, and for a
        parameter with values that are not finite."""
        tensor = self.tensors[name]
        if tensor.ndim == 0:
            offsets, out = (), out.view(())
        try:
            tensor.fill(offsets, out)
        except UnreadableError as error:
            raise ModelError(f"{self.setting}: {error}") from error
        if is_buffer:
            return
        # Extremes need no memory: a sum in float64 would copy. With a NaN, both extremes are NaN.
        views = (narrowed(out, *block) for block in blocks(tuple(out.shape), out.itemsize))
        extremes = (value for view in views if view.numel() for value in torch.aminmax(view))
        if not all(math.isfinite(value) for value in extremes):
            stored_names = ", ".join(map(str, tensor.origin.sources())) or name
            raise ModelError(
                f"{self.setting}: {stored_names} holds numbers that are not finite (NaN or "
                "infinity), with which every loss is NaN -> take a base without them"
            )

    @torch.no_grad()
    def fill_model(self, model: PreTrainedModel) -> None:
        """Fill a full model on this rank. Raises ModelError as `fill`."""
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in self.tensors:
                is_buffer = not isinstance(tensor, torch.nn.Parameter)
                self.fill(name, (0,) * tensor.ndim, tensor.data, is_buffer=is_buffer)
        forget_computed()


def find_weights(
    source: str, hf_config: PreTrainedConfig, key: str = "model.path", *, seed: int = 0
) -> Weights:
    """Return the lazy weights in `source` for a model with configuration `hf_config`.

    `source`: a directory, or the name of a model in the hub's cache or on the hub. `key`: the
    setting that named `source`, for errors. `seed`: for the initial head of a model that scores
    samples, if the files contain a causal LM, whose head is then dropped. Reads only headers. Not
    collective: the ranks' results are equal. Raises ModelError for files that are missing or
    corrupt, and for tensors that are missing, unknown, or have another shape or dtype than the
    model's tensors.
    """
    setting = f"{key} = {source!r}"
    if source.startswith((".", "/", "~")) and not Path(source).exists():
        raise ModelError(f"{setting}: no such directory -> restore it, or name where it is now")
    try:
        files = tuple(weight_files(local_path(source), hf_config))
        origins: dict[str, _Origin] = dict(stored_tensors_of(files))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(f"{setting}: {one_line(error, None)}") from error
    with torch.device("meta"):
        model: Any = auto_class(hf_config).from_config(
            copy.deepcopy(hf_config), dtype=torch.float32
        )
    # A base without a score head gets an initial score head instead of the token head.
    if scores_samples(hf_config) and not origins.keys() & set(head_parameters(model)):
        with torch.device("meta"):
            causal_lm: Any = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))
        _load(causal_lm, _lazy_tensors(origins), origins)
        heads = map(causal_lm.get_parameter, head_parameters(causal_lm))
        token_heads = [head for head in heads if isinstance(head, LazyTensor)]  # none if tied
        for name in {name for head in token_heads for name in _stored_names(head)}:
            del origins[name]
        for name, tensor in initial_head(model, seed):
            origins[name] = _InitialTensor(name, tensor)
    lazy_tensors = _lazy_tensors(origins)
    mtp_copies, problems = _load_with_mtp_layers(model, hf_config, lazy_tensors, origins)
    if problems and (method := _quantization_method(source)) is not None:
        problems.append(
            f"its config.json has quantization_config.quant_method = {method!r}: quantized weights "
            "are not trained -> convert them to bfloat16 first, or take the unquantized model"
        )
    if problems:
        raise ModelError(_mismatch(setting, source, hf_config, problems))
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    # The files may have both of two tied parameters (the target is then a copy), or one of them.
    copies: dict[str, str] = {}
    for target, origin in model.all_tied_weights_keys.items():
        tied = [tensors[n] for n in (target, origin) if isinstance(tensors[n], LazyTensor)]
        if len(tied) == 2:
            target_sources, origin_sources = map(_stored_names, tied)
            # Both have the same source if transformers tied the loaded parameters.
            if target_sources != origin_sources and len(target_sources) == len(origin_sources) == 1:
                copies[target_sources[0]] = origin_sources[0]
        tensors[target] = tensors[origin] = tied[-1]
    for stored_name, parameter_name in mtp_copies.items():
        parameter_sources = _stored_names(tensors[parameter_name])
        if len(parameter_sources) == 1:
            copies[stored_name] = parameter_sources[0]
    loaded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, LazyTensor)}
    stored = {
        name: tensor
        for name, tensor in lazy_tensors.items()
        if isinstance(origins[name], StoredTensor)
    }
    return Weights(setting, loaded, files, stored, copies)


def _lazy_tensors(origins: Mapping[str, _Origin]) -> dict[str, LazyTensor]:
    """Return tensors without memory that read from `origins`, by name in the files."""
    return {
        name: LazyTensor(origin.shape, origin.dtype, origin) for name, origin in origins.items()
    }


def _mismatch(
    setting: str, source: str, hf_config: PreTrainedConfig, problems: Sequence[str]
) -> str:
    """Return the error text for files whose tensors do not fit the model: the first `problems`."""
    lines = [*problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"and {len(problems) - _SHOWN} more, the last: {problems[-1]}")
    if all(text.endswith(_UNKNOWN) for text in problems):  # only superfluous tensors
        lines.append(
            "-> if the model does not need them, write it again without them: "
            f"{REWRITE.format(source=source)}"
        )
    head = "with a score head" if scores_samples(hf_config) else "causal LM"
    return (
        f"{setting}: its weights are not those of a {hf_config.model_type} {head} of this "
        "configuration:\n" + "\n".join(f"  {text}" for text in lines)
    )


def _load_with_mtp_layers(
    model: Any,
    hf_config: PreTrainedConfig,
    lazy_tensors: Mapping[str, LazyTensor],
    origins: Mapping[str, _Origin],
) -> tuple[dict[str, str], list[str]]:
    """Load `lazy_tensors` into `model`. If a run with `hf_config` trains layers for multi-token
    prediction, add these layers and load their tensors, which are otherwise unused. Return the
    names in files of tensors that repeat a parameter of the model, with the parameter's name, and
    the problems."""
    trains = num_trained_mtp_layers(hf_config) > 0
    from bigtrain.models.weights.mtp_names import MtpNames, load_mtp_layers

    names = MtpNames.find(model) if trains else MtpNames.find_known(model)
    if names is None:
        return {}, _load(model, lazy_tensors, origins)
    decoder_tensors = {
        name: tensor for name, tensor in lazy_tensors.items() if not names.is_one(name)
    }
    problems = _load(model, decoder_tensors, origins)
    if not trains:
        return {}, problems
    copies, mtp_tensors = {}, {}
    for name in lazy_tensors.keys() - decoder_tensors.keys():
        if table := names.repeated(name):  # "input" or "output"
            embedding = getattr(model, f"get_{table}_embeddings")()
            embedding_name = next(n for n, m in model.named_modules() if m is embedding)
            copies[name] = f"{embedding_name}.weight"
        else:
            mtp_tensors[name] = lazy_tensors[name]
    with torch.device("meta"):
        add_mtp_layers(model, hf_config)
    layers = mtp_layers(model)
    assert layers is not None
    return copies, [*problems, *load_mtp_layers(model, layers, mtp_tensors)]


def _stored_names(tensor: LazyTensor) -> list[str]:
    """Return the names in files of the tensors that `tensor` is made of."""
    return [leaf.name for leaf in tensor.origin.sources() if isinstance(leaf, StoredTensor)]


def _quantization_method(source: str) -> str | None:
    """Return the quantization method in the config.json of `source`; None without one."""
    path = find_file(local_path(source), CONFIG_NAME)
    with suppress(OSError, ValueError, LookupError, AttributeError):
        if path is not None:
            method = json.loads(path.read_text())["quantization_config"].get("quant_method")
            return None if method is None else str(method)
    return None


def _load(
    model: Any, lazy_tensors: Mapping[str, LazyTensor], origins: Mapping[str, _Origin]
) -> list[str]:
    """Let transformers load `lazy_tensors` into `model`; returns the problems."""
    settings = LoadStateDictConfig(
        dtype=torch.float32,
        device_map={"": "cpu"},
        weight_mapping=get_model_conversion_mapping(model),
    )
    with quiet_transformers():
        info, _ = convert_and_load_state_dict_in_model(
            model, dict(lazy_tensors), settings, disk_offload_index=None
        )
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [
        f"{_describe(name, origins)} has shape {list(stored_shape)}, the model's {name} "
        f"{list(model_shape)}"
        for name, stored_shape, model_shape in sorted(info.mismatched_keys)
    ]
    problems += [
        f"{name}: cannot be made of the tensors there: {text.strip().splitlines()[-1]}"
        for name, text in sorted(info.conversion_errors.items())
    ]
    # Files may have either name of a tied parameter, or both with equal values.
    for tied_name, source_name in model.all_tied_weights_keys.items():
        missing_names = {tied_name, source_name} & info.missing_keys
        if len(missing_names) == 1:
            info.missing_keys -= missing_names
        elif not missing_names and not torch.equal(
            model.get_parameter(tied_name), model.get_parameter(source_name)
        ):
            problems.append(
                f"{_describe(tied_name, origins)} and {_describe(source_name, origins)} are tied "
                "in this configuration and hold different values -> set tie_word_embeddings: false"
            )
    # Drop the keys that the class expects to be missing or unexpected, except for parameters that
    # it would initialize randomly: pretrained weights must be complete.
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    missing_parameters = info.missing_keys & parameter_names
    drop_expected_keys(model, info)
    info.missing_keys |= missing_parameters
    reported_names = {*info.conversion_errors, *(name for name, *_ in info.mismatched_keys)}
    text = model.config.get_text_config()  # some classes do not declare whether they tie
    head, remedies = model.get_output_embeddings(), {}
    if not getattr(text, "tie_word_embeddings", False):
        tie = " -> set tie_word_embeddings: true in config.json, if the embedding is the output too"
        remedies = {f"{name}.weight": tie for name, m in model.named_modules() if m is head}
    problems += [
        f"no tensor there is the model's {name} {shapes[name]}{remedies.get(name, '')}"
        for name in sorted(info.missing_keys - reported_names)
    ]
    problems += [f"{_describe(n, origins)}{_UNKNOWN}" for n in sorted(info.unexpected_keys)]
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, LazyTensor) and tensor.is_floating_point():
            problems += [
                f"{source} is {str(source.dtype).removeprefix('torch.')}, the model's {name} needs "
                "float64, float32, bfloat16 or float16"
                for source in tensor.origin.sources()
                # Integers, and floating point of 8 bits.
                if isinstance(source, StoredTensor) and not source.is_plain
            ]
    return problems


def _describe(name: str, origins: Mapping[str, _Origin]) -> str:
    """Return a text for the stored tensor that becomes parameter `name`, for errors: a guess from
    the names, which differ in prefixes at most."""
    candidates = [
        origin
        for stored_name, origin in origins.items()
        if stored_name == name
        or stored_name.endswith(f".{name}")
        or name.endswith(f".{stored_name}")
    ]
    return str(candidates[0]) if candidates else f"what becomes {name}"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars, and warnings about problems that are errors here."""
    with only_errors("transformers"), without_progress():
        yield


# --- files ---


@dataclass(frozen=True)
class _InitialTensor:
    """An initial value of a parameter that no file contains."""

    name: str
    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __str__(self) -> str:
        return self.name

    def fill(self, offsets: Offsets, out: torch.Tensor) -> None:
        out.copy_(narrowed(self.values, offsets, tuple(out.shape)))

    def sources(self) -> Iterator[object]:
        yield self


_Origin = StoredTensor | _InitialTensor
