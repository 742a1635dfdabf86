"""torch.compile of single decoder layers.

The layers share code and shapes, so the first layer compiles and all later layers reuse its graphs
(regional compilation in PyTorch's documentation); the full model would take minutes, and break the
graph at every hook. A layer's forward method is replaced, so that names stay and hooks are outside
of the graph, while recomputation is inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from bigtrain.errors import ModelError
from bigtrain.models.layers.parameters import decoder_layers
from bigtrain.models.torch_patches import divide_graphs_in_callees, keep_graphs, shadow
from bigtrain.models.transformers_patches import forward_without_recomputation, recomputed

_COMPILED = "bigtrain_compiled"
_MOST_GRAPHS = 256
"""Of all layers together: some architectures have other widths in each layer."""


def compile_layers(
    model: PreTrainedModel, *, divided: bool = False, backend: Callable[..., Any] | None = None
) -> int:
    """Make the decoder layers of `model` compile at their first call; returns their number. Raises
    ModelError for a model without decoder layers. divided: whether something inside the layers or
    their recomputation stays outside of the graphs; a layer has a graph before and one after it.
    `backend`: of torch.compile, if not the process's."""
    keep_graphs(_MOST_GRAPHS)
    if divided:
        divide_graphs_in_callees()
    layers: list[Any] = [
        layer for _, layer in decoder_layers(model) if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ModelError(f"a {model.config.model_type} has no decoder layers of transformers' kind")
    for layer in layers:
        # Recomputation is inside the graph, unless it calls what no graph can contain.
        inner_forward = forward_without_recomputation(layer) if divided else None
        # Shapes depend on the micro-batch only: the same in every step.
        viewing_forward = _with_own_input(inner_forward or layer.forward)
        options: dict[str, Any] = {} if backend is None else {"backend": backend}
        forward = torch.compile(viewing_forward, dynamic=False, **options)
        shadow(layer, "forward", recomputed(layer, forward) if inner_forward else forward)
        shadow(layer, _COMPILED, True)
    return len(layers)


def compiled_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of `model` whose forward method is compiled."""
    return [module for module in model.modules() if _COMPILED in vars(module)]


def _with_own_input(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` of a view of the hidden states. Tensor parallelism stores what is made of a
    tensor on the tensor (`bigtrain.models.parallel.collectives.sum_gradient`): on a graph's own
    tensor it ends with the graph, on an input it would reference the input and never be freed."""

    def forward_of_view(*args: Any, **kwargs: Any) -> Any:
        views = (args[0].view_as(args[0]), *args[1:]) if args else args
        return forward(*views, **kwargs)

    return forward_of_view


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside, compiled layers run eagerly: for a pass with shapes that occur once."""
    with torch.compiler.set_stance("force_eager"):
        yield
