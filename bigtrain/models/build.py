"""Building any Hugging Face causal LM, or its architecture with a score head, with random or
pretrained weights, full or partitioned (by a `Partitioning` of the engine, since deepspeed is not
imported here)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

from bigtrain.errors import ModelError
from bigtrain.models.configuration import auto_class, scores_samples
from bigtrain.models.layers.multi_token import add_mtp_layers
from bigtrain.models.layers.parameters import freeze, freeze_named, seed_of
from bigtrain.models.layers.plans import NO_FLOAT8, Float8Plan
from bigtrain.models.torch_patches import has_buffers_alone, shadowed
from bigtrain.models.transformers_patches import (
    computed_in_float32,
    initialize_module,
    mark_initialized,
    modules_of_experts,
)
from bigtrain.models.weights.import_hf import Weights, find_weights
from bigtrain.models.weights.lazy_tensors import allocate
from bigtrain.settings.run_config import AdaptersSection, ModelSection


@dataclass(frozen=True)
class Partitioning:
    """How parameters are split over ranks while the model is built (ZeRO-3).

    construct: context in which every new parameter is partitioned as soon as its module exists.
    gather: context in which the given parameters are full; what the rank with `writes_weights`
        writes to them is on every rank afterwards. Collective over all ranks.
    writes_weights: whether this rank's values count inside `gather`.
    prepare: called once with the full constructed model, before weights are filled in; it may
        remove parts. Then `gather` also shards full parameters on exit.
    """

    construct: Callable[[], AbstractContextManager[Any]]
    gather: Callable[[list[nn.Parameter]], AbstractContextManager[Any]]
    writes_weights: bool
    prepare: Callable[[PreTrainedModel], None] | None = None


WHOLE = Partitioning(construct=nullcontext, gather=lambda _: nullcontext(), writes_weights=True)


def build_model(
    section: ModelSection,
    hf_config: PreTrainedConfig,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    partitioning: Partitioning = WHOLE,
    weights: Literal["read", "left"] = "read",
    adapters: AdaptersSection | None = None,
    run_dtype: torch.dtype | None = None,
    untrained: Sequence[str] = (),
    float8: Float8Plan = NO_FLOAT8,
) -> PreTrainedModel:
    """Return the run's model on the CPU (partitioned models: where `partitioning` puts them).

    Random weights depend only on `seed` and parameter names: not on the dtype (beyond rounding),
    world size, partitioning or device. Pretrained weights (`section.path`) are read into a full
    model (`weights`: read); a partitioned model is filled by its engine and uninitialized until
    then (left). `adapters`: added to the frozen weights with initial values, full on every rank
    until the engine takes over. Layers in 4 bits, if `adapters` has them, are empty until
    `read_quantized` fills them; `run_dtype` (default: `dtype`): the dtype in which they compute.
    `untrained`: names of parameters that are frozen in addition to ``model.frozen``. `float8`:
    layers that compute in float8. Collective over all ranks when partitioned. Raises ModelError for
    a model that cannot be built, and as `find_weights`.
    """
    # The look-ups import the model class. A class that is imported while DeepSpeed partitions
    # constructed models (0.19.8, zero/partition_parameters.py) loses the constructor that its
    # decorators made.
    MODEL_FOR_CAUSAL_LM_MAPPING.get(type(hf_config), None)
    if scores_samples(hf_config):
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(hf_config), None)
    # transformers and the lines below change the configuration, so they get a copy.
    model = _construct(copy.deepcopy(hf_config), section, seed, dtype, partitioning)
    if partitioning is WHOLE:
        for name in computed_in_float32(model, dtype):
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.float()
    # Checkpointing counts layers, so it comes before layers are removed.
    _set_gradient_checkpointing(model, section)
    freeze(model, section.frozen)
    freeze_named(model, untrained)
    if adapters is not None:
        from bigtrain.models.layers.adapters import add_adapters
        from bigtrain.models.layers.recurrence.functions import call_adapted_projections
        from bigtrain.models.weights.quantized import (
            fill_with_zeros,
            finish_layers,
            quantize_layers,
        )

        if adapters.is_quantized:
            quantize_layers(model, adapters, run_dtype or dtype)
            if adapters.dora:  # peft computes norms of the weights, which are still empty
                fill_with_zeros(model)
        add_adapters(model, adapters, lambda layer_name: seed_of(seed, layer_name))
        finish_layers(model, adapters)
        call_adapted_projections(model)
    if float8.recipe != "none":
        from bigtrain.models.layers.float8 import install_float8

        install_float8(model, float8)
    if partitioning.prepare is not None:
        partitioning.prepare(model)
    if section.path is None:
        initialize_weights(model, seed, partitioning)
    else:
        _settle_shapes_and_buffers(model, partitioning)
        if weights == "read":
            find_weights(section.path, hf_config, seed=seed).fill_model(model)
    fit_grouped_products(model)
    model.config.use_cache = False
    return model


def fit_grouped_products(model: PreTrainedModel) -> None:
    """Let the experts of `model`, if there are any, be computed by products that take their
    width."""
    if any(modules_of_experts(model)):
        from bigtrain.models.parallel.grouped_experts import fit_experts

        fit_experts(model)


@torch.no_grad()
def _settle_shapes_and_buffers(model: PreTrainedModel, partitioning: Partitioning) -> None:
    """Shard full parameters, and fill the buffers that are not in files."""
    if partitioning.prepare is not None:
        for parameter in model.parameters():
            with partitioning.gather([parameter]):
                pass  # the exit shards a full parameter
    for _, module, pretrained_model in _children_first(model, "", model, True):
        if has_buffers_alone(module):
            initialize_module(pretrained_model, module)


@torch.no_grad()
def read_in_turn(model: PreTrainedModel, weights: Weights) -> None:
    """Make a model that was built without weights read a layer's weights when the layer is called,
    and free the weights afterwards: a forward pass holds a single layer's weights at a time."""

    def read(name: str, parameter: nn.Parameter) -> None:
        parameter.data = allocate(tuple(weights.tensors[name].shape), parameter.dtype)
        weights.fill(name, (0,) * parameter.ndim, parameter.data)

    def free(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.data = parameter.data.new_empty(0)

    # Weights of a layer are read by a hook of the layer, weights outside the layers at once.
    for unit in _units(model, "", model):
        dot = f"{unit.name}." if unit.name else ""
        parameters = {
            dot + name: parameter
            for name, parameter in unit.module.named_parameters(recurse=unit.has_subtree)
        }
        if not unit.has_subtree:
            for name, parameter in parameters.items():
                read(name, parameter)
            continue

        # The default binds the parameters of this pass of the loop.
        def read_layer(
            _: nn.Module, __: object, parameters: dict[str, nn.Parameter] = parameters
        ) -> None:
            for name, parameter in parameters.items():
                read(name, parameter)

        free(unit.module)
        unit.module.register_forward_pre_hook(read_layer)
        unit.module.register_forward_hook(lambda module, *_: free(module))
    for name, buffer in model.named_buffers():
        if name in weights.tensors:
            weights.fill(name, (0,) * buffer.ndim, buffer, is_buffer=True)


def empty_model(hf_config: PreTrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Return the model on the meta device, constructed in `dtype` (default: the configuration's
    dtype): names and shapes without memory."""
    options = {} if dtype is None else {"dtype": dtype}
    with torch.device("meta"):
        model: PreTrainedModel = auto_class(hf_config).from_config(
            copy.deepcopy(hf_config), **options
        )
        add_mtp_layers(model, hf_config)
    return model


def _construct(
    hf_config: PreTrainedConfig,
    section: ModelSection,
    seed: int,
    dtype: torch.dtype,
    partitioning: Partitioning,
) -> PreTrainedModel:
    """Return the model with tied but uninitialized parameters, in `dtype`, and with stored buffers
    in float32. Raises ModelError for a model or attention that transformers does not build."""
    with torch.random.fork_rng(devices=[]), no_init_weights(), partitioning.construct():
        # Few constructors draw random numbers; nearly all are drawn by `_init_weights`.
        torch.manual_seed(seed)
        # With None, transformers chooses the attention.
        attention = None if section.attention == "auto" else section.attention
        try:
            model = auto_class(hf_config).from_config(
                hf_config, dtype=dtype, attn_implementation=attention
            )
        except (ValueError, ImportError) as error:
            key = "model.config" if section.path is None else f"model.path = {section.path!r}"
            text = str(error).strip() or type(error).__name__
            is_about_attention = "attention" in text.lower() or "flash" in text.lower()
            if section.attention in ("auto", "eager") or not is_about_attention:
                raise ModelError(f"{key}: {text}") from error
            first_sentence = text.split(" yet. ", 1)[0]
            alternative = "eager" if section.attention == "sdpa" else "sdpa"
            raise ModelError(
                f"model.attention = {section.attention!r}: {first_sentence} -> set "
                f"model.attention={alternative}"
            ) from error
        add_mtp_layers(model, hf_config)
    if scores_samples(hf_config):
        # Padding follows a row's last token, so padding gets no gradient. The padding token may
        # occur in conversations, where its embedding is trained like every embedding.
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None
    # no_init_weights also skips the tying that post_init would do.
    model.tie_weights()
    assert isinstance(model, PreTrainedModel)
    # DeepSpeed does not cast buffers. In float32 at every ZeRO stage, stored buffers have equal
    # values in all computations and exports.
    stored_names = model.state_dict(keep_vars=True).keys()
    for name, buffer in list(model.named_buffers()):
        if name in stored_names and buffer.is_floating_point() and buffer.itemsize < 4:
            prefix, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(prefix), leaf, buffer.float())
    return model


def _set_gradient_checkpointing(model: PreTrainedModel, section: ModelSection) -> None:
    """Checkpoint every layer ("full"), or every n-th layer (a number), as `section` says."""
    if section.gradient_checkpointing == "none":
        return
    interval = 1 if section.gradient_checkpointing == "full" else section.gradient_checkpointing
    try:
        model.activation_checkpointing_enable({"use_reentrant": False}, every_n_layers=interval)
    except ValueError as error:
        raise ModelError(
            f"model.gradient_checkpointing = {section.gradient_checkpointing!r}: {error}"
        ) from error


@torch.no_grad()
def initialize_weights(
    model: PreTrainedModel, seed: int, partitioning: Partitioning = WHOLE
) -> None:
    """Initialize every parameter by the model's rules, from a random stream per module.

    The values come from the architecture's `_init_weights`, called in transformers' order (children
    before parents), but every module draws from a CPU generator seeded with (seed, module name), in
    float32. So values do not depend on ZeRO stage, world size or device, and a single layer at a
    time is full. Collective over all ranks when partitioned.
    """
    initialized_ids: set[int] = set()
    for unit in _units(model, "", model):
        parameters = [
            parameter
            for parameter in unit.module.parameters(recurse=unit.has_subtree)
            if id(parameter) not in initialized_ids
        ]
        with partitioning.gather(parameters):
            if partitioning.writes_weights:
                with _float32_on_cpu(parameters), torch.random.fork_rng(devices=[]):
                    for name, module, pretrained_model in _children_first(
                        unit.module, unit.name, unit.pretrained_model, unit.has_subtree
                    ):
                        if getattr(module, "is_hollow", False):
                            continue
                        torch.manual_seed(seed_of(seed, name))
                        with _ignored_stage_layers(module):
                            initialize_module(pretrained_model, module)
        for parameter in parameters:
            # transformers' init functions skip flagged tensors: a tied weight, or a layer that a
            # container's rule would initialize again when it is no longer full.
            mark_initialized(parameter)
            initialized_ids.add(id(parameter))


class _IgnoredTensors:
    """Stands for a module or parameter of a layer on another stage: transformers' rules of
    initialization skip it because of its flag (transformers/initialization.py)."""

    _is_hf_initialized = True

    def __getattr__(self, name: str) -> _IgnoredTensors:
        return self


@contextmanager
def _ignored_stage_layers(module: nn.Module) -> Iterator[None]:
    """Inside, placeholders of layers on other stages have modules and parameters of any name: a
    rule for `module` may initialize tensors of its layers (Falcon-H1)."""
    with ExitStack() as undo:
        for layer in module.modules():
            if layer is not module and getattr(layer, "is_placeholder", False):
                undo.enter_context(shadowed(layer, {"absent": _IgnoredTensors()}))
        yield


class _Unit(NamedTuple):
    """A module whose parameters are full together. pretrained_model: the innermost that contains
    the module. has_subtree: whether the unit includes the parameters of the module's children."""

    name: str
    module: nn.Module
    pretrained_model: PreTrainedModel
    has_subtree: bool


def _units(module: nn.Module, name: str, pretrained_model: PreTrainedModel) -> Iterator[_Unit]:
    """Yield a unit with subtree for every layer, and a unit without for every module that contains
    lists of layers."""
    if isinstance(module, PreTrainedModel):
        pretrained_model = module
    if not any(isinstance(child, nn.ModuleList) for child in module.modules()):
        yield _Unit(name, module, pretrained_model, has_subtree=True)
        return
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        yield from _units(child, full_name, pretrained_model)
    yield _Unit(name, module, pretrained_model, has_subtree=False)


def _children_first(
    module: nn.Module, name: str, pretrained_model: PreTrainedModel, recurse: bool
) -> Iterator[tuple[str, nn.Module, PreTrainedModel]]:
    """Yield `module`, and if `recurse` every module below: name, module, and the innermost
    pretrained model that contains the module. Children come before their parents."""
    if isinstance(module, PreTrainedModel):
        pretrained_model = module
    if recurse:
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            yield from _children_first(child, full_name, pretrained_model, True)
    yield name, module, pretrained_model


@contextmanager
def _float32_on_cpu(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Replace the data of parameters by float32 copies on the CPU; write the copies back on
    exit."""
    originals = [parameter.data for parameter in parameters]
    for parameter, original in zip(parameters, originals, strict=True):
        parameter.data = original.to(device="cpu", dtype=torch.float32, copy=True)
    try:
        yield
    finally:
        for parameter, original in zip(parameters, originals, strict=True):
            original.copy_(parameter.data)
            parameter.data = original
