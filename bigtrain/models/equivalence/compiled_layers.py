"""Whether compiled decoder layers compute what uncompiled layers do, from graphs of the first
micro-batch, tested on a proxy model. torch may compute something else where a layer is divided in
graphs (a copied function that is resumed with the names of another module), and compiles experts
that are computed one by one again for each number of tokens. No configuration lists either."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import ModelError, Problem
from bigtrain.models.equivalence.proxy_model import (
    MODEL_FAILURES,
    TOKENS,
    build_proxy_model,
    check_runs,
    failure_text,
    positions_of_lengths,
    proxy_tokens,
    rescale_weights,
)
from bigtrain.models.equivalence.reductions import deterministic, smaller, with_heads
from bigtrain.models.equivalence.trial import (
    GRADIENT,
    OUTPUT,
    Tolerance,
    Values,
    first_difference,
    pop_gradients,
)
from bigtrain.models.experts import ExpertCounts, auxiliary_loss
from bigtrain.models.layers.compilation import compile_layers
from bigtrain.models.layers.document_attention import Isolation
from bigtrain.models.layers.document_masks import document_attention
from bigtrain.models.layers.plans import MAY_COMPILE, CompilationPlan
from bigtrain.models.layers.recurrence.functions import has_replaced_functions
from bigtrain.settings.run_config import RunConfig

KEY = "model.compile"
_DOCUMENT_TOKENS = (((3, 19, 2), (5, 5, 5, 5, 4)), ((24,), (1, 20, 3)), ((7, 9, 8), (12, 12)))
"""Tokens of the documents, by micro-batch and sample."""
_TOLERANCES = {OUTPUT: Tolerance(relative=1e-5), GRADIENT: Tolerance(common=1e-5)}
"""The graphs' operators run one by one: they compute the same bits, or something else."""


def plan_compilation(
    config: RunConfig, hf_config: PreTrainedConfig, isolation: Isolation
) -> tuple[CompilationPlan, list[Problem]]:
    """Return whether layers of `hf_config` can be compiled, and the problem if they cannot and the
    run asks for it; where layers may be compiled. Takes a few seconds."""
    section = config.model
    failure, num_graphs = try_compilation(
        hf_config, section.attention, config.batch.sequence_length, isolation
    )
    if failure and section.compile == "on":
        rule = f"is not supported for model_type {hf_config.model_type}: {failure}"
        return MAY_COMPILE, [Problem(KEY, "on", rule, f"{KEY}=off")]
    if failure:
        return CompilationPlan(refusal=failure), []
    first, last = num_graphs[0], num_graphs[-1]
    if last <= first:
        return MAY_COMPILE, []
    growth = (
        f"layers of a {hf_config.model_type} are compiled again for other tokens ({first} graphs "
        f"after the first micro-batch, {last} after {len(num_graphs)})"
    )
    if section.compile == "on":
        return CompilationPlan(reason=f"{growth}: steps wait for it; {KEY}=off does not"), []
    return CompilationPlan(refusal=growth), []


def try_compilation(
    hf_config: PreTrainedConfig, attention: str, sequence_length: int, isolation: Isolation
) -> tuple[str, list[int]]:
    """Return what distinguishes compiled layers from uncompiled ones, empty if nothing does, and
    the number of graphs after each micro-batch. A model that cannot be built is left to the trials
    before this one."""
    try:
        model = build_proxy_model(
            deterministic(hf_config),
            attention,
            smaller(with_heads(2)),
            check_runs,
            sequence_length=sequence_length,
        )
    except ValueError:
        return "", [0]
    graphs: list[Any] = []

    def run_by_operators(graph: Any, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    num_graphs: list[int] = []
    torch.compiler.reset()
    try:
        with ExitStack() as undo:
            rescale_weights(model).eval()
            if isolation.method == "lengths":
                undo.enter_context(document_attention(model))
            undo.callback(isolation.install(model))
            batches = range(len(_DOCUMENT_TOKENS))
            expected = [_results(model, isolation, batch) for batch in batches]
            counts = ExpertCounts(model, is_compiled=True)
            is_divided = isolation.method in ("documents", "lengths") or bool(counts.modules)
            is_divided = is_divided or has_replaced_functions(model)
            compile_layers(model, divided=is_divided, backend=run_by_operators)
            for batch, expected_results in zip(batches, expected, strict=True):
                results = _results(model, isolation, batch)
                difference = first_difference(expected_results, results, _TOLERANCES)
                if difference is not None:
                    return f"the {difference.where} differs {difference.size}", num_graphs
                num_graphs.append(len(graphs))
    except ModelError as error:
        return str(error), num_graphs
    except MODEL_FAILURES as error:
        return failure_text(error), num_graphs
    finally:
        torch.compiler.reset()
    return "", num_graphs


def _results(model: PreTrainedModel, isolation: Isolation, batch: int) -> dict[str, Values]:
    """Return logits and gradients of micro-batch `batch`, whose documents share samples if they are
    isolated."""
    arguments: dict[str, Any] = {"input_ids": proxy_tokens(model, TOKENS, seed=batch)}
    positions = None
    if isolation.method != "none":
        positions = positions_of_lengths(_DOCUMENT_TOKENS[batch])
        arguments |= {"position_ids": positions, **isolation.arguments(positions)}
    with isolation.document_mask(positions):
        outputs = model(**arguments, use_cache=False)
        loss, router_loss = outputs.logits.float().square().mean(), auxiliary_loss(outputs)
        (loss if router_loss is None else loss + router_loss).backward()
    return {OUTPUT: {"logits": outputs.logits.detach()}, GRADIENT: pop_gradients(model)}
