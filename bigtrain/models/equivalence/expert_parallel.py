"""Whether a model's experts compute the same when ranks divide them: tried on a proxy model.

A plan names the modules that hold experts, but does not say that they follow the contract that
expert parallelism needs (`bigtrain.models.parallel.experts`): for example that outputs are weighted
last, or that a token's output does not depend on other tokens. So it is tried before there is a
process group: threads stand in for ranks, each with its own samples, and every gradient is compared
with the full model's.
"""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.build import empty_model
from bigtrain.models.configuration import text_config
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    VOCABULARY,
    build_proxy_model,
    fewer_experts,
    with_heads,
)
from bigtrain.models.equivalence.rank_threads import RankThreads
from bigtrain.models.equivalence.tensor_parallel import deterministic, randomize
from bigtrain.models.equivalence.thresholds import TOKENS
from bigtrain.models.parallel.experts import check_divides, expert_modules, shard_experts
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.models.parallel.sharding import cut_parameter, is_expert, shard_of

# Of the largest gradient of the parameter, and of the model: rounding of float32 is far below
# both, a part of a gradient or a wrong factor far above.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
_LOSS = 1e-5


def check_expert_parallel(
    hf_config: PreTrainedConfig, attention: str, size: int, *, sequence_length: int
) -> list[Problem]:
    """Problems with dividing the experts of a model of `hf_config` among `size` ranks; or none.

    `sequence_length`: tokens of the run's samples. The proxy model is divided among as many ranks
    as the smallest prime factor of `size`: each does the same for any number of them. Takes a
    second or two.
    """
    try:
        for experts in expert_modules(empty_model(hf_config)):
            check_divides(experts, size)
        ranks = next(n for n in range(2, size + 1) if size % n == 0)
        model = _proxy_model(hf_config, attention, ranks, sequence_length)
        found = _difference(model, ranks)
    except ModelError as error:
        rule, _, remedy = str(error).rpartition(" -> ")
        return [Problem("parallel.expert", size, rule.partition(": ")[2], remedy)]
    except (*MODEL_FAILURES, ImportError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        found = f"a proxy model of {hf_config.model_type} failed: {reason}"
    if found is None:
        return []
    return [Problem("parallel.expert", size, found, "parallel.expert=1")]


def _proxy_model(
    hf_config: PreTrainedConfig, attention: str, ranks: int, sequence_length: int
) -> PreTrainedModel:
    fewer_heads = with_heads(2)

    def smallest(config: Any) -> None:
        fewer_experts(config, ranks)
        fewer_heads(config)

    def fewer(config: Any) -> None:
        fewer_experts(config, ranks)

    def usable(model: PreTrainedModel) -> None:
        for experts in expert_modules(model):
            check_divides(experts, ranks)
        randomize(model)
        _loss(model, 0).backward()
        model.zero_grad()

    if attention not in ("auto", "sdpa", "eager"):
        attention = "sdpa"  # other kernels have no float32
    return build_proxy_model(
        deterministic(hf_config),
        attention,
        [smallest, fewer, fewer_heads],
        usable,
        sequence_length=sequence_length,
    )


def _difference(model: PreTrainedModel, ranks: int) -> str | None:
    """The difference between `model` with and without divided experts; None if there is none."""
    kind = model.config.model_type
    divided = [copy.deepcopy(model) for _ in range(ranks)]
    losses = [_loss(model, rank) for rank in range(ranks)]
    torch.stack(losses).sum().backward()
    found = _divided_losses(divided)
    for whole, other in zip([float(loss.detach()) for loss in losses], found, strict=True):
        if not math.isfinite(whole):
            return f"the loss of a {kind} is {whole}, so that nothing can be compared"
        if not abs(other - whole) <= _LOSS * max(1.0, abs(whole)):
            return (
                f"a {kind} has another loss with divided experts ({other:.6f}) than whole "
                f"({whole:.6f})"
            )
    expected = dict(model.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in expected.values() if p.grad is not None)
    for name, parameter in expected.items():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        have = _joined([rank.get_parameter(name) for rank in divided], wanted)
        limit = _RELATIVE * float(wanted.abs().max()) + _ABSOLUTE * largest
        if not float((have - wanted).abs().max()) <= limit:
            return f"the gradient of {name} of a {kind} is another one with divided experts"
    return None


def _divided_losses(models: list[PreTrainedModel]) -> list[float]:
    """The loss of each rank's samples; gradients are in `models`."""
    exchange = RankThreads(len(models))

    def compute(rank: int) -> float:
        with exchange.as_rank(rank):
            shard_experts(models[rank], exchange)
            for parameter in models[rank].parameters():
                cut_parameter(parameter)
            fit_experts(models[rank])
            loss = _loss(models[rank], rank)
            loss.backward()
            return float(loss.detach())

    with ThreadPoolExecutor(len(models)) as pool:
        return list(pool.map(compute, range(len(models))))


def _joined(parameters: list[Any], like: torch.Tensor) -> torch.Tensor:
    """The gradient of a full parameter from all ranks: the sum, or for experts each rank's part."""
    total = torch.zeros_like(like)
    for parameter in parameters:
        shard = shard_of(parameter)
        if parameter.grad is None:
            continue
        if is_expert(parameter) and shard is not None:
            ((start, stop),) = shard.ranges
            total[start:stop] += parameter.grad
        else:
            total += parameter.grad
    return total


def _loss(model: PreTrainedModel, rank: int) -> torch.Tensor:
    """The loss of samples that only rank `rank` has."""
    generator = torch.Generator().manual_seed(rank)
    vocabulary = min(VOCABULARY, int(text_config(model.config).vocab_size))
    ids = torch.randint(3, vocabulary, (2, TOKENS), generator=generator)
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss
