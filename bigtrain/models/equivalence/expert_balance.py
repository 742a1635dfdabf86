"""Whether a model supports a run's `moe` section: tried on a proxy model.

No configuration says that a model's auxiliary loss is Switch Transformer's, or what its router
returns as logits. So the loss is computed again from these, and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.gradient_reach import (
    GradientReach,
    find_gradient_reach,
    parameters_without_gradient,
)
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    VOCABULARY,
    build_proxy_model,
    fewer_experts,
    with_heads,
)
from bigtrain.models.equivalence.tensor_parallel import deterministic, randomize
from bigtrain.models.equivalence.thresholds import TOKENS
from bigtrain.models.experts.router_logits import (
    Routing,
    ask_for_router_logits,
    auxiliary_loss,
    balance_loss,
    router_logits_of,
)
from bigtrain.models.experts.selection_biases import selection_biases
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.settings.run_config import RunConfig

_LOSS = 1e-5
_FAR = 1e4  # of a selection bias from all router scores
_AUXILIARY, _Z_LOSS, _BIAS = (
    "moe.auxiliary_loss",
    "moe.z_loss_coefficient",
    "moe.bias_update_rate",
)

_Tried = Callable[[], tuple[Any, PreTrainedModel]]


def check_expert_balance(
    config: RunConfig, hf_config: PreTrainedConfig, reach: GradientReach | None = None
) -> list[Problem]:
    """Problems with the section `moe` of `config` for a model of `hf_config`; empty if none.

    Takes a second or two if a router loss is asked for. `reach`: of the model, if it is known.
    """
    section, problems = config.moe, []
    kind, attention = hf_config.model_type, config.model.attention
    tried = cache(partial(_tried, hf_config, attention))
    if section.bias_update_rate and (reason := _without_biases(hf_config, attention, reach)):
        problems.append(Problem(_BIAS, section.bias_update_rate, reason, "0"))
    if section.auxiliary_loss == "global_batch":
        if not _has_auxiliary_loss(hf_config):
            rule = f"the {kind} has no auxiliary loss, or it is off"
            remedy = (
                "micro_batch, or model.overrides={output_router_logits: true, "
                "router_aux_loss_coef: 0.001} where the architecture has one"
            )
            problems.append(Problem(_AUXILIARY, "global_batch", rule, remedy))
        elif reason := _other_auxiliary_loss(kind, tried):
            problems.append(Problem(_AUXILIARY, "global_batch", reason, "micro_batch"))
    if section.z_loss_coefficient and (reason := _without_logits(kind, tried)):
        problems.append(Problem(_Z_LOSS, section.z_loss_coefficient, reason, "0"))
    return problems


def _has_auxiliary_loss(hf_config: PreTrainedConfig) -> bool:
    return bool(
        getattr(hf_config, "output_router_logits", False)
        and getattr(hf_config, "router_aux_loss_coef", 0.0)
    )


def _without_biases(
    hf_config: PreTrainedConfig, attention: str, reach: GradientReach | None
) -> str | None:
    """Why the biases by which tokens choose cannot be updated; None if they can.

    A block of experts without one is skipped: DeepSeek-V4's first ones choose by a hash.
    """
    kind = hf_config.model_type
    absent = f"the routers of a {kind} have no bias by which tokens choose experts"
    model = empty_model(hf_config)
    if not any(True for _ in modules_of_experts(model)):
        return absent
    reach = reach or find_gradient_reach(hf_config, attention)
    if not selection_biases(model, reach.absent or ()):
        return absent
    try:
        return _other_choice(hf_config, attention)
    except ModelError as error:
        return f"a {kind}: {error}"
    except MODEL_FAILURES as error:
        return f"a proxy model of {kind} failed: {_first_words(error)}"


@torch.no_grad()
def _other_choice(hf_config: PreTrainedConfig, attention: str) -> str | None:
    """Why the biases of a proxy model are not such by which tokens choose experts: one that is much
    larger than the others has to draw all tokens, and one that is much smaller none."""
    model = _proxy(hf_config, attention)
    untrained = parameters_without_gradient(model.config, attention) or ()
    ids = _tokens(model)
    for bias in selection_biases(model, untrained):
        experts, before = model.get_submodule(bias.experts), bias.tensor.clone()
        for change, expected in ((_FAR, True), (-_FAR, False)):
            bias.tensor.view(-1)[0] += change
            with _chosen(experts) as choices:
                model(input_ids=ids, use_cache=False)
            bias.tensor.copy_(before)
            draws = [(chosen == 0).any(-1) for chosen in choices]
            if not draws or not all(bool((d == expected).all()) for d in draws):
                return (
                    f"{bias.name} of a {hf_config.model_type} is not a bias by which tokens choose "
                    "experts"
                )
    return None


@contextmanager
def _chosen(experts: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The experts [tokens, k] that `experts` is called with, of each call inside."""
    choices: list[torch.Tensor] = []

    def note(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        choices.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

    handle = experts.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield choices
    finally:
        handle.remove()


def _other_auxiliary_loss(kind: str, tried: _Tried) -> str | None:
    """Why the auxiliary loss cannot be computed from router logits; None if it can."""
    try:
        outputs, model = tried()
        own = auxiliary_loss(outputs)
        if own is None:
            return f"a {kind} returns no auxiliary loss"
        expected = float(own.detach())
        top_k = int(getattr(model.config, "num_experts_per_tok", 0) or 0)
        routing = Routing.of(router_logits_of(outputs), top_k)
        found = float(
            balance_loss(routing.chosen / routing.num_rows, routing.probabilities.detach())
        )
    except ModelError as error:
        return f"a {kind}: {error}"
    except MODEL_FAILURES as error:
        return f"a proxy model of {kind} failed: {_first_words(error)}"
    if not abs(found - expected) <= _LOSS * abs(expected):
        return (
            f"a {kind} computes another auxiliary loss ({expected:.6f}) than Switch "
            f"Transformer's of its router logits ({found:.6f})"
        )
    return None


def _without_logits(kind: str, tried: _Tried) -> str | None:
    """Why no loss can be computed from router logits; None if it can."""
    try:
        outputs, model = tried()
        logits = router_logits_of(outputs)
        num_experts = {int(m.num_experts) for m in modules_of_experts(model)}  # type: ignore[arg-type]
    except ModelError as error:
        return f"a {kind}: {error}"
    except MODEL_FAILURES as error:
        return f"a proxy model of {kind} failed: {_first_words(error)}"
    if num_experts != {layer.shape[-1] for layer in logits}:
        return f"what a {kind} returns as router logits has not one for each expert"
    if any(_are_probabilities(layer) for layer in logits):
        return f"what a {kind} returns as router logits are probabilities"
    if not all(layer.requires_grad for layer in logits):
        return f"the router logits of a {kind} have no gradients"
    return None


def _are_probabilities(layer: torch.Tensor) -> bool:
    in_range = bool((layer >= 0).all() and (layer <= 1).all())
    return in_range or torch.allclose(layer.float().exp().sum(-1), torch.ones(layer.shape[0]))


def _tried(hf_config: PreTrainedConfig, attention: str) -> tuple[Any, PreTrainedModel]:
    """The outputs of a proxy model with router logits, and the model."""
    model = _proxy(hf_config, attention)
    ask_for_router_logits(model)
    return model(input_ids=_tokens(model), use_cache=False), model


def _proxy(hf_config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    fewer_heads = with_heads(2)

    def smallest(config: Any) -> None:
        fewer_experts(config)
        fewer_heads(config)

    if attention not in ("auto", "sdpa", "eager"):
        attention = "sdpa"  # other kernels have no float32
    model = build_proxy_model(
        deterministic(hf_config), attention, [smallest, fewer_experts, fewer_heads]
    )
    randomize(model)
    return model


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = min(VOCABULARY, int(text_config(model.config).vocab_size))
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (2, TOKENS), generator=generator)


def _first_words(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
