"""The matrix products and parameters of a run's adapters, for the planner."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.models.configuration import text_config
from bigtrain.models.layers.adapter_targets import (
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
_REPLICATED, _DIVIDED, _SAVED_SUMS = range(3)
"""Positions of a layer's numbers of parameters."""


def adapter_costs(model: PreTrainedModel, section: AdaptersSection) -> AdapterCosts:
    """Return costs of the adapters that a run would add to `model`, which may be on the meta
    device."""
    targets = find_targets(model, section).names
    plan = known_plan(model, targets)
    text = text_config(model.config)
    count = getattr(text, "num_hidden_layers", None)
    prefixes = [f"{name}." for name, _ in listed_layers(model, count)]
    products: list[list[Matmul]] = [[] for _ in prefixes]
    # Of every layer, and outside of layers.
    parameter_counts = [[0, 0, 0] for _ in (*prefixes, None)]

    def add(
        name: str, matmuls: list[Matmul], num_elements: int = 0, *, cut: bool = False
    ) -> list[int]:
        """Add adapters' products and `num_elements` more parameters to the layer of module `name`;
        outside of layers, products are parameters. Return the layer's numbers of parameters."""
        index = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), -1)
        parameter_counts[index][_DIVIDED if cut else _REPLICATED] += num_elements
        if index >= 0:
            products[index] += matmuls
        else:
            parameter_counts[index][_REPLICATED] += sum(
                m.in_size * m.out_size * m.num_groups for m in matmuls
            )
        return parameter_counts[index]

    # Linear layers; DoRA trains a length for each output.
    for name in targets:
        product = _product(model, name, plan)
        lengths = product.out_size * section.dora
        is_cut = product.cut == "out" and plan.get(name) not in _GATHERED
        add(name, list(adapter_of(product, section.rank)), lengths, cut=is_cut)

    # Stacks of experts [experts, in, out]: the plan names the dimension that ranks divide.
    share = float(number_of(text, CHOSEN_EXPERTS) or 1)
    for name in find_parameters(model, section).names:
        groups, first_size, second_size = model.get_parameter(name).shape
        style = plan.get(name, "")
        side: Literal["in", "out"] | None = None
        if "colwise" in style or "rowwise" in style:
            side = "in" if "colwise" in style else "out"
        stack = Matmul(first_size, second_size, side, num_groups=groups, share=share)
        stack_matmuls = list(adapter_of(stack, section.rank))
        add(name, stack_matmuls)[_SAVED_SUMS] += groups * first_size * second_size

    # Trained copies. A layer that is split by inputs has a full bias.
    for name in find_saved(model, section).names:
        for leaf, parameter in model.get_submodule(name).named_parameters():
            style = plan.get(f"{name}.{leaf}", "")
            is_full_bias = leaf.endswith("bias") and "rowwise" in style
            is_split = "colwise" in style or ("rowwise" in style and not is_full_bias)
            is_cut = "embedding" in style or is_split
            add(f"{name}.{leaf}", [], parameter.numel(), cut=is_cut)
    packed = _packed(model, section, prefixes) if section.is_quantized else ()
    *layer_parameters, outside_layers = (ExtraAdapterParameters(*n) for n in parameter_counts)
    return AdapterCosts(
        tuple(map(tuple, products)), tuple(layer_parameters), outside_layers, packed
    )


def _packed(
    model: PreTrainedModel, section: AdaptersSection, prefixes: list[str]
) -> tuple[QuantizedWeights, ...]:
    """Return costs of the decoder layers; linear layers outside count as not quantized."""
    assert section.packing is not None
    shapes: dict[str, list[tuple[int, int]]] = {prefix: [] for prefix in prefixes}
    for name in quantized_layers(model):
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            layer = model.get_submodule(name)
            rows, columns = layer.weight.shape
            is_transposed = isinstance(layer, Conv1D)
            shapes[prefix].append((columns, rows) if is_transposed else (rows, columns))
    return tuple(
        QuantizedWeights.of(layer_shapes, section.packing) for layer_shapes in shapes.values()
    )


def _product(model: PreTrainedModel, name: str, plan: Plan) -> Matmul:
    layer = model.get_submodule(name)
    rows, columns = layer.weight.shape
    num_inputs, num_outputs = (rows, columns) if isinstance(layer, Conv1D) else (columns, rows)
    style = plan.get(name, "")
    if "colwise" in style:
        return Matmul(num_inputs, num_outputs, "out")
    return Matmul(num_inputs, num_outputs, "in" if "rowwise" in style else None)
