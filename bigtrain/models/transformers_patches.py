"""Private parts of transformers (5.23) and peft (0.21) that models need, each with the reason.
`tests/unit/models/test_transformers_patches.py` has a contract test for each. Private parts that
tokenizers need are in `bigtrain.data.tokenizers.transformers_patches`."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, masking_utils
from transformers.distributed.parallel_utils import _get_parameter_plan
from transformers.integrations import moe
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing
from transformers.utils.logging import (
    disable_progress_bar,
    enable_progress_bar,
    is_progress_bar_enabled,
)

from bigtrain.models.torch_patches import shadow, shadowed

Checkpoint = Callable[..., Any]
Product = Callable[..., torch.Tensor]

# --- weights ---


def initialize_module(owner: PreTrainedModel, module: nn.Module) -> None:
    """Initialize the parameters and buffers of `module` itself by its model's rules. transformers
    calls `_init_weights` (modeling_utils.py:2295, and every architecture's own) from only
    `init_weights` and `from_pretrained`, for the full model at once."""
    owner._init_weights(module)


def mark_initialized(tensor: torch.Tensor) -> None:
    """Make transformers' init functions skip `tensor` (initialization.py; 5.23)."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]


def names_not_saved(model: PreTrainedModel) -> set[str]:
    """Return names in the state dict of `model` that `save_pretrained` skips, except tied names.
    `_keys_to_ignore_on_save` of the class, and by modeling_utils.py:1310 of submodules."""
    return set(model._keys_to_ignore_on_save or ())


def ignored_keys(model: PreTrainedModel) -> list[str]:
    """Return patterns of names in files that the class of `model` does not load, such as those of
    layers for multi-token prediction. `_keys_to_ignore_on_load_unexpected` (modeling_utils.py:1296)
    of a class or a model, a list or a set; transformers' own `MtpModel` reads it."""
    return sorted(model._keys_to_ignore_on_load_unexpected or ())


def dtype_plan(model: PreTrainedModel, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
    """Return patterns of names that `from_pretrained` keeps in another dtype when it loads in
    `dtype`. modeling_utils.py:3835, `_get_dtype_plan`."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    return plan


def computed_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> list[str]:
    """Return names of the parameters of `model`, constructed in `dtype`, that the architecture
    keeps in float32: parameters that match `dtype_plan` as in `build_glob_alternation`
    (core_model_loading.py), and parameters that a constructor makes in float32 whatever the default
    is, which `from_pretrained` does not change."""
    if dtype == torch.float32:
        return []
    patterns = [pattern.replace("*", ".*") for pattern in dtype_plan(model, dtype)]
    names = []
    for name, parameter in model.named_parameters():
        is_planned = any(re.search(pattern, name) for pattern in patterns)
        if parameter.dtype == torch.float32 or is_planned:
            names.append(name)
    return names


def kept_in_float32(model: PreTrainedModel) -> list[str]:
    """Return parts of names of modules that transformers does not quantize, because 16 bits are too
    few. `_keep_in_fp32_modules` (modeling_utils.py:1302), which quantizer_bnb_4bit.py skips."""
    return sorted(model._keep_in_fp32_modules or ())


def drop_expected_keys(model: PreTrainedModel, loading_info: Any) -> None:
    """Remove keys that a class expects from the missing and unexpected keys of `loading_info`. As
    `from_pretrained` does: modeling_utils.py:4916, `_adjust_missing_and_unexpected_keys`."""
    model._adjust_missing_and_unexpected_keys(loading_info)


@contextmanager
def only_errors(logger: str) -> Iterator[None]:
    """Hide the messages of a library's logger below errors."""
    log = logging.getLogger(logger)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def without_progress() -> Iterator[None]:
    """Hide transformers' progress bars; may be nested."""
    were_shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bar()


# --- parallelism ---


def expanded_plan(model: PreTrainedModel, plan: dict[str, str]) -> dict[str, str]:
    """Return `plan` by concrete name of every module and parameter, parameters before their module.
    `_expand_parallel_plan` (distributed/mixin.py:211), so that patterns match as in
    transformers."""
    expanded: dict[str, str] = model._expand_parallel_plan(plan)
    return expanded


def style_of(plan: dict[str, str], name: str, *, is_parameter: bool) -> str | None:
    """Return the style in `plan`, by its patterns, of a name that the model may not have; None
    without one (`_get_parameter_plan`, distributed/parallel_utils.py:49)."""
    style: str | None = _get_parameter_plan(name, plan, is_weight=is_parameter)
    return style


def modules_of_experts(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules whose experts may be computed by grouped products. The decorator
    `use_experts_implementation` sets `_is_expert_parallel` on them (integrations/moe.py:629)."""
    return (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))


def grouped_experts(name: str, product: Callable[[Product], Product]) -> None:
    """Register `name` for `set_experts_implementation`: grouped experts with transformers' grouped
    product wrapped by `product`.

    `grouped_mm_experts_forward` (integrations/moe.py:344) multiplies by `_grouped_mm` in that
    module (rows [n, in], stacks [experts, in, out], ends of the experts' rows [experts]). This
    function copies it with other globals; the module does not change.
    """
    linear = _with_globals(moe._grouped_linear, _grouped_mm=product(moe._grouped_mm))
    forward = _with_globals(moe.grouped_mm_experts_forward, _grouped_linear=linear)
    moe.ALL_EXPERTS_FUNCTIONS.register(name, forward)


def takes_any_width(rows: torch.Tensor, stacks: torch.Tensor, ends: torch.Tensor) -> bool:
    """Return whether transformers computes this grouped product without torch's, expert by expert.
    `_can_use_grouped_mm` (integrations/moe.py:250): on old GPUs and within torch.compile."""
    return not moe._can_use_grouped_mm(rows, stacks, ends)


def functions_called(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the functions out of `names` that the forward method of `module` calls, as functions
    of the file of its class or as methods. So layers call the functions of
    `bigtrain.models.layers.recurrence.functions`, which may be CUDA kernels
    (integrations/hub_kernels.py:990, `use_kernel_func_from_hub_with_fallback`). Empty for layers
    that are recomputed as a unit, whose forward method is wrapped (modeling_layers.py:85)."""
    forward: Any = inspect.unwrap(type(module).forward)
    if isinstance(module, GradientCheckpointingLayer) or not hasattr(forward, "__code__"):
        return set()
    referenced_names = set(forward.__code__.co_names).intersection(names)
    return {
        name
        for name in referenced_names
        if callable(forward.__globals__.get(name)) or callable(getattr(type(module), name, None))
    }


def uses_kernel(function: Callable[..., Any]) -> bool:
    """Return whether `function` of an architecture's file, or a method of a layer, may be computed
    by a kernel here, not by the torch code of the file. A function that may be one has a wrapper
    (integrations/hub_kernels.py:1028), whose variable says whether a kernel is installed."""
    if not hasattr(function, "__wrapped__"):
        return False
    wrapper_variables = inspect.getclosurevars(function).nonlocals
    return bool(wrapper_variables.get("is_new_implementation", True))


def with_functions(module: nn.Module, replaced: Mapping[str, Callable[[Any], Any]]) -> Any:
    """Return the forward method of `module` with other functions of its file. replaced: by name,
    returns the new function for the function of the file; names of methods are skipped. The result
    lacks the decorators of the class's method: accelerate's hooks (integrations/accelerate.py:987,
    `force_accelerate_hooks`), which bigtrain does not use."""
    forward: Any = inspect.unwrap(type(module).forward)
    functions = {
        name: replace(forward.__globals__[name])
        for name, replace in replaced.items()
        if name in forward.__globals__
    }
    return MethodType(_with_globals(forward, **functions), module)


def _with_globals(function: Any, **names: Any) -> Any:
    """Return a copy of `function` with other globals."""
    # When dynamo resumes a copy after a graph, it looks names up in the module `__name__`, not in
    # the copy's globals (torch/_dynamo/symbolic_convert.py, `get_globals_source_and_value`).
    copied_globals = {**function.__globals__, **names}
    copied_globals.pop("__name__", None)
    copied = FunctionType(
        function.__code__,
        copied_globals,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


# --- forward passes ---


def attention_name(model: PreTrainedModel) -> str:
    """Return the name of the model's attention in transformers' registry, whether chosen or given.
    Only `set_attn_implementation` is public; it sets ``config._attn_implementation``
    (configuration_utils.py:595)."""
    return str(model.config._attn_implementation)


def follow_implementations(follower: PreTrainedModel, model: PreTrainedModel) -> None:
    """Let `follower`, whose configuration is a copy of the configuration of `model`, compute
    attention and experts as `model` does now. Every layer reads the names of the implementations
    (configuration_utils.py:595, :617); the public setters look for kernels at every call."""
    for name in ("_attn_implementation", "_experts_implementation"):
        implementation = getattr(model.config.get_text_config(), name, None)
        if getattr(follower.config, name, None) != implementation:
            setattr(follower.config, name, implementation)


def attention_classes(model: PreTrainedModel) -> tuple[type, ...]:
    """Return the classes of the modules whose attention weights can be asked for; none if the
    architecture declares none."""
    return _recorded(model.base_model, "attentions")


def recorded_classes(model: nn.Module, output: str) -> tuple[type, ...]:
    """Return the classes whose outputs any model in `model` records as `output`, such as
    router_logits."""
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    return tuple(
        {recorded_class for submodel in models for recorded_class in _recorded(submodel, output)}
    )


def _recorded(model: Any, output: str) -> tuple[type, ...]:
    """Return `_can_record_outputs` of a model's class: classes or `OutputRecorder`s by output name
    (utils/output_capturing.py:58)."""
    declared: Any = getattr(model, "_can_record_outputs", None) or {}
    classes = declared.get(output, ())
    recorded: list[Any] = list(classes) if isinstance(classes, list | tuple) else [classes]
    return tuple(getattr(item, "target_class", item) for item in recorded)


def replace_checkpoint(layer: Any, wrap: Callable[[Checkpoint], Checkpoint]) -> None:
    """Wrap the checkpoint function of a checkpointed layer by `wrap`. The layer's class calls
    `_gradient_checkpointing_func` (modeling_layers.py:120), which `gradient_checkpointing_enable`
    sets on every layer; it takes arguments of torch's function and no other function."""
    layer._gradient_checkpointing_func = wrap(layer._gradient_checkpointing_func)


def forward_without_recomputation(layer: Any) -> Callable[..., Any] | None:
    """Return the forward method of a `layer` without the recomputation that transformers 5.23 puts
    inside it (modeling_layers.py:86, `forward_with_checkpointing`); None of an older transformers,
    whose layers recompute around their forward method."""
    forward: Any = type(layer).forward
    if forward.__code__.co_name != "forward_with_checkpointing":
        return None
    bound: Callable[..., Any] = forward.__wrapped__.__get__(layer)
    return bound


def recomputed(layer: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` of `layer` with the recomputation of `forward_with_checkpointing`
    (modeling_layers.py:120) around it: with `_gradient_checkpointing_func` while the layer
    trains, if `gradient_checkpointing` is on."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if layer.gradient_checkpointing and layer.training:
            return layer._gradient_checkpointing_func(partial(forward, **kwargs), *args)
        return forward(*args, **kwargs)

    return run


def collected_outputs() -> dict[str, Any] | None:
    """Return the outputs recorded in the current forward pass, lists by name; otherwise None.
    `output_capturing._active_collector` (utils/output_capturing.py:117), set in `capture_outputs`
    around a base model's forward, transformers 5.17 to 5.23."""
    collected: dict[str, Any] | None = output_capturing._active_collector.get()
    return collected


@contextmanager
def packed_sequences_found_by(
    find: Callable[[torch.Tensor], torch.Tensor | None],
) -> Iterator[None]:
    """Make masks use the documents that `find` returns for positions (None: one per sample).

    Replaces `find_packed_sequence_indices` (masking_utils.py:750), which is called for every kind
    of mask in every forward pass (:881) and reads the positions: on a GPU the host then waits for
    all queued work.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


# --- which targets peft takes ---


def refused_by_peft(model: PreTrainedModel, ends: Iterable[str]) -> set[str]:
    """Return the last parts of module names in `ends` that peft refuses in this architecture:
    Mamba's kernels read the weights of these layers without adapters
    (tuners/tuners_utils.py:145, `_check_lora_target_modules_mamba`). Imports peft."""
    from peft import LoraConfig
    from peft.tuners import tuners_utils

    refused = set()
    for end in ends:
        try:
            tuners_utils._check_lora_target_modules_mamba(LoraConfig(), model, end)
        except ValueError:
            refused.add(end)
    return refused


def taken_for_experts(model: PreTrainedModel, ends: Iterable[str]) -> set[str]:
    """Return the last parts of module names in `ends` that peft treats as layers of experts.

    transformers 5 has stacked the experts of some architectures. For these, peft 0.21 takes the
    former names of the experts' linear layers (``gate_proj`` of DeepSeek-V3) in a configuration's
    targets for the stacks, and leaves all other layers of the name without an adapter
    (utils/transformers_weight_conversion.py, `convert_peft_config_for_transformers`). Imports peft.
    """
    from peft import LoraConfig
    from peft.utils import transformers_weight_conversion as conversion

    expert_ends = set()
    for end in ends:
        config = LoraConfig(target_modules=[end])
        try:
            conversion.convert_peft_config_for_transformers(config, model=model, conversions=None)
        except ValueError:  # a stack with two names
            expert_ends.add(end)
        if end not in (config.target_modules or ()):
            expert_ends.add(end)
    return expert_ends


@contextmanager
def targets_as_named() -> Iterator[None]:
    """Make peft add adapters to the layers that are named (`taken_for_experts`)."""
    from peft.utils import transformers_weight_conversion as conversion

    name = "convert_peft_config_for_transformers"
    with shadowed(conversion, {name: lambda *_, **__: None}):
        yield


def trace_dora(model: nn.Module, weight_of: Callable[[Any], Any]) -> None:
    """Let graphs contain the layers of `model` with DoRA. Otherwise a graph ends at each adapter,
    and is compiled again for each layer. Imports peft.

    peft empties a cache at each call (tuners/lora/dora.py:61), which it fills only for inference on
    demand: this is skipped, since recomputation in a graph must not change state outside of the
    graph. And peft reads weights by `dequantize_module_weight` (utils/integrations.py:83), whose
    check for torchao's weights torch cannot trace: in graphs, process-wide, `weight_of` is called
    instead.
    """
    from peft.tuners.lora.dora import DoraLinearLayer

    layers = [module for module in model.modules() if isinstance(module, DoraLinearLayer)]
    if layers:
        _replace_in_graphs(weight_of)
    for layer in layers:
        shadow(layer, "_cache_clear", _keep_cache)


def _keep_cache() -> None:
    """Do nothing. A single function for all layers, since a graph depends on the functions that it
    calls."""


@cache  # torch accepts a substitute only once
def _replace_in_graphs(weight_of: Callable[[Any], Any]) -> None:
    from peft.utils import integrations

    torch.compiler.substitute_in_graph(integrations.dequantize_module_weight)(weight_of)
