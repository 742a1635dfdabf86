"""Models with a head that scores a sample at its last token, instead of one that predicts tokens:
transformers' `AutoModelForSequenceClassification` of an architecture. A configuration names the
class in `architectures`, as the config.json of such a model does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from bigtrain.errors import ConfigError, Problem
from bigtrain.models.layers.parameters import seed_of
from bigtrain.models.transformers_patches import initialize_module
from bigtrain.settings.run_config import RunConfig

_SUFFIX = "ForSequenceClassification"


def scores_samples(hf_config: PreTrainedConfig) -> bool:
    """Return whether the model of `hf_config` scores samples."""
    return any(name.endswith(_SUFFIX) for name in hf_config.architectures or ())


def has_score_head(model: nn.Module) -> bool:
    """Return whether `model` is of a class that scores samples."""
    return type(model).__name__.endswith(_SUFFIX)


def auto_class(hf_config: PreTrainedConfig) -> Any:
    """Return transformers' class that builds and loads the model of `hf_config`."""
    return AutoModelForSequenceClassification if scores_samples(hf_config) else AutoModelForCausalLM


def with_objective_head(
    hf_config: PreTrainedConfig, config: RunConfig, labels: tuple[str, ...] = ()
) -> PreTrainedConfig:
    """Return `hf_config` with the head of the run's objective: unchanged for one that predicts
    tokens. `labels`: names of the classes. Raises ConfigError for a base with another kind of head,
    an architecture without such a class, and one without a token that pads."""
    section = config.objective
    key = "model.path" if config.model.path is not None else "model.config"
    if not section.scores_samples:
        if not scores_samples(hf_config):
            return hf_config
        rule = f"is a model that scores samples, and objective.type = {section.type} trains one "
        remedy = "the causal language model it was made of, or objective.type=reward"
        raise _refused(key, config, rule + "that predicts tokens", remedy)
    if type(hf_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        rule = f"is a {hf_config.model_type}, of which transformers has no class with a score head"
        raise _refused(key, config, rule, "an architecture with one, such as llama or qwen3")
    found = copy.deepcopy(hf_config)
    text = found.get_text_config()
    if text.pad_token_id is None:
        end = text.eos_token_id
        text.pad_token_id = end[0] if isinstance(end, list) else end
    if text.pad_token_id is None:
        rule = (
            "has neither pad_token_id nor eos_token_id, and a sample is scored at its last token "
        )
        remedy = "model.overrides={pad_token_id: ID}"
        raise _refused(key, config, rule + "that is not padding", remedy)
    if not labels:
        found.num_labels = 1
    else:
        found.id2label = dict(enumerate(labels))
        found.label2id = {name: number for number, name in enumerate(labels)}
    found.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(found)].__name__]
    return found


def _refused(key: str, config: RunConfig, rule: str, remedy: str) -> ConfigError:
    return ConfigError(Problem(key, config.model.path, rule, remedy))


def output_layer(model: Any) -> nn.Module | None:
    """Return the layer that makes logits: of tokens, or of samples; None if it is not one
    module."""
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None or not has_score_head(model):
        return head
    heads = {name.rpartition(".")[0] for name in head_parameters(model)}
    return model.get_submodule(heads.pop()) if len(heads) == 1 else None


def head_parameters(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters that are not the base model's."""
    own = f"{model.base_model_prefix}."
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return [name for name in names if not name.startswith(own)]


def token_head(hf_config: PreTrainedConfig) -> list[str]:
    """Return the names of the head's parameters in the causal language model of `hf_config`."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(hf_config))
    return head_parameters(model)


@torch.no_grad()
def initial_head(model: PreTrainedModel, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and initial values (float32) of the head of `model`, which may be on the meta
    device: by the architecture's own rules, from a random stream for each module, as
    `bigtrain.models.build.initialize_weights` draws them."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in head_parameters(model))
    for prefix in modules:
        module = copy.deepcopy(model.get_submodule(prefix)).to_empty(device="cpu").float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(seed, prefix))
            initialize_module(model, module)
        for leaf, parameter in module.named_parameters(recurse=False):
            yield f"{prefix}.{leaf}", parameter.detach()
