"""Router logits, counts of tokens by expert, and selection biases of a mixture of experts. The
auxiliary loss (``load_balancing_loss_func``, Switch Transformer's equations 4 to 6) multiplies two
means over all tokens and layers, so that no sum of parts' losses equals it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bigtrain.errors import ModelError
from bigtrain.models.layers.parameters import local_shape
from bigtrain.models.torch_patches import is_in_backward, own_parameter, shadow
from bigtrain.models.transformers_patches import collected_outputs, modules_of_experts

KEY = "router_logits"
COUNTED, EXCHANGED = "tokens of experts are counted", "ranks exchange tokens of experts"
"""Reasons for which a compiled layer with experts is divided in two graphs."""


def recorded() -> list[torch.Tensor] | None:
    """Return the list of router logits of the current forward pass, in the order of layers; append
    logits from other stages. None unless the logits are requested (``output_router_logits``)."""
    # For a model whose logits are not in this list, the trial of pipeline stages detects another
    # loss.
    collected = collected_outputs()
    return None if collected is None else collected.get(KEY)


EXCHANGE = "bigtrain_row_exchange"
"""Attribute of a module of experts that ranks divide: the exchange of rows among these ranks."""


def exchange_of(module: nn.Module) -> object | None:
    """Return the exchange (`bigtrain.models.parallel.collectives.RowExchange`) of the ranks that
    divide this `module` of experts; None if it is not divided."""
    return vars(module).get(EXCHANGE)


def has_auxiliary_loss(config: Any) -> bool:
    """Return whether the model of a transformers configuration adds its auxiliary loss."""
    is_on = bool(getattr(config, "output_router_logits", False))
    return is_on and bool(getattr(config, "router_aux_loss_coef", 0.0))


def auxiliary_loss(outputs: Any) -> torch.Tensor | None:
    """Return the loss that a model computed from its router logits; None if there is none."""
    loss = getattr(outputs, "aux_loss", None)
    return loss if torch.is_tensor(loss) else None


def router_logits_of(outputs: Any) -> tuple[torch.Tensor, ...]:
    """Return the router logits [tokens, experts] of every layer in a model's `outputs`. Raises
    ModelError if there are none."""
    logits = getattr(outputs, KEY, None)
    if not isinstance(logits, tuple) or not logits or not all(map(torch.is_tensor, logits)):
        raise ModelError("the model returns no router logits")
    return logits


@dataclass(frozen=True)
class Routing:
    """Terms of the auxiliary loss, over all layers together, as in transformers. expert_tokens:
    float32 [experts], tokens that chose an expert. probabilities: float32 [experts], means over
    `num_rows`, the tokens times layers; with gradients."""

    expert_tokens: torch.Tensor
    probabilities: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, logits: tuple[torch.Tensor, ...], top_k: int) -> Routing:
        """Return the terms for the layers' `logits` [tokens, experts]; a token chooses `top_k`
        experts of a layer."""
        expert_tokens = torch.zeros(logits[0].shape[-1], device=logits[0].device)
        probability_sums = torch.zeros_like(expert_tokens)
        for layer_logits in logits:
            probabilities = torch.softmax(layer_logits, dim=-1)
            expert_ids = probabilities.topk(top_k, dim=-1).indices.flatten()
            expert_tokens.scatter_add_(
                0, expert_ids, torch.ones_like(expert_ids, dtype=expert_tokens.dtype)
            )
            probability_sums = probability_sums + probabilities.float().sum(0)
        num_rows = sum(layer_logits.shape[0] for layer_logits in logits)
        return cls(expert_tokens, probability_sums / num_rows, num_rows)


def balance_loss(fractions: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """Return ``num_experts * sum_i(f_i * P_i)`` (Switch Transformer, Fedus et al. 2021, arXiv
    2101.03961, equation 4): `fractions` f [experts] of tokens by chosen expert, and the routers'
    mean `probabilities` P [experts]."""
    return (fractions * probabilities).sum() * fractions.numel()


def z_loss(logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the mean over tokens and layers of the square of the logits' log-sum-exp (ST-MoE, Zoph
    et al. 2022, arXiv 2202.08906, equation 5)."""
    layer_sums = [torch.logsumexp(layer.float(), -1).square().sum() for layer in logits]
    num_rows = sum(layer.shape[0] for layer in logits)
    return torch.stack(layer_sums).sum() / num_rows


