"""Growth of the vocabulary of trained weights: new rows of the embedding, the head and its bias.

Computes what transformers' `resize_token_embeddings` (modeling_utils.py, 5.23) does, for weights
that are read a rectangle at a time: new rows are computed once, from the full old tensor, so that
they do not depend on the topology.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributions import MultivariateNormal, constraints
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bigtrain.errors import ModelError
from bigtrain.models.configuration import text_config, vocabulary_size
from bigtrain.models.layers.parameters import seed_of
from bigtrain.models.transformers_patches import initialize_module
from bigtrain.models.weights.import_hf import Weights
from bigtrain.models.weights.lazy_tensors import LazyTensor, allocate, rows_joined
from bigtrain.settings.run_config import ModelSection

_VARIANCE = 1e-9
"""Factor of the covariance of the old rows in transformers (`mean_resizing`)."""

_KEY = "model.vocabulary"

Rows = dict[str, torch.Tensor]
"""New rows by the name of their parameter."""


@dataclass(frozen=True)
class VocabularyResize:
    """A vocabulary that grows. before: rows in the files. names: parameters with a row for every
    token, without tied parameters. notes: further changes by an export, one line each."""

    before: int
    after: int
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def grown_configuration(
    section: ModelSection, hf_config: PreTrainedConfig, tokens: int
) -> tuple[PreTrainedConfig, VocabularyResize | None]:
    """Return `hf_config` with the vocabulary that `section` sets for a tokenizer with `tokens`, and
    its growth; `hf_config` and None if it does not grow. Raises ModelError for a model with
    parameters by token besides embedding and head."""
    before = vocabulary_size(hf_config)
    after = before if section.vocabulary is None else section.vocabulary.size(before, tokens)
    if after == before:
        return hf_config, None
    grown = copy.deepcopy(hf_config)
    text_config(grown).vocab_size = after
    # Only embedding and head can grow, not other parameters whose shape depends on the vocabulary.
    small, large = _empty_model(hf_config), _empty_model(grown)
    token_parameters = {id(p) for m in _by_token(small) for p in m.parameters(recurse=False)}
    shapes = {name: t.shape for name, t in [*large.named_parameters(), *large.named_buffers()]}
    names = []
    for name, tensor in [*small.named_parameters(), *small.named_buffers()]:
        if shapes.get(name) == tensor.shape:
            continue
        if id(tensor) not in token_parameters:
            raise ModelError(
                f"{_KEY}: {name} {list(tensor.shape)} of a {hf_config.model_type} depends on the "
                "vocabulary too, and transformers does not grow it -> leave model.vocabulary out, "
                "and take tokens that the base's tokenizer has reserved"
            )
        names.append(name)
    return grown, VocabularyResize(before, after, tuple(names))


def base_configuration(hf_config: PreTrainedConfig, growth: VocabularyResize) -> PreTrainedConfig:
    """Return the configuration of the files, from the grown configuration."""
    base = copy.deepcopy(hf_config)
    text_config(base).vocab_size = growth.before
    return base


def _empty_model(hf_config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))


def _by_token(model: Any) -> list[nn.Module]:
    """Return embedding and head."""
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    return [module for module in embeddings if module is not None]


def grown_weights(
    weights: Weights,
    hf_config: PreTrainedConfig,
    growth: VocabularyResize,
    section: ModelSection,
    seed: int,
    *,
    on_main_rank: Callable[[Callable[[], Rows]], Rows],
) -> Weights:
    """Return `weights` with the `new_rows` of a growing vocabulary. `on_main_rank`: computes a
    result on the main rank and sends it to all ranks (CPUs might round differently, and the ranks
    hold parts of a single tensor). Collective if `on_main_rank` is."""
    rows = on_main_rank(lambda: new_rows(weights, hf_config, growth, section, seed))
    return with_new_rows(weights, rows)


@torch.no_grad()
def new_rows(
    weights: Weights,
    hf_config: PreTrainedConfig,
    growth: VocabularyResize,
    section: ModelSection,
    seed: int,
) -> Rows:
    """Return the new rows of the parameters in ``growth.names``: float32 [after - before, ...].
    hf_config: the grown configuration. A function of `seed`, the parameter's name and the old rows,
    which are read in full. Raises ModelError for a file that cannot be read."""
    assert section.vocabulary is not None
    method, count = section.vocabulary.new_rows, growth.after - growth.before
    rows: Rows = {}
    for name in growth.names:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, name))
            if method == "normal":
                # The architecture initializes an embedding or a head of `count` tokens.
                owner = _empty_model(hf_config)
                module_name, _, parameter_name = name.rpartition(".")
                full_module = owner.get_submodule(module_name)
                if isinstance(full_module, nn.Embedding):
                    module: nn.Module = nn.Embedding(count, full_module.embedding_dim)
                else:
                    has_bias = parameter_name == "bias"
                    module = nn.Linear(full_module.in_features, count, bias=has_bias)
                initialize_module(owner, module)
                rows[name] = module.get_parameter(parameter_name).detach().float()
                continue
            lazy = weights.tensors[name]
            old = allocate(tuple(lazy.shape), torch.float32)
            weights.fill(name, (0,) * lazy.ndim, old)
            rows[name] = _initialize_near_mean(old, count, spread=method == "mean_covariance")
    return rows


def _initialize_near_mean(old: torch.Tensor, count: int, *, spread: bool) -> torch.Tensor:
    """Draw `count` rows like transformers from the `old` rows (overwritten): from
    ``N(mean, 1e-9 covariance)``; without `spread` the mean (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html)."""
    mean = torch.mean(old, 0)
    mean_rows = mean.expand(count, *mean.shape).clone()
    if not spread:
        return mean_rows
    if old.ndim == 1:  # a bias
        return mean_rows.normal_(mean=float(mean), std=_VARIANCE * float(torch.std(old, 0)))
    old -= mean
    covariance = _VARIANCE * (old.T @ old / len(old))
    # With fewer tokens than dimensions, the covariance is singular.
    if not constraints.positive_definite.check(covariance).all():
        return mean_rows
    drawn: torch.Tensor = MultivariateNormal(mean, covariance_matrix=covariance).sample((count,))
    return drawn


def with_new_rows(weights: Weights, rows: Rows) -> Weights:
    """Return `weights` with `rows` below the old rows, under every name of a tied parameter."""
    joined = {
        id(weights.tensors[name]): rows_joined(weights.tensors[name], added)
        for name, added in rows.items()
    }
    tensors: dict[str, LazyTensor] = {
        name: joined.get(id(tensor), tensor) for name, tensor in weights.tensors.items()
    }
    return replace(weights, tensors=tensors)
