"""Tests of a model's experts on a proxy model, before there is a process group.

Expert parallelism: a plan names the modules of experts, but does not say whether these follow the
contract of `bigtrain.models.parallel.experts`. The `moe` section: no configuration states the
formula of the auxiliary loss, or what the router returns as logits. ZeRO 3: where a loop computes
only the experts that have tokens (DBRX), ranks reach different modules and deadlock.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.equivalence.parameter_plan import (
    GradientReach,
    find_gradient_reach,
)
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    add_noise,
    build_proxy_model,
    failure_text,
    proxy_tokens,
)
from bigtrain.models.equivalence.reductions import (
    deterministic,
    fewer_experts,
    smaller,
    with_heads,
)
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    LOSS,
    SHARDED,
    RankThreads,
    Trial,
    Values,
    first_difference,
    training_results,
)
from bigtrain.models.experts import (
    Routing,
    auxiliary_loss,
    balance_loss,
    has_auxiliary_loss,
    router_logits_of,
    selection_biases,
)
from bigtrain.models.layers.parameters import unmarked_experts
from bigtrain.models.parallel.experts import check_divides, expert_modules, shard_experts
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sharding import cut_parameter, is_expert, shard_of
from bigtrain.models.torch_patches import OperatorMode
from bigtrain.models.transformers_patches import modules_of_experts
from bigtrain.settings.run_config import RunConfig


def check_expert_parallel(
    hf_config: PreTrainedConfig, attention: str, size: int, *, sequence_length: int
) -> list[Problem]:
    """Return problems with dividing the experts of a model of `hf_config` among `size` ranks.

    `sequence_length`: tokens of the run's samples. The proxy model is divided among as many ranks
    as the smallest prime factor of `size`: what a rank computes does not depend on the number.
    Takes a second or two.
    """
    model_type = hf_config.model_type
    try:
        for experts in expert_modules(empty_model(hf_config)):
            check_divides(experts, size)
        num_ranks = next(n for n in range(2, size + 1) if size % n == 0)

        # Raises an error for a proxy model that cannot be divided or trained.
        def usable(model: PreTrainedModel) -> None:
            add_noise(model)
            for experts in expert_modules(model):
                check_divides(experts, num_ranks)
            training_results(model)

        model = build_proxy_model(
            deterministic(hf_config),
            attention,
            smaller(with_heads(2), divisor=num_ranks),
            usable,
            sequence_length=sequence_length,
        )
        # One rank with all ranks' samples is compared with ranks that divide the experts.
        trial = Trial(
            lambda model: _summed_results(
                [training_results(model, seed=n) for n in range(num_ranks)]
            ),
            partial(_results_of_divided_experts, num_ranks),
            SHARDED,
        )
        difference = trial.difference(model)
        if difference is None:
            return []
        rule = (
            f"expert parallelism changes the {difference.where} ({model_type}, {difference.size})"
        )
    except ModelError as error:
        rule, _, remedy = str(error).rpartition(" -> ")
        return [Problem("parallel.expert", size, rule.partition(": ")[2], remedy)]
    except (*MODEL_FAILURES, ImportError) as error:
        rule = f"a proxy model of {model_type} failed: {failure_text(error)}"
    return [Problem("parallel.expert", size, rule, "parallel.expert=1")]


def _results_of_divided_experts(num_ranks: int, model: PreTrainedModel) -> dict[str, Values]:
    """Return losses for every rank's samples and the summed gradients, computed by `num_ranks`
    threads that divide the experts of `model`."""
    exchange = RankThreads(num_ranks)
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def compute(rank: int) -> dict[str, Values]:
        shard_experts(models[rank], exchange)
        for parameter in models[rank].parameters():
            cut_parameter(parameter)
        fit_experts(models[rank])
        results = training_results(models[rank], seed=rank)
        gradients = dict(results[GRADIENT])
        for name, parameter in models[rank].named_parameters():
            shard = shard_of(parameter)
            if is_expert(parameter) and shard is not None:
                gradients[name] = shard.put(gradients[name])
        return {LOSS: results[LOSS], GRADIENT: gradients}

    return _summed_results(exchange.run(compute))


def _summed_results(results: Sequence[Mapping[str, Values]]) -> dict[str, Values]:
    """Return every rank's loss, and the sums of the gradients."""
    losses = {
        "loss" if rank == 0 else f"loss of rank {rank}": loss
        for rank, rank_results in enumerate(results)
        for loss in rank_results[LOSS].values()
    }
    gradients = {
        name: torch.stack([rank_results[GRADIENT][name] for rank_results in results]).sum(0)
        for name in results[0][GRADIENT]
    }
    return {LOSS: losses, GRADIENT: gradients}