class ExpertCounts:
    """Counts tokens by expert at the modules of experts of `model` that transformers' decorator
    marks.

    Counts every token of a training forward pass once: nothing before `begin`, in evaluation mode,
    or when the backward pass recomputes a layer. Does not wait for the device.

    is_compiled: whether layers are compiled. Then the counting, which differs from step to step,
    happens between two graphs: in `forward`, since a hook would divide the callers' graphs too.
    """

    def __init__(self, model: nn.Module, *, is_compiled: bool = False) -> None:
        names = {module: name for name, module in model.named_modules()}
        modules: dict[str, Any] = {names[module]: module for module in modules_of_experts(model)}
        self.modules: dict[str, Any] = modules
        self.num_experts = {name: int(module.num_experts) for name, module in modules.items()}
        self._counts: dict[str, torch.Tensor] = {}
        self._is_counting = False
        self._hooks: list[RemovableHandle] = []
        self._counted: list[nn.Module] = []
        for name, module in modules.items():
            note = partial(self._note, name)
            if is_compiled:
                shadow(module, "forward", _noting(note, module))
                self._counted.append(module)
            else:
                self._hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))

    def begin(self, *, counting: bool) -> None:
        """Reset the counts; `counting`: whether to count from here on."""
        self._counts.clear()
        self._is_counting = counting

    def of(self, name: str, device: torch.device) -> torch.Tensor:
        """Return this rank's numbers of tokens by expert of module `name`, int64 [experts]; a token
        counts for every chosen expert."""
        counts = self._counts.get(name)
        if counts is None:
            return torch.zeros(self.num_experts[name], dtype=torch.int64, device=device)
        return counts[:-1]  # without the count of "no expert"

    def close(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        for module in self._counted:
            shadow(module, "forward", vars(module)["forward"].__wrapped__)

    @torch.no_grad()
    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the tokens of a call of `module`, the module of experts `name`."""
        if not self._is_counting or not module.training or is_in_backward():
            return
        expert_ids = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        expert_ids = expert_ids.reshape(-1)
        no_expert = self.num_experts[name]  # id by which some routers leave a token unchanged
        counts = self._counts.get(name)
        if counts is None:
            counts = expert_ids.new_zeros(no_expert + 1, dtype=torch.int64)
            self._counts[name] = counts
        # The output length of `bincount` would make the host wait.
        count_ids = expert_ids.clamp(max=no_expert).long()
        counts.scatter_add_(0, count_ids, torch.ones_like(count_ids))


def _noting(note: Callable[..., None], module: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the forward method of a `module` of experts in a compiled layer, with its arguments
    passed to `note` outside of the graphs."""
    forward: Callable[..., torch.Tensor] = module.forward

    is_divided = exchange_of(module) is not None
    if not is_divided:  # divided experts run outside of graphs completely
        note = torch.compiler.disable(note, reason=COUNTED)

    def note_and_compute(*args: Any, **kwargs: Any) -> torch.Tensor:
        note(module, args, kwargs)
        return forward(*args, **kwargs)

    counted: Any = note_and_compute
    if is_divided:
        counted = torch.compiler.disable(note_and_compute, reason=EXCHANGED)
    counted.__wrapped__ = forward
    return counted  # type: ignore[no-any-return]


@dataclass(frozen=True)
class SelectionBias:
    """Bias by which tokens choose experts of a module. experts: the module's name. name: of the
    bias, a buffer, or a parameter if `is_parameter`. tensor: an element for every expert, in any
    shape; ZeRO-3 may have partitioned the tensor of a parameter."""

    experts: str
    name: str
    tensor: torch.Tensor
    is_parameter: bool


def selection_biases(model: nn.Module, untrained: Collection[str] = ()) -> list[SelectionBias]:
    """Return the selection biases of a model's modules of experts, in model order.

    Names differ by architecture (``e_score_correction_bias``, ``expert_bias``), and the bias is a
    buffer or a parameter. It belongs to the block around the experts, or to the block's router,
    with an element for every expert and without a gradient, since a choice has no gradient.
    `untrained`: names of parameters without a gradient.
    """
    modules = dict(model.named_modules())
    selection_biases = []
    for experts in list(modules_of_experts(model)):
        name = next(key for key, module in modules.items() if module is experts)
        # Biases in the block around the experts, but not in the experts.
        block = name.rpartition(".")[0]
        block_modules = {
            key: module
            for key, module in modules.items()
            if f"{key}.".startswith(f"{block}.") and not f"{key}.".startswith(f"{name}.")
        }
        biases = [
            SelectionBias(name, f"{key}.{leaf}", buffer, False)
            for key, module in block_modules.items()
            for leaf, buffer in module.named_buffers(recurse=False)
            if "bias" in leaf and buffer.is_floating_point()
        ]
        biases += [
            SelectionBias(name, f"{key}.{leaf}", own_parameter(module, leaf), True)
            for key, module in block_modules.items()
            for leaf, _ in module.named_parameters(recurse=False)
            if "bias" in leaf and f"{key}.{leaf}" in untrained
        ]
        # The selection bias is the only bias with an element for every expert.
        num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        biases = [b for b in biases if math.prod(local_shape(b.tensor)) == num_experts]
        if len(biases) == 1:
            selection_biases += biases
    return selection_biases
