"""Parameters that get no gradient from text, read from autograd's graph of one forward pass.

Examples: a vision tower, an indexer whose choice has no gradient. torch leaves them unchanged,
while DeepSpeed gives them a gradient of zeros, and weight decay shrinks them; so they are not
trained.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    proxy_tokens,
    smaller,
    with_heads,
)
from bigtrain.models.equivalence.trial import failure_text
from bigtrain.models.experts import auxiliary_loss
from bigtrain.models.layers.document_masks import document_boundaries
from bigtrain.models.torch_patches import OperatorMode

_META_TOKENS = 32


@dataclass(frozen=True)
class GradientReach:
    """Parameters that the logits depend on, observed in one forward pass.

    absent: first names of the parameters that the logits do not depend on, in the model's order;
    None if no model of this configuration can be run. failure: why its own code cannot run a
    forward pass, neither on the meta device nor of a proxy model on the CPU; empty if it can, or if
    that is not known.
    """

    absent: tuple[str, ...] | None
    failure: str = ""


def find_gradient_reach(hf_config: PreTrainedConfig, attention: str = "auto") -> GradientReach:
    """Run a forward pass of the model, without values where that is possible.

    Takes a tenth of a second, a few seconds where the meta device is not enough.
    """
    with torch.random.fork_rng(devices=[]):  # constructors may draw numbers
        try:
            return GradientReach(_on_meta(hf_config))
        except Exception:  # whatever model code does with tensors without values
            pass
        try:
            return GradientReach(_on_cpu(hf_config, attention))
        except NotImplementedError:
            return GradientReach(None)
        except (*MODEL_FAILURES, ArithmeticError) as error:
            return GradientReach(None, f"{type(error).__name__}: {failure_text(error)}")


def parameters_without_gradient(
    hf_config: PreTrainedConfig, attention: str = "auto"
) -> tuple[str, ...] | None:
    """Return `GradientReach.absent` of a model."""
    return find_gradient_reach(hf_config, attention).absent


def _on_meta(hf_config: PreTrainedConfig) -> tuple[str, ...]:
    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))
        ids = torch.zeros(1, _META_TOKENS, dtype=torch.int64)
    model.tie_weights()  # which no_init_weights also skips
    model.train()
    with _WithoutValues():  # type: ignore[no-untyped-call]
        return _unreached(model, ids)


def _on_cpu(hf_config: PreTrainedConfig, attention: str) -> tuple[str, ...]:
    model = build_proxy_model(hf_config, attention, smaller(with_heads(2)), all_layers=True)
    model.train()
    return _unreached(model, proxy_tokens(model))


def _unreached(model: Any, ids: torch.Tensor) -> tuple[str, ...]:
    with torch.enable_grad(), document_boundaries(packed=False):
        outputs = model(input_ids=ids, use_cache=False)
        extra = auxiliary_loss(outputs)
        roots = [outputs.logits] if extra is None else [outputs.logits, extra]
        reached, is_complete = _leaves(roots)
        absent = [(name, p) for name, p in model.named_parameters() if id(p) not in reached]
        if absent and not is_complete:
            torch.stack([root.float().sum() for root in roots]).sum().backward()
    return tuple(name for name, parameter in absent if parameter.grad is None)


def _leaves(roots: list[torch.Tensor]) -> tuple[set[int], bool]:
    """Return ids of the parameters in the graph of `roots`, and whether these are all: a function
    with its own backward pass (Reformer's) may have more."""
    leaves: set[int] = set()
    seen, waiting, is_complete = set(), [root.grad_fn for root in roots], True
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        is_complete = is_complete and not isinstance(node, BackwardCFunction)
        variable: nn.Parameter | None = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        waiting += [following for following, _ in node.next_functions]
    return leaves, is_complete


class _WithoutValues(OperatorMode):
    """Answers what the meta device cannot: grouped products, and values that decide control
    flow."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name == "aten::_grouped_mm":
            rows, stack = args[0], args[1]
            return rows.new_empty((*rows.shape[:-1], stack.shape[-1]))
        if name == "aten::_local_scalar_dense" and args[0].is_meta:
            if args[0].dtype == torch.bool:
                return True
            return 1.0 if args[0].is_floating_point() else 1
        if name == "aten::nonzero" and args[0].is_meta:
            return args[0].new_empty((1, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))