_BIAS_BEYOND_SCORES = 1e4  # distance of a changed selection bias from all router scores
_AUXILIARY, _Z_LOSS, _BIAS = (
    "moe.auxiliary_loss",
    "moe.z_loss_coefficient",
    "moe.bias_update_rate",
)


def check_expert_balance(
    config: RunConfig, hf_config: PreTrainedConfig, reach: GradientReach | None = None
) -> list[Problem]:
    """Return problems with the section `moe` of `config` for a model of `hf_config`. Takes a second
    or two if the section has a router loss. `reach`: the model's gradient reach; None: computed if
    needed."""
    section, problems = config.moe, []
    model_type, attention = hf_config.model_type, config.model.attention
    sequence_length = config.batch.sequence_length
    run_proxy = cache(partial(_run_proxy, hf_config, attention, sequence_length))

    def problem_of_outputs(check: Callable[..., str | None]) -> str | None:
        return _check_problem(model_type, lambda: check(model_type, *run_proxy()))

    # The three settings need different things of a router: selection biases, Switch Transformer's
    # auxiliary loss, and logits with gradients.
    if section.bias_update_rate:
        if reason := _bias_problem(hf_config, attention, sequence_length, reach):
            problems.append(Problem(_BIAS, section.bias_update_rate, reason, "0"))
    if section.auxiliary_loss == "global_batch":
        if not has_auxiliary_loss(hf_config):
            rule = f"the {model_type} has no auxiliary loss, or it is off"
            remedy = (
                "micro_batch, or model.overrides={output_router_logits: true, "
                "router_aux_loss_coef: 0.001} where the architecture has one"
            )
            problems.append(Problem(_AUXILIARY, "global_batch", rule, remedy))
        elif reason := problem_of_outputs(_auxiliary_loss_problem):
            problems.append(Problem(_AUXILIARY, "global_batch", reason, "micro_batch"))
    if section.z_loss_coefficient and (reason := problem_of_outputs(_logits_problem)):
        problems.append(Problem(_Z_LOSS, section.z_loss_coefficient, reason, "0"))
    return problems


def _bias_problem(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, reach: GradientReach | None
) -> str | None:
    """Return why the run cannot update biases by which tokens choose experts; None if it can.
    Blocks of experts without a bias are skipped: DeepSeek-V4's first blocks choose by a hash."""
    model_type = hf_config.model_type
    no_bias = f"the routers of a {model_type} have no bias by which tokens choose experts"
    model = empty_model(hf_config)
    if not any(True for _ in modules_of_experts(model)):
        return no_bias
    reach = reach or find_gradient_reach(hf_config, sequence_length, attention)
    if not selection_biases(model, reach.absent or ()):
        return no_bias
    return _check_problem(
        model_type, partial(_bias_effect_problem, hf_config, attention, sequence_length)
    )


@torch.no_grad()
def _bias_effect_problem(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int
) -> str | None:
    """Return why tokens of a proxy model do not choose experts by their biases: an expert with a
    much larger bias has to get all tokens, and with a much smaller bias none."""
    model = build_proxy_model(
        deterministic(hf_config), attention, usable=add_noise, sequence_length=sequence_length
    )
    untrained = find_gradient_reach(model.config, TOKENS, attention).absent or ()
    ids = proxy_tokens(model)
    for bias in selection_biases(model, untrained):
        experts, original = model.get_submodule(bias.experts), bias.tensor.clone()
        for change, gets_tokens in ((_BIAS_BEYOND_SCORES, True), (-_BIAS_BEYOND_SCORES, False)):
            bias.tensor.view(-1)[0] += change
            with _recorded_expert_ids(experts) as calls:
                model(input_ids=ids, use_cache=False)
            bias.tensor.copy_(original)
            # Per call, whether each token chooses the first expert: bool [tokens].
            choices = [(expert_ids == 0).any(-1) for expert_ids in calls]
            if not calls or not all(bool((x == gets_tokens).all()) for x in choices):
                return (
                    f"{bias.name} of a {hf_config.model_type} is not a bias by which tokens choose "
                    "experts"
                )
    return None


