"""Proxy model of an architecture: a few small layers with every option of the real model.

Lengths at which a model's computation changes (sliding windows, attention chunks, long rotary
embeddings) are scaled down, since 24 tokens would never reach the lengths of a run; but only
lengths that the run's samples cross, since a length that a run never reaches must not rule the run
out.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from bigtrain.errors import one_line
from bigtrain.models.configuration import auto_class, scores_samples, text_config
from bigtrain.models.equivalence.reductions import (
    VOCABULARY,
    Change,
    build_smallest,
    check_size,
    smaller,
    with_heads,
)
from bigtrain.models.equivalence.thresholds import cross_thresholds
from bigtrain.models.parallel.grouped_experts import fit_experts
from bigtrain.settings.extensions import user_code_at

TOKENS = 24
"""Length of the samples on which proxy models are tested."""


def document_positions(samples: int, tokens: int = TOKENS) -> torch.Tensor:
    """Return positions in documents shorter and longer than the lengths that `cross_thresholds`
    sets: int64 [samples, tokens], counted from 0 in each document. Every second sample has only
    short documents, so that a dependence between samples of a micro-batch shows."""
    long, short = [3, tokens - 5, 2], [5] * (tokens // 5) + [tokens % 5]
    return positions_of_lengths([short if sample % 2 else long for sample in range(samples)])


def positions_of_lengths(lengths_by_sample: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return positions in documents of these lengths: int64 [samples, tokens], from 0 in each
    document."""
    return torch.stack(
        [torch.cat([torch.arange(length) for length in lengths]) for lengths in lengths_by_sample]
    )


MODEL_FAILURES = (
    ValueError,
    TypeError,
    RuntimeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
)
"""Exceptions of a model's code that is used in a way its author did not expect."""


def failure_text(error: BaseException) -> str:
    """Return the text of an error that a model's code raised, with the file and line of the user's
    class, or with the method of transformers' class, if it was raised there."""
    # As ``Class.method``, the innermost last.
    methods = [
        frame.f_code.co_qualname
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("transformers.models.")
    ]
    raised_in = user_code_at(error) or (methods[-1] if methods else "")
    return f"{one_line(error)} ({raised_in})" if raised_in else one_line(error)


def build_proxy_model(
    hf_config: PreTrainedConfig,
    attention: str,
    reductions: Sequence[Change] | None = None,
    usable: Callable[[PreTrainedModel], None] = lambda model: None,
    *,
    sequence_length: int,
    all_layers: bool = False,
    tokens: int = TOKENS,
) -> PreTrainedModel:
    """Return a float32 model on the CPU, as small as its class can be built, equal on every rank.

    `reductions`: changes that make a text configuration smaller, the smallest result first
    (`smaller`; None: two heads, few experts). `usable` raises for a model that cannot be used, and
    the next larger model is tested. The model has a few layers, at least one of every type, or
    `all_layers`. Samples of `tokens` cross every length that samples of `sequence_length` cross
    (`cross_thresholds`). `attention`: an implementation without float32 on a CPU is replaced by
    transformers' default. Raises ValueError with the first reason if no model can be built.
    """
    implementation = attention if attention in ("sdpa", "eager") else None

    def new_model(config: PreTrainedConfig) -> PreTrainedModel:
        if sequence_length > tokens:
            cross_thresholds(config, sequence_length, tokens, hf_config)
        if scores_samples(config):
            text_config(config).pad_token_id = 0  # not among `proxy_tokens`
        check_size(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: PreTrainedModel = auto_class(config).from_config(
                config, dtype=torch.float32, attn_implementation=implementation
            )
            fit_experts(model)
        usable(model)
        return model

    reductions = smaller(with_heads(2)) if reductions is None else reductions
    return build_smallest(hf_config, reductions, new_model, all_layers=all_layers)


@torch.no_grad()
def check_runs(model: PreTrainedModel) -> None:
    """Raise what the code of `model` raises for a sample: a constructor does not check all sizes.
    For `build_proxy_model`."""
    model(input_ids=proxy_tokens(model), use_cache=False)


@torch.no_grad()
def rescale_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Scale the matrices of `model` to preserve the norm of their inputs; return `model`. With
    initial weights, small layers hardly change the residual stream and attention is almost uniform:
    which token attends to which would not show in the logits."""
    for parameter in model.parameters():
        if parameter.ndim >= 2 and (spread := float(parameter.std())) > 0:
            parameter.div_(spread * parameter.shape[-1] ** 0.5)
    return model


@torch.no_grad()
def add_noise(model: PreTrainedModel) -> None:
    """Add noise to every parameter: ones and zeros would hide errors. For `build_proxy_model`, of a
    `deterministic` configuration."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if not torch.isfinite(parameter).all():  # not initialized by the constructor
            parameter.zero_()
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def proxy_tokens(model: PreTrainedModel, length: int = TOKENS, seed: int = 0) -> torch.Tensor:
    """Return random token ids for a proxy model: int64 [2, length]."""
    vocabulary = min(VOCABULARY, int(text_config(model.config).vocab_size))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (2, length), generator=generator)
