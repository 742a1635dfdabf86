"""Equivalence of pipeline stages and the full model, tested on a proxy model.

All stages run one after another in this process; logits and every gradient are compared with the
full model's. Anything that cutting into stages would break shows here, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem, one_line
from bigtrain.models.build import empty_model
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    build_proxy_model,
    fewer_experts,
    set_heads,
    with_heads,
)
from bigtrain.models.experts import (
    ask_for_router_logits,
    auxiliary_loss,
    router_logits_of,
    z_loss,
)
from bigtrain.models.layers.parameter_roles import parameter_roles
from bigtrain.models.layers.parameters import parameter_of
from bigtrain.models.parallel.stage_layout import StageLayout, StagePlan, find_layout
from bigtrain.models.parallel.stages import Payload, Stage
from bigtrain.planner.stages import StageCosts, balanced_cuts
from bigtrain.settings.compatibility.check import Facts, check_model
from bigtrain.settings.hf_config_keys import share_of_experts

_TOLERANCE = 1e-5
"""Relative to the largest logit and gradient; float32 sums in another order make 1e-7."""


@dataclass(frozen=True)
class Difference:
    """Differences between a model in stages and the full one, relative to the largest value.

    parameter: the one whose gradient differs most. auxiliary: of the router's loss, relative to it.
    """

    logits: float
    gradients: float
    parameter: str
    auxiliary: float = 0.0


def plan_stages(
    hf_config: PreTrainedConfig,
    attention: str,
    num_stages: int,
    sequence_length: int,
    *,
    router_losses: bool = False,
) -> tuple[StagePlan | None, list[Problem]]:
    """Plan how to split a model of `hf_config` into `num_stages`, or return why it cannot be.
    sequence_length: of the samples. router_losses: whether losses are to be computed from its
    router logits.

    Builds a proxy model with all of its layers on the CPU; takes seconds. Not collective: all
    ranks compute the same plan.
    """

    def refused(rule: str, remedy: str) -> tuple[None, list[Problem]]:
        return None, [Problem("parallel.pipeline", num_stages, rule, remedy)]

    without = "parallel.pipeline=1"
    try:
        model = build_proxy_model(
            hf_config,
            attention,
            _REDUCTIONS,
            _runs,
            all_layers=True,
            sequence_length=sequence_length,
        )
        if router_losses:
            ask_for_router_logits(model)
        ids = _tokens(model)
        layout = find_layout(model, ids)
        facts = Facts(pipeline_size=num_stages, num_layers=layout.num_layers)
        if problems := check_model(facts):
            return None, problems
        cuts = balanced_cuts(stage_costs(hf_config, layout), num_stages)
        plan, reason = find_stage_plan(model, layout, cuts, ids, router_losses=router_losses)
    except (ModelError, *MODEL_FAILURES) as error:
        plan, reason = None, one_line(error)
    if plan is None:
        rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
        return refused(rule, f"{without}, or another architecture")
    return plan, []


def find_stage_plan(
    model: PreTrainedModel,
    layout: StageLayout,
    cuts: Sequence[int],
    input_ids: torch.Tensor,
    *,
    router_losses: bool = False,
) -> tuple[StagePlan | None, str]:
    """Return the plan with which `model` computes the same in stages, or the reason why none does.

    If token ids only on the first stage do not work, token ids on every stage are tested.
    """
    reason = ""
    for everywhere in sorted({layout.tokens_everywhere, True}):
        tried = replace(layout, tokens_everywhere=everywhere)
        try:
            differences = difference(model, tried, cuts, input_ids, router_losses=router_losses)
        except MODEL_FAILURES as error:
            reason = reason or f"a stage of it fails ({' '.join(str(error).split())[:200]})"
            continue
        if max(differences.logits, differences.gradients, differences.auxiliary) <= _TOLERANCE:
            return StagePlan(tried, tuple(cuts)), ""
        reason = reason or (
            f"splitting into stages changes the result (logits differ by {differences.logits:.1g} "
            f"of the largest, gradients by {differences.gradients:.1g}, most at "
            f"{differences.parameter}, the router's loss by {differences.auxiliary:.1g})"
        )
    return None, reason


def difference(
    model: PreTrainedModel,
    layout: StageLayout,
    cuts: Sequence[int],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    router_losses: bool = False,
) -> Difference:
    """Compare `model` split at `cuts` with the full one, for a random gradient of the logits and
    the router's auxiliary loss, if it has one; with `router_losses`, of every router logit, too."""
    model.zero_grad(set_to_none=True)
    whole = model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    expected: torch.Tensor = whole.logits.detach()
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))

    def objective(outputs: Any) -> torch.Tensor:
        total: torch.Tensor = (outputs.logits * direction).sum()
        # So that both terms are about equally large.
        weight = expected.numel() ** 0.5
        if router_losses:
            total = total + weight * z_loss(router_logits_of(outputs))
        auxiliary = auxiliary_loss(outputs)
        return total if auxiliary is None else total + weight * auxiliary

    objective(whole).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    # Parameters are shared, so what stages give to their gradients adds up.
    tensors = [*model.parameters(), *model.buffers()]
    # State left by forward passes cannot be copied.
    tensors += [t for m in model.modules() for t in vars(m).values() if torch.is_tensor(t)]
    shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    stages = [
        Stage(copy.deepcopy(model, dict(shared)), layout, cuts, index)
        for index in range(len(cuts) - 1)
    ]
    outputs = run_in_turn(stages, input_ids, position_ids, objective)
    stage_gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    largest = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    worst, where = 0.0, ""
    for name, gradient in gradients.items():
        zero = torch.zeros(())
        wanted, other = (zero if g is None else g for g in (gradient, stage_gradients[name]))
        distance = float((other - wanted).abs().max()) / largest
        if not distance <= worst:
            worst, where = distance, name
    logits = float((outputs.logits - expected).detach().abs().max() / expected.abs().max())
    return Difference(logits, worst, where, _auxiliary_difference(whole, outputs))