@contextmanager
def _recorded_expert_ids(experts: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Record the expert ids [tokens, k] of every call of `experts`."""
    calls: list[torch.Tensor] = []

    def record(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])

    with experts.register_forward_pre_hook(record, with_kwargs=True):
        yield calls


def _auxiliary_loss_problem(model_type: str, outputs: Any, model: PreTrainedModel) -> str | None:
    """Return why the run cannot compute the auxiliary loss from router logits; None if it can."""
    model_loss = auxiliary_loss(outputs)
    if model_loss is None:
        return f"a {model_type} returns no auxiliary loss"
    top_k = int(getattr(model.config, "num_experts_per_tok", 0) or 0)
    routing = Routing.of(router_logits_of(outputs), top_k)
    recomputed_loss = balance_loss(
        routing.expert_tokens / routing.num_rows, routing.probabilities.detach()
    )
    difference = first_difference(
        {LOSS: {"auxiliary loss": model_loss.detach()}},
        {LOSS: {"auxiliary loss": recomputed_loss}},
        SHARDED,
    )
    if difference is None:
        return None
    return (
        f"a {model_type} computes another auxiliary loss than Switch Transformer's of its router "
        f"logits ({difference.size})"
    )


def _logits_problem(model_type: str, outputs: Any, model: PreTrainedModel) -> str | None:
    """Return why the run cannot compute a loss from router logits; None if it can."""
    logits_of_layers = router_logits_of(outputs)
    num_experts = {int(m.num_experts) for m in modules_of_experts(model)}  # type: ignore[arg-type]
    if num_experts != {logits.shape[-1] for logits in logits_of_layers}:
        return f"what a {model_type} returns as router logits has not one for each expert"
    for logits in logits_of_layers:
        are_probabilities = bool((logits >= 0).all() and (logits <= 1).all())
        if not are_probabilities:  # log-probabilities are probabilities after exp
            sums = logits.float().exp().sum(-1)
            are_probabilities = torch.allclose(sums, torch.ones(logits.shape[0]))
        if are_probabilities:
            return f"what a {model_type} returns as router logits are probabilities"
    if not all(logits.requires_grad for logits in logits_of_layers):
        return f"the router logits of a {model_type} have no gradients"
    return None


def _check_problem(model_type: str, check: Callable[[], str | None]) -> str | None:
    """Return the problem that `check` of a proxy model finds, or the error that it raises."""
    try:
        return check()
    except ModelError as error:
        return f"a {model_type}: {error}"
    except MODEL_FAILURES as error:
        return f"a proxy model of {model_type} failed: {failure_text(error)}"


def _run_proxy(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int
) -> tuple[Any, PreTrainedModel]:
    """Return the outputs of a proxy model with router logits, and the model."""
    model = build_proxy_model(
        deterministic(hf_config), attention, usable=add_noise, sequence_length=sequence_length
    )
    model.config.output_router_logits = True
    return model(input_ids=proxy_tokens(model), use_cache=False), model


def check_expert_gathering(
    hf_config: PreTrainedConfig, zero_stage: int, num_replicas: int, sequence_length: int
) -> list[Problem]:
    """Return the problem with ZeRO 3 for a model of `hf_config`, if any. num_replicas: ranks that
    partition the model. sequence_length: tokens of the run's samples. Takes a second for a model
    with experts that transformers does not compute in one grouped product."""
    has_expert_keys = "expert" in hf_config.to_json_string()
    if zero_stage < 3 or num_replicas == 1 or not has_expert_keys:
        return []
    if not unmarked_experts(empty_model(hf_config)):
        return []
    try:
        model = build_proxy_model(
            hf_config, "eager", [fewer_experts], sequence_length=sequence_length
        )
        with _NonzeroCalls(unmarked_experts(model)) as nonzero_calls, torch.no_grad():
            model(input_ids=proxy_tokens(model), use_cache=False)
    except MODEL_FAILURES:
        return []  # errors are left to the run
    # Only a loop over the experts that have tokens computes which elements are nonzero.
    if not nonzero_calls.occurred:
        return []
    rule = (
        f"the tokens decide which experts of a {hf_config.model_type} are computed, in a loop; "
        "with ZeRO 3 ranks would wait for each other's"
    )
    return [Problem("zero_optimization.stage", 3, rule, "ds_configs/zero2.json")]


class _NonzeroCalls(OperatorMode):
    """Records whether a forward pass of `modules` calls ``nonzero``. occurred: whether it did."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.occurred, self._num_running_modules = False, 0
        for module in modules:
            module.register_forward_pre_hook(partial(self._count_running, 1))
            module.register_forward_hook(partial(self._count_running, -1))

    def _count_running(self, change: int, *_: object) -> None:
        self._num_running_modules += change

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_nonzero = func is torch.ops.aten.nonzero.default
        self.occurred |= self._num_running_modules > 0 and is_nonzero
        return func(*args, **(kwargs or {}))
