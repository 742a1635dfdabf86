"""Router logits, counts of tokens by expert, and selection biases of a mixture of experts. The
auxiliary loss (``load_balancing_loss_func``, Switch Transformer's equations 4 to 6) multiplies two
means over all tokens and layers: it is not a sum over parts."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bigtrain.errors import ModelError
from bigtrain.models.layers.parameters import local_shape
from bigtrain.models.torch_patches import is_in_backward, own_parameter
from bigtrain.models.transformers_patches import collected_outputs, modules_of_experts

KEY = "router_logits"


def recorded() -> list[torch.Tensor] | None:
    """Return the router logits of the current forward pass, in the order of layers; append those of
    other stages' layers. None unless they are asked for (``output_router_logits``)."""
    # If a model's logits do not come here, its loss in stages differs, which the trial finds.
    collected = collected_outputs()
    return None if collected is None else collected.get(KEY)


def has_auxiliary_loss(config: Any) -> bool:
    """Return whether the model of a transformers configuration adds its auxiliary loss."""
    is_on = bool(getattr(config, "output_router_logits", False))
    return is_on and bool(getattr(config, "router_aux_loss_coef", 0.0))


def auxiliary_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss that a model computed from its router logits; None if there is none."""
    loss = getattr(outputs, "aux_loss", None)
    return loss if torch.is_tensor(loss) else None


def ask_for_router_logits(model: Any) -> None:
    """Make a model return its router logits, as if its configuration requested it."""
    model.config.output_router_logits = True


def router_logits_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the logits of each layer's router [tokens, experts] that a model returned. Raises
    ModelError if it returned none."""
    logits = getattr(outputs, KEY, None)
    if not isinstance(logits, tuple) or not logits or not all(map(torch.is_tensor, logits)):
        raise ModelError("the model returns no router logits")
    return logits


@dataclass(frozen=True)
class Routing:
    """The terms of the auxiliary loss, over all layers together, as in transformers. chosen:
    float32 [experts], tokens that choose each. probabilities: float32 [experts], means over
    `num_rows`, the tokens times layers; with gradients."""

    chosen: torch.Tensor
    probabilities: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, logits: tuple[torch.Tensor, ...], top_k: int) -> Routing:
        """logits: of each layer [tokens, experts]; a token chooses `top_k` experts of a layer."""
        chosen = torch.zeros(logits[0].shape[-1], device=logits[0].device)
        total = torch.zeros_like(chosen)
        for layer in logits:
            weights = torch.softmax(layer, dim=-1)
            places = weights.topk(top_k, dim=-1).indices.flatten()
            chosen.scatter_add_(0, places, torch.ones_like(places, dtype=chosen.dtype))
            total = total + weights.float().sum(0)
        num_rows = sum(layer.shape[0] for layer in logits)
        return cls(chosen, total / num_rows, num_rows)


def balance_loss(fractions: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Switch Transformer's equation 4: `fractions` [experts] of tokens that choose each expert,
    and the mean `probabilities` [experts] that routers give them."""
    return (fractions * probabilities).sum() * fractions.numel()


def z_loss(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean over tokens and layers of the square of the logits' log-sum-exp (ST-MoE, Zoph
    et al. 2022, arXiv 2202.08906, equation 5)."""
    squares = [torch.logsumexp(layer.float(), -1).square().sum() for layer in logits]
    return torch.stack(squares).sum() / sum(layer.shape[0] for layer in logits)


class ExpertCounts:
    """Counts by hooks on the experts modules of `model` that transformers' decorator marks.

    Counts every token of a training forward pass once: nothing before `begin`, in evaluation mode,
    or when the backward pass recomputes a layer. Does not wait for the device. Not for compiled
    layers: the counting would become a part of their graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        modules: dict[str, Any] = {names[module]: module for module in modules_of_experts(model)}
        self.modules: dict[str, Any] = modules
        self.num_experts = {name: int(module.num_experts) for name, module in modules.items()}
        self._counts: dict[str, torch.Tensor] = {}
        self._is_counting = False
        self._hooks = [
            module.register_forward_pre_hook(partial(self._note, name), with_kwargs=True)
            for name, module in modules.items()
        ]

    def begin(self, *, counting: bool) -> None:
        """Reset the counts; `counting`: whether to count from here on."""
        self._counts.clear()
        self._is_counting = counting

    def of(self, name: str, device: torch.device) -> torch.Tensor:
        """Return tokens of this rank that chose each expert of module `name`, int64 [experts]; a
        token counts for each of the experts it has chosen."""
        counted = self._counts.get(name)
        if counted is None:
            return torch.zeros(self.num_experts[name], dtype=torch.int64, device=device)
        return counted[:-1]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._is_counting or not module.training or is_in_backward():
            return
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        chosen = chosen.reshape(-1)
        last = self.num_experts[name]
        counts = self._counts.get(name)
        if counts is None:
            # One more for "no expert": some routers may choose to leave a token unchanged.
            counts = chosen.new_zeros(last + 1, dtype=torch.int64)
            self._counts[name] = counts
        # Not `bincount`, whose output length makes the host wait.
        places = chosen.clamp(max=last).long()
        counts.scatter_add_(0, places, torch.ones_like(places))


@dataclass(frozen=True)
class SelectionBias:
    """The bias of one module of experts that tokens choose from. experts: the module's name. name:
    of the bias, a buffer, or a parameter if `is_parameter`. tensor: an element for each expert, in
    any shape; ZeRO-3 may have partitioned a parameter's."""

    experts: str
    name: str
    tensor: torch.Tensor
    is_parameter: bool


def selection_biases(model: nn.Module, untrained: Collection[str] = ()) -> list[SelectionBias]:
    """Return by module of experts, in model order.

    Architectures call it otherwise (``e_score_correction_bias``, ``expert_bias``), and have it as a
    buffer or as a parameter. It is a bias of the block that holds the experts, or of its router,
    with an element for each expert and without a gradient: a choice has none. `untrained`: names of
    the parameters without one.
    """
    modules = dict(model.named_modules())
    selection_biases = []
    for experts in list(modules_of_experts(model)):
        name = next(key for key, module in modules.items() if module is experts)
        block = name.rpartition(".")[0]
        inside = {
            key: module
            for key, module in modules.items()
            if f"{key}.".startswith(f"{block}.") and not f"{key}.".startswith(f"{name}.")
        }
        biases = [
            bias
            for key, module in inside.items()
            for bias in _biases(name, key, module, untrained)
            if _count(bias.tensor) == int(experts.num_experts)  # type: ignore[arg-type]
        ]
        if len(biases) == 1:
            selection_biases += biases
    return selection_biases


def _biases(
    experts: str, prefix: str, module: nn.Module, untrained: Collection[str]
) -> list[SelectionBias]:
    selection_biases = [
        SelectionBias(experts, f"{prefix}.{leaf}", buffer, False)
        for leaf, buffer in module.named_buffers(recurse=False)
        if "bias" in leaf and buffer.is_floating_point()
    ]
    return selection_biases + [
        SelectionBias(experts, f"{prefix}.{leaf}", own_parameter(module, leaf), True)
        for leaf, _ in module.named_parameters(recurse=False)
        if "bias" in leaf and f"{prefix}.{leaf}" in untrained
    ]


def _count(tensor: torch.Tensor) -> int:
    return math.prod(local_shape(tensor))
