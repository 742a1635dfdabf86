"""The matrix products and parameters of a run's adapters, for the planner."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.models.configuration import text_config
from bigtrain.models.layers.adapters import (
    find_parameters,
    find_saved,
    find_targets,
    quantized_layers,
)
from bigtrain.models.layers.parameters import listed_layers
from bigtrain.models.parallel.tensor import Plan, known_plan
from bigtrain.planner.model_costs import (
    AdapterCosts,
    ExtraAdapterParameters,
    Matmul,
    QuantizedWeights,
    adapter_of,
)
from bigtrain.settings.hf_config_keys import CHOSEN_EXPERTS, number_of
from bigtrain.settings.sections.adapters import AdaptersSection

_GATHERED = ("colwise_gather_output", "colwise_rep")
"""Styles of transformers' plans whose outputs every rank has in full."""


def adapter_costs(model: PreTrainedModel, section: AdaptersSection) -> AdapterCosts:
    """Costs of the adapters that a run would add to `model`, which may be on the meta device."""
    plan = known_plan(model)
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
        is_cut = product.cut == "out" and plan.get(name) not in _GATHERED
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
    *inside, outside = (ExtraAdapterParameters(*parts) for parts in others)
    return AdapterCosts(tuple(map(tuple, products)), tuple(inside), outside, packed)


def _side_of_stack(style: str) -> Literal["in", "out"] | None:
    """Return whether the first matrix dimension of a stack [experts, in, out] is that of inputs."""
    if "colwise" in style:
        return "in"
    return "out" if "rowwise" in style else None


def _is_cut(name: str, plan: Plan) -> bool:
    """Return whether ranks divide a parameter: one split by inputs has a full bias."""
    style = plan.get(name, "")
    is_bias = name.endswith("bias") and "rowwise" in style
    return "embedding" in style or (any(s in style for s in ("colwise", "rowwise")) and not is_bias)


def _packed(
    model: PreTrainedModel, section: AdaptersSection, prefixes: list[str]
) -> tuple[QuantizedWeights, ...]:
    """Return costs of each decoder layer; linear layers outside of those count as plain ones."""
    sizes: dict[str, list[int]] = {prefix: [] for prefix in prefixes}
    for name in quantized_layers(model):
        of_layer = next(
            (layer_sizes for prefix, layer_sizes in sizes.items() if name.startswith(prefix)), None
        )
        if of_layer is not None:
            of_layer.append(model.get_submodule(name).weight.numel())
    double = section.double_quantization
    return tuple(QuantizedWeights.of(layer_sizes, double=double) for layer_sizes in sizes.values())


def _product(model: PreTrainedModel, name: str, plan: Plan) -> Matmul:
    layer = model.get_submodule(name)
    rows, columns = layer.weight.shape
    in_size, out_size = (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)
    style = plan.get(name, "")
    if "colwise" in style:
        return Matmul(in_size, out_size, "out")
    return Matmul(in_size, out_size, "in" if "rowwise" in style else None)
