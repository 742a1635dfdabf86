"""Equivalence of pipeline stages, run one after another in this process, and the full model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    build_proxy_model,
    failure_text,
    proxy_tokens,
)
from bigtrain.models.equivalence.reductions import smaller, with_heads
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    OUTPUT,
    Results,
    Tolerance,
    Tolerances,
    Trial,
    forward_results,
    pop_gradients,
)
from bigtrain.models.experts import auxiliary_loss, router_logits_of, z_loss
from bigtrain.models.layers.parameter_roles import parameter_roles
from bigtrain.models.layers.parameters import has_score_head, parameter_of
from bigtrain.models.parallel.stage_layout import StageLayout, StagePlan, find_layout
from bigtrain.models.parallel.stages import Stage
from bigtrain.planner.stages import StageCosts, balanced_cuts
from bigtrain.settings.compatibility.check import check_model
from bigtrain.settings.compatibility.facts import Facts
from bigtrain.settings.hf_config_keys import share_of_experts

TOLERANCES = {
    OUTPUT: Tolerance(relative=1e-5),
    LOSS: Tolerance(relative=1e-5),
    GRADIENT: Tolerance(common=1e-5),
}
"""Float32 sums in another order make 1e-7."""

_PADDING = 5


def plan_stages(
    hf_config: PreTrainedConfig,
    attention: str,
    num_stages: int,
    sequence_length: int,
    *,
    router_losses: bool = False,
) -> tuple[StagePlan | None, list[Problem]]:
    """Plan how to split a model of `hf_config` into `num_stages`, or return why it cannot be split.
    sequence_length: tokens of the samples. router_losses: whether losses are to be computed from
    router logits.

    Builds a proxy model with every layer on the CPU; takes seconds. Not collective: all ranks
    compute the same plan.
    """
    try:
        model = build_proxy_model(
            hf_config,
            attention,
            smaller(with_heads(2, head_size=16), with_heads(2)),
            _runs,
            all_layers=True,
            sequence_length=sequence_length,
        )
        if router_losses:
            model.config.output_router_logits = True
        ids = _tokens(model)
        layout = find_layout(model, ids)
        facts = Facts(pipeline_size=num_stages, num_layers=layout.num_layers)
        if problems := check_model(facts):
            return None, problems
        cuts = balanced_cuts(stage_costs(hf_config, layout), num_stages)
        plan, reason = find_stage_plan(model, layout, cuts, ids, router_losses=router_losses)
    except (ModelError, *MODEL_FAILURES) as error:
        plan, reason = None, failure_text(error)
    if plan is None:
        rule = f"is not supported for model_type {hf_config.model_type}: {reason}"
        remedy = "parallel.pipeline=1, or another architecture"
        return None, [Problem("parallel.pipeline", num_stages, rule, remedy)]
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
    If token ids only on the first stage do not work, token ids on every stage are tested."""
    reason = ""
    for everywhere in sorted({layout.tokens_everywhere, True}):
        candidate = replace(layout, tokens_everywhere=everywhere)
        try:
            trial = stage_trial(candidate, cuts, input_ids, router_losses=router_losses)
            difference = trial.difference(model)
        except MODEL_FAILURES as error:
            reason = reason or f"a stage of it fails ({failure_text(error)})"
            continue
        if difference is None:
            return StagePlan(candidate, tuple(cuts)), ""
        reason = reason or (
            f"splitting into stages changes the {difference.where} ({difference.size})"
        )
    return None, reason


