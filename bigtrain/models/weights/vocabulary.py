"""Growth of the vocabulary of trained weights: new rows of the embedding, the head and its bias.

The same as transformers' `resize_token_embeddings` (modeling_utils.py, 5.23) for weights that are
read a rectangle at a time: new rows are computed once, from the full old tensor, so that they are
the same at every topology.
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
    """A vocabulary that grows. before: rows in the files. names: of the parameters with a row for
    each token, tied ones apart. notes: what else an export changed, a line each."""

    before: int
    after: int
    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def grown_configuration(
    section: ModelSection, hf_config: PreTrainedConfig, tokens: int
) -> tuple[PreTrainedConfig, VocabularyResize | None]:
    """`hf_config` with the vocabulary that `section` asks for where the tokenizer has `tokens`; the
    same one and None where it does not grow. Raises ModelError for a model that holds something
    else by token than embedding and head."""
    before = vocabulary_size(hf_config)
    after = before if section.vocabulary is None else section.vocabulary.size(before, tokens)
    if after == before:
        return hf_config, None
    grown = copy.deepcopy(hf_config)
    text_config(grown).vocab_size = after
    return grown, VocabularyResize(before, after, _growing(hf_config, grown))


def base_configuration(hf_config: PreTrainedConfig, growth: VocabularyResize) -> PreTrainedConfig:
    """Return the configuration of the files, from the grown one."""
    base = copy.deepcopy(hf_config)
    text_config(base).vocab_size = growth.before
    return base


def _growing(before: PreTrainedConfig, after: PreTrainedConfig) -> tuple[str, ...]:
    small, large = _empty_model(before), _empty_model(after)
    known = {id(p) for module in _by_token(small) for p in module.parameters(recurse=False)}
    shapes = {name: t.shape for name, t in [*large.named_parameters(), *large.named_buffers()]}
    names = []
    for name, tensor in [*small.named_parameters(), *small.named_buffers()]:
        if shapes.get(name) == tensor.shape:
            continue
        if id(tensor) not in known:
            raise ModelError(
                f"{_KEY}: {name} {list(tensor.shape)} of a {before.model_type} depends on the "
                "vocabulary too, and transformers does not grow it -> leave model.vocabulary out, "
                "and take tokens that the base's tokenizer has reserved"
            )
        names.append(name)
    return tuple(names)


def _empty_model(hf_config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))


def _by_token(model: Any) -> list[nn.Module]:
    """Embedding and head."""
    embeddings = model.get_input_embeddings(), model.get_output_embeddings()
    return [module for module in embeddings if module is not None]


def grown_weights(
    weights: Weights,
    hf_config: PreTrainedConfig,
    growth: VocabularyResize,
    section: ModelSection,
    seed: int,
    on_main_rank: Callable[[Callable[[], Rows]], Rows],
) -> Weights:
    """`weights` with the rows by which the vocabulary grows; arguments as of `new_rows`.
    `on_main_rank`: has one rank compute them and gives all ranks the result (another CPU might
    round another way, and the ranks' parts must be of one tensor). Collective as it is."""
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
    """Return the new rows of each parameter in ``growth.names``: float32 [after - before, ...].
    hf_config: the grown one. A function of `seed`, the parameter's name and the old rows, all of
    which are read here. Raises ModelError for a file that cannot be read."""
    assert section.vocabulary is not None
    kind, count = section.vocabulary.new_rows, growth.after - growth.before
    rows: Rows = {}
    for name in growth.names:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, name))
            if kind == "normal":
                rows[name] = _initialized(hf_config, name, count)
                continue
            lazy = weights.tensors[name]
            old = allocate(tuple(lazy.shape), torch.float32)
            weights.fill(name, (0,) * lazy.ndim, old)
            rows[name] = _initialize_near_mean(old, count, spread=kind == "mean_covariance")
    return rows


def _initialize_near_mean(old: torch.Tensor, count: int, *, spread: bool) -> torch.Tensor:
    """Draw `count` rows like transformers from the `old` ones (overwritten); without `spread` their
    mean."""
    mean = torch.mean(old, 0)
    same = mean.expand(count, *mean.shape).clone()
    if not spread:
        return same
    if old.ndim == 1:  # a bias
        return same.normal_(mean=float(mean), std=_VARIANCE * float(torch.std(old, 0)))
    old -= mean
    covariance = _VARIANCE * (old.T @ old / len(old))
    # Not where there are fewer tokens than dimensions.
    if not constraints.positive_definite.check(covariance).all():
        return same
    drawn: torch.Tensor = MultivariateNormal(mean, covariance_matrix=covariance).sample((count,))
    return drawn


def _initialized(hf_config: PreTrainedConfig, name: str, count: int) -> torch.Tensor:
    """`count` rows as the architecture initializes an embedding or a head of that many tokens."""
    owner = _empty_model(hf_config)
    place, _, kind = name.rpartition(".")
    like = owner.get_submodule(place)
    if isinstance(like, nn.Embedding):
        module: nn.Module = nn.Embedding(count, like.embedding_dim)
    else:
        module = nn.Linear(like.in_features, count, bias=kind == "bias")
    initialize_module(owner, module)
    return module.get_parameter(kind).detach().float()


def with_new_rows(weights: Weights, rows: Rows) -> Weights:
    """`weights` with `rows` below the old ones of each parameter, under all of its names."""
    joined = {
        id(weights.tensors[name]): rows_joined(weights.tensors[name], added)
        for name, added in rows.items()
    }
    tensors: dict[str, LazyTensor] = {
        name: joined.get(id(tensor), tensor) for name, tensor in weights.tensors.items()
    }
    return replace(weights, tensors=tensors)
