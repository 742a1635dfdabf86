"""The costs of a run's model, traced once and cached; a closed form if it cannot be traced.

Imports torch and transformers only if the costs are not cached yet, so that later calls of
`bigtrain plan` take a fraction of a second.

The matrix products and parameters of a run's adapters, for the planner.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import ConfigError, ModelError, Problem
from bigtrain.models.configuration import text_config
from bigtrain.models.layers.adapters import (
    find_parameters,
    find_saved,
    find_targets,
    quantized_layers,
)
from bigtrain.models.layers.parameters import listed_layers
from bigtrain.models.parallel.tensor import Plan, tensor_plan
from bigtrain.models.tracing.trace_process import NoTraceProcessError, trace_apart
from bigtrain.planner.model_costs import (
    AdapterCosts,
    Matmul,
    ModelCosts,
    Others,
    Packed,
    adapter_of,
    closed_form,
    dense_shape,
    of_all_linear,
    with_adapters,
)
from bigtrain.settings.hf_config_keys import CHOSEN_EXPERTS, number_of, written_configuration
from bigtrain.settings.run_config import AdaptersSection, ModelSection, RunConfig
from bigtrain.settings.sections.base import Section
from bigtrain.system.user_cache import builds, cache_get, cache_put, cached, key_of, package_source

KIND = "model_costs"


def model_costs(
    config: RunConfig, hf_config: Any = None, *, traces: bool = True
) -> tuple[ModelCosts, str]:
    """Costs of the run's model, and a remark on them (or empty). `hf_config`: its configuration, if
    already loaded. Without `traces`, no torch is imported.

    Raises ConfigError or ModelError if the model is not known, or is neither traceable nor dense,
    and if its adapters are not known without torch.
    """
    costs, remark = _own_costs(config, hf_config, traces)
    if config.adapters is not None:
        costs = with_adapters(costs, _adapter_costs(config, config.adapters, costs, traces))
    return costs, remark


def _own_costs(config: RunConfig, hf_config: Any, traces: bool) -> tuple[ModelCosts, str]:
    values = written_configuration(config.model)
    key = _key(config, values, hf_config) if values else None
    if key is not None:
        found = cache_get(KIND, key)
        if found is not None:
            with suppress(KeyError, TypeError):
                return ModelCosts.from_json(found), ""
    try:
        if not traces:
            raise ModelError("it has no earlier trace, and only --gpu NAME makes one")
        if key is None:
            return _trace(config, hf_config), ""
        kept = cached(KIND, key, lambda: _trace(config, hf_config).to_json())
        return ModelCosts.from_json(kept), ""
    except (ModelError, ImportError) as error:
        reason = " ".join(str(error).split())
    shape = dense_shape(values)
    if shape is None and not traces:
        raise ModelError("the model's layers have no earlier trace")
    if shape is None:
        remedy = "write hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and "
        raise ConfigError(
            Problem("model", None, f"its layers cannot be traced ({reason})", remedy + "vocab_size")
        )
    size = 4 if config.precision.dtype == "float32" else 2
    return closed_form(shape, size), f"by a closed form of dense layers, not traced: {reason}"


def _adapter_costs(
    config: RunConfig, section: AdaptersSection, costs: ModelCosts, traces: bool
) -> AdapterCosts:
    is_simple = not (section.target_parameters or section.modules_to_save or section.dora)
    if not traces and is_simple and section.targets == "all-linear":
        double = section.double_quantization if section.is_quantized else None
        return of_all_linear(costs, section.rank, double)
    values = written_configuration(config.model)
    key = _key(config, values, None, section) if values else None
    found = cache_get(KIND, key) if key is not None else None
    if found is not None:
        with suppress(KeyError, TypeError):
            return AdapterCosts.from_json(found)
    if not traces:
        raise ModelError("which layers get adapters was not looked up yet")
    from bigtrain.models.build import empty_model
    from bigtrain.models.configuration import load_hf_config
    from bigtrain.models.tracing.traced_costs import adapter_costs

    counted = adapter_costs(empty_model(load_hf_config(_section(config))), section)
    if key is not None:
        cache_put(KIND, key, counted.to_json())
    return counted


def _key(
    config: RunConfig, values: Mapping[str, Any], hf_config: Any, *more: Section
) -> str | None:
    """`hf_config`: what is traced, whose vocabulary may have grown beyond the written one."""
    grown = ""
    if hf_config is not None and config.model.vocabulary is not None:
        grown = str(hf_config.get_text_config().vocab_size)
    with suppress(LookupError):
        return key_of(
            [
                json.dumps(values, sort_keys=True),
                grown,
                config.precision.dtype,
                builds("torch", "transformers", *(("peft",) if more else ())),
                package_source(),
                *(section.model_dump_json() for section in more),
            ]
        )
    return None


def _trace(config: RunConfig, hf_config: Any) -> ModelCosts:
    if hf_config is None and "torch" not in sys.modules:
        with suppress(NoTraceProcessError):
            return trace_apart(_section(config), config.precision.dtype)
    import torch

    from bigtrain.models.configuration import load_hf_config
    from bigtrain.models.tracing.meta_trace import trace_model

    dtype = getattr(torch, config.precision.dtype)
    if hf_config is not None:
        return trace_model(hf_config, dtype)
    return trace_model(load_hf_config(_section(config)), dtype)


def _section(config: RunConfig) -> ModelSection:
    """The run's model section; configurations shipped with the recipes replace a hub name, so that
    they need no network and no access to gated models."""
    section = config.model
    values = written_configuration(section)
    source = section.path or section.config
    if values and isinstance(source, str) and not Path(source).exists():
        return ModelSection(config=values)
    return section


def adapter_costs(model: PreTrainedModel, section: AdaptersSection) -> AdapterCosts:
    """Costs of the adapters that a run would add to `model`, which may be on the meta device."""
    try:
        plan = tensor_plan(model)
    except ModelError:
        plan = {}
    text = text_config(model.config)
    count = getattr(text, "num_hidden_layers", None)
    prefixes = [f"{name}." for name, _ in listed_layers(model, count)]
    products: list[list[Matmul]] = [[] for _ in prefixes]
    # Of each layer, and outside of all: trained by every rank, divided, and sums that are saved.
    others = [[0, 0, 0] for _ in (*prefixes, None)]

    def add(name: str, own: list[Matmul], more: int = 0, *, cut: bool = False) -> list[int]:
        index = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), -1)
        others[index][cut] += more
        if index >= 0:
            products[index] += own
        else:
            others[index][0] += sum(m.in_size * m.out_size * m.num_groups for m in own)
        return others[index]

    for name in find_targets(model, section)[0]:
        product = _product(model, name, plan)
        lengths = product.out_size * section.dora
        is_cut = product.cut == "out" and not _is_gathered(plan.get(name, ""))
        add(name, list(adapter_of(product, section.rank)), lengths, cut=is_cut)
    share = float(number_of(text, CHOSEN_EXPERTS) or 1)
    for name in find_parameters(model, section)[0]:
        groups, one, other = model.get_parameter(name).shape
        side = _side_of_stack(plan.get(name, ""))
        stack = Matmul(one, other, side, num_groups=groups, share=share)
        own = list(adapter_of(stack, section.rank))
        add(name, own)[2] += groups * one * other
    for name in find_saved(model, section)[0]:
        for leaf, parameter in model.get_submodule(name).named_parameters():
            full = f"{name}.{leaf}"
            add(full, [], parameter.numel(), cut=_is_cut(full, plan))
    packed = _packed(model, section, prefixes) if section.is_quantized else ()
    *inside, outside = (Others(*parts) for parts in others)
    return AdapterCosts(tuple(map(tuple, products)), tuple(inside), outside, packed)


def _is_gathered(style: str) -> bool:
    return style in ("colwise_gather_output", "colwise_rep")


def _side_of_stack(style: str) -> Literal["in", "out"] | None:
    """Of a stack [experts, in, out], if its first matrix dimension counts as that of inputs."""
    if "colwise" in style:
        return "in"
    return "out" if "rowwise" in style else None


def _is_cut(name: str, plan: Plan) -> bool:
    """Whether ranks divide a parameter: one cut by inputs has a whole bias."""
    style = plan.get(name, "")
    is_bias = name.endswith("bias") and "rowwise" in style
    return "embedding" in style or (any(s in style for s in ("colwise", "rowwise")) and not is_bias)


def _packed(
    model: PreTrainedModel, section: AdaptersSection, prefixes: list[str]
) -> tuple[Packed, ...]:
    """Of each decoder layer; the few linear layers outside of those count as if they were plain."""
    sizes: dict[str, list[int]] = {prefix: [] for prefix in prefixes}
    for name in quantized_layers(model):
        of_layer = next((found for prefix, found in sizes.items() if name.startswith(prefix)), None)
        if of_layer is not None:
            of_layer.append(model.get_submodule(name).weight.numel())
    double = section.double_quantization
    return tuple(Packed.of(found, double=double) for found in sizes.values())


def _product(model: PreTrainedModel, name: str, plan: Plan) -> Matmul:
    layer = model.get_submodule(name)
    rows, columns = layer.weight.shape
    in_size, out_size = (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)
    style = plan.get(name, "")
    if "colwise" in style:
        return Matmul(in_size, out_size, "out")
    return Matmul(in_size, out_size, "in" if "rowwise" in style else None)
