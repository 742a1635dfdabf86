"""The matrix products and parameters of a run's adapters, for the planner."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from bigtrain.errors import ModelError
from bigtrain.models.configuration import text_config
from bigtrain.models.layers.adapters import (
    find_parameters,
    find_saved,
    find_targets,
    quantized_layers,
)
from bigtrain.models.layers.decoder_layers import listed_layers
from bigtrain.models.parallel.tensor import Plan, tensor_plan
from bigtrain.planner.model_costs import AdapterCosts, Matmul, Packed, adapter_of
from bigtrain.settings.sections.adapters import AdaptersSection


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
    others = [0] * len(prefixes)
    outside = 0

    def add(name: str, own: list[Matmul], more: int) -> None:
        nonlocal outside
        index = next((i for i, prefix in enumerate(prefixes) if name.startswith(prefix)), None)
        if index is None:
            outside += more + sum(m.in_size * m.out_size for m in own)
            return
        products[index] += own
        others[index] += more

    for name in find_targets(model, section)[0]:
        product = _product(model, name, plan)
        add(name, list(adapter_of(product, section.rank)), product.out_size * section.dora)
    share = float(getattr(text, "num_experts_per_tok", None) or 1)
    for name in find_parameters(model, section)[0]:
        groups, one, other = model.get_parameter(name).shape
        stack = Matmul(one, other, num_groups=groups, share=share)
        add(name, list(adapter_of(stack, section.rank)), 0)
    for name in find_saved(model, section)[0]:
        add(name, [], sum(p.numel() for p in model.get_submodule(name).parameters()))
    packed = _packed(model, section, prefixes) if section.is_quantized else ()
    return AdapterCosts(tuple(map(tuple, products)), tuple(others), outside, packed)


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