def stage_trial(
    layout: StageLayout,
    cuts: Sequence[int],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    *,
    router_losses: bool = False,
    tolerances: Tolerances = TOLERANCES,
) -> Trial:
    """Return the comparison of a model split at `cuts` with the full model, for a random gradient
    of the logits and the router's auxiliary loss, if the model has a router; with `router_losses`
    also for a gradient of every router logit."""

    def objective(outputs: Any) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(outputs.logits.shape, generator=generator)
        total: torch.Tensor = (outputs.logits * direction).sum()
        # The sum's standard deviation, so that all terms are about equally large.
        weight = direction.numel() ** 0.5
        if router_losses:
            total = total + weight * z_loss(router_logits_of(outputs))
        auxiliary = auxiliary_loss(outputs)
        return total if auxiliary is None else total + weight * auxiliary

    def results(model: PreTrainedModel, outputs: Any) -> Results:
        return {**forward_results(outputs), GRADIENT: pop_gradients(model)}

    def full(model: PreTrainedModel) -> Results:
        model.zero_grad(set_to_none=True)
        outputs = model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        objective(outputs).backward()
        return results(model, outputs)

    def in_stages(model: PreTrainedModel) -> Results:
        # Stages share parameters, so that their gradients add up.
        tensors = [*model.parameters(), *model.buffers()]
        # State left by forward passes cannot be copied.
        tensors += [t for m in model.modules() for t in vars(m).values() if torch.is_tensor(t)]
        shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
        stages = [
            Stage(copy.deepcopy(model, dict(shared)), layout, cuts, index)
            for index in range(len(cuts) - 1)
        ]
        return results(model, run_in_turn(stages, input_ids, position_ids, objective))

    return Trial(full, in_stages, tolerances)


def run_in_turn(
    stages: Sequence[Stage],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None,
    objective: Callable[[Any], torch.Tensor],
) -> Any:
    """Run stages one after another; return the outputs of the last stage, and accumulate gradients
    of the scalar ``objective(outputs)`` in the stages' parameters."""
    # Between two stages a tensor is copied without its graph, as when it is sent to another rank.
    boundaries: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def send(tensor: torch.Tensor) -> torch.Tensor:
        received = tensor.detach().clone()
        if tensor.requires_grad:
            boundaries[-1].append((tensor, received.requires_grad_()))
        return received

    payload: Any = None
    for stage in stages[:-1]:
        boundaries.append([])
        payload = stage(payload, input_ids, position_ids).map(send)
    outputs = stages[-1](payload, input_ids, position_ids)
    # The backward pass sends the gradients of the copies back, from the last boundary to the first.
    objective(outputs).backward()
    for boundary in reversed(boundaries):
        pairs = [(sent, received.grad) for sent, received in boundary if received.grad is not None]
        torch.autograd.backward([sent for sent, _ in pairs], [grad for _, grad in pairs])
    return outputs


def stage_costs(hf_config: PreTrainedConfig, layout: StageLayout) -> StageCosts:
    """Return multiply-adds per token and parameters of a model's parts; allocate no weights."""
    model = empty_model(hf_config)
    # A token uses the weights of a few experts.
    active_share = share_of_experts(hf_config.get_text_config())
    roles = parameter_roles(model).values()
    stacked = {id(parameter_of(model, entry.name)) for entry in roles if entry.is_stacked}

    layers = list(model.get_submodule(layout.layers).children())
    # Parameters outside the layers belong to the first stage, the last stage, or both.
    boundary_parameters = {
        name: p
        for name, p in model.named_parameters(remove_duplicate=False)
        if not name.startswith(f"{layout.layers}.")
    }
    head = model.get_output_embeddings()
    first = [p for name, p in boundary_parameters.items() if name in layout.prologue]
    last = [p for name, p in boundary_parameters.items() if name in layout.epilogue]
    return StageCosts(
        layer_time=tuple(
            sum(p.numel() * (active_share if id(p) in stacked else 1.0) for p in layer.parameters())
            for layer in layers
        ),
        layer_memory=tuple(float(sum(p.numel() for p in x.parameters())) for x in layers),
        # An embedding lookup costs nothing; a head multiplies even if it is tied to the embedding.
        last_time=float(head.weight.numel()) if head is not None else 0.0,
        first_memory=float(sum(p.numel() for p in first)),
        last_memory=float(sum(p.numel() for p in last)),
    )


def _tokens(model: PreTrainedModel) -> torch.Tensor:
    """Return `proxy_tokens`, with padding at the end of the first row for a model with a score
    head."""
    ids = proxy_tokens(model)
    if has_score_head(model):
        ids[0, -_PADDING:] = model.config.get_text_config().pad_token_id
    return ids


@torch.no_grad()
def _runs(model: PreTrainedModel) -> None:
    """Run one forward pass in evaluation mode; raises if the reduced sizes do not fit together."""
    model.eval()
    model(input_ids=_tokens(model), use_cache=False)