def _auxiliary_difference(whole: Any, outputs: Any) -> float:
    wanted, actual = auxiliary_loss(whole), auxiliary_loss(outputs)
    if wanted is None or actual is None:
        return 0.0 if wanted is actual else float("inf")
    return float((actual - wanted).detach().abs() / wanted.detach().abs().clamp(min=1e-30))


def run_in_turn(
    stages: Sequence[Stage],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    objective: Callable[[Any], torch.Tensor],
) -> Any:
    """Run stages one after another; returns the last one's outputs, and leaves gradients of a
    scalar `objective` of these in the stages' parameters."""
    sent: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    payload: Any = None
    for stage in stages[:-1]:
        payload = stage(payload, input_ids, position_ids)
        leaving: list[torch.Tensor] = []
        arriving: list[torch.Tensor] = []
        payload = _cut(payload, leaving, arriving)
        sent.append((leaving, arriving))
    outputs = stages[-1](payload, input_ids, position_ids)
    objective(outputs).backward()
    for leaving, arriving in reversed(sent):
        pairs = [(a, b.grad) for a, b in zip(leaving, arriving, strict=True) if b.grad is not None]
        torch.autograd.backward([a for a, _ in pairs], [b for _, b in pairs])
    return outputs


def _cut(payload: Payload, leaving: list[torch.Tensor], arriving: list[torch.Tensor]) -> Payload:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().clone()
        if tensor.requires_grad:
            copied.requires_grad_()
            leaving.append(tensor)
            arriving.append(copied)
        return copied

    return payload.map(cut)


def stage_costs(hf_config: PreTrainedConfig, layout: StageLayout) -> StageCosts:
    """Multiply-adds per token and parameters of a model's parts; allocates no weights."""
    model = empty_model(hf_config)
    active = share_of_experts(hf_config.get_text_config())
    roles = parameter_roles(model).values()
    stacked = {id(parameter_of(model, entry.name)) for entry in roles if entry.is_stacked}

    def time(parameter: torch.Tensor) -> float:
        return parameter.numel() * (active if id(parameter) in stacked else 1.0)

    layers = list(model.get_submodule(layout.layers).children())
    outside = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if not name.startswith(f"{layout.layers}.")
    }
    head = model.get_output_embeddings()
    first = [p for name, p in outside.items() if name in layout.prologue]
    last = [p for name, p in outside.items() if name in layout.epilogue]
    return StageCosts(
        layer_time=tuple(sum(time(p) for p in layer.parameters()) for layer in layers),
        layer_memory=tuple(float(sum(p.numel() for p in x.parameters())) for x in layers),
        # A lookup costs nothing; the head is a matrix also where it is the embedding's.
        last_time=float(head.weight.numel()) if head is not None else 0.0,
        first_memory=float(sum(p.numel() for p in first)),
        last_memory=float(sum(p.numel() for p in last)),
    )


def _smaller_heads(config: Any) -> None:
    key_heads = getattr(config, "num_key_value_heads", None)
    set_heads(config, 2, 2 if key_heads == config.num_attention_heads else 1, head_size=16)
    fewer_experts(config)


def _fewer_heads_and_experts(config: Any) -> None:
    with_heads(2)(config)
    fewer_experts(config)


_REDUCTIONS = (_smaller_heads, _fewer_heads_and_experts, with_heads(2))


@torch.no_grad()
def _runs(model: PreTrainedModel) -> None:
    """Run one forward pass in evaluation mode; raises if the reduced sizes do not fit together."""
    model.eval()
    model(input_ids=_tokens(model), use_cache=False)


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, vocabulary, (2, TOKENS), generator=generator)
